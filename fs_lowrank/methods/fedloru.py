"""FedLoRU: federated low-rank updates that accumulate.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", Algorithm 1.

    every round:       A ← Σ_k p_k A_k,  B ← Σ_k p_k B_k
    every tau rounds:  W ← W + s B A on every copy, then the pair starts anew

``init: random`` draws A and sets B = 0, which leaves the model's function unchanged. ``init: momentum`` keeps the
values, so the function jumps by one ``s B A``: the papers' momentum effect, and the default of the authors' code.
``schedule`` lists the accumulation rounds instead of ``tau``.

``merge: false`` is for fine-tuning: the base remains unchanged, the accumulated pairs are stored beside it, and all of
them are saved as one LoRA adapter whose rank is the sum of theirs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..models.accumulated import accumulate_pair, add_accumulated
from ..models.adapters import ACCUMULATED, base_weight_name, load_tensors
from ..models.merging import check_products, merge_adapter
from ..models.names import named_tensors, pairs, select, zero_at_start
from ..settings import key
from .base import Averaging, split_merges
from .registry import register_method
from .terms import beside_the_base


@register_method("fedloru")
class FedLoRU(Averaging):
    source = "Park and Klabjan, 2024, Algorithm 1"
    sends = "A and B"

    @dataclass(frozen=True)
    class Params:
        tau: int = key(20, min=1, help="rounds between accumulations")
        schedule: tuple[int, ...] = key((), min=1, help="the accumulation rounds themselves; takes precedence over tau")
        init: str = key("random", choices=("random", "momentum"), help="how the pair is initialised after accumulation")
        merge: bool = key(True, help="False: keep the accumulated pairs beside the base, and save them as one adapter")

    params: Params

    @classmethod
    def requires(cls, params):
        idle = {"lowrank.tau": "lowrank.schedule takes precedence"} if params.schedule else {}
        key, first = ("schedule", min(params.schedule)) if params.schedule else ("tau", params.tau)
        # Accumulating at the end of the last round changes the model only if the pair then keeps its values.
        fewest = first if params.init == "momentum" else first + 1
        begins = {f"lowrank.{key}": (fewest, f"the first accumulation is at the end of round {first}")}
        needs = replace(super().requires(params), changes_base=params.merge, idle=idle, begins=begins)
        return replace(needs, without=("lora_bias",)) if params.merge else beside_the_base(needs)

    def adapt(self, model):
        model = super().adapt(model)
        check_products(model, self.name, merges=self.params.merge)
        return model if self.params.merge else add_accumulated(model, self.setting.seed)

    def accumulates(self, round: int) -> bool:
        """Whether the pair is accumulated at the end of ``round``."""
        return round in self.params.schedule if self.params.schedule else round % self.params.tau == 0

    def restart(self, name: str, value: Tensor, round: int) -> Tensor:
        """The adapter's tensor ``name`` after the accumulation of ``round``; ``value`` is the one before."""
        if self.params.init == "momentum":
            return value
        drawn = torch.zeros(value.shape) if zero_at_start(name) else self.draw_down(name, value.shape, round)
        return drawn.to(value)

    def settle(self, mean, state, round):
        state, message = dict(state), dict(mean)
        for name in select(mean, {"adapter"}) if self.accumulates(round) else ():
            # The pair is sent once, to be merged; every copy computes its new pair itself.
            message[f"merge:{round}:{name}"] = message.pop(name)
            state[name] = self.restart(name, mean[name], round)
        return state, message

    def apply(self, model, message, round):
        merges, tensors = split_merges(message)
        for merged_in, adapter in merges.items():
            if self.params.merge:
                load_tensors(model, adapter)
                merge_adapter(model, adapter)
            else:
                for b, a in pairs(adapter):
                    accumulate_pair(model, a, self.adapter.scale() * adapter[b], adapter[a])
            load_tensors(model, {n: self.restart(n, t, merged_in) for n, t in adapter.items()})
        load_tensors(model, tensors)

    def changed_base(self, model):
        if not self.params.merge:
            return list(named_tensors(model, (ACCUMULATED,)))
        return sorted({base_weight_name(n) for n in named_tensors(model, ("adapter",))})
