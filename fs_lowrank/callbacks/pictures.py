"""The pictures of a run (``lowrank.pictures``): the clients' data, the learning curves, the test set."""

from __future__ import annotations

from typing import Any

from ..draw.figures import figure, save
from ..draw.runs import client_panel, curves, predictions, setting_of
from ..rounds.record import extremes
from ..rounds.recorder import Callback, Recorder
from ..runs.result import RunResult
from ..runs.split import read_split


class Pictures(Callback):
    """Draws ``clients.png`` after the first round, and at the end ``curves.png``, and ``test.png`` of a classifier."""

    def after_round(self, run: Recorder, record: dict[str, Any]) -> None:
        picture = run.outdir / "clients.png"
        if record["round"] == 1 or not picture.exists():
            # Not before: the library that draws takes as long to import as a small run's first round.
            save(figure([client_panel(read_split(run.outdir))], setting_of(run.config), size=(8.0, 3.4)), picture)

    def on_end(self, run: Recorder, result: RunResult) -> None:
        if not result.history:
            return
        data, title = run.workspace.data, f"{run.method.name} · {setting_of(run.config)}"
        histories = {run.method.name: [result.history]}
        sizes, language = result.facts["held_out"], run.config.is_language
        chart = curves(histories, data.majority, title=title, sizes=sizes, language=language)
        result.saved["curves"] = save(chart, run.outdir / "curves.png")
        if data.task.endswith("classification") and any("test" in r["metrics"] for r in result.history):
            on_test = run.evaluator.on_test()
            result.facts["on_test"] = {**on_test, "clients": extremes(on_test["clients"])}
            save(predictions(on_test, data.label_names, data.majority, title=title), run.outdir / "test.png")
