"""Local training and evaluation of one model, for any method."""

from .evaluate import evaluate, predictions
from .local import LocalResult, samples_trained, steps_taken, train_client

__all__ = ["LocalResult", "evaluate", "predictions", "samples_trained", "steps_taken", "train_client"]
