"""Trainers of the framework that train through our loop: what a method's phases say, and nothing else moves."""

from __future__ import annotations

import torch
from federatedscope.core.trainers import GeneralTorchTrainer
from federatedscope.llm.trainer.trainer import LLMTrainer

from ...methods import Update
from ...models.adapters import load_tensors
from ...models.names import all_tensors
from ...training import evaluate
from .config import TRAINERS
from .session import current


class LowRank:
    """What our trainers share, over any trainer of the framework.

    ``worker`` and ``round`` are set by the client before it trains; ``update`` holds what it then sends.
    """

    def __init__(self, *args, **kwargs):
        self.session = current()
        self.number, self.round, self.prefix = 0, 0, None
        self.outcome: Update | None = None
        self.loss = 0.0
        #: the last evaluation of each split: mean loss, accuracy
        self.results: dict[str, dict[str, float]] = {}
        super().__init__(*args, **kwargs)

    def parse_data(self, data):
        found = {}
        for split in ("train", "val", "test"):
            examples = data.get(split, {}).get("examples") if data is not None else None
            found[f"{split}_data"], found[f"{split}_loader"] = examples, None
            found[f"num_{split}_data"] = 0 if examples is None else len(examples)
        return found

    def train(self, target_data_split_name="train", hooks_set=None):
        """Train as this worker's client in ``round``; (samples processed, tensors to send, metrics)."""
        session = self.session
        update, result = session.site.fit(
            session.client(self.number), self.ctx.train_data, self.round, self.ctx.model, self.prefix
        )
        self.outcome, self.loss = update, result.loss
        return (
            result.samples,
            dict(update.tensors),
            {"train_loss": result.loss * result.samples, "train_avg_loss": result.loss, "train_total": result.samples},
        )

    def evaluate(self, target_data_split_name="test"):
        """Metrics in the framework's names: ``SPLIT_loss`` is the sum over samples, ``SPLIT_avg_loss`` the mean."""
        split, config = target_data_split_name, self.session.config
        examples = self.ctx.get(f"{split}_data")
        if examples is None:
            return {}
        size = config.eval.batch_size or config.dataloader.batch_size
        found = self.results[split] = evaluate(self.ctx.model, examples, size, owner=split, prefix=self._kept())
        total = len(examples)
        metrics = {f"{split}_loss": found["loss"] * total, f"{split}_avg_loss": found["loss"], f"{split}_total": total}
        # The framework looks every metric up among those of eval.metrics.
        return {**metrics, f"{split}_acc": found["acc"]} if "acc" in self.cfg.eval.metrics else metrics

    def _kept(self):
        # The session's prefix knows the whole held-out sets; a client's share of them is not among what it keeps.
        return self.session.site.prefix if self.number == 0 else None

    def update(self, model_parameters, strict=False):
        load_tensors(self.ctx.model, model_parameters)

    def get_model_para(self):
        return {n: t.detach() for n, t in self.session.method.view(self.session.ledger.state).items()}

    def save_model(self, path, cur_round=-1):
        names = self.session.method.view(self.session.ledger.state)
        tensors = all_tensors(self.ctx.model)
        torch.save({"cur_round": cur_round, "model": {n: tensors[n].detach().cpu() for n in names}}, path)


class LowRankLLMTrainer(LowRank, LLMTrainer):
    """Causal language models."""


class LowRankNLPTrainer(LowRank, GeneralTorchTrainer):
    """Sequence classification."""


class LowRankCVTrainer(LowRank, GeneralTorchTrainer):
    """Images: our networks, whose batches are ``pixel_values`` and ``labels``."""


def choose(kind: str):
    """The trainer class called ``kind``; None leaves it to the framework."""
    classes = (LowRankLLMTrainer, LowRankNLPTrainer, LowRankCVTrainer)
    return dict(zip(TRAINERS.values(), classes)).get(kind)
