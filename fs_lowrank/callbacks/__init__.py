"""What a run does beside training: answers to prompts, trackers, what is saved, pictures, early stopping."""

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
    """The callbacks of a run: those that its configuration asks for, and the user's ``own``.

    What adds to a round's record comes before the trackers, which are told all of it.

    Args:
        trackers: their names; None: those that the configuration asks for.
    """
    answers = [Answers()] if config.eval.generate.freq and config.model.task == "CausalLM" else []
    told = Trackers(trackers_of(config) if trackers is None else trackers)
    pictures = [Pictures()] if config.lowrank.pictures else []
    return [*answers, *own, told, Saved(), Best(), *pictures, EarlyStopping()]
