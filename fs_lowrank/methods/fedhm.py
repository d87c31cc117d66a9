"""FedHM: clients train a factorised net of the rank they can bear, the server keeps and averages full weights.

Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021.

    client k gets     U √Σ and √Σ Vᵀ of every W, cut to its rank, in the place of W
    and trains them   with Frobenius decay, c (U V Vᵀ, UᵀU V) added to the two gradients
    the server takes  W_k = U_k V_k,  W ← Σ_k p_k W_k,  p_k = 1/K or n_k / Σ n_j

Everything that is not factorised (first layer, downsampling, norms, head) is trained and averaged whole.
``average_by: uniform`` is the original's, ``samples`` the rule of the FedLoRU authors' port, which has no
Frobenius decay (``decay: 0``).
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from ..algebra import factor_matrices, factorise, stack_pairs
from ..algebra.factorise import from_matrix
from ..models.adapters import load_tensors, target_modules
from ..models.factorised import empty_factors, factorise_layers, frobenius
from ..models.names import select
from .base import Method, Phase, State, Tensors
from .registry import register_method

_WEIGHT = ".base_layer.weight"


@register_method("fedhm")
class FedHM(Method):
    source = "Yao et al., 2021"
    sends = "the factors of every adapted layer at the client's rank, everything else whole"
    additive = False
    shared = ("base", "head", "factor")

    @dataclass(frozen=True)
    class Params:
        rank_factors: tuple[float, ...] = field(
            default=(4.0,),
            metadata={
                "min": 1.0,
                "help": "a layer's rank is round(d_out / rank_factor); one for every client, repeated in turn",
            },
        )
        decay: float = field(default=1e-4, metadata={"min": 0.0, "help": "c of the Frobenius decay"})
        average_by: str = field(
            default="uniform", metadata={"choices": ("uniform", "samples"), "help": "of the clients in the average"}
        )

    def adapt(self, model: nn.Module) -> nn.Module:
        return factorise_layers(model, target_modules(model, self.adapter))

    def rank(self, shape, client: int | None = None) -> int:
        """Rank of a weight of ``shape`` at ``client``; None: the largest of all."""
        factors = self.params.rank_factors
        factor = min(factors) if client is None else factors[(client - 1) % len(factors)]
        out, into, k1, k2 = (*shape, 1, 1)[:4]
        return min(max(round(shape[0] / factor), 1), out * k1, into * k2)

    def factors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """``svd:…`` entries: the factors of every full weight in ``tensors``, at the largest rank."""
        made = {}
        for name in (n for n in tensors if n.endswith(_WEIGHT)):
            left, right = factorise(tensors[name].float(), self.rank(tensors[name].shape))
            layer = name.removesuffix(_WEIGHT)
            made |= {f"svd:{layer}.factor_U": left.to(tensors[name]), f"svd:{layer}.factor_V": right.to(tensors[name])}
        return made

    def initial_state(self, model: nn.Module) -> State:
        state = super().initial_state(model)
        return {**state, **self.factors(state)}

    def phases(self, round: int, client: int | None = None) -> list[Phase]:
        c = self.params.decay
        penalty = (lambda model: c * frobenius(model)) if c else None
        return [Phase(train=("factor", "rest", "head"), penalty=penalty)]

    def view(self, state, client=None):
        tensors = super().view(state)
        return (
            tensors
            if client is None
            else self.tailor({**tensors, **{n: t for n, t in state.items() if n.startswith("svd:")}}, client)
        )

    def tailor(self, tensors: Tensors, client: int) -> dict[str, torch.Tensor]:
        """The factors cut to the client's rank in the place of the full weights."""
        kept = {n: t for n, t in tensors.items() if ":" not in n and not n.endswith(_WEIGHT) and ".factor_" not in n}
        for name in (n for n in tensors if n.startswith("svd:")):
            layer, half = name.removeprefix("svd:").rsplit(".", 1)
            u = tensors[f"svd:{layer}.factor_U"]
            v = tensors[f"svd:{layer}.factor_V"]
            shape = (u.shape[0], v.shape[1], *((u.shape[2], v.shape[3]) if u.ndim == 4 else ()))
            rank = self.rank(shape, client)
            kept[f"{layer}.{half}"] = u[:, :rank] if half == "factor_U" else v[:rank]
        return kept

    def weights(self, updates):
        if self.params.average_by == "uniform":
            return [1 / len(updates)] * len(updates)
        return super().weights(updates)

    def aggregate(self, updates, state, round):
        mean, memory = self.average(updates, state, tagged=("rest", "head"))
        full = {}
        for u in select(updates[0].tensors, {"factor"}):
            if u.endswith("factor_V"):
                continue
            name = u.removesuffix(".factor_U") + _WEIGHT
            lefts, rights = zip(*(factor_matrices(x.tensors[u], x.tensors[u[:-1] + "V"]) for x in updates))
            left, right = stack_pairs(lefts, rights, self.weights(updates))
            full[name] = from_matrix(left @ right, state[name].shape)
        if self.combine:
            full, more = self.combine(full, state)
            memory = {**memory, **more}
        message = {**mean, **full, **self.factors(full)}
        return {**state, **message, **memory}, message

    def apply(self, model: nn.Module, message: Tensors, round: int) -> None:
        own = {n: t for n, t in message.items() if ":" not in n}
        for name in (n for n in own.copy() if n.endswith(_WEIGHT)):
            left, right = empty_factors(own[name])
            layer = name.removesuffix(_WEIGHT)
            own |= {f"{layer}.factor_U": left, f"{layer}.factor_V": right}
        load_tensors(model, own)
