"""FedFisher: the global model is the mode of the product of the clients' posteriors, by their Fisher information.

Jhunjhunwala, Wang and Joshi, "FedFisher: Leveraging Fisher Information for One-Shot Federated Learning", AISTATS 2024,
Algorithm 1.

    client k sends    W_k, and F_k = (1/n_k) Σ_x E_y [∇log p(y|x) ∇log p(y|x)ᵀ] at W_k, y ~ the model's p(y|x)
    the server takes  W = argmin Σ_k p_k (W − W_k)ᵀ F_k (W − W_k), of its minimisers the one nearest to Σ_k p_k W_k

The expectation over ``y`` is exact for models of up to 100 classes, as in the paper (equation 3) and the authors' code;
with ``draws``, labels are drawn from the model instead. ``fisher`` is the form of ``F_k``: its diagonal; one Kronecker
product ``A ⊗ G`` per layer (parameters of other layers than linear and convolutional ones are then averaged); or the
full matrix, for tiny networks. ``solver`` is how the minimiser is computed:

- ``closed``: for diag ``(Σ p_k F_k W_k) / (Σ p_k F_k)``, and the mean where the sum is zero; for full a pseudo-inverse;
- ``cg``: conjugate gradients from the mean, whose limit is the nearest minimiser (Lemma 1), until the residual has
  fallen by ``tolerance``; the remaining residual is in directions in which the Fisher is almost zero. The start and the
  iterates at which the residual has fallen by √10, 10, … are scored on validation data, since an iterate before the
  minimiser may be a better model;
- ``adam``: the paper's, ``steps`` steps; every 100th iterate, the first and the last are scored in the same way;
- ``reference``: the authors' code, which differs: moments that are sums, without bias correction, the iterates after
  steps 1, 101, … scored, and for K-FAC ``√(d + ε)`` in place of ``√d + ε``. Its validation data were among the clients'
  training data; ours never are.

With ``select: False`` nothing is scored and the last iterate is taken.

With ``fisher: diag`` sums are enough: if the server may see no more, clients send ``F_k W_k`` too. ``compress`` brings
``W_k`` and ``F_k`` to 16 bits per weight each, the bytes of plain averaging; ``cg`` then ends where the residual
reaches the rounding error of the factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...algebra import weighted_mean
from ...errors import UserError
from ...models.curvature import check_full_size, full_fisher, kronecker_fisher, matrix_layers, require_curvlinops
from ...settings import key
from ..registry import register_method
from ..terms import Tensors, refuse_negative
from .base import CLASSIFIERS, DRAWS, OneShot, best, meta, refuse_indefinite
from .compress import VECTOR_BITS, quantised
from .objective import Block, diagonal_block, full_block, kronecker_block, minimise


def solver_of(params: FedFisher.Params) -> str:
    """``params.solver``, with ``auto`` resolved."""
    return params.solver if params.solver != "auto" else ("closed" if params.fisher == "diag" else "cg")


@register_method("fedfisher")
class FedFisher(OneShot):
    source = "Jhunjhunwala et al., AISTATS 2024, Algorithm 1"
    sends = "all weights, and their Fisher information (diagonal, Kronecker factors or full)"
    #: 2: the expectation over labels was estimated by one drawn label per sample
    revision = 2

    @dataclass(frozen=True)
    class Params:
        fisher: str = key("diag", choices=("diag", "kfac", "full"), help="form of the Fisher information")
        solver: str = key(
            "auto",
            choices=("auto", "closed", "cg", "adam", "reference"),
            help="how the minimiser is computed; auto is closed for diag, cg otherwise",
        )
        draws: int | None = key(None, **DRAWS)
        steps: int = key(2000, min=1, help="of adam and reference; maximum for cg")
        lr: float = key(0.01, above=0.0, help="of adam and reference")
        tolerance: float = key(
            1e-4, min=1e-7, help="cg ends when the residual has fallen by this factor; float32 resolves no smaller one"
        )
        select: bool = key(
            True, help="take the iterate of cg, adam or reference that is best on validation data; False: the last"
        )
        compress: bool = key(False, help="quantise weights and Fisher to the bytes of plain averaging")

    params: Params

    @classmethod
    def requires(cls, params: Params):
        sums = params.fisher == "diag" and not params.compress
        solver = solver_of(params)
        validation = params.select and solver != "closed"
        used = {"closed": (), "cg": ("steps", "tolerance", "select")}.get(solver, ("steps", "lr", "select"))
        unused = {"steps", "lr", "tolerance", "select"} - {*used}
        idle = {f"lowrank.{name}": f"the solver is {solver}" for name in sorted(unused)}
        return replace(super().requires(params), tasks=CLASSIFIERS, sums=sums, validation=validation, idle=idle)

    def __init__(self, params, setting):
        super().__init__(params, setting)
        if params.fisher == "kfac":
            require_curvlinops()
            if solver_of(params) == "closed":
                raise UserError(
                    "lowrank.solver = closed: a sum of Kronecker products has no closed-form inverse; "
                    "choose cg, adam or reference, or fisher diag or full"
                )
        if params.fisher == "full" and params.compress:
            raise UserError("lowrank.compress is for fisher diag and kfac; the full one is for tiny networks")

    def adapt(self, model):
        model = super().adapt(model)
        if self.params.fisher == "full":
            check_full_size({n: p for n, p in model.named_parameters() if n in set(self.parameters)})
        #: linear and convolutional layers among the parameters -> whether they have a bias
        self.layers = matrix_layers(model, self.parameters)
        if self.params.fisher == "kfac" and not self.layers:
            raise UserError(
                "lowrank.fisher = kfac: no trained parameter belongs to a linear or convolutional layer; choose diag"
            )
        return model

    # -- client: compute F_k and send it with W_k ----------------------------------------------------

    def beside(self, model, tensors, round, client):
        if self.params.fisher == "diag":
            return self.diagonal_entries(self.diagonal(model, round, client), tensors)
        draws = self.label_draws(model, round, client)
        if self.params.fisher == "full":
            return {"fisher:": full_fisher(model, client.batches(), self.parameters, **draws)}
        factors = kronecker_fisher(model, client.batches(), self.layers, **draws)
        return {f"{kind}:{n}": m for n, pair in factors.items() for kind, m in zip(("inputs", "outputs"), pair)}

    def beside_shapes(self, tensors):
        if self.params.fisher == "diag":
            return self.diagonal_shapes(tensors)
        if self.params.fisher == "full":
            size = sum(tensors[n].numel() for n in self.parameters)
            return {"fisher:": meta(size, size, dtype=torch.float64)}
        shapes = {}
        for layer, bias in self.layers.items():
            weight = tensors[f"{layer}.weight"]
            inputs = weight[0].numel() + bias
            shapes[f"inputs:{layer}"], shapes[f"outputs:{layer}"] = meta(inputs, inputs), meta(len(weight), len(weight))
        return shapes

    def check(self, update):
        super().check(update)
        if self.params.fisher == "diag":
            sent = quantised("fisher", update.tensors) if self.compresses else update.tensors
            refuse_negative(replace(update, tensors=sent), [n for n in sent if n.startswith("fisher:")])
        else:
            refuse_indefinite(update, [n for n in update.tensors if n.startswith(("inputs:", "outputs:", "fisher:"))])

    # -- server: start at the mean, minimise ---------------------------------------------------------

    def aggregate(self, updates, state, round):
        parts, weights = self.received(updates, state), self.weights(updates)
        mean = weighted_mean([{n: part[n] for n in self.view(state)} for part in parts], weights)
        params = self.params
        # A residual below the rounding error of compressed factors would be fitted to that error.
        tolerance = max(params.tolerance, 2.0 ** (1 - VECTOR_BITS) if params.compress else 0.0)
        iterates = minimise(
            lambda dtype: self.blocks(parts, weights, mean, dtype),
            mean,
            solver_of(params),
            steps=params.steps,
            lr=params.lr,
            tolerance=tolerance,
            scored=params.select,
            eps_inside=params.fisher == "kfac",
        )
        if self.needs.validation:
            message = best(self.workbench, iterates)
        else:
            *_, message = iterates
        return {**state, **message}, message

    def blocks(
        self, parts: Sequence[Tensors], weights: Sequence[float], mean: Tensors, dtype: torch.dtype
    ) -> Iterator[Block]:
        """The objective ``Σ p_k (W − W_k)ᵀ F_k (W − W_k)`` as blocks that do not depend on each other."""
        if self.params.fisher == "kfac":
            for layer, bias in self.layers.items():
                yield kronecker_block(layer, bias, parts, weights, mean, dtype)
        elif self.params.fisher == "full":
            yield full_block(self.parameters, parts, weights, mean, dtype)
        else:
            sums = {n: self.diagonal_sums(parts, weights, n) for n in self.parameters}
            yield diagonal_block(sums, mean, dtype)
