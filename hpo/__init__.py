"""Search of hyperparameters with Optuna, over any config: ``fs-lowrank hpo tune | status | best | plot``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .best import read_header, results
    from .space import Space, load_space, space_from
    from .tune import Search, tune

__all__ = ["Search", "Space", "load_space", "read_header", "results", "space_from", "tune"]

_MODULES = {"read_header": "best", "results": "best", "Search": "tune", "tune": "tune"}


def __getattr__(name: str) -> Any:
    """Import what needs Optuna when it is asked for, so that the command can say that Optuna is missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES.get(name, 'space')}", __name__), name)
