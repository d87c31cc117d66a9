"""Search of hyperparameters with Optuna, over any config: ``fs-lowrank hpo tune | status | best | plot``.

Modules are imported on first use: most need Optuna, which takes a second, and a suite can be read without it.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "TRIALS": "start",
    "Search": "settings",
    "Space": "space",
    "accepts": "space",
    "at_an_end": "space",
    "budget_text": "best",
    "check_config": "objectives",
    "load_space": "space",
    "parse_objectives": "objectives",
    "read_header": "best",
    "results": "summary",
    "space_from": "space",
    "tune": "start",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
