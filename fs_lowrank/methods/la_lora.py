"""LA-LoRA without privacy: within a client's training, A and B are trained by turns, a step at a time.

Liu et al., "Rethinking LoRA for Privacy-Preserving Federated Learning in Large Models", ICLR 2026.

    odd step:   B frozen,  A ← A − η ∇_A        even step:  A frozen,  B ← B − η ∇_B
    A ← Σ_k p_k A_k        B ← Σ_k p_k B_k

So a step's change of ``B A`` is linear in the trained half, and the gradients of the halves are not coupled. The means
are those of FedLoRA, which are inexact. ``first: b`` begins with B: in round 1, where ``B = 0``, the gradient of A is
zero, and the first step of the order above changes nothing.

Differs from the authors' code: one learning rate for both halves (theirs is doubled for B), without the paper's
differential privacy (clipping, noise, the low-pass filter of noisy gradients).
"""

from dataclasses import dataclass, replace

from ..settings import key
from .base import Averaging
from .registry import register_method
from .terms import Phase


@register_method("la_lora")
class LALoRA(Averaging):
    source = "Liu et al., ICLR 2026"
    sends = "A and B"

    @dataclass(frozen=True)
    class Params:
        first: str = key("a", choices=("a", "b"), help="the half that trains in a client's first step of a round")

    params: Params

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), adapter="lora")

    def phases(self, round, client=None):
        halves = ("lora_A", "lora_B") if self.params.first == "a" else ("lora_B", "lora_A")
        return [Phase(train=(*halves, *self.whole), turns=halves)]
