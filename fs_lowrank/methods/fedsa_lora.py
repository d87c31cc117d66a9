"""FedSA-LoRA: A is shared and averaged, B stays with its client.

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025, equation 7.

    client k trains   A and its own B_k, from the shared A and the B_k that it had after its last round
    sent:             A ← Σ_k p_k A_k;  B_k never

Each client ends with a model of its own, ``W + s B_k A``. On GLUE the paper keeps the classifier with its client, too:
``lowrank.personal: [head]``.
"""

from .base import Averaging
from .registry import register_method
from .terms import Phase


@register_method("fedsa_lora")
class FedSALoRA(Averaging):
    source = "Guo et al., ICLR 2025"
    sends = "A; B stays with the client"
    shared = ("lora_A", "head")
    personal = ("lora_B",)

    def phases(self, round, client=None):
        return [Phase(train=("lora_A", "lora_B", *self.whole))]
