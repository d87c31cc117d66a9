"""Local training and evaluation, on one model, for any method."""

from .evaluate import evaluate
from .local import LocalResult, train_client

__all__ = ["LocalResult", "evaluate", "train_client"]
