"""The pictures of a run (``lowrank.pictures``): the clients' data, the learning curves, the test set."""

from __future__ import annotations

from typing import Any

from ..draw.runs import plot_clients, plot_curves, plot_test, setting_of
from ..rounds.keeper import Callback, RecordKeeper
from ..rounds.record import extremes
from ..runs.result import RunResult
from ..runs.split import read_split


class Pictures(Callback):
    """Draws ``clients.png`` after the first round, and at the end ``curves.png``, and ``test.png`` of a classifier."""

    def after_round(self, run: RecordKeeper, record: dict[str, Any]) -> None:
        picture = run.outdir / "clients.png"
        if record["round"] == 1 or not picture.exists():
            # Not before: the library that draws takes as long to import as a small run's first round.
            plot_clients(read_split(run.outdir), picture, title=setting_of(run.config))

    def on_end(self, run: RecordKeeper, result: RunResult) -> None:
        data, title = run.site.data, f"{run.method.name} · {setting_of(run.config)}"
        curves, history = run.outdir / "curves.png", {run.method.name: result.history}
        sizes = result.facts["held_out"]
        result.saved["curves"] = plot_curves(history, curves, data.majority, title=title, sizes=sizes)
        if data.task.endswith("classification") and any("test" in r["metrics"] for r in result.history):
            on_test = run.evaluator.on_test()
            result.facts["on_test"] = {**on_test, "clients": extremes(on_test["clients"])}
            plot_test(on_test, run.outdir / "test.png", data.label_names, data.majority, title=title)
