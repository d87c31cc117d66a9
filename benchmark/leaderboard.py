"""The leaderboard: low-rank methods in the same settings, from the cells of the suite ``leaderboard``."""

from __future__ import annotations

import io
import logging
import math
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fs_lowrank.draw.panels import Panel
from fs_lowrank.errors import ROWS_LOGGER, counted
from fs_lowrank.jobs.files import write_text
from fs_lowrank.testing.bench import Bench, quietly

from .conditions import shown
from .figures import draw_on_white, point
from .frame import row
from .intervals import Estimate, Figure, estimate, pooled
from .methods_table import signed
from .results import ExperimentResults
from .suite import Suite
from .template import markdown

#: the suite
LEADERBOARD = "leaderboard"
#: what the others are compared with
BASE = "fedlora"
#: of the base's accuracy in a setting: the accuracy to which bytes are counted
TARGET = 0.98
HEAD = (
    "method",
    "accuracy",
    f"points against `{BASE}`, equal rounds",
    "equal bytes",
    "settings, runs",
    "kB up, down",
    "bytes to a common accuracy",
    "client, s",
    "server, ms",
    "memory, GB",
    "off the mean of the products",
)
#: of each run, of which the table has medians
MEASURED = ["uplink_without_head", "downlink_without_head", "client", "aggregation", "memory"]
#: what names a run
RUN = ["setting", "method", "seed"]
#: setting -> the accuracy of a method on test data
Figures = Mapping[str, Figure]


def write_leaderboard(suite: Suite, results: Mapping[str, ExperimentResults], root: Path) -> list[Path]:
    """Write ``leaderboard.md``, for a size for a GPU ``leaderboard_paper.md``, and its picture below ``root``.

    Nothing is written without results of ``fedlora``.
    """
    page = root / f"{LEADERBOARD}{'_paper' if suite.size == 'paper' else ''}.md"
    figures, runs = of_methods(results)
    if not figures:
        return []
    rows = table(figures, runs)
    _draw(figures, runs, page.with_suffix(".svg"))
    there = [each for each in results.values() if each.cells]
    write_text(page, markdown("leaderboard", [HEAD, *rows], there, page.with_suffix(".svg").name))
    return [page, page.with_suffix(".svg")]


def of_methods(results: Mapping[str, ExperimentResults]) -> tuple[dict[str, Figures], pd.DataFrame]:
    """Method -> its accuracies, the best method first, and a row for each run: in the settings that have results of the
    base.
    """
    figures: dict[str, dict[str, Figure]] = {}
    runs = []
    for name, each in results.items():
        for column in (c for c in each.columns if each.has(BASE, c, "test_acc")):
            setting = f"{name} {column}"
            for method in each.methods:
                if figure := each.figure(method, column, "test_acc"):
                    figures.setdefault(method, {})[setting] = figure
                found = each.records.get((method, column), ()) if figure and figure.n else ()
                runs += [{**row(r), **_of_a_client(r), "method": method, "setting": setting} for r in found]
    there = [method for method, of in figures.items() if any(figure.n for figure in of.values())]
    order = sorted(there, key=lambda method: -gap(figures[method], figures[BASE]).centre)
    return {method: figures[method] for method in order}, pd.DataFrame(runs)


def _of_a_client(record: Mapping[str, Any]) -> dict[str, Any]:
    """Further columns of a run: seconds of training by client and round, the curve, the configuration."""
    config = record["config"]
    few = config.get("federate.sample_client_num", -1)
    clients = few if few > 0 else config["federate.client_num"]
    seconds = record["seconds"]["training"] / max(1, record["rounds"]) / clients
    return {"client": seconds, "points": record["history"]["evaluated"], "config": config}


def table(figures: Mapping[str, Figures], runs: pd.DataFrame) -> list[tuple[str, ...]]:
    """The rows below ``HEAD``."""
    by_method, points = runs.groupby("method"), curves(runs)
    medians = runs[MEASURED].astype(float).groupby(runs["method"]).median()
    equal, (quotients, reached) = equal_bytes(points), bytes_to_target(points, runs)
    rows: list[tuple[str, ...]] = []
    for method, of in figures.items():
        here, number, config = medians.loc[method], len(by_method.groups[method]), by_method["config"].first()[method]
        known, settings = equal[method].dropna(), sum(figure.n > 0 for figure in of.values())
        some = f" in {counted(len(known), 'setting')}" if len(known) < settings else ""
        lost = sum(len(figure.failed) for figure in of.values())
        away = exactness(config["federate.method"], config)
        target = f"reached by {reached[method]} of {number}"
        rows.append(
            (
                f"`{method}`",
                _points(mean(of), ".1f"),
                _points(gap(of, figures[BASE])) if method != BASE else "0",
                signed(100 * known.mean()) + some if len(known) else "–",
                f"{settings}, {number}" + (f" ({lost} failed)" if lost else ""),
                ", ".join(_shown(here[way] / 1e3, 3) for way in MEASURED[:2]),
                target if math.isnan(quotients[method]) else f"{quotients[method]:.2g}×, {target}",
                _shown(here["client"]),
                _shown(here["aggregation"] * 1e3),
                _shown(here["memory"] / 1e9),
                "exact" if away < 1e-5 else f"{100 * away:.2g} %",
            )
        )
    return rows


def mean(of: Figures) -> Estimate:
    """The mean over the settings."""
    there = [figure for figure in of.values() if figure.n]
    return estimate([(1 / len(there), figure) for figure in there])


def gap(of: Figures, base: Figures) -> Estimate:
    """The accuracy above that of the base, over the settings as random effects; 0 of the base itself."""
    gaps = [estimate([(1, f), (-1, base[setting])]) for setting, f in of.items() if f.n and f is not base[setting]]
    if len(gaps) > 1 and all(gap.error for gap in gaps):
        return pooled(gaps)
    return gaps[0] if len(gaps) == 1 else Estimate(statistics.fmean([g.centre for g in gaps] or [0.0]), None)


def curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Each evaluation of each run: all bytes ``sent`` until then, without the head, and ``val_acc``."""
    named = runs[[*RUN, "points"]].explode("points", ignore_index=True)
    made = named[RUN].join(pd.DataFrame([*named["points"]]))
    return made.assign(sent=made["uplink_without_head"] + made["downlink_without_head"])


def _by_setting(found: pd.Series, runs: pd.Index) -> pd.DataFrame:
    """Over the seeds the mean of each setting (rows) and method (columns); not a number (NaN) if a run has none."""
    return found.reindex(runs).groupby(RUN[:2]).agg(lambda of: of.mean(skipna=False)).unstack("method")


def equal_bytes(points: pd.DataFrame) -> pd.DataFrame:
    """By setting and method the accuracy on validation data above that of the base when both have sent half of what the
    base sends; NaN where a run had not been evaluated by then.
    """
    ends = points.groupby(RUN)["sent"].last()
    budget = points["setting"].map(ends.xs(BASE, level="method").groupby("setting").mean() / 2)
    found = _by_setting(points[points["sent"] <= budget].groupby(RUN)["val_acc"].last(), ends.index)
    return found.sub(found[BASE], axis=0)


def bytes_to_target(points: pd.DataFrame, runs: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """By method all bytes until ``TARGET`` of the base's accuracy on validation data, as a multiple of the base's, the
    median over the settings in which all runs reach it; and the number of runs that do.
    """
    last = runs[runs["method"] == BASE].groupby("setting")["val_acc"].mean()
    there = points["val_acc"] >= points["setting"].map(TARGET * last)
    first = points[there].groupby(RUN)["sent"].first()
    every = points.groupby(RUN).size().index
    found = _by_setting(first, every)
    return found.div(found[BASE], axis=0).median(), first.reindex(every).groupby("method").count()


def _shown(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def _points(found: Estimate, form: str = "+.1f") -> str:
    """An accuracy in percent, or a difference in points, with its interval."""
    return shown(found, form, 100).replace("-", "−")


def exactness(method: str, keys: Mapping[str, Any]) -> float:
    """How far the server's step is from the mean of the products that the clients have trained: the Frobenius norm of
    the difference, over that of the clients' mean change, over all adapted layers.

    A round of three clients with unequal data on a tiny encoder, rank 2 and alpha 4, after two other rounds. What a
    layer computes is read by its answer to unit vectors, whatever the method makes of it.

    Args:
        keys: of a configuration, of which ``lowrank.tau`` is taken.
    """
    own = {name: given for name, given in keys.items() if name == "lowrank.tau"}
    silent = mock.patch.object(logging.getLogger(ROWS_LOGGER), "disabled", True)
    with tempfile.TemporaryDirectory() as folder, quietly(folder), redirect_stderr(io.StringIO()), silent:
        engine = Bench(folder).make("encoder", method, {"train.local_update_steps": 4, **own})
        before, of_clients = torch.empty(0), dict[int, Tensor]()
        upload, last = engine.method.upload, engine.config.federate.total_round_num

        def spy(model: nn.Module, round: int, client: Any) -> Mapping[str, Tensor]:
            if round == last:
                of_clients[client.id] = _responses(model)
            return upload(model, round, client)

        def on_round(record: Mapping[str, Any]) -> None:
            nonlocal before
            if record["round"] == last - 1:
                engine.workspace.load_global(engine.ledger.state)
                before = _responses(engine.model)

        with mock.patch.object(engine.method, "upload", spy):
            engine.on_round = on_round
            engine.run()
        after, rows = (
            _responses(engine.model),
            [len(engine.workspace.data.clients[number - 1]) for number in of_clients],
        )
        mean = torch.from_numpy(np.average([*of_clients.values()], axis=0, weights=rows))
        return float((after - mean).norm() / (mean - before).norm())


def _responses(model: nn.Module) -> Tensor:
    """The answers to unit vectors of every linear layer with an adapter, one after the other, float64 ``(n,)``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model.eval()
    found = []
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, BaseTunerLayer)):
            units = torch.eye(layer.get_base_layer().in_features)
            found.append((layer(units) - layer(torch.zeros_like(units))).double().flatten())
    return torch.cat(found)


def _draw(figures: Mapping[str, Figures], runs: pd.DataFrame, path: Path) -> None:
    """Accuracy against the bytes up, a point a method, with its interval."""
    up, marks = runs.groupby("method")["uplink_without_head"].median() / 1e3, []
    for place, (method, of) in enumerate(figures.items()):
        marks.append(point(method, place, up[method], mean(of).centre, mean(of).ends))
    panel = Panel("leaderboard", "", "kB that a client sends up in a round", "accuracy on test data", marks)
    draw_on_white([panel], "mean over the settings with its 95 % interval", path, size=(7.2, 4.4))
