"""FedSVD: only B trains, as in FFA-LoRA, and from time to time A takes the directions of the product.

Lee et al., "FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA", NeurIPS 2025, Algorithm 1.

    every round:          B ← Σ_k p_k B_k
    every period rounds:  B A = U Σ Vᵀ,  A ← Vᵀ,  B ← U Σ

Exact: the mean is of B alone, and the decomposition leaves the product as it is. Both matrices are sent after it. The
sign of each component is such that the largest entry of its row of A is positive.
"""

from dataclasses import dataclass, replace

from ..algebra import low_rank_sum_svd, signed, top_components
from ..models.names import pairs
from ..settings import key
from .base import Averaging
from .registry import register_method
from .terms import Phase


@register_method("fedsvd")
class FedSVD(Averaging):
    source = "Lee et al., NeurIPS 2025, Algorithm 1"
    sends = "B; receives A, too, after a decomposition"
    shared = ("lora_A", "lora_B", "head")

    @dataclass(frozen=True)
    class Params:
        period: int = key(1, min=1, help="rounds between decompositions")

    params: Params

    @classmethod
    def requires(cls, params):
        begins = {"lowrank.period": (params.period + 1, f"the first decomposition is after round {params.period}")}
        return replace(super().requires(params), begins=begins)

    def phases(self, round, client=None):
        return [Phase(train=("lora_B", *self.whole))]

    def settle(self, mean, state, round):
        if round % self.params.period:
            return state, mean
        new = dict(mean)
        for b, a in pairs(state):
            up, down = state[b].flatten(1), state[a].flatten(1)
            u, s, vh = signed(*low_rank_sum_svd([up], [down], [1.0], len(down)))
            u, s, vh = top_components(u, s, vh, len(down), fill=down)
            new[b], new[a] = (u * s).reshape(state[b].shape), vh.reshape(state[a].shape)
        return {**state, **new}, new
