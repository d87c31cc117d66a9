"""FedFisher: the global model is the mode of the product of the clients' posteriors, by their Fisher information.

Jhunjhunwala, Wang and Joshi, "FedFisher: Leveraging Fisher Information for One-Shot Federated Learning", AISTATS 2024,
Algorithm 1.

    client k sends    W_k, and F_k = (1/n_k) Σ_x E_y [∇log p(y|x) ∇log p(y|x)ᵀ] at W_k, y ~ the model's p(y|x)
    the server takes  W = argmin Σ_k p_k (W − W_k)ᵀ F_k (W − W_k), of its minimisers the one nearest to Σ_k p_k W_k

The expectation over ``y`` is exact for models of up to 100 classes, as in the paper (equation 3) and the authors' code;
``draws`` asks for labels drawn from the model instead. ``fisher`` is the form of ``F_k``: its diagonal; one Kronecker
product ``A ⊗ G`` a layer (what is neither a linear nor a convolutional layer is then averaged); or all of it, for tiny
nets. ``solver`` is how the minimiser is found:

- ``closed``: for diag ``(Σ p_k F_k W_k) / (Σ p_k F_k)``, and the mean where the sum is zero; for full a pseudo-inverse;
- ``cg``: conjugate gradients from the mean, whose limit is the nearest minimiser (Lemma 1), until the residual has
  fallen by ``tolerance``; what is left then lies where the Fisher hardly sees anything. The start and the iterates
  where it has fallen by √10, 10, … are scored on validation data: the way to the minimiser may pass better models;
- ``adam``: the paper's, ``steps`` steps; every 100 of them, the start and the end are scored in the same way;
- ``reference``: the authors' code, which differs: moments that are sums, without bias correction, the iterates after
  steps 1, 101, … scored, and for K-FAC ``√(d + ε)`` in the place of ``√d + ε``. Its validation data came from the
  clients' training data; ours never do.

With ``select: False`` nothing is scored and the last iterate is taken.

With ``fisher: diag`` sums are enough: where the server may see no more, clients send ``F_k W_k`` too. ``compress``
brings ``W_k`` and ``F_k`` to 16 bits a weight each, the bytes of plain averaging; ``cg`` then ends where the residual
reaches the rounding of the factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice, takewhile

import torch
from torch import Tensor, nn

from ...algebra import adam, conjugate_path, summed_moments, weighted_mean
from ...errors import UserError
from ...models.curvature import check_full_size, full_fisher, kronecker_fisher, matrix_layers, require_curvlinops
from ..base import Client, State, Tensors
from ..registry import register_method
from .base import CLASSIFIERS, DRAWS, OneShot, best, diagonal_sums, entries, with_products
from .compress import VECTOR_BITS, Budget
from .objective import Block, diagonal_block, full_block, kronecker_block

#: steps between two iterates that are scored
SCORED = 100


def solver_of(params: FedFisher.Params) -> str:
    """``params.solver``; of auto, the one that it stands for."""
    return params.solver if params.solver != "auto" else ("closed" if params.fisher == "diag" else "cg")


@register_method("fedfisher")
class FedFisher(OneShot):
    source = "Jhunjhunwala et al., AISTATS 2024, Algorithm 1"
    sends = "all weights, and their Fisher information (diagonal, Kronecker factors or full)"
    #: 2: one label was drawn for each sample where the expectation is now exact
    revision = 2

    @dataclass(frozen=True)
    class Params:
        fisher: str = field(
            default="diag", metadata={"choices": ("diag", "kfac", "full"), "help": "form of the Fisher information"}
        )
        solver: str = field(
            default="auto",
            metadata={
                "choices": ("auto", "closed", "cg", "adam", "reference"),
                "help": "how the minimiser is found; auto is closed for diag, cg otherwise",
            },
        )
        draws: int | None = field(default=None, metadata=DRAWS)
        steps: int = field(default=2000, metadata={"min": 1, "help": "of adam and reference; most that cg takes"})
        lr: float = field(default=0.01, metadata={"above": 0.0, "help": "of adam and reference"})
        tolerance: float = field(
            default=1e-4,
            metadata={
                "min": 1e-7,
                "help": "cg ends when the residual has fallen by this factor; float32 tells no less",
            },
        )
        select: bool = field(
            default=True,
            metadata={
                "help": "take the iterate of cg, adam or reference that is best on validation data; False: the last"
            },
        )
        compress: bool = field(
            default=False, metadata={"help": "quantise weights and Fisher to the bytes of plain averaging"}
        )

    @classmethod
    def requires(cls, params):
        sums = params.fisher == "diag" and not params.compress
        validation = params.select and solver_of(params) != "closed"
        return replace(super().requires(params), tasks=CLASSIFIERS, sums=sums, validation=validation)

    def __init__(self, params, setting):
        super().__init__(params, setting)
        self.solver = solver_of(params)
        if params.fisher == "kfac":
            require_curvlinops()
            if self.solver == "closed":
                raise UserError(
                    "lowrank.solver = closed: a sum of Kronecker products has no closed-form inverse; "
                    "choose cg, adam or reference, or fisher diag or full"
                )
        if params.fisher == "full" and params.compress:
            raise UserError("lowrank.compress is for fisher diag and kfac; the full one is for tiny nets")
        #: linear and convolutional layers that are adapted -> whether they have a bias; known once there is a model
        self.layers: dict[str, bool] = {}

    def adapt(self, model: nn.Module) -> nn.Module:
        model = super().adapt(model)
        names = self.trained(model)
        if self.params.fisher == "full":
            check_full_size({n: p for n, p in model.named_parameters() if n in set(names)})
        self.layers = matrix_layers(model, names)
        self.parameters = names
        if self.params.fisher == "kfac" and not self.layers:
            raise UserError(
                "lowrank.fisher = kfac: none of what trains is a linear or convolutional layer; choose diag"
            )
        return model

    # -- client ------------------------------------------------------------------------------------

    def upload(self, model: nn.Module, round: int, client: Client) -> dict[str, Tensor]:
        own = super().upload(model, round, client)
        if self.params.fisher == "diag":
            diagonal = self.diagonal(model, round, client)
            fisher = with_products(diagonal, own) if self.setting.only_sums else entries("fisher", diagonal)
        else:
            of_labels = {"draws": self.draws(model, client), "seed": self.draw_seed(round, client)}
            if self.params.fisher == "kfac":
                factors = kronecker_fisher(model, client.batches(), self.layers, **of_labels)
                fisher = {f"{k}:{n}": m for n, pair in factors.items() for k, m in zip(("inputs", "outputs"), pair)}
            else:
                fisher = {"fisher:": full_fisher(model, client.batches(), self.parameters, **of_labels)}
        return Budget(own, self.parameters, fisher).compress() if self.params.compress else {**own, **fisher}

    def _fisher_shapes(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Names, shapes and dtypes of what comes beside the weights."""

        def meta(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device="meta")

        if self.params.fisher == "full":
            size = sum(own[n].numel() for n in self.parameters)
            return {"fisher:": meta(size, size).double()}
        if self.params.fisher == "diag":
            kinds = ("fisher", "product") if self.setting.only_sums else ("fisher",)
            return {f"{kind}:{n}": meta(*own[n].shape) for n in self.parameters for kind in kinds}
        made = {}
        for layer, bias in self.layers.items():
            weight = own[f"{layer}.weight"]
            inside = weight[0].numel() + bias
            made |= {f"inputs:{layer}": meta(inside, inside), f"outputs:{layer}": meta(len(weight), len(weight))}
        return made

    def expected(self, state: State, round: int, client: int) -> dict[str, Tensor]:
        own = super().expected(state, round, client)
        fisher = self._fisher_shapes(own)
        return Budget(own, self.parameters, fisher).shapes() if self.params.compress else {**own, **fisher}

    # -- server ------------------------------------------------------------------------------------

    def aggregate(self, updates, state, round):
        parts = [dict(u.tensors) for u in updates]
        own = self.view(state)
        if self.params.compress:
            budget = Budget(own, self.parameters, self._fisher_shapes(own))
            parts = [budget.expand(part) for part in parts]
        weights = self.weights(updates)
        mean = weighted_mean([{n: part[n] for n in own} for part in parts], weights)
        message = {**mean, **self.solve(parts, weights, mean)}
        return {**state, **message}, message

    def solve(self, parts: list[dict[str, Tensor]], weights: list[float], mean: Tensors) -> dict[str, Tensor]:
        """The minimiser, by name, in the dtypes of ``mean``; from what each client sent and ``p_k``."""
        if self.solver == "closed":
            found = {}
            for block in self.blocks(parts, weights, mean, torch.float64):
                found |= block.split(block.closed())
            return {n: t.to(mean[n].dtype) for n, t in found.items()}
        if self.solver == "cg":
            return self._choose([mean] + self._path(parts, weights, mean))
        blocks = list(self.blocks(parts, weights, mean, torch.float32))

        def gradient(x: list[Tensor]) -> list[Tensor]:
            return [block.product(at) - block.target for block, at in zip(blocks, x)]

        def named(x: list[Tensor]) -> dict[str, Tensor]:
            return {
                **mean,
                **{n: t.to(mean[n].dtype) for block, at in zip(blocks, x) for n, t in block.split(at).items()},
            }

        start, steps = [block.start for block in blocks], self.params.steps
        if self.solver == "adam":
            iterates = islice(adam(gradient, start, lr=self.params.lr), steps + 1)
            scored = (named(x) for i, x in enumerate(iterates) if i % SCORED == 0 or i == steps)
        else:
            iterates = islice(
                summed_moments(gradient, start, lr=self.params.lr, eps_inside=self.params.fisher == "kfac"), steps
            )
            # The authors never score the last one.
            scored = (
                named(x) for i, x in enumerate(iterates) if i % SCORED == 0 or i == steps - 1 and not self.params.select
            )
        return self._choose(scored)

    def _path(self, parts: list[dict[str, Tensor]], weights: list[float], mean: Tensors) -> list[dict[str, Tensor]]:
        """The models on the way of conjugate gradients, as the residual falls by √10 at a time to the tolerance."""
        # A residual below the rounding of the factors would be fitted to their noise.
        last = max(self.params.tolerance, 2.0 ** (1 - VECTOR_BITS) if self.params.compress else 0.0)
        levels = takewhile(lambda level: level > 1.001 * last, (10 ** (-i / 2) for i in count(1)))
        levels = [*(levels if self.params.select else ()), last]
        models: list[dict[str, Tensor]] = [dict(mean) for _ in levels]
        # One block at a time in float64, so that the server holds the clients' factors and little more.
        for block in self.blocks(parts, weights, mean, torch.float64):
            path = conjugate_path(block.product, block.target, block.start, levels, steps=self.params.steps)
            for model, (x, _) in zip(models, path):
                model |= {n: t.to(mean[n].dtype) for n, t in block.split(x).items()}
        return models

    def _choose(self, models: Iterable[Tensors]) -> dict[str, Tensor]:
        if self.params.select:
            return best(self.workbench, models)
        *_, last = models
        return dict(last)

    def blocks(
        self, parts: list[dict[str, Tensor]], weights: list[float], mean: Tensors, dtype: torch.dtype
    ) -> Iterator[Block]:
        """The objective ``Σ p_k (W − W_k)ᵀ F_k (W − W_k)`` in parts that do not depend on each other."""
        if self.params.fisher == "kfac":
            for layer, bias in self.layers.items():
                yield kronecker_block(layer, bias, parts, weights, mean, dtype)
        elif self.params.fisher == "full":
            yield full_block(self.parameters, parts, weights, mean, dtype)
        else:
            sums = {n: diagonal_sums(parts, weights, n, self.setting.only_sums) for n in self.parameters}
            yield diagonal_block(sums, mean, dtype)
