"""FLoRA: the server stacks the clients' pairs, every copy merges the product and draws a new pair.

Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
NeurIPS 2024.

    A = [A_1; …; A_K]    B = [p_1 s_1 B_1, …, p_K s_K B_K]
    W ← W + B A, then a new A is drawn and B = 0

Exact for any ranks and any subset of the clients, but the downlink grows with ``Σ r_k``.

``merge: false`` leaves the base as it is and keeps the products beside it, which are saved with the pair as one LoRA
adapter. Its rank grows by ``Σ r_k`` a round up to ``max_kept_rank``, beyond which the best approximation is stored.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..algebra import stack_pairs
from ..errors import say_once
from ..models.accumulated import accumulate_pair, add_accumulated
from ..models.adapters import ACCUMULATED, base_weight_name, load_tensors
from ..models.merging import merge_pair
from ..models.names import named_tensors, pairs
from ..settings import key
from .base import split_merges
from .ranks import RankedMethod, RankedParams
from .registry import register_method
from .terms import Tensors, beside_the_base


@register_method("flora")
class FLoRA(RankedMethod):
    source = "Wang et al., NeurIPS 2024"
    sends = "A and B, at the client's rank; receives those of all clients"

    @dataclass(frozen=True)
    class Params(RankedParams):
        merge: bool = key(True, help="False: keep the products beside the base, and save them as one adapter")
        max_kept_rank: int = key(512, min=1, help="with merge False, the largest rank that is stored for a layer")

    params: Params

    @classmethod
    def requires(cls, params):
        idle = {"lowrank.max_kept_rank": "lowrank.merge is True"} if params.merge else {}
        needs = replace(super().requires(params), changes_base=params.merge, idle=idle)
        return needs if params.merge else beside_the_base(needs)

    def __init__(self, params, setting):
        super().__init__(params, setting)
        #: whether the accumulated products are exact
        self.exact = True

    def adapt(self, model):
        model = super().adapt(model)
        return model if self.params.merge else add_accumulated(model, self.setting.seed)

    def aggregate(self, updates, state, round):
        message = self.mean_of(updates, self.averaged)
        fresh = dict(message)
        weights, scale = self.weights(updates), self.adapter.scale
        for b, a in pairs(updates[0].tensors):
            ups, downs = [u.tensors[b] for u in updates], [u.tensors[a] for u in updates]
            message[f"merge:{round}:{b}"], message[f"merge:{round}:{a}"] = self.combined(
                ups, downs, [p * scale(d.shape[0]) for p, d in zip(weights, downs)]
            )
            fresh[a] = self.draw_down(a, state[a].shape, round).to(state[a])
            fresh[b] = torch.zeros_like(state[b])
        return {**state, **fresh}, message

    def combined(self, ups: list[Tensor], downs: list[Tensor], weights: list[float]) -> tuple[Tensor, Tensor]:
        """``B (d_out, q)`` and ``A (q, d_in)`` of what every copy merges, from the clients' pairs and ``p_k s_k``."""
        return stack_pairs(ups, downs, weights)

    def apply(self, model: nn.Module, message: Tensors, round: int) -> None:
        merges, tensors = split_merges(message)
        for merged_in, stacks in merges.items():
            for b, a in pairs(stacks):
                if self.params.merge:
                    merge_pair(model, a, stacks[b], stacks[a])
                elif accumulate_pair(model, a, stacks[b], stacks[a], self.params.max_kept_rank) and self.exact:
                    self.exact = False
                    say_once(
                        f"lowrank.max_kept_rank = {self.params.max_kept_rank} is reached in round {merged_in}: from "
                        f"now on {self.name} is not exact, and the best approximation of that rank is stored"
                    )
        load_tensors(model, tensors)
        adapter = named_tensors(model, ("adapter",))
        with torch.no_grad():
            for b, a in pairs(adapter):
                down = adapter[a]
                down.copy_(self.draw_down(a, (self.rank(), *down.shape[1:]), round)[: len(down)])
                adapter[b].zero_()

    def changed_base(self, model: nn.Module) -> list[str]:
        if not self.params.merge:
            return list(named_tensors(model, (ACCUMULATED,)))
        return [base_weight_name(a) for _, a in pairs(named_tensors(model, ("adapter",)))]
