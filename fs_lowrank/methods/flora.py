"""FLoRA: the server stacks the clients' pairs, every copy merges the product and draws a new pair.

Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
NeurIPS 2024.

    A = [A_1; …; A_K]    B = [p_1 s_1 B_1, …, p_K s_K B_K]
    W ← W + B A, then a new A is drawn and B = 0

Exact for any ranks and any subset of the clients, but the downlink grows with ``Σ r_k``.
"""

import torch
from torch import nn

from ..algebra import stack_pairs
from ..models.adapters import base_weight_name, load_tensors, merge_pair
from ..models.names import named_tensors, pairs
from .base import Tensors, split_merges
from .ranks import RankedMethod
from .registry import register_method


@register_method("flora")
class FLoRA(RankedMethod):
    source = "Wang et al., NeurIPS 2024"
    sends = "A and B, at the client's rank; receives those of all clients"

    def aggregate(self, updates, state, round):
        message = self.mean_of(updates, self.averaged)
        fresh = dict(message)
        weights, scale = self.weights(updates), self.adapter.scale
        for b, a in pairs(updates[0].tensors):
            ups, downs = [u.tensors[b] for u in updates], [u.tensors[a] for u in updates]
            message[f"merge:{round}:{b}"], message[f"merge:{round}:{a}"] = stack_pairs(
                ups, downs, [p * scale(d.shape[0]) for p, d in zip(weights, downs)]
            )
            fresh[a] = self.draw_down(a, state[a].shape, round).to(state[a])
            fresh[b] = torch.zeros_like(state[b])
        return {**state, **fresh}, message

    def apply(self, model: nn.Module, message: Tensors, round: int) -> None:
        merges, rest = split_merges(message)
        for stacks in merges.values():
            for b, a in pairs(stacks):
                merge_pair(model, a, stacks[b], stacks[a])
        load_tensors(model, rest)
        own = named_tensors(model, ("adapter",))
        with torch.no_grad():
            for b, a in pairs(own):
                down = own[a]
                down.copy_(self.draw_down(a, (self.rank(), *down.shape[1:]), round)[: len(down)])
                own[b].zero_()

    def changed_base(self, model: nn.Module) -> list[str]:
        return [base_weight_name(a) for _, a in pairs(named_tensors(model, ("adapter",)))]
