"""RoLoRA: alternating optimisation of the two halves of every LoRA pair.

Chen et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", Algorithm 1.

    odd round:   A frozen,  B ← Σ_k p_k B_k
    even round:  B frozen,  A ← Σ_k p_k A_k

Both means are exact, since ``B A`` is linear in each half, and a round sends half of the bytes of FedLoRA. The first
round trains B: with ``B = 0`` the gradient of A is exactly zero. With ``mix: q``, the first ``⌈q·T⌉`` rounds alternate,
and in the others A remains frozen as in FFA-LoRA (section 5.3).
"""

from dataclasses import dataclass, replace

from ..settings import key
from ..settings.check import rounds_of
from .base import Averaging
from .registry import register_method
from .terms import Phase


@register_method("rolora")
class RoLoRA(Averaging):
    source = "Chen et al., 2025, Algorithm 1"
    sends = "B in odd rounds, A in even rounds"

    @dataclass(frozen=True)
    class Params:
        mix: float = key(1.0, min=0.0, max=1.0, help="share of the rounds that alternate; A stays frozen after them")

    params: Params

    @classmethod
    def requires(cls, params: Params):
        begins = {}
        if params.mix:  # with 0, A stays frozen in any number of rounds, as was asked for
            fewest = int(min(1 / params.mix, 2**53)) + 1
            begins = {"lowrank.mix": (fewest, "B alone trains, as with ffa_lora")}
        return replace(super().requires(params), adapter="lora", rounds=params.mix < 1, begins=begins)

    def half(self, round: int) -> str:
        """The half that trains in ``round``: ``lora_A`` or ``lora_B``."""
        # ``requires`` asks for the number of rounds unless all alternate.
        alternates = self.params.mix >= 1 or round <= rounds_of(self.params.mix, self.setting.rounds or 0)
        return "lora_A" if round % 2 == 0 and alternates else "lora_B"

    def phases(self, round, client=None):
        return [Phase(train=(self.half(round), *self.whole))]
