"""Callbacks, which act beside training: answers to prompts, trackers, saved models, pictures, early stopping."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Config
from ..rounds.recorder import Callback
from .answers import Answers
from .best import Best
from .pictures import Pictures
from .saved import Saved
from .stopping import EarlyStopping
from .trackers import Trackers, trackers_of

__all__ = ["Callback", "callbacks_of"]


def callbacks_of(config: Config, own: Sequence[Callback] = (), trackers: Sequence[str] | None = None) -> list[Callback]:
    """The callbacks of a run: those of its configuration, and the user's ``own``.

    Callbacks that add to a round's record come before the trackers, which log the whole record.

    Args:
        trackers: their names; None: the trackers of the configuration.
    """
    answers = [Answers()] if config.eval.generate.freq and config.model.task == "CausalLM" else []
    tracking = Trackers(trackers_of(config) if trackers is None else trackers)
    pictures = [Pictures()] if config.lowrank.pictures else []
    return [*answers, *own, tracking, Saved(), Best(), *pictures, EarlyStopping()]
