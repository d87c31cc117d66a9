"""FedAvg: every client trains all weights, the server averages them.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    W ← Σ_k p_k W_k
"""

from torch import nn

from .base import Averaging
from .registry import register_method


@register_method("fedavg")
class FedAvg(Averaging):
    source = "McMahan et al., AISTATS 2017"
    sends = "all weights"
    shared = ("base", "head")

    def adapt(self, model: nn.Module) -> nn.Module:
        return model
