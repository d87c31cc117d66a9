"""FlexLoRA: clients of different ranks; the server averages the products and splits them again by SVD.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
NeurIPS 2024.

    ΔW = Σ_k p_k s_k B_k A_k = U Σ Vᵀ          (s_k = alpha / r_k)
    client k gets A = V_rᵀ, B = U_r Σ_r / s_k, its r_k largest components

``split: sqrt`` gives √Σ to each half; where Σ is zero, as for components that the clients of a round lack, A keeps its
direction whole and B is zero, as two zeros would never train. The default gives all of Σ to B, as in the authors' code.
Differs from the authors' code in cost only: ΔW is formed only where R = Σ r_k is not below its smaller side
(``algebra.low_rank_sum_svd``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..algebra import low_rank_sum_svd, top_components
from ..models.names import pairs
from ..settings import key
from .ranks import RankedMethod, RankedParams
from .registry import register_method


@register_method("flexlora")
class FlexLoRA(RankedMethod):
    source = "Bai et al., NeurIPS 2024"
    sends = "A and B, at the client's rank"

    @dataclass(frozen=True)
    class Params(RankedParams):
        split: str = key("b", choices=("b", "sqrt"), help="b: all singular values in B; sqrt: shared with A")

    params: Params

    def aggregate(self, updates, state, round):
        message, columns = self.mean_of(updates, self.averaged), self.columns(updates)
        for b, a in pairs(updates[0].tensors):
            svd = low_rank_sum_svd(
                [u.tensors[b].flatten(1) for u in updates],
                [u.tensors[a].flatten(1) for u in updates],
                [[w * self.adapter.scale(len(client)) for w in client] for client in columns],
                self.rank(),
            )
            message[b], message[a] = self.halves(*svd, state[b], state[a])
        return {**state, **message}, message

    def columns(self, updates) -> list[list[float]]:
        """Of each client, the weights of the components of its pair."""
        return [[p] * self.rank(u.client) for p, u in zip(self.weights(updates), updates)]

    def halves(self, u: Tensor, s: Tensor, vh: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """B and A, in the shapes of ``b`` and ``a``, those before the round, with the product ``u s vh / scale``."""
        rank = self.rank()
        u, s, vh = top_components(u, s / self.adapter.scale(rank), vh, rank, fill=a.flatten(1))
        to_b, to_a = self._halves(s, max(u.shape[0], vh.shape[1]))
        return (u * to_b).reshape(b.shape), (to_a[:, None] * vh).reshape(a.shape)

    def _halves(self, s: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The parts of the singular values ``s`` that go to B and to A; ``size``: of the longer side of the matrix."""
        if self.params.split == "b":
            return s, torch.ones_like(s)
        zero = s <= s[0] * size * torch.finfo(s.dtype).eps  # but for rounding
        return torch.where(zero, s, s.sqrt()), torch.where(zero, 1, s.sqrt())
