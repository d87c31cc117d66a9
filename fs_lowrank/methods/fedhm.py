"""FedHM: clients train a factorised net of the rank they can bear, the server keeps and averages full weights.

Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021.

    client k gets     U √Σ and √Σ Vᵀ of every W, cut to its rank, in the place of W
    and trains them   with Frobenius decay, c (U V Vᵀ, UᵀU V) added to the two gradients
    the server takes  W_k = U_k V_k,  W ← Σ_k p_k W_k,  p_k = 1/K or n_k / Σ n_j

A client of rank factor 1 holds, trains and sends ``W`` itself, without Frobenius decay, as in both authors' codes.
Everything that is not factorised (first layer, downsampling, norms, head) is trained and averaged in full.
``average_by: uniform`` is the original's, ``samples`` the rule of the FedLoRU authors' port, which has no
Frobenius decay (``decay: 0``).

``master: True`` does what the original's code does and the paper does not say: in a round in which no client has the
smallest rank factor of all, the server's own model is averaged as one more client, so that what no client's rank can
hold is not lost at once. By samples it counts as an average client of the round.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from ..algebra import factor_matrices, factorise, stack_pairs
from ..algebra.factorise import from_matrix
from ..models.adapters import load_tensors, target_modules
from ..models.factorised import empty_factors, factorise_layers, frobenius
from ..models.names import select
from .base import Method, Phase, State, Tensors, Update
from .registry import register_method

_WEIGHT = ".base_layer.weight"


@register_method("fedhm")
class FedHM(Method):
    source = "Yao et al., 2021"
    sends = "the factors of every adapted layer at the client's rank, everything else whole"
    additive = False
    shared = ("base", "head", "factor")
    #: 2: rank factor 1 was a factorised layer too, cut to rank d_out
    revision = 2

    @dataclass(frozen=True)
    class Params:
        rank_factors: tuple[float, ...] = field(
            default=(4.0,),
            metadata={
                "min": 1.0,
                "help": "a layer's rank is round(d_out / rank_factor), and 1 is the full layer; one for every client, "
                "repeated in turn",
            },
        )
        decay: float = field(default=1e-4, metadata={"min": 0.0, "help": "c of the Frobenius decay"})
        average_by: str = field(
            default="uniform", metadata={"choices": ("uniform", "samples"), "help": "of the clients in the average"}
        )
        master: bool = field(
            default=False,
            metadata={"help": "the server's model is one more client where none has the smallest rank factor"},
        )

    @classmethod
    def revision_of(cls, params) -> int:
        return cls.revision if min(params.rank_factors, default=0) == 1 else 1

    def adapt(self, model: nn.Module) -> nn.Module:
        return factorise_layers(model, target_modules(model, self.adapter))

    def factor(self, client: int) -> float:
        """The rank factor of ``client``; 1 is the full layer."""
        return self.params.rank_factors[(client - 1) % len(self.params.rank_factors)]

    @staticmethod
    def rank(shape, factor: float) -> int:
        """Rank of the factors of a weight of ``shape``."""
        out, into, k1, k2 = (*shape, 1, 1)[:4]
        return min(max(round(out / factor), 1), out * k1, into * k2)

    def factors(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """``svd:…`` entries: the factors of every full weight in ``tensors``, at the largest rank of any client."""
        made, of_clients = {}, [f for f in self.params.rank_factors if f > 1]
        for name in (n for n in tensors if n.endswith(_WEIGHT) and of_clients):
            left, right = factorise(tensors[name].float(), self.rank(tensors[name].shape, min(of_clients)))
            layer = name.removesuffix(_WEIGHT)
            made |= {f"svd:{layer}.factor_U": left.to(tensors[name]), f"svd:{layer}.factor_V": right.to(tensors[name])}
        return made

    def initial_state(self, model: nn.Module) -> State:
        state = super().initial_state(model)
        return {**state, **self.factors(state)}

    def phases(self, round: int, client: int | None = None) -> list[Phase]:
        if client is not None and self.factor(client) == 1:
            return [Phase(train=("base", "head"))]
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
        """The factors cut to the client's rank in the place of the full weights, or the full weights alone."""
        if self.factor(client) == 1:
            return {n: t for n, t in tensors.items() if ":" not in n}
        kept = {n: t for n, t in tensors.items() if ":" not in n and not n.endswith(_WEIGHT) and ".factor_" not in n}
        for name in (n for n in tensors if n.startswith("svd:")):
            layer, half = name.removeprefix("svd:").rsplit(".", 1)
            u = tensors[f"svd:{layer}.factor_U"]
            v = tensors[f"svd:{layer}.factor_V"]
            shape = (u.shape[0], v.shape[1], *((u.shape[2], v.shape[3]) if u.ndim == 4 else ()))
            rank = self.rank(shape, self.factor(client))
            kept[f"{layer}.{half}"] = u[:, :rank] if half == "factor_U" else v[:rank]
        return kept

    def weights(self, updates):
        if self.params.average_by == "uniform":
            return [1 / len(updates)] * len(updates)
        return super().weights(updates)

    def with_master(self, updates: list[Update], state: State) -> list[Update]:
        """``updates``, and the server's model as that of a client 0 where ``master`` asks for it."""
        if not self.params.master or min(self.factor(u.client) for u in updates) == min(self.params.rank_factors):
            return updates
        own = {n: state[n] for n in select(state, ("base", "head"))}
        return [*updates, Update(0, max(sum(u.num_samples for u in updates) // len(updates), 1), own)]

    def mean_weight(self, layer: str, updates: list[Update], like: torch.Tensor) -> torch.Tensor:
        """``Σ p_k W_k`` of a factorised layer, from the factors of some clients and the full weights of others."""
        weighted = list(zip(self.weights(updates), (u.tensors for u in updates)))
        mean = torch.zeros_like(like)
        if held := [
            (p, t[f"{layer}.factor_U"], t[f"{layer}.factor_V"]) for p, t in weighted if f"{layer}.factor_U" in t
        ]:
            lefts, rights = zip(*(factor_matrices(u, v) for _, u, v in held))
            left, right = stack_pairs(lefts, rights, [p for p, _, _ in held])
            mean = from_matrix(left @ right, like.shape)
        for p, tensors in weighted:
            if layer + _WEIGHT in tensors:
                mean = mean + p * tensors[layer + _WEIGHT]
        return mean

    def aggregate(self, updates, state, round):
        updates = self.with_master(updates, state)
        mean, memory = self.average(updates, state, tagged=("rest", "head"))
        layers = [n.removesuffix(_WEIGHT) for n in select(state, ("base",)) if n.endswith(_WEIGHT)]
        full = {layer + _WEIGHT: self.mean_weight(layer, updates, state[layer + _WEIGHT]) for layer in layers}
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
