"""FedLoRU: federated low-rank updates that accumulate.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", Algorithm 1.

    every round:       A ← Σ_k p_k A_k,  B ← Σ_k p_k B_k
    every tau rounds:  W ← W + s B A on every copy, then the pair starts anew

``init: random`` draws A and sets B = 0, which leaves the model's function unchanged; ``init: momentum`` keeps
the values, so that the function jumps by one ``s B A``: the papers' momentum effect, and the default of the
authors' code. ``schedule`` gives the accumulation rounds as a list instead of ``tau``.
"""
from dataclasses import dataclass, field

import torch
from torch import nn

from ..models.adapters import base_weight_name, load_tensors, merge_pair
from ..models.names import named_tensors, pairs
from .base import Method, Tensors, split_merges
from .registry import register_method


@register_method("fedloru")
class FedLoRU(Method):
    source = "Park and Klabjan, 2024, Algorithm 1"
    sends = "A and B"

    @dataclass(frozen=True)
    class Params:
        tau: int = field(default=20, metadata={"min": 1, "help": "rounds between accumulations"})
        schedule: tuple[int, ...] = field(default=(), metadata={
            "min": 1, "help": "the accumulation rounds themselves; goes before tau"})
        init: str = field(default="random", metadata={
            "choices": ("random", "momentum"), "help": "how the pair starts again"})

    def accumulates(self, round: int) -> bool:
        """Whether the pair is merged at the end of ``round``."""
        return round in self.params.schedule if self.params.schedule else round % self.params.tau == 0

    def aggregate(self, updates, state, round):
        mean, memory = self.average(updates, state)
        state, message = {**state, **mean, **memory}, dict(mean)
        if not self.accumulates(round):
            return state, message
        for b, a in pairs(mean):
            # The pair travels once, as what to merge; every copy starts its new pair by itself.
            message[f"merge:{round}:{b}"], message[f"merge:{round}:{a}"] = message.pop(b), message.pop(a)
            if self.params.init == "random":
                state[a], state[b] = self.draw_down(a, mean[a].shape, round).to(mean[a]), torch.zeros_like(mean[b])
                state = {n: v for n, v in state.items()
                         if not (n.startswith("server_optimizer:") and n.endswith((a, b)))}
        return state, message

    def apply(self, model: nn.Module, message: Tensors, round: int) -> None:
        merges, rest = split_merges(message)
        for merged_in, a, up, down in merges:
            merge_pair(model, a, self.adapter.scale() * up, down)
            if self.params.init == "random":
                up, down = torch.zeros_like(up), self.draw_down(a, down.shape, merged_in).to(down)
            load_tensors(model, {a: down, a.replace(".lora_A.", ".lora_B."): up})
        load_tensors(model, rest)

    def changed_base(self, model: nn.Module) -> list[str]:
        return [base_weight_name(a) for _, a in pairs(named_tensors(model, ("adapter",)))]
