"""A finished run: its model loaded again, evaluated on a file, or asked for predictions."""

from .predictions import answers, check_table, predict_rows, write_table
from .rows import Rows, read_rows
from .run import FinishedRun, load_run
from .scores import evaluate_rows

__all__ = [
    "FinishedRun",
    "Rows",
    "answers",
    "check_table",
    "evaluate_rows",
    "load_run",
    "predict_rows",
    "read_rows",
    "write_table",
]
