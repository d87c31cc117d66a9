"""The leaderboard: low-rank methods in the same settings, from the cells of the suite ``leaderboard``."""

from __future__ import annotations

import io
import logging
import math
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fs_lowrank.draw.panels import Panel
from fs_lowrank.errors import ROWS_LOGGER, UserError, counted
from fs_lowrank.jobs.files import write_text
from fs_lowrank.jobs.progress import steps
from fs_lowrank.testing.bench import Bench, quietly

from .conditions import interval_text
from .figures import draw_on_white, point
from .frame import row
from .intervals import Estimate, Figure, estimate
from .results import ExperimentResults
from .suite import Suite
from .template import markdown

#: the suite
LEADERBOARD = "leaderboard"
#: the method that the others are compared with
BASE = "fedlora"
#: bytes are counted until a method is as near as this to the base's accuracy or loss in a setting
NEAR = 0.02
#: the worst tenth of clients, of one global model on their shares of the test set
WORST = "test_acc_worst_decile"
#: the columns of runs whose medians are in the table
MEASURED = ["uplink_without_head", "downlink_without_head", "client", "aggregation", "memory"]
#: the columns that identify a run
RUN = ["setting", "method", "seed"]
#: setting -> the score of a method on test data
Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Score:
    """How models are scored: in tables as ``name``, in units of ``1 / factor`` and by ``form``.

    Attributes:
        sign: 1 if a larger value is better, otherwise −1.
    """

    metric: str
    name: str
    difference: str
    factor: float
    form: str
    sign: int

    def text(self, estimate: Estimate, sign: str = "") -> str:
        """With its 95 % interval."""
        return interval_text(estimate, sign + self.form, self.factor)


ACCURACY = Score("acc", "accuracy", "points", 100, ".1f", 1)
#: of a language model, per token of the answers
LOSS = Score("loss", "loss", "difference", 1, ".3f", -1)


def write_leaderboard(suite: Suite, results: Mapping[str, ExperimentResults], root: Path) -> list[Path]:
    """Write ``leaderboard.md``, for a size for a GPU ``leaderboard_paper.md``, and its picture below ``root``.

    Nothing is written without results of ``fedlora``.
    """
    page = root / f"{LEADERBOARD}{'_paper' if suite.size == 'paper' else ''}.md"
    figures, runs = collect(results, ACCURACY)
    losses, language_runs = collect(results, LOSS)
    if not (figures or losses):
        return []
    picture = page.with_suffix(".svg") if figures else None
    if picture:
        _draw(figures, runs, picture)
    tables = [table(figures, runs), parts(figures, runs), table(losses, language_runs, LOSS)]
    experiments = [experiment for experiment in results.values() if experiment.records]
    cells = [[[*rows[0]], *([*row.values()] for row in rows)] if rows else [] for rows in tables]
    write_text(page, markdown("leaderboard", *cells, experiments, picture and picture.name))
    return [page, *([picture] if picture else [])]


def collect(results: Mapping[str, ExperimentResults], score: Score) -> tuple[dict[str, Figures], pd.DataFrame]:
    """Method -> its scores, the best method first, and a row for each run: of the experiments that have this score, in
    the settings that have results of the base.
    """
    figures: dict[str, dict[str, Figure]] = {}
    runs = []
    for name, experiment in results.items():
        metric = f"test_{score.metric}"
        columns = experiment.columns if experiment.language == (score is LOSS) else []
        for column in (c for c in columns if experiment.has(BASE, c, metric)):
            setting = f"{name} {column}"
            for method in experiment.methods:
                if figure := experiment.figure(method, column, metric):
                    figures.setdefault(method, {})[setting] = figure
                records = experiment.records.get((method, column), ()) if figure and figure.n else ()
                labels = {"method": method, "setting": setting, "task": experiment.experiment.title, "clients": column}
                runs += [{**row(r), **_run_columns(r), **labels} for r in records]
    available = [method for method, by_setting in figures.items() if any(figure.n for figure in by_setting.values())]
    order = sorted(available, key=lambda method: -score.sign * gap(figures[method], figures[BASE]).centre)
    return {method: figures[method] for method in order}, pd.DataFrame(runs)


def _run_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """Further columns of a run: seconds of training by client and round, the curve, the configuration.

    The seconds are those after the second evaluation: the first run on a task computes the states of frozen layers for
    all that follow, and every run compares its shortcuts with the plain model first.
    """
    config = record["config"]
    sampled = config.get("federate.sample_client_num", -1)
    clients = sampled if sampled > 0 else config["federate.client_num"]
    points = record["history"]["evaluated"]
    first, last = points[min(1, len(points) - 1)], points[-1]
    rounds, server = last["round"] - first["round"], record["seconds"]["aggregation_median"]
    seconds = ((last["seconds"] - first["seconds"]) / rounds - server) / clients if rounds else math.nan
    return {"client": seconds, "points": points, "config": config}


def table(figures: Mapping[str, Figures], runs: pd.DataFrame, score: Score = ACCURACY) -> list[dict[str, str]]:
    """A row for each method: column -> text."""
    if not figures:
        return []
    by_method, points = runs.groupby("method"), curves(runs, score)
    medians = runs[MEASURED].astype(float).groupby(runs["method"]).median()
    sent = runs[MEASURED[:2]].astype(float).div(1e3).groupby([runs["method"], runs["setting"]]).mean()
    worst = runs.reindex(columns=[*RUN, WORST]).groupby(["method", "setting"])[WORST].mean().groupby("method").mean()
    equal, (multiples, reached) = equal_bytes(points), bytes_to_target(points, runs, score)
    rows = []
    for method, by_setting in steps([*figures.items()], "measuring the server's steps"):
        median, number, config = medians.loc[method], len(by_method.groups[method]), by_method["config"].first()[method]
        settings = sum(figure.n > 0 for figure in by_setting.values())
        gaps, ratios = equal[method].dropna(), multiples.xs(method, level="method").dropna()
        notes = [f" in {counted(len(c), 'setting')}" if len(c) < settings else "" for c in (gaps, ratios)]
        lost = sum(len(figure.failed) for figure in by_setting.values())
        distance = exactness(config["federate.method"], config.get("lowrank.tau"))
        multiple = "{:.2g}×, {:.2g}×".format(*ratios.median()) + f"{notes[1]}, " if len(ratios) else ""
        ends = sent.loc[method].agg(["min", "max"])
        dagger = " †" * any(figure.at_end for figure in by_setting.values())
        rows.append(
            {
                "method": f"`{method}`",
                score.name: score.text(mean(by_setting)),
                f"{score.difference} against `{BASE}`, equal rounds": _gap(method, by_setting, figures[BASE], score)
                + dagger,
                "equal bytes": score.text(Estimate(gaps.mean(), None), "+") + notes[0] if len(gaps) else "–",
                "worst tenth of clients": _rounded(100 * worst[method], 3),
                "settings, runs": f"{settings}, {number}" + (f" ({lost} failed)" if lost else ""),
                "kB up, down": ", ".join(_span(*ends[direction]) for direction in MEASURED[:2]),
                f"bytes up, down to a common {score.name}": f"{multiple}reached by {reached[method]} of {number}",
                "client, s": _rounded(median["client"]),
                "server, ms": _rounded(median["aggregation"] * 1e3),
                "memory, GB": _rounded(median["memory"] / 1e9),
                "off the mean of the products": _off(distance),
            }
        )
    return rows


def parts(figures: Mapping[str, Figures], runs: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each method: its points against the base in each task, and in each division of data among clients."""
    if not figures:
        return []
    groups = {name: {*part["setting"]} for by in ("task", "clients") for name, part in runs.groupby(by, sort=False)}

    def of(method: str, group: set[str]) -> str:
        return _gap(method, {s: f for s, f in figures[method].items() if s in group}, figures[BASE], ACCURACY)

    return [{"method": f"`{m}`", **{name: of(m, group) for name, group in groups.items()}} for m in figures]


def _gap(method: str, figures: Figures, base: Figures, score: Score) -> str:
    """The difference of a method to the base, with its 95 % interval; ``–`` without a setting of both."""
    ahead = gap(figures, base)
    return "0" if method == BASE else "–" if math.isnan(ahead.centre) else score.text(ahead, "+")


def mean(figures: Figures) -> Estimate:
    """The mean over the settings."""
    values = [figure for figure in figures.values() if figure.n]
    return estimate([(1 / len(values), figure) for figure in values])


def gap(figures: Figures, base: Figures) -> Estimate:
    """The score less that of the base, the mean over the settings in which both have a seed; NaN without one.

    A seed gives all methods the same split and the same clients, so a setting has a difference for each seed that both
    have. Seeds of different settings have nothing in common.
    """
    differences = []
    for setting, ours in figures.items():
        theirs = base[setting]
        by_seed = {seed: value - theirs.by_seed[seed] for seed, value in ours.by_seed.items() if seed in theirs.by_seed}
        right = {
            seed: (test_set, rows - theirs.right[seed][1])
            for seed, (test_set, rows) in ours.right.items()
            if seed in by_seed and seed in theirs.right and theirs.right[seed][0] == test_set
        }
        differences += [Figure(by_seed, right=right)] if by_seed else []
    count = len(differences)
    return estimate([(1 / count, figure) for figure in differences]) if count else Estimate(math.nan, None)


def curves(runs: pd.DataFrame, score: Score = ACCURACY) -> pd.DataFrame:
    """Each evaluation of each run: the bytes until then with the head, ``uplink``, ``downlink`` and both ``sent``, and
    the ``score`` on validation data.
    """
    rows = runs[[*RUN, "points"]].explode("points", ignore_index=True)
    frame = rows[RUN].join(pd.DataFrame([*rows["points"]]))
    return frame.assign(sent=frame["uplink"] + frame["downlink"], score=frame[f"val_{score.metric}"])


def equal_bytes(points: pd.DataFrame) -> pd.DataFrame:
    """By setting and method the score on validation data less that of the base when both have sent half of what the
    base sends, interpolated between two evaluations; NaN where a run had not been evaluated by then, or had ended.
    """
    curve, ends = points.groupby(RUN), points.groupby(RUN)["sent"].last()
    budgets = ends.xs(BASE, level="method").groupby("setting").mean() / 2
    outside = {"left": math.nan, "right": math.nan}
    at_budget = {run: np.interp(budgets[run[0]], c["sent"], c["score"], **outside) for run, c in curve}
    by_setting = pd.Series(at_budget).rename_axis(RUN).groupby(RUN[:2])
    scores = by_setting.agg(lambda seeds: seeds.mean(skipna=False)).unstack("method")
    return scores.sub(scores[BASE], axis=0)


def bytes_to_target(
    points: pd.DataFrame, runs: pd.DataFrame, score: Score = ACCURACY
) -> tuple[pd.DataFrame, pd.Series]:
    """By setting and method the bytes up and down until the score on validation data is as ``NEAR`` to the base's last,
    as multiples of the base's: of the median seed, NaN where it does not come so near; and by method the number of runs
    that do.
    """
    last = runs[runs["method"] == BASE].groupby("setting")[f"val_{score.metric}"].mean()
    targets = points["setting"].map((1 - score.sign * NEAR) * last)
    first = points[score.sign * (points["score"] - targets) >= 0].groupby(RUN)[["uplink", "downlink"]].first()
    first = first.reindex(points.groupby(RUN).size().index)
    medians = first.fillna(math.inf).groupby(RUN[:2]).median().replace(math.inf, math.nan)
    base = medians.xs(BASE, level="method").reindex(medians.index.get_level_values("setting")).to_numpy()
    return medians / base, first["uplink"].groupby("method").count()


def _rounded(value: float, digits: int = 2) -> str:
    """``value`` with that many digits that count: 400, not 4e+02."""
    return "–" if math.isnan(value) else f"{float(f'{value:.{digits}g}'):g}"


def _off(distance: float) -> str:
    """``exactness`` as text."""
    return "exact" if distance < 1e-5 else "–" if math.isnan(distance) else f"{_rounded(100 * distance)} %"


def _span(low: float, high: float) -> str:
    """Both ends of a range, or one number if they are nearly the same."""
    return _rounded(low, 3) if math.isnan(low) or high < 1.02 * low else f"{_rounded(low, 3)} to {_rounded(high, 3)}"


@cache
def exactness(method: str, tau: int | None = None) -> float:
    """How far the server's step is from the mean of the products that the clients have trained: the Frobenius norm of
    the difference, over that of the clients' mean change, over all adapted layers; the mean over rounds 2 to 12.

    Three clients with unequal data on a tiny encoder, rank 2 and alpha 4. The map of a layer is read from its answers
    to unit vectors, for any method. NaN for a method that puts no adapter on the encoder, or is not for it.

    Args:
        tau: ``lowrank.tau``, of a method that has it.
    """
    silent = mock.patch.object(logging.getLogger(ROWS_LOGGER), "disabled", True)
    with tempfile.TemporaryDirectory() as folder, quietly(folder), redirect_stderr(io.StringIO()), silent:
        keys = {"federate.total_round_num": 12, "train.local_update_steps": 4}
        try:
            engine = Bench(folder).make("encoder", method, keys if tau is None else {**keys, "lowrank.tau": tau})
        except UserError:  # it is for other models, or needs keys
            return math.nan
        if not len(_responses(engine.model)):
            return math.nan
        by_client, after_round, distances = dict[int, Tensor](), list[Tensor](), list[float]()
        upload = engine.method.upload

        def spy(model: nn.Module, round: int, client: Any) -> Mapping[str, Tensor]:
            by_client[client.id] = _responses(model)  # all take part in every round
            return upload(model, round, client)

        def on_round(record: Mapping[str, Any]) -> None:
            engine.workspace.load_global(engine.ledger.state)
            after = _responses(engine.model)
            if after_round:
                rows = [len(engine.workspace.data.clients[number - 1]) for number in by_client]
                mean = torch.from_numpy(np.average([*by_client.values()], axis=0, weights=rows))
                distances.append(float((after - mean).norm() / (mean - after_round[-1]).norm()))
            after_round.append(after)

        with mock.patch.object(engine.method, "upload", spy):
            engine.on_round = on_round
            engine.run()
        return statistics.fmean(distances)


def _responses(model: nn.Module) -> Tensor:
    """The answers to unit vectors of every linear layer with an adapter, one after the other, float64 ``(n,)``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model.eval()
    answers = []
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, BaseTunerLayer)):
            units = torch.eye(layer.get_base_layer().in_features)
            answers.append((layer(units) - layer(torch.zeros_like(units))).double().flatten())
    return torch.cat(answers) if answers else torch.empty(0)


def _draw(figures: Mapping[str, Figures], runs: pd.DataFrame, path: Path) -> None:
    """Accuracy against the bytes up, a point a method, with its interval."""
    uplink, marks = runs.groupby("method")["uplink_without_head"].median() / 1e3, []
    for index, (method, by_setting) in enumerate(figures.items()):
        marks.append(point(method, index, uplink[method], mean(by_setting).centre, mean(by_setting).ends))
    panel = Panel("leaderboard", "", "kB that a client sends up in a round", "accuracy on test data", marks)
    draw_on_white([panel], "mean over the settings with its 95 % interval", path, size=(7.2, 4.4))
