"""raFLoRA (also RB-LoRA): FlexLoRA, with a mean for each rank over the clients that have that rank.

Wu et al., "Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity", arXiv 2602.13486,
2026; Ha et al., "RB-LoRA: Rank-Balanced Aggregation for Low-Rank Adaptation with Federated Fine-Tuning", Findings of
EACL 2026.

    ΔW = Σ_k Σ_j w_kj s_k B_k[:, j] A_k[j, :],   w_kj = p_k / Σ_{i: r_i ≥ j} p_i   for j ≤ r_k
    then as FlexLoRA: client k gets the r_k largest components of ΔW

With FlexLoRA, a component that only clients of a large rank have is divided by the weight of all clients, so that it
fades from round to round. Equal ranks give FlexLoRA.
"""

from .flexlora import FlexLoRA
from .registry import register_method


@register_method("raflora")
class RaFLoRA(FlexLoRA):
    source = "Wu et al., 2026; Ha et al., EACL Findings 2026 (RB-LoRA)"

    def columns(self, updates):
        p, ranks = self.weights(updates), [self.rank(u.client) for u in updates]
        have = [sum(w for w, r in zip(p, ranks) if r > j) for j in range(max(ranks))]
        return [[w / have[j] for j in range(r)] for w, r in zip(p, ranks)]
