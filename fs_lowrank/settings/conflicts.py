"""What excludes what: values of a configuration that cannot be together, each with its reason. All are asked once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from .metrics import METRICS
from .origin import Origin, show
from .parameters import params_fields
from .schema import Settings
from .sections import robust_needs

#: a key, whether its value is refused, and what the message says after the key
Conflict = tuple[str, bool, str]
_METHOD = "llm.adapter.args.0.adapter_method"


def check_together(config: Settings, method: Any, needs: Any, origin: Origin) -> None:
    """Refuse values that cannot be together.

    Args:
        method: the class of ``federate.method``. needs: what it requires with its hyperparameters.
    Raises:
        UserError: names file, line, key, value and reason, of the first conflict.
    """
    for key, refused, reason in _conflicts(config, method, needs):
        if refused:
            origin.fail(key, reason)


def _conflicts(config: Settings, method: Any, needs: Any) -> Iterator[Conflict]:
    yield from _of_clients(config)
    yield from _of_one_client(config)
    yield from _of_robust_means(config)
    yield from _of_models(config)
    yield from _of_data(config)
    yield from _of_place_and_scores(config)
    model, task = config.model.type, config.model.task
    takes = f"= {method.name} is not for model.type = {model} ({task}); it takes models of {', '.join(needs.tasks)}"
    yield "federate.method", bool(task) and task not in needs.tasks, takes
    own = f"= {config.lowrank.personal}: federate.method = {method.name} computes with all weights, the head's too"
    yield "lowrank.personal", bool(config.lowrank.personal) and needs.own_upload, own
    yield from _of_unchanged_bases(config, method, needs)
    if config.llm.adapter.use and config.adapter.virtual_tokens:
        yield from _of_virtual_tokens(config)
    if config.model.device_map:
        yield from _of_device_map(config)


def _expected(value: Any, expected: str) -> str:
    return f"= {show(value)}: expected {expected}"


def _of_clients(config: Settings) -> Iterator[Conflict]:
    federate = config.federate
    count, drawn, rate = federate.client_num, federate.sample_client_num, federate.sample_client_rate
    yield "federate.client_num", count < 1, f"= {count}: set it to the number of clients, 1 or more"
    name = "federate.sample_client_num"
    yield name, drawn == 0, _expected(0, "clients a round, 1 or more; or -1 for all")
    yield name, drawn > count, _expected(drawn, f"at most federate.client_num, which is {count}")
    shares = _expected(rate, "a share above 0 and at most 1; or -1 for all")
    yield "federate.sample_client_rate", rate <= 0 and rate != -1, shares
    fewest, a_round = config.lowrank.min_clients, config.sampled_per_round
    yield "lowrank.min_clients", fewest > a_round, _expected(fewest, f"at most the clients of a round, {a_round}")
    factor = config.lowrank.max_update_norm_factor
    below = _expected(factor, "1 or more, as half of the updates exceed their median; or 0 for no bound")
    yield "lowrank.max_update_norm_factor", 0 < factor < 1, below
    given = {key for own in config.own_settings.values() for key in own}
    one_rank = f"gives clients a rank, and federate.method = {federate.method} has one for all; see lowrank.ranks"
    yield "lowrank.clients", "rank" in given and "ranks" not in config.lowrank.params, one_rank


def _of_one_client(config: Settings) -> Iterator[Conflict]:
    """One client of a division trains alone: there is such a client, and nothing needs several."""
    name, alone, federate = "federate.client_idx_for_local_train", config.alone, config.federate
    number = f"the number of a client, 1 to {federate.client_num}; or 0 for all clients"
    yield name, not 0 <= alone <= federate.client_num, _expected(alone, number)
    own = bool(config.lowrank.clients) or len(config.lowrank.params.get("ranks") or ()) > 1
    for key, together in (
        ("federate.mode", federate.mode != "standalone"),
        ("federate.use_ss", federate.use_ss),
        ("lowrank.clients or lowrank.ranks", own),
    ):
        yield name, bool(alone) and together, f"= {alone} trains one client alone; leave {key} out"


def _of_robust_means(config: Settings) -> Iterator[Conflict]:
    rule, malicious = config.lowrank.robust, config.lowrank.robust_malicious
    needed = robust_needs(rule, malicious)
    few = f"= {rule} with robust_malicious = {malicious} needs {needed} clients per round; there are "
    yield "lowrank.robust", config.sampled_per_round < needed, f"{few}{config.sampled_per_round}"


def _of_models(config: Settings) -> Iterator[Conflict]:
    model, lowrank, vision = config.model, config.lowrank, config.is_vision
    no_head, named = not lowrank.train_head, config.adapter.extra.get("modules_to_save")
    headless = f"= False is for classifiers; {model.task} has no head of its own"
    yield "lowrank.train_head", no_head and config.is_language, headless
    asks = f"= False, but modules_to_save {list(named or ())} asks for trained modules"
    yield "lowrank.train_head", no_head and bool(named), asks
    own, whole = list(lowrank.personal), not config.llm.adapter.use
    alone = f"= {own}: the clients' own heads are saved beside their adapters, and {config.federate.method} has none"
    yield "lowrank.personal", bool(own) and whole, alone
    untrained = f"= {own}, and lowrank.train_head is False; leave one of the two out"
    yield "lowrank.personal", bool(own) and no_head, untrained
    yield "lowrank.personal", bool(own) and config.is_language, f"= {own}: {model.task} has no head of its own"
    images = _expected(model.task, f"ImageClassification, or nothing, with {model.type}")
    yield "model.task", vision and model.task != "ImageClassification", images
    wiped = "= 'zero' would wipe out the pre-trained weights of lowrank.weights; it is for training from scratch"
    yield "lowrank.base_init", lowrank.base_init == "zero" and vision and bool(lowrank.weights), wiped


def _of_data(config: Settings) -> Iterator[Conflict]:
    splits, loader = config.data.splits, config.dataloader
    shares = _expected(splits, "three shares, of train, validation and test, that add up to 1")
    yield "data.splits", len(splits) != 3 or abs(sum(splits) - 1) > 1e-6, shares
    images = "counts the tokens of texts, and images have none; leave it out"
    yield "dataloader.batch_tokens", bool(loader.batch_tokens) and config.is_vision, images
    drops = "= True leaves out smaller batches, and by dataloader.batch_tokens batches differ; leave one of the two out"
    yield "dataloader.drop_last", bool(loader.batch_tokens) and loader.drop_last, drops


def _of_place_and_scores(config: Settings) -> Iterator[Conflict]:
    device = config.device
    nowhere = device != "cpu" if isinstance(device, str) else device < -1
    yield "device", nowhere, _expected(device, "the index of a GPU, -1 for any, or cpu")
    folder = PurePath(config.expname)
    outside = ".." in folder.parts or folder.is_absolute()
    yield "expname", outside, _expected(config.expname, "a folder below outdir")
    task = config.model.task
    for i, metric in enumerate(config.eval.metrics):
        tasks = METRICS[metric].tasks if metric not in ("acc", "loss") else (task,)
        others = f"= {metric}: it is for {' and '.join(tasks)}; model.task is {task}"
        yield f"eval.metrics.{i}", bool(task) and task not in tasks, others
    best = config.eval.best_res_update_round_wise_key
    named = re.fullmatch(r"(\w+\.)?(train|val|test|client_test)_\w+", best)
    scores = _expected(best, "SPLIT_METRIC, such as val_loss or test_acc")
    yield "eval.best_res_update_round_wise_key", not named, scores


def _of_unchanged_bases(config: Settings, method: Any, needs: Any) -> Iterator[Conflict]:
    """Keys by which nobody can change the base, with image networks and with methods that change it."""
    changes = not config.llm.adapter.use or needs.changes_base and needs.adapter != "optional"
    for name, value in (("lowrank.dtype", config.quantised), ("model.device_map", config.model.device_map)):
        images = f"= {value} is for models of transformers, not {config.model.type}"
        yield name, bool(value) and config.is_vision, images
        advice = "take a method that leaves the base as it is, such as fedlora"
        if "merge" in params_fields(method):
            advice = "set lowrank.merge False, by which it keeps beside the base what it would merge"
        elif name == "lowrank.dtype":
            advice += ", or lowrank.dtype bfloat16"
        changed = f"= {value}: federate.method = {method.name} changes the weights of the base; {advice}"
        yield name, bool(value) and changes, changed
    kind = config.adapter.method
    only = f"of a quantised base (lowrank.dtype = {config.quantised}) PEFT computes LoRA's pairs only"
    others = f"= {kind}: {only}; take lora, or lowrank.dtype bfloat16"
    yield _METHOD, bool(config.quantised) and kind != "lora" and not config.adapter.virtual_tokens, others


def _of_virtual_tokens(config: Settings) -> Iterator[Conflict]:
    """Nothing of the model changes, and virtual tokens are put before a text."""
    chosen, model = f"llm.adapter.args: adapter_method = {config.adapter.method}", config.model
    images = f"= {model.type} is for images, and {chosen} puts tokens before a text"
    yield "model.type", config.is_vision, images
    merged = f"= True: {chosen} trains virtual tokens, which cannot be merged into weights; leave it out"
    yield "lowrank.save_merged", config.lowrank.save_merged, merged
    spread = f"= {model.device_map}: {chosen} keeps its virtual tokens on one device; take lora, or leave it out"
    yield "model.device_map", bool(model.device_map), spread


def _of_device_map(config: Settings) -> Iterator[Conflict]:
    processes, start = config.federate.process_num, config.adapter.extra.get("init_lora_weights", True)
    spread = (
        f"= {config.model.device_map} spreads one model over all devices, and federate.process_num = "
        f"{processes or 'auto'} puts one on each; leave one of the two out"
    )
    yield "model.device_map", processes != 1, spread
    computes = f"= {start} computes with the weights of the base, which model.device_map keeps elsewhere; leave it out"
    yield "llm.adapter.args.0.init_lora_weights", start not in (True, False, "gaussian"), computes
    merged = "= True needs the whole model on one device; leave it out with model.device_map, and merge elsewhere"
    yield "lowrank.save_merged", config.lowrank.save_merged, merged
