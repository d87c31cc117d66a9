"""Build checked sections from plain nested data, and check values that depend on each other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn

from ..errors import UserError
from . import framework
from .check import check_value, hints_of, misspelt
from .metrics import METRICS
from .origin import Origin
from .schema import Settings, known_keys
from .sections import ROBUST, VISION_MODELS, robust_needs


def read_section(cls: type, raw: Any, prefix: str, origin: Origin, others: dict[str, Any]) -> Any:
    """An instance of ``cls`` from its section of the file. FederatedScope's other keys go to ``others``."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        origin.wrong(prefix.rstrip("."), raw, "a section with keys of its own")
    hints = hints_of(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if not (f.metadata.get("open") or f.metadata.get("hidden"))}
    rest = next((f.name for f in dataclasses.fields(cls) if f.metadata.get("open")), None)
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in raw.items():
        name = prefix + key
        if key in fields:
            values[key] = (
                read_section(hints[key], value, name + ".", origin, others)
                if dataclasses.is_dataclass(hints[key])
                else check_value(name, value, hints[key], fields[key].metadata, origin)
            )
        elif _framework_key(name, value, origin, others):
            continue
        elif rest is None:
            unknown_key(name, origin)
        else:
            # The section accepts further keys, which are checked when it is used.
            close = misspelt(key, fields) if rest == "extra" else None
            if close and close == key.lower():
                raise UserError(f"{origin.where(name)}unknown key {name!r}; did you mean {prefix + close!r}?")
            extra[key] = value
    return cls(**values, **({rest: extra} if rest else {}))


def unknown_key(name: str, origin: Origin, more: Sequence[str] = ()) -> NoReturn:
    """Refuse the key ``name``; the message names the key that is probably meant, if one is likely enough."""
    known = [*known_keys(), *more]
    ours = [key for key in known if key not in framework.DEFAULTS]
    section, _, last = name.rpartition(".")
    close = _meant(section, last, ours, 0.6) or _meant(section, last, known, 0.8)  # FederatedScope's: if it is clear
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise UserError(f"{origin.where(name)}unknown key {name!r}{hint}")


def _meant(section: str, last: str, known: Sequence[str], cutoff: float) -> list[str]:
    """The keys of ``known`` that ``section.last`` is probably meant to be; none is better than one that misleads.

    One of the same section with a similar name, else those of that very name in other sections (three at most), else
    one whose whole name hardly differs. That two keys are of one section does not make them alike.
    """
    keys = {*known, *(key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1))}
    beside = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if close := misspelt(last, beside):
        return [beside[close]]
    same = sorted(key for key in keys if key.rpartition(".")[2] == last.lower())
    same = [key for key in same if key.startswith(f"{section}.")] or same
    if 0 < len(same) <= 3:
        return same
    close = misspelt(last, beside, cutoff)
    whole = misspelt(f"{section}.{last}", keys, 0.85)
    return [beside[close]] if close else [whole] if whole else []


def _framework_key(name: str, value: Any, origin: Origin, others: dict[str, Any]) -> bool:
    """Whether FederatedScope has this key. A value other than its default is added to ``others``."""
    if name in framework.DEFAULTS:
        default = framework.DEFAULTS[name]
        value = check_value(name, value, type(default), {}, origin)
        if value != default:
            others[name] = value
        return True
    if framework.within(name, framework.OPEN) and name not in framework.OPEN:
        others[name] = value
        return True
    if name not in framework.OPEN and not any(key.startswith(name + ".") for key in framework.DEFAULTS):
        return False
    if value is not None and not isinstance(value, Mapping):
        origin.wrong(name, value, "a section with keys of its own")
    for key, item in (value or {}).items():
        if not _framework_key(f"{name}.{key}", item, origin, others):
            unknown_key(f"{name}.{key}", origin)
    return True


def _check_robust(config: Settings, origin: Origin) -> None:
    """Keys of ``lowrank.robust`` that its rule does not use, and rounds with too few clients for it."""
    rule, malicious, norm = config.lowrank.robust, config.lowrank.robust_malicious, config.lowrank.robust_norm
    if malicious != 1 and robust_needs(rule, malicious) == 1:
        users = ", ".join(r for r in ROBUST if robust_needs(r, 1) > 1)
        origin.fail("lowrank.robust_malicious", f"= {malicious} is for {users}; lowrank.robust is {rule}")
    if norm and rule != "norm_bound":
        origin.fail("lowrank.robust_norm", f"= {norm:g} is for norm_bound; lowrank.robust is {rule}")
    if config.sampled_per_round < (needed := robust_needs(rule, malicious)):
        origin.fail(
            "lowrank.robust",
            f"= {rule} with robust_malicious = {malicious} needs {needed} clients per round; there are "
            f"{config.sampled_per_round}",
        )


def _check_alone(config: Settings, origin: Origin) -> None:
    """One client of a division trains alone: that there is such a client, and nothing that needs several."""
    name, federate = "federate.client_idx_for_local_train", config.federate
    if not 0 <= config.alone <= federate.client_num:
        origin.wrong(name, config.alone, f"the number of a client, 1 to {federate.client_num}; or 0 for all clients")
    if not config.alone:
        return
    ranks = config.lowrank.params.get("ranks") or ()
    for wrong, what in (
        (federate.mode != "standalone", f"federate.mode = {federate.mode} is for clients that train together"),
        (federate.use_ss, "federate.use_ss hides the updates of several clients from each other"),
        (
            bool(config.lowrank.clients) or len(ranks) > 1,
            "lowrank.clients and lowrank.ranks are for clients that train together; give the file the client's values",
        ),
    ):
        if wrong:
            origin.fail(name, f"= {config.alone} trains one client alone, and {what}; leave one of the two out")


def check_together(config: Settings, origin: Origin) -> None:
    """Check values that depend on each other."""
    _check_clients(config, origin)
    _check_alone(config, origin)
    _check_robust(config, origin)
    _check_model(config, origin)
    _check_data(config, origin)
    _check_place_and_scores(config, origin)


def _check_clients(config: Settings, origin: Origin) -> None:
    federate = config.federate
    if federate.client_num < 1:
        origin.fail("federate.client_num", f"= {federate.client_num}: set it to the number of clients, 1 or more")
    if federate.sample_client_num == 0:
        origin.wrong("federate.sample_client_num", 0, "clients a round, 1 or more; or -1 for all")
    if federate.sample_client_num > federate.client_num:
        origin.wrong(
            "federate.sample_client_num",
            federate.sample_client_num,
            f"at most federate.client_num, which is {federate.client_num}",
        )
    if federate.sample_client_rate <= 0 and federate.sample_client_rate != -1:
        origin.wrong(
            "federate.sample_client_rate", federate.sample_client_rate, "a share above 0 and at most 1; or -1 for all"
        )
    if config.lowrank.min_clients > config.sampled_per_round:
        origin.wrong(
            "lowrank.min_clients",
            config.lowrank.min_clients,
            f"at most the clients of a round, {config.sampled_per_round}",
        )


def _check_model(config: Settings, origin: Origin) -> None:
    if not config.lowrank.train_head:
        if config.is_language:
            origin.fail("lowrank.train_head", f"= False is for classifiers; {config.model.task} has no head of its own")
        if named := config.adapter.extra.get("modules_to_save"):
            origin.fail("lowrank.train_head", f"= False, but modules_to_save {list(named)} asks for trained modules")
    if config.is_vision and config.model.task != "ImageClassification":
        origin.wrong("model.task", config.model.task, f"ImageClassification, or nothing, with {config.model.type}")
    for key, value, default in (
        ()
        if config.is_vision
        else (
            ("norm", config.lowrank.norm, "batch"),
            ("width", config.lowrank.width, 1.0),
            ("weights", config.lowrank.weights, ""),
            ("base_init", config.lowrank.base_init, "random"),
        )
    ):
        if value != default:
            origin.fail(
                f"lowrank.{key}",
                f"= {value!r} is for networks of ours ({', '.join(VISION_MODELS)}); "
                f"model.type is {config.model.type!r}",
            )
    if config.lowrank.base_init == "zero" and not config.from_scratch:
        origin.fail(
            "lowrank.base_init",
            "= 'zero' would wipe out the pre-trained weights of lowrank.weights; it is for training from scratch",
        )


def _check_data(config: Settings, origin: Origin) -> None:
    splits = config.data.splits
    if len(splits) != 3 or abs(sum(splits) - 1) > 1e-6:
        origin.wrong("data.splits", splits, "three shares, of train, validation and test, that add up to 1")
    if config.dataloader.batch_tokens and config.is_vision:
        origin.fail("dataloader.batch_tokens", "counts the tokens of texts, and images have none; leave it out")
    if config.dataloader.batch_tokens and config.dataloader.drop_last:
        origin.fail(
            "dataloader.drop_last",
            "= True leaves out a batch with fewer samples than the others, and with dataloader.batch_tokens batches "
            "differ in that; leave one of the two out",
        )


def _check_place_and_scores(config: Settings, origin: Origin) -> None:
    if (
        isinstance(config.device, str)
        and config.device != "cpu"
        or isinstance(config.device, int)
        and config.device < -1
    ):
        origin.wrong("device", config.device, "the index of a GPU, -1 for any, or cpu")
    if ".." in PurePath(config.expname).parts or PurePath(config.expname).is_absolute():
        origin.wrong("expname", config.expname, "a folder below outdir")
    for i, metric in enumerate(config.eval.metrics):
        if metric not in ("acc", "loss") and config.model.task and config.model.task not in METRICS[metric].tasks:
            tasks = " and ".join(METRICS[metric].tasks)
            origin.fail(f"eval.metrics.{i}", f"= {metric}: it is for {tasks}; model.task is {config.model.task}")
    best = config.eval.best_res_update_round_wise_key
    if not re.fullmatch(r"(\w+\.)?(train|val|test|client_test)_\w+", best):
        origin.wrong("eval.best_res_update_round_wise_key", best, "SPLIT_METRIC, such as val_loss or test_acc")
