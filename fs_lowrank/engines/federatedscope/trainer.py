"""The trainer for the framework that runs our training loop, which follows the phases of the method."""

from __future__ import annotations

from federatedscope.core.trainers import GeneralTorchTrainer

from ...models.names import all_tensors
from ...rounds.evaluator import size_of
from ...rounds.task import Task
from ...rounds.trainer import Fitted
from ...training import evaluate
from . import saved
from .config import TRAINER
from .session import current


def named(split, result, total, cfg):
    """The metrics of a split by the framework's names: ``SPLIT_loss`` is the sum, ``SPLIT_avg_loss`` the mean.

    Args:
        result: metrics by their own names. total: number of samples, of a language model of tokens; the framework
            weights clients by it. cfg: the framework's configuration.
    """
    loss = result["loss"]
    values = {f"{split}_loss": loss * total, f"{split}_avg_loss": loss, f"{split}_total": total}
    # The framework accepts no metric that is not in eval.metrics.
    accurate = "acc" in cfg.eval.metrics and "acc" in result
    return {**values, f"{split}_acc": result["acc"]} if accurate else values


class LowRankTrainer(GeneralTorchTrainer):
    """A trainer, of whatever model.

    Attributes:
        number: of the client; 0 on the server. task: its work. Both, and ``prefix``, are set before training.
        prefix: the cache of the frozen layers' outputs, or None.
        fitted: the outcome of the last training.
        results: the last evaluation of each split: mean loss and accuracy.
    """

    def __init__(self, *args, **kwargs):
        self.session = current()
        self.number, self.prefix = 0, None
        self.task: Task | None = None
        self.fitted: Fitted | None = None
        self.results: dict[str, dict[str, float]] = {}
        super().__init__(*args, **kwargs)

    def parse_data(self, data):
        """The framework's names for the data of each split."""
        parsed = {}
        for split in ("train", "val", "test"):
            examples = data.get(split, {}).get("examples") if data is not None else None
            parsed[f"{split}_data"], parsed[f"{split}_loader"] = examples, None
            parsed[f"num_{split}_data"] = 0 if examples is None else len(examples)
        return parsed

    def train(self, target_data_split_name="train", hooks_set=None):
        """Do ``task``; returns the samples processed, the tensors to send, and metrics."""
        self.fitted = fitted = self.session.trainer.fit(self.task, self.ctx.model, self.prefix)
        loss, samples = fitted.result.loss, fitted.result.samples
        metrics = {"train_loss": loss * samples, "train_avg_loss": loss, "train_total": samples}
        return samples, dict(fitted.update.tensors), metrics

    def evaluate(self, target_data_split_name="test"):
        """The metrics of a split, as ``named``."""
        split, config = target_data_split_name, self.session.config
        examples = self.ctx.get(f"{split}_data")
        if examples is None:
            return {}
        if self.number == 0:
            result = self.session.evaluator.score(examples, split, config.metrics)
        else:  # the workspace's cache knows the whole held-out sets, not the clients' shares of them
            reads = self.session.trainer.reads_of(self.ctx.model)
            result = evaluate(self.ctx.model, examples, config.eval_batch_size, reads)
        self.results[split] = result
        size = size_of(examples)
        return named(split, result, size.get("tokens", size["samples"]), self.cfg)

    def save_model(self, path, cur_round=-1):
        names = self.session.method.view(self.session.ledger.state)
        tensors = all_tensors(self.ctx.model)
        saved.write(path, {"cur_round": cur_round, "model": {n: tensors[n].detach().cpu() for n in names}})


def choose(kind: str):
    """The trainer class called ``kind``; None leaves the trainer to the framework."""
    return LowRankTrainer if kind == TRAINER else None
