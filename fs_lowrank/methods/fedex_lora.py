"""FedEx-LoRA: FedLoRA, and the base takes the mean of the products minus the product of the means.

Singhal, Ponkshe and Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
Models", ACL 2025.

    A ← Σ_k p_k A_k = Ā        B ← Σ_k p_k B_k = B̄
    W ← W + s (Σ_k p_k B_k A_k − B̄ Ā) = W + s Σ_k p_k (B_k − B̄)(A_k − Ā)

Exact. The residual is computed in its second form, which avoids cancellation, and is sent as stacked factors of rank
``Σ r_k``; ``residual_rank`` cuts it to its best approximation of that rank, the paper's inexact variant.
"""

from dataclasses import dataclass

from ..algebra import low_rank_sum_svd, stack_pairs
from ..models.adapters import load_tensors
from ..models.merging import merge_pair
from ..models.names import pairs
from ..settings import key
from .base import Gathering, split_merges
from .merging import Merging
from .registry import register_method


@register_method("fedex_lora")
class FedExLoRA(Merging, Gathering):
    source = "Singhal et al., ACL 2025"
    sends = "A and B; receives their means and the residual"

    @dataclass(frozen=True)
    class Params:
        residual_rank: int = key(0, min=0, help="rank to which the residual of a layer is cut; 0: all of it is sent")

    params: Params

    def aggregate(self, updates, state, round):
        mean, weights = self.mean_of(updates), self.weights(updates)
        message, scale = dict(mean), self.adapter.scale()
        for b, a in pairs(mean):
            ups = [(u.tensors[b] - mean[b]).flatten(1) for u in updates]
            downs = [(u.tensors[a] - mean[a]).flatten(1) for u in updates]
            scaled = [scale * p for p in weights]
            if self.params.residual_rank:
                left, values, down = low_rank_sum_svd(ups, downs, scaled, self.params.residual_rank)
                up = left * values
            else:
                up, down = stack_pairs(ups, downs, scaled)
            message[f"merge:{round}:{b}"], message[f"merge:{round}:{a}"] = up, down
        return {**state, **mean}, message

    def apply(self, model, message, round):
        merges, tensors = split_merges(message)
        for residuals in merges.values():
            for b, a in pairs(residuals):
                merge_pair(model, a, residuals[b], residuals[a])
        load_tensors(model, tensors)
