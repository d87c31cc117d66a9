"""Search of hyperparameters with Optuna, over any config: ``python -m hpo tune | status | best | plot``."""

from .best import failures, read_header
from .space import Space, load_space
from .tune import Search, tune

__all__ = ["Search", "Space", "failures", "load_space", "read_header", "tune"]
