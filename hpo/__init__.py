"""Search of hyperparameters with Optuna, over any config: ``fs-lowrank hpo tune | status | best | plot``."""

try:
    from .best import read_header, results
    from .space import Space, load_space, space_from
    from .tune import Search, tune
except ModuleNotFoundError as error:  # the command says in one line that Optuna is missing
    if error.name != "optuna":
        raise

__all__ = ["Search", "Space", "load_space", "read_header", "results", "space_from", "tune"]
