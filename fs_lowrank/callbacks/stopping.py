"""Early stopping (``early_stop``)."""

from __future__ import annotations

from typing import Any

from ..rounds.recorder import Callback, Recorder


class EarlyStopping(Callback):
    """Ends a run where ``Evaluator.stalled`` says so, also one that is resumed after it."""

    def on_start(self, run: Recorder) -> bool:
        return run.evaluator.stalled(run.history)

    def after_round(self, run: Recorder, record: dict[str, Any]) -> bool:
        return run.evaluator.stalled([*run.history, record])
