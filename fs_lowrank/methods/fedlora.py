"""FedLoRA (also FedIT, or plain "LoRA" in the RoLoRA paper): both halves of every pair are averaged.

Zhang et al., "Towards Building the FederatedGPT: Federated Instruction Tuning", ICASSP 2024.

    A ← Σ_k p_k A_k        B ← Σ_k p_k B_k

Inexact: ``mean(B) · mean(A)`` is not ``mean(B · A)``.
"""

from dataclasses import replace

from .base import Averaging
from .registry import register_method


@register_method("fedlora")
class FedLoRA(Averaging):
    source = "Zhang et al., ICASSP 2024 (FedIT)"
    sends = "A and B"

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), adapter="every")
