"""Values of a configuration that exclude each other, with the reasons. Every conflict is looked for once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import PurePath
from typing import Any

from .check import keys_of
from .metrics import METRICS
from .origin import Origin, show
from .schema import Settings
from .sections import Lowrank, robust_needs

#: whether the value of a key is refused, the key, and why
Conflict = tuple[Any, str, str]


def check_together(config: Settings, method: Any, needs: Any, origin: Origin) -> None:
    """Refuse values that cannot be together.

    Args:
        method: the class of ``federate.method``. needs: its requirements with its hyperparameters.
    Raises:
        UserError: names file, line, key, value and reason, of the first conflict.
    """
    groups = (_of_clients(config), _of_drift(config), _of_data(config), _of_models(config, method, needs))
    for refused, key, reason in chain(*groups, _of_devices(config)):
        if refused:
            origin.fail(key, f"= {show(config.get(key))}: {reason}")


def _of_clients(config: Settings) -> Iterator[Conflict]:
    federate, lowrank, alone = config.federate, config.lowrank, config.alone
    count, rate = federate.client_num, federate.sample_client_rate
    yield count < 1, "federate.client_num", "set it to the number of clients, 1 or more"
    drawn = f"expected 1 to federate.client_num, which is {count}; or -1 for all"
    yield not -1 <= federate.sample_client_num <= count, "federate.sample_client_num", drawn
    yield federate.sample_client_num == 0, "federate.sample_client_num", drawn
    share = "expected a share above 0 and at most 1; or -1 for all"
    yield rate <= 0 and rate != -1, "federate.sample_client_rate", share
    fewest = f"expected at most the clients of a round, {config.sampled_per_round}"
    yield lowrank.min_clients > config.sampled_per_round, "lowrank.min_clients", fewest
    bound = "expected 1 or more, as half of the updates exceed their median; or 0 for no bound"
    yield 0 < lowrank.max_update_norm_factor < 1, "lowrank.max_update_norm_factor", bound
    own_rank = any("rank" in entry for entry in config.client_settings.values())
    one_rank = f"it gives clients a rank, and federate.method = {federate.method} has one for all; see lowrank.ranks"
    yield own_rank and "ranks" not in lowrank.params, "lowrank.clients", one_rank
    own_length = config.is_vision and any("tok_len" in entry for entry in config.client_settings.values())
    no_length = f"it gives clients a tok_len, and model.type = {config.model.type} is for images"
    yield own_length, "lowrank.clients", no_length
    number = f"expected the number of a client, 1 to {count}; or 0 for all clients"
    yield not 0 <= alone <= count, "federate.client_idx_for_local_train", number
    individual = lowrank.clients or len(lowrank.params.get("ranks") or ()) > 1
    together = federate.mode != "standalone" or federate.use_ss or individual
    several = "it trains one client alone; leave federate.mode, federate.use_ss, lowrank.clients and lowrank.ranks out"
    yield alone and together, "federate.client_idx_for_local_train", several
    needed = robust_needs(lowrank.robust, lowrank.robust_malicious)
    shortage = f"robust_malicious = {lowrank.robust_malicious} needs {needed} clients per round; there are "
    yield config.sampled_per_round < needed, "lowrank.robust", f"{shortage}{config.sampled_per_round}"


def _of_drift(config: Settings) -> Iterator[Conflict]:
    """Conflicts of a correction of the clients' objective."""
    kind, weight, optimizer = config.lowrank.drift, config.lowrank.drift_weight, config.train.optimizer
    unused = kind not in ("fedprox", "feddyn") and weight != Lowrank().drift_weight
    yield unused, "lowrank.drift_weight", f"it is for fedprox and feddyn; lowrank.drift is {kind}"
    divided = kind == "feddyn" and not weight
    yield divided, "lowrank.drift_weight", "expected a number above 0, by which feddyn divides"
    plain = optimizer.type == "SGD" and not optimizer.extra.get("momentum") and config.grad.grad_clip <= 0
    steps = "it takes a client's mean gradient from how far plain steps have led"
    advice = "take train.optimizer.type SGD without momentum, and no grad.grad_clip"
    yield kind == "scaffold" and not plain, "lowrank.drift", f"{steps}; {advice}"
    own_step, step = kind in ("scaffold", "feddyn"), "has a server's step of its own, on updates as they were sent"
    for key, value in (
        ("fedopt.use", config.fedopt.use),
        ("lowrank.robust", config.lowrank.robust != "none"),
        ("federate.use_ss", config.federate.use_ss),
        ("federate.online_aggr", config.federate.online_aggr),
        ("quantization.method", config.framework.get("quantization.method", "none") != "none"),
    ):
        yield own_step and value, key, f"lowrank.drift = {kind} {step}; leave one of the two out"
    spread = kind != "none" and config.model.device_map
    yield spread, "model.device_map", f"lowrank.drift = {kind} is for a model on one device"


def _of_data(config: Settings) -> Iterator[Conflict]:
    splits, device, folder, task = config.data.splits, config.device, PurePath(config.expname), config.model.task
    shares = "expected three shares, of train, validation and test, that add up to 1"
    yield len(splits) != 3 or abs(sum(splits) - 1) > 1e-6, "data.splits", shares
    by_tokens = config.dataloader.batch_tokens
    images = "it counts the tokens of texts, and images have none; leave it out"
    yield by_tokens and config.is_vision, "dataloader.batch_tokens", images
    drops = "it leaves out smaller batches, and by dataloader.batch_tokens batches differ; leave one of the two out"
    yield by_tokens and config.dataloader.drop_last, "dataloader.drop_last", drops
    nowhere = device != "cpu" if isinstance(device, str) else device < -1
    yield nowhere, "device", "expected the index of a GPU, -1 for any, or cpu"
    yield ".." in folder.parts or folder.is_absolute(), "expname", "expected a folder below outdir"
    for i, metric in enumerate(config.eval.metrics):
        tasks = METRICS[metric].tasks
        unsuited = task and metric not in ("acc", "loss") and task not in tasks
        yield unsuited, f"eval.metrics.{i}", f"it is for {' and '.join(tasks)}; model.task is {task}"
    key = "eval.best_res_update_round_wise_key"
    match = re.fullmatch(r"(\w+\.)?(train|val|test|client_test)_\w+", config.get(key))
    yield not match, key, "expected SPLIT_METRIC, such as val_loss or test_acc"


def _of_models(config: Settings, method: Any, needs: Any) -> Iterator[Conflict]:
    model, lowrank, task, full = config.model, config.lowrank, config.model.task, not config.llm.adapter.use
    misfit = f"it is not for model.type = {model.type} ({task}); it takes models of {', '.join(needs.tasks)}"
    yield task and task not in needs.tasks, "federate.method", misfit
    vision = f"expected ImageClassification, or nothing, with {model.type}"
    yield config.is_vision and task != "ImageClassification", "model.task", vision
    headless = f"{task} has no head of its own"
    yield not lowrank.train_head and config.is_language, "lowrank.train_head", headless
    trained = "modules_to_save of llm.adapter.args asks for trained modules; leave one of the two out"
    yield not lowrank.train_head and config.adapter.extra.get("modules_to_save"), "lowrank.train_head", trained
    for refused, reason in (
        (needs.own_upload, f"federate.method = {method.name} computes with all weights, the head's too"),
        (full, f"the clients' own heads are saved beside their adapters, and {method.name} has none"),
        (not lowrank.train_head, "lowrank.train_head is False; leave one of the two out"),
        (config.is_language, headless),
    ):
        yield lowrank.personal and refused, "lowrank.personal", reason
    zero = lowrank.base_init == "zero" and config.is_vision
    yield zero and lowrank.weights, "lowrank.base_init", "it would wipe out the pre-trained weights; take random"
    yield zero and needs.float_base, "lowrank.base_init", f"{method.name} computes with the base's weights; take random"
    changes = full or needs.changes_base and needs.adapter != "optional"
    advice = "take a method that leaves the base as it is, such as fedlora, or leave the key out"
    if "merge" in keys_of(method.Params):
        advice = "set lowrank.merge False, with which it merges nothing into the base"
    changed = f"federate.method = {method.name} changes the weights of the base; {advice}"
    for name, value in (("lowrank.dtype", config.quantised), ("model.device_map", model.device_map)):
        yield value and config.is_vision, name, f"it is for models of transformers, not {model.type}"
        yield value and changes, name, changed
    yield config.quantised and needs.float_base, "lowrank.dtype", f"{method.name} needs float weights; take bfloat16"
    not_lora = config.adapter.method != "lora" and not config.adapter.virtual_tokens
    lora_only = f"of a base of lowrank.dtype = {config.quantised} PEFT computes LoRA's pairs only; take lora"
    yield config.quantised and not_lora, "llm.adapter.args.0.adapter_method", lora_only


def _of_devices(config: Settings) -> Iterator[Conflict]:
    """Conflicts of adapters of virtual tokens, and of a model on several devices."""
    spread, merges = config.model.device_map, config.lowrank.save_merged
    if config.llm.adapter.use and config.adapter.virtual_tokens:
        tokens = f"adapter_method = {config.adapter.method} trains virtual tokens before a text, "
        yield config.is_vision, "model.type", f"{tokens}and this model is for images"
        yield merges, "lowrank.save_merged", f"{tokens}which cannot be merged into weights; leave it out"
        yield spread, "model.device_map", f"{tokens}which it keeps on one device; take lora, or leave it out"
    processes = "it spreads one model over all devices, and federate.process_num puts one on each; leave one out"
    yield spread and config.federate.process_num != 1, "model.device_map", processes
    start = config.adapter.extra.get("init_lora_weights", True)
    computes = "it computes with the weights of the base, which model.device_map puts elsewhere; leave it out"
    yield spread and start not in (True, False, "gaussian"), "llm.adapter.args.0.init_lora_weights", computes
    undivided = "it needs the whole model on one device; leave it out with model.device_map, and merge elsewhere"
    yield spread and merges, "lowrank.save_merged", undivided
