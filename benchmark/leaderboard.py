"""The leaderboard: low-rank methods in the same settings, from the cells of the suite ``leaderboard``."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fs_lowrank.draw.figures import figure
from fs_lowrank.draw.panels import Panel
from fs_lowrank.errors import counted
from fs_lowrank.jobs.files import write_text
from fs_lowrank.testing.bench import Bench, quietly

from .conditions import shown
from .figures import point, save_on_white
from .intervals import Estimate, estimate, pooled
from .methods_table import signed
from .results import ExperimentResults, value
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
Place = tuple[ExperimentResults, str]


def write_leaderboard(suite: Suite, results: Mapping[str, ExperimentResults], root: Path) -> list[Path]:
    """Write ``leaderboard.md``, for a size for a GPU ``leaderboard_paper.md``, and its picture below ``root``.

    Nothing is written without results of ``fedlora``.
    """
    page = root / f"{LEADERBOARD}{'_paper' if suite.size == 'paper' else ''}.md"
    places = [(each, column) for each in results.values() for column in each.columns]
    shared = [place for place in places if place[0].has(BASE, place[1], "test_acc")]
    methods = dict.fromkeys(method for each, _ in shared for method in each.methods)
    entries = [entry for method in methods if (entry := Entry(method, shared)).places]
    if not entries:
        return []
    entries.sort(key=lambda entry: -entry.gap.centre)
    _draw(entries, page.with_suffix(".svg"))
    table = [HEAD, *(entry.cells() for entry in entries)]
    there = [each for each in results.values() if each.cells]
    write_text(page, markdown("leaderboard", table, there, page.with_suffix(".svg").name))
    return [page, page.with_suffix(".svg")]


@dataclass
class Entry:
    """What the cells say of a method.

    Attributes:
        shared: the settings that have results of the base.
    """

    method: str
    shared: Sequence[Place]

    @cached_property
    def places(self) -> list[Place]:
        """The settings that have results of the method, too."""
        return [(each, column) for each, column in self.shared if each.has(self.method, column, "test_acc")]

    def records(self, method: str = "") -> list[list[dict]]:
        """By setting the results of the method, or of another."""
        return [each.records.get((method or self.method, column), []) for each, column in self.places]

    @cached_property
    def accuracy(self) -> Estimate:
        """The mean over the settings."""
        found = [each.figure(self.method, column, "test_acc") for each, column in self.places]
        return estimate([(1 / len(found), of_setting) for of_setting in found if of_setting])

    @cached_property
    def gap(self) -> Estimate:
        """The accuracy above that of the base, over the settings as random effects."""
        gaps = []
        for each, column in self.places:
            ours, base = (each.figure(method, column, "test_acc") for method in (self.method, BASE))
            if ours and base and self.method != BASE:
                gaps.append(estimate([(1, ours), (-1, base)]))
        if len(gaps) > 1 and all(gap.error for gap in gaps):
            return pooled(gaps)
        return gaps[0] if len(gaps) == 1 else Estimate(statistics.fmean([g.centre for g in gaps] or [0.0]), None)

    @property
    def gap_of_bytes(self) -> str:
        """The accuracy on validation data above that of the base when both have sent half of what the base sends, and
        in how many settings that is known, if not in all.
        """
        gaps = []
        for ours, base in zip(self.records(), self.records(BASE)):
            budget = statistics.fmean(_sent(record["history"]["evaluated"][-1]) for record in base) / 2
            at = [[_until(record, budget) for record in records] for records in (ours, base)]
            if None not in (*at[0], *at[1]):
                gaps.append(statistics.fmean(at[0]) - statistics.fmean(at[1]))  # type: ignore[arg-type]
        some = f" in {counted(len(gaps), 'setting')}" if len(gaps) < len(self.places) else ""
        return signed(100 * statistics.fmean(gaps)) + some if gaps else "–"

    @property
    def bytes_to_target(self) -> str:
        """All bytes until ``TARGET`` of the base's accuracy, as a multiple of the base's; how many runs reach it."""
        quotients, reached = [], 0
        for ours, base in zip(self.records(), self.records(BASE)):
            target = TARGET * statistics.fmean(record["metrics"]["val_acc"] for record in base)
            found, theirs = ([_reached(record, target) for record in records] for records in (ours, base))
            reached += sum(sent is not None for sent in found)
            if None not in (*found, *theirs):
                quotients.append(statistics.fmean(found) / statistics.fmean(theirs))  # type: ignore[arg-type]
        of_all = f"reached by {reached} of {sum(map(len, self.records()))}"
        return f"{statistics.median(quotients):.2g}×, {of_all}" if quotients else of_all

    def median(self, metric: str, unit: float = 1.0) -> float:
        """Over the runs that have the metric, as a multiple of ``unit``; not a number (NaN) if none has."""
        found = [v for of in self.records() for record in of if (v := value(record, metric)) is not None]
        return statistics.median(found) / unit if found else math.nan

    def as_text(self, metric: str, unit: float, digits: int = 2) -> str:
        """The median as text."""
        found = self.median(metric, unit)
        return "–" if math.isnan(found) else f"{found:.{digits}g}"

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        runs = [record for of in self.records() for record in of]
        figures = [each.figure(self.method, column, "test_acc") for each, column in self.shared]
        lost = sum(len(found.failed) for found in figures if found)
        trained = [r["seconds"]["training"] / max(1, r["rounds"]) / _clients(r) for r in runs]
        away = exactness(runs[0]["config"]["federate.method"], runs[0]["config"])
        return (
            f"`{self.method}`",
            _points(self.accuracy, ".1f"),
            _points(self.gap) if self.method != BASE else "0",
            self.gap_of_bytes,
            f"{len(self.places)}, {len(runs)}" + (f" ({lost} failed)" if lost else ""),
            ", ".join(self.as_text(way, 1e3, 3) for way in ("uplink_without_head", "downlink_without_head")),
            self.bytes_to_target,
            f"{statistics.median(trained):.2g}",
            self.as_text("aggregation", 1e-3),
            self.as_text("memory", 1e9),
            "exact" if away < 1e-5 else f"{100 * away:.2g} %",
        )


def _clients(record: Mapping[str, Any]) -> int:
    """The clients of a round."""
    config = record["config"]
    few = config.get("federate.sample_client_num", -1)
    return few if few > 0 else config["federate.client_num"]


def _sent(point: Mapping[str, Any]) -> float:
    return point["uplink_without_head"] + point["downlink_without_head"]


def _until(record: Mapping[str, Any], budget: float) -> float | None:
    """The last validation accuracy within ``budget`` bytes."""
    return next((p["val_acc"] for p in reversed(record["history"]["evaluated"]) if _sent(p) <= budget), None)


def _reached(record: Mapping[str, Any], target: float) -> float | None:
    """The bytes that were sent when the validation accuracy first was ``target``."""
    return next((_sent(p) for p in record["history"]["evaluated"] if p["val_acc"] >= target), None)


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
    with tempfile.TemporaryDirectory() as folder, quietly(folder):
        engine = Bench(folder).make("encoder", method, {"train.local_update_steps": 4, **own})
        before: dict[str, Tensor] = {}
        of_clients: dict[int, dict[str, Tensor]] = {}
        upload, last = engine.method.upload, engine.config.federate.total_round_num
        clients = engine.site.data.clients

        def spy(model: nn.Module, round: int, client: Any) -> Mapping[str, Tensor]:
            if round == last:
                of_clients[client.id] = _responses(model)
            return upload(model, round, client)

        def on_round(record: Mapping[str, Any]) -> None:
            if record["round"] == last - 1:
                engine.site.load_global(engine.ledger.state)
                before.update(_responses(engine.model))

        with mock.patch.object(engine.method, "upload", spy):
            engine.on_round = on_round
            engine.run()
        after = _responses(engine.model)
        sizes = {number: len(clients[number - 1]) for number in of_clients}
        share = {number: size / sum(sizes.values()) for number, size in sizes.items()}
        mean = {n: sum(share[number] * of[n] for number, of in of_clients.items()) for n in after}
        far = sum(float((after[n] - mean[n]).square().sum()) for n in after)
        changed = sum(float((mean[n] - before[n]).square().sum()) for n in after)
        return (far / changed) ** 0.5


def _responses(model: nn.Module) -> dict[str, Tensor]:
    """Layer -> the answers to unit vectors, float64 ``(d_in, d_out)``, of every linear layer with an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model.eval()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    found = {}
    with torch.no_grad():
        for name, layer in layers.items():
            units = torch.eye(layer.get_base_layer().in_features)
            found[name] = (layer(units) - layer(torch.zeros_like(units))).double()
    return found


def _draw(entries: Sequence[Entry], path: Path) -> None:
    """Accuracy against the bytes up, a point a method, with its interval."""
    marks = []
    for place, entry in enumerate(entries):
        found, up = entry.accuracy, entry.median("uplink_without_head", 1e3)
        marks.append(point(entry.method, place, up, found.centre, found.ends))
    panel = Panel("leaderboard", "", "kB that a client sends up in a round", "accuracy on test data", marks)
    made = figure([panel], "mean over the settings with its 95 % interval", size=(7.2, 4.4))
    save_on_white(made, path)
