"""FedPara: a weight is the elementwise product of two matrices of low rank, whose factors are averaged.

Nam, Moon and Oh, "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning", ICLR 2022.

    linear layer    W = s (X₁ Y₁ᵀ) ∘ (X₂ Y₂ᵀ)                         rank up to r², for the values of rank 2 r
    convolution     W = s (T₁ ×₁ X₁ ×₂ Y₁) ∘ (T₂ ×₁ X₂ ×₂ Y₂)         T: r × r × k × k (proposition 3)
    server          X_i, Y_i, T_i ← Σ_k p_k of the clients'

Inexact: the product of the means is not the mean of the products. In a model from scratch the product is the whole
weight, as in the paper, and the factors start with He's deviation ``√(2 / fan)``, as in the authors' code. The paper
has no pre-trained weights; beside these the product is added, and ``Y₂`` starts at zero, so that the model is
unchanged. The factors are PEFT's LoHa, with its ``s = alpha / r``; the paper's 1 is ``alpha`` equal to ``r``.
"""

from dataclasses import replace

import torch
from torch import nn

from ..models.adapters import add_adapter, base_weight_name, module_of
from ..models.names import all_tensors, select
from ..seeds import derive
from .base import Averaging
from .registry import register_method


@register_method("fedpara")
class FedPara(Averaging):
    source = "Nam et al., ICLR 2022"
    sends = "four factors of every adapted layer, six of a convolution"

    @classmethod
    def requires(cls, params):
        needs = super().requires(params)
        return replace(needs, adapter="loha", without=("use_rslora",), alone=True, float_base=True)

    @property
    def adapter(self):
        return replace(self.setting.adapter, method="loha")

    def adapt(self, model):
        spec, convolves = self.adapter, any(isinstance(module, nn.Conv2d) for module in model.modules())
        if convolves:
            spec = replace(spec, extra={"use_effective_conv2d": True, **spec.extra})
        model = add_adapter(model, spec, self.setting.seed)
        tensors = all_tensors(model)
        for name in select(tensors, {"adapter"}) if self.setting.from_scratch else ():
            factor, rank = tensors[name], model.get_submodule(module_of(name)).r["default"]
            draw = torch.Generator().manual_seed(derive(self.setting.seed, "adapter", name))
            with torch.no_grad():
                factor.copy_(torch.randn(factor.shape, generator=draw) * (2 * rank / factor.numel()) ** 0.5)
                tensors[base_weight_name(name)].zero_()
        return model
