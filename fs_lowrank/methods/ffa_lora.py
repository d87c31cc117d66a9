"""FFA-LoRA: A remains at the random initial value that all clients share, and only B trains.

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.

    B ← Σ_k p_k B_k, exact because B A is linear in B
"""

from dataclasses import replace

from .base import Averaging
from .registry import register_method
from .terms import Phase


@register_method("ffa_lora")
class FFALoRA(Averaging):
    source = "Sun et al., ICLR 2024"
    sends = "B"

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), adapter="lora")

    def phases(self, round, client=None):
        return [Phase(train=("lora_B", *self.whole))]
