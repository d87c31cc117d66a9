"""The options of a search, its objectives, and whether a config measures them. Nothing here needs Optuna."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fs_lowrank import Config, UserError
from fs_lowrank.errors import nearest
from fs_lowrank.settings.metrics import METRICS, measured

SAMPLERS = ("grid", "tpe", "random", "cmaes", "gp")
PRUNERS = ("none", "median", "halving", "hyperband")
#: name of the storage in the folder of a search
FILE = "study.db"
#: name of the file in the folder of a study with its ``summary.summary`` from when a trial last began or ended
SUMMARY = "summary.json"
#: the key of the metric that stops a run early
WATCHED = "eval.best_res_update_round_wise_key"
#: the objectives and their directions; none of them is of the test data
OBJECTIVES: dict[str, Literal["minimize", "maximize"]] = {
    **{f"val_{name}": "maximize" if metric.larger else "minimize" for name, metric in METRICS.items()},
    **dict.fromkeys(("uplink_bytes", "downlink_bytes", "client_steps"), "minimize"),
}


def one_test_set(base: Config) -> Config:
    """``base`` with one test set for all seeds (``lowrank.test_seed``), if the test set is split off the training rows.

    With a test set for each seed, rows by which the search has chosen would be in the test sets of the fresh seeds.
    """
    cut = base.data.splits[2] and base.lowrank.test_seed < 0
    return base.replace({"lowrank.test_seed": base.seed}) if cut else base


def metric_of(objectives: Sequence[str]) -> str:
    """The first objective on validation data, by which a trial is pruned and its run stops early."""
    return next(name for name in objectives if name.startswith("val"))


def parse_objectives(text: str) -> tuple[str, ...]:
    """``val_acc,uplink_bytes`` as a tuple.

    Raises:
        UserError: an unknown objective, or one of the test data.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name.startswith("test"):
            raise UserError(
                f"objective {name}: the test data chooses nothing; search by val{name[4:]}, and the best "
                "config is tested when it is confirmed"
            )
        if name not in OBJECTIVES:
            raise UserError(f"objective {name}{nearest(name, OBJECTIVES)}; there are: {', '.join(OBJECTIVES)}")
    if not names or len(set(names)) < len(names) or not any(n.startswith("val") for n in names):
        raise UserError(
            f"objective {text!r}: expected val_acc, val_loss or another metric of validation data, and perhaps a "
            "cost, such as val_acc,uplink_bytes"
        )
    return names


def check_config(config: Config, objectives: Sequence[str] = (), engine: str = "local") -> None:
    """Refuse a config that cannot be searched by validation, or does not measure ``objectives``.

    Raises:
        UserError: the config has no validation data, or does not evaluate the global model; or its steps are not known.
    """
    metrics = measured(config.model.task, config.eval.metrics)
    for name in objectives:
        if name.startswith("val_") and name.removeprefix("val_") not in metrics:
            raise UserError(
                f"objective {name}: it is not measured with model.task = {config.model.task} and eval.metrics = "
                f"{list(config.eval.metrics)}; measured are: {', '.join(f'val_{m}' for m in metrics)}"
            )
    if not config.federate.make_global_eval and engine != "federatedscope":  # whose clients evaluate validation data
        raise UserError(
            "federate.make_global_eval = False: only the clients' own models are evaluated, on test data, and a search "
            "goes by the global model on validation data; set federate.make_global_eval True"
        )
    if config.dataloader.batch_tokens and config.train.batch_or_epoch == "epoch":
        raise UserError(
            f"dataloader.batch_tokens = {config.dataloader.batch_tokens}: a search counts the steps of clients, which "
            "are not known for epochs of such batches; set train.batch_or_epoch batch"
        )
    if not config.data.splits[1] and not any("validation" in a for a in config.data.args if isinstance(a, dict)):
        raise UserError(
            f"data.splits = {list(config.data.splits)}: a search needs validation data; give "
            "the middle one a share, such as: data.splits '[0.8, 0.1, 0.1]'"
        )
