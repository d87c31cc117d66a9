"""What the one-shot methods share: all weights or an adapter, the model's own Fisher, and choosing by validation."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...errors import UserError
from ...models.curvature import LARGEST_EXACT, count_classes, diagonal_fisher
from ...models.names import entries, select
from ...seeds import derive
from ..base import Client, Gathering, Tensors, Workbench

logger = logging.getLogger("fs_lowrank")

#: metadata of the hyperparameter ``draws``
DRAWS = {
    "min": 0,
    "help": "labels drawn from the model for each sample, for the expectation in the Fisher; 0 takes it exactly, and "
    f"so does None up to {LARGEST_EXACT} classes (one drawn label beyond)",
}
#: the tasks of models whose Fisher information there is
CLASSIFIERS = ("SequenceClassification", "ImageClassification")
#: what the Fisher is multiplied by where only sums arrive: they may be fixed-point numbers, and it is small
SUM_SCALE = 2.0**8
#: a Fisher that such numbers could not tell from their rounding; it then counts as none
SMALLEST_SUM = 1e-8


class OneShot(Gathering):
    """Trains and sends all weights; or the adapter and the head, where ``llm.adapter.use`` asks for it."""

    shared = ("base", "head")
    #: whether it has been said that labels are drawn because there are many classes
    _said_draws = False

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), adapter="optional")

    def __init__(self, params, setting):
        if self.requires(params).adapter == "optional" and setting.with_adapter:
            self.shared = ("adapter", "head")
        super().__init__(params, setting)

    def adapt(self, model: nn.Module) -> nn.Module:
        return super().adapt(model) if "adapter" in self.shared else model

    def trained(self, model: nn.Module) -> list[str]:
        """Names of the parameters that are sent: without running statistics, which have no gradient."""
        return select(dict(model.named_parameters()), self.shared)

    def draw_seed(self, round: int, client: Client) -> int:
        """For labels drawn from the model of ``client``."""
        return derive(self.setting.seed, "fisher", round, client.id)

    def draws(self, model: nn.Module, client: Client) -> int:
        """``params.draws``; where it is None, 0 for a model of up to ``LARGEST_EXACT`` classes and 1 beyond."""
        if self.params.draws is not None:
            return self.params.draws
        classes = count_classes(model, client.batches())
        if classes > LARGEST_EXACT and not self._said_draws:
            logger.warning(
                "%s: with %d classes the Fisher's expectation over labels is estimated by one drawn label a sample, "
                "since the exact one takes a backward pass a class; set lowrank.draws 0 to take it all the same "
                "(without the key it is exact up to %d classes)",
                self.name,
                classes,
                LARGEST_EXACT,
            )
            self._said_draws = True
        return int(classes > LARGEST_EXACT)

    def diagonal(self, model: nn.Module, round: int, client: Client) -> dict[str, Tensor]:
        """The Fisher's diagonal at ``model`` over the client's data, in float32, by parameter."""
        draws, seed = self.draws(model, client), self.draw_seed(round, client)
        return diagonal_fisher(model, client.batches(), self.trained(model), draws=draws, seed=seed)


def diagonal_sums(parts: list[Tensors], weights: list[float], name: str, only_sums: bool) -> tuple[Tensor, Tensor]:
    """``Σ p_k F_k`` and ``Σ p_k F_k W_k`` of the parameter ``name``, in float64.

    Args:
        only_sums: clients have sent the products, as ``with_products`` gives them.
    """
    total = sum(p * t[f"fisher:{name}"].double() for p, t in zip(weights, parts))
    if only_sums:
        products = sum(p * t[f"product:{name}"].double() for p, t in zip(weights, parts))
        total, products = total / SUM_SCALE, products / SUM_SCALE
        known = total >= SMALLEST_SUM
        return total * known, products * known
    return total, sum(p * t[f"fisher:{name}"].double() * t[name].double() for p, t in zip(weights, parts))


def with_products(fisher: Tensors, own: Tensors) -> dict[str, Tensor]:
    """``fisher:…`` and ``product:…`` of what a client sends where only sums arrive."""
    scaled = {n: f * SUM_SCALE for n, f in fisher.items()}
    return {**entries("fisher", scaled), **entries("product", {n: f * own[n].float() for n, f in scaled.items()})}


def logits_of(model: nn.Module, tensors: Tensors, batch: Tensors) -> Tensor:
    """``model``'s logits on ``batch`` with ``tensors`` in the place of its own, which stay as they are."""
    device = next(model.parameters()).device
    inputs = {k: v.to(device) for k, v in batch.items() if k != "labels"}
    return functional_call(model, dict(tensors), kwargs=inputs).logits


@torch.no_grad()
def accuracy(workbench: Workbench, tensors: Tensors) -> float:
    """Share of the validation samples (or predicted tokens) that the model with ``tensors`` gets right."""
    workbench.model.eval()
    right = count = 0
    for batch in workbench.validation():
        logits, labels = logits_of(workbench.model, tensors, batch), batch["labels"]
        if labels.ndim == 2:
            logits, labels = logits[:, :-1], labels[:, 1:]
        kept = labels.to(logits.device) != -100
        right += int((logits.argmax(-1) == labels.to(logits.device))[kept].sum())
        count += int(kept.sum())
    return right / max(count, 1)


def best(workbench: Workbench, candidates: Iterable[Tensors]) -> dict[str, Tensor]:
    """The candidate of the highest validation accuracy, the first of several; candidates are finite or passed over.

    Raises:
        UserError: none is finite.
    """
    found, score = None, -1.0
    for candidate in candidates:
        if not all(bool(torch.isfinite(t).all()) for t in candidate.values() if t.is_floating_point()):
            continue
        now = accuracy(workbench, candidate)
        if now > score:
            found, score = {n: t.detach().clone() for n, t in candidate.items()}, now
    if found is None:
        raise UserError("the server's step came to nothing finite; choose a smaller step, or another solver")
    return found
