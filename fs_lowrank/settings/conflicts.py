"""Values of a configuration that exclude each other, with the reasons. Every conflict is looked for once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import PurePath
from typing import Any

from ..errors import nearest
from . import framework
from .adapter import ADDED, AdapterSpec
from .check import keys_of
from .metrics import CLIENTS, METRICS, measured, of_clients
from .origin import Origin, show
from .parameters import with_params
from .schema import Settings
from .sections import Lowrank, robust_needs

#: whether the value of a key is refused, the key, and why. Those of all engines are asked for when a configuration is
#: read, the others when it meets its engine
Conflict = tuple[Any, str, str]


#: of options of the adapter, what a method needs that cannot take them (``Requires.without``)
_WITHOUT = {
    "rank_pattern": "needs one rank for all layers",
    "alpha_pattern": "needs one alpha for all layers",
    "lora_bias": "computes with products of pairs, which hold no bias",
    "init_lora_weights": "needs a base of which no part is moved into the pair",
}


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
    if config.llm.adapter.use:
        name = with_params(method, config.method_params)
        check_adapter(config.adapter, config.from_scratch, name, needs, origin)


def check_adapter(adapter: AdapterSpec, from_scratch: bool, name: str, needs: Any, origin: Origin) -> None:
    """Refuse an adapter that a method cannot take, of a configuration or of a method made in Python.

    Args:
        name: ``with_params`` of the method. needs: the requirements of the method with its hyperparameters.
    Raises:
        UserError: as of ``check_together``.
    """
    kind, options = needs.adapter, adapter.to_args() | {"init_lora_weights": adapter.moves_base}
    additive = "use_dora" if adapter.method == "lora" else "adapter_method"
    halves = f"it has no halves A and B, which {name} works on; choose lora, or a method that averages adapters"
    added = f"it does not add to a weight, as {name} takes it to do; choose {' or '.join(ADDED)} without use_dora"
    fedlora = "federate.method = fedlora, which averages adapters of every kind"
    other, ranks = "leave it out, or choose another method", (adapter.r, *needs.ranks)
    parts = needs.own_ranks or needs.ranks and min(needs.ranks) < max(ranks)
    lacking = "it moves a part of the base into the pair, and clients of smaller ranks would lack some of it"
    conflicts = [
        (kind == "lora" and adapter.method != "lora", "adapter_method", f"{halves} of any kind"),
        (kind in ("any", "lora", "loha", "optional") and not adapter.is_additive, additive, f"{added}, or {fedlora}"),
        (kind == "loha" and adapter.method == "lokr", "adapter_method", f"{name} trains loha; leave it out"),
        (parts and adapter.moves_base, "init_lora_weights", f"{lacking}; take gaussian, or one rank for all"),
        *(
            (options.get(option), option, f"{name} {_WITHOUT.get(option, 'cannot take it')}; {other}")
            for option in needs.without
        ),
    ]
    if from_scratch and needs.pretrained:
        origin.fail("model.type", f"gives a model from scratch, and {name} keeps pairs beside a pre-trained base")
    for refused, key, reason in conflicts:
        if refused:
            origin.fail(f"llm.adapter.args.0.{key}", f"= {show(options[key])}: {reason}")


def conflicts_on(config: Settings, engine: str) -> list[tuple[str, Any, str]]:
    """The conflicts of ``config`` that ``engine`` has and others have not: key, value and reason."""
    conflicts = [conflict for engines, conflict in _of_engines(config) if engine in engines]
    return [(key, config.get(key), reason) for refused, key, reason in conflicts if refused]


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
    (split, metric), metrics = config.watched, measured(task, config.eval.metrics)
    metrics = of_clients(metrics) if split == CLIENTS else metrics
    unmeasured = f"no metric {metric!r} is measured{nearest(metric, metrics)}"
    yield task and metric not in metrics, key, f"{unmeasured}; {split}_ may be followed by: {', '.join(metrics)}"


def _of_models(config: Settings, method: Any, needs: Any) -> Iterator[Conflict]:
    model, lowrank, task, full = config.model, config.lowrank, config.model.task, not config.llm.adapter.use
    misfit = f"it is not for model.type = {model.type} ({task}); it takes models of {', '.join(needs.tasks)}"
    yield task and task not in needs.tasks, "federate.method", misfit
    trains = f"federate.method = {method.name} trains adapters; remove the key, or choose fedavg to train all weights"
    yield full and needs.adapts(False), "llm.adapter.use", trains
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


def _of_engines(config: Settings) -> Iterator[tuple[tuple[str, ...], Conflict]]:
    """Conflicts by the engines that have them; the other engines refuse the keys, or honour them."""
    keys = {**framework.DEFAULTS, **config.framework}
    kind, bits = keys["quantization.method"], keys["quantization.nbits"]
    encoders = ("federatedscope", "flower")
    yield encoders, (kind not in ("none", "uniform"), "quantization.method", "expected none or uniform")
    yield encoders, (kind == "uniform" and bits not in (8, 16), "quantization.nbits", "expected 8 or 16")
    for conflict in chain(_of_sums(config, keys), _of_scores(config), _of_processes(config, keys)):
        yield ("federatedscope",), conflict


def _of_sums(config: Settings, keys: Mapping[str, Any]) -> Iterator[Conflict]:
    """Conflicts of a server that sees no single updates."""
    federate, lowrank, count = config.federate, config.lowrank, config.federate.client_num
    exact = "with federate.use_ss the server sees nothing but the exact sum of the updates of all clients"
    yield federate.use_ss and keys["quantization.method"] != "none", "quantization.method", exact
    for name in ("drop_rate", "max_update_norm", "max_update_norm_factor"):
        yield federate.use_ss and getattr(lowrank, name), f"lowrank.{name}", exact
    everyone = "it needs at least two clients, and every client in every round"
    yield federate.use_ss and not 2 <= config.sampled_per_round == count, "federate.use_ss", everyone
    unstored = "with federate.online_aggr no update is stored until the others are in"
    yield federate.online_aggr and lowrank.max_update_norm_factor, "lowrank.max_update_norm_factor", unstored


def _of_scores(config: Settings) -> Iterator[Conflict]:
    """Conflicts of the framework's evaluation."""
    key, distributed = "eval.best_res_update_round_wise_key", config.federate.mode == "distributed"
    best, by_clients = config.eval.best_res_update_round_wise_key, not config.federate.make_global_eval
    files = "the framework files clients' own metrics under test_"
    yield "client_test_" in best and not distributed, key, files
    reports = "with federate.make_global_eval False clients report loss and accuracy"
    yield by_clients and best.rpartition("_")[2] in METRICS.keys() - {"acc", "loss"}, key, reports
    after = "between processes and with federate.make_global_eval False clients evaluate after a round alone"
    yield distributed and by_clients and config.eval.before, "eval.before", after


def _of_processes(config: Settings, keys: Mapping[str, Any]) -> Iterator[Conflict]:
    """Conflicts of the framework's runs of several processes."""
    distributed, several = config.federate.mode == "distributed", config.federate.process_num != 1
    for key in ("federate.join_in_info", "federate.save_client_model"):
        yield distributed and keys[key], key, "between processes clients neither send nor save that"
    standalone = "as any number but 1, also auto (0), it divides the clients of a standalone run"
    own = "in mode distributed every client is a process of its own"
    yield distributed and several, "federate.process_num", f"{standalone}; {own}"
    sampler, samplers = keys["federate.sampler"], ("uniform", "group", "responsiveness")
    unknown = f"expected {', '.join(samplers)}{nearest(sampler, samplers)}"
    yield sampler not in samplers, "federate.sampler", unknown
    fast = "it draws by how fast the clients are, in mode standalone; use the sampler uniform"
    yield distributed and sampler != "uniform", "federate.sampler", fast
    for key, value in (
        ("federate.sampler", sampler != "uniform"),
        ("federate.save_client_model", keys["federate.save_client_model"]),
    ):
        yield several and not distributed and value, key, "it needs one process; set federate.process_num 1"
    role, part, count = keys["distribute.role"], keys["distribute.data_idx"], config.federate.client_num
    yield distributed and role not in ("server", "client"), "distribute.role", "expected server or client"
    parts = f"expected 1 to {count}, the client's part of the data; or -1, as all data that it reads are its own"
    yield distributed and role == "client" and part != -1 and not 1 <= part <= count, "distribute.data_idx", parts
