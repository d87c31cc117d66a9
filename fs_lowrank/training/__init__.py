"""Local training and evaluation of one model, for any method."""

from .evaluate import evaluate
from .local import LocalResult, samples_trained, steps_taken, train_client

__all__ = ["LocalResult", "evaluate", "samples_trained", "steps_taken", "train_client"]
