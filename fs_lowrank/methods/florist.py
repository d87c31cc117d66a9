"""FLoRIST: FLoRA, whose server sends the stack's largest singular values instead of the stack.

Ramesh and Dass, "FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated Fine-Tuning of Large
Language Models", MLSys 2026.

    ΔW = Σ_k p_k s_k B_k A_k = U Σ Vᵀ          q: the smallest with  Σ_{i ≤ q} σ_i² ≥ τ Σ_i σ_i²
    W ← W + (U_q Σ_q) V_qᵀ, then a new A is drawn and B = 0

The rank ``q`` that travels down is a layer's own and differs from round to round, so the downlink no longer grows with
the number of clients. ``threshold: 1`` keeps all and is FLoRA, exact. The decomposition is that of the stacked factors,
while they are smaller than the dense ΔW (``algebra.low_rank_sum_svd``).

Differs from the authors' code: it stacks the pairs without ``s_k`` and leaves the scale to the model that merges, which
is the same only where ``alpha_k / r_k`` is equal for all clients, as it is there. Here the alpha is one for all.
"""

from dataclasses import dataclass

from ..algebra import low_rank_sum_svd
from ..settings import key
from .flora import FLoRA
from .registry import register_method


@register_method("florist")
class FLoRIST(FLoRA):
    source = "Ramesh and Dass, MLSys 2026"
    sends = "A and B, at the client's rank; receives the largest components of all"

    @dataclass(frozen=True)
    class Params(FLoRA.Params):
        threshold: float = key(0.9, above=0.0, max=1.0, help="share of the squared singular values that is sent")

    params: Params

    def combined(self, ups, downs, weights):
        flat_ups, flat_downs = [up.flatten(1) for up in ups], [down.flatten(1) for down in downs]
        u, s, vh = low_rank_sum_svd(flat_ups, flat_downs, weights, sum(map(len, downs)))
        energy = s.double().square().cumsum(0)
        rank = int((energy < self.params.threshold * energy[-1]).sum()) + 1
        return u[:, :rank] * s[:rank], vh[:rank]
