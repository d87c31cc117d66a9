"""Local training and evaluation of one model, for any method."""

from .evaluate import evaluate, predictions
from .local import LocalResult, train_client

__all__ = ["LocalResult", "evaluate", "predictions", "train_client"]
