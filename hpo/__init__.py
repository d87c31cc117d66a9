"""Search of hyperparameters with Optuna, over any config: ``fs-lowrank hpo tune | status | best | plot``."""

from .objectives import check_config, parse_objectives
from .space import Space, accepts, at_an_end, load_space, space_from

try:
    from .best import budget_text, read_header, results
    from .tune import TRIALS, Search, tune
except ModuleNotFoundError as error:  # the command says in one line that Optuna is missing
    if error.name != "optuna":
        raise

__all__ = [
    "TRIALS",
    "Search",
    "Space",
    "accepts",
    "at_an_end",
    "budget_text",
    "check_config",
    "load_space",
    "parse_objectives",
    "read_header",
    "results",
    "space_from",
    "tune",
]
