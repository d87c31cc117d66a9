"""Local training and evaluation of one model, for any method."""

from .evaluate import evaluate
from .local import LocalResult, train_client

__all__ = ["LocalResult", "evaluate", "train_client"]
