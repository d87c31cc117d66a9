"""The keys that the engine honours; without Flower, so that they can be checked before it is installed."""

from __future__ import annotations

from ...config import Config, check_engine
from ..program import check_others


def check(config: Config) -> None:
    """Raise ``UserError`` for modules of the program and keys that the engine does not honour; report idle keys."""
    check_others(config, "take engine local, with federate.process_num 1")
    check_engine(config, "flower")
