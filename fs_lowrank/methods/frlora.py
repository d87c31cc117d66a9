"""FRLoRA: every round trains the same pair, the principal components of the base, and the base takes its change.

Yan et al., "Federated Residual Low-Rank Adaption of Large Language Models", ICLR 2025.

    at the start:  W = U Σ Vᵀ,  B₀ = U_r √(Σ_r / s),  A₀ = √(Σ_r / s) V_rᵀ,  W ← W − s B₀ A₀
    every round:   W ← W + s (B̄ Ā − B₀ A₀)  with B̄ = Σ_k p_k B_k, Ā = Σ_k p_k A_k;  the pair is (B₀, A₀) again

Inexact: the product of the means is not the mean of the products. Every copy decomposes its own base; the sign of each
component is such that the largest entry of its row of A₀ is positive, so that all copies agree up to rounding.
"""

from dataclasses import replace

import torch

from ..algebra import signed
from ..models.adapters import load_tensors, module_of
from ..models.merging import merge_pair
from ..models.names import entries, entries_of, named_tensors, pairs, select
from .base import Averaging, split_merges, tensors_of
from .merging import Merging
from .registry import register_method


@register_method("frlora")
class FRLoRA(Merging, Averaging):
    source = "Yan et al., ICLR 2025"
    sends = "A and B"

    @classmethod
    def requires(cls, params):
        needs = super().requires(params)
        return replace(needs, without=(*needs.without, "init_lora_weights"), float_base=True)

    def adapt(self, model):
        model = super().adapt(model)
        scale, tensors = self.adapter.scale(), named_tensors(model, ("adapter",))
        for b, a in pairs(tensors):
            layer = model.get_submodule(module_of(a))
            weight = layer.get_base_layer().weight.detach().double().flatten(1)
            if getattr(layer, "fan_in_fan_out", False):
                weight = weight.T
            u, s, vh = signed(*torch.linalg.svd(weight, full_matrices=False))
            rank = len(tensors[a])
            half = (s[:rank] / scale).sqrt()
            first = {b: u[:, :rank] * half, a: half[:, None] * vh[:rank]}
            load_tensors(model, {n: t.reshape(tensors[n].shape).to(tensors[n]) for n, t in first.items()})
            for part, name in (("first_B", b), ("first_A", a)):
                layer.register_buffer(part, tensors[name].detach().clone(), persistent=False)
            merge_pair(model, a, -scale * layer.first_B, layer.first_A)
        return model

    def initial_state(self, model):
        state = super().initial_state(model)
        pair = tensors_of({n: state[n] for n in select(state, {"adapter"})})
        return state | entries("first", {n: t.clone() for n, t in pair.items()})

    def settle(self, mean, state, round):
        first = entries_of("first", state)
        message = {n: t for n, t in mean.items() if n not in first}
        restart = {n: t.clone() for n, t in tensors_of(first).items()}  # two names of one tensor cannot be saved
        return {**state, **restart}, message | entries(f"merge:{round}", {n: mean[n] for n in first})

    def apply(self, model, message, round):
        merges, tensors = split_merges(message)
        for means in merges.values():
            for b, a in pairs(means):
                layer = model.get_submodule(module_of(a))
                up = torch.cat([means[b].to(layer.first_B), -layer.first_B], 1)
                merge_pair(model, a, self.adapter.scale() * up, torch.cat([means[a].to(layer.first_A), layer.first_A]))
                load_tensors(model, {b: layer.first_B, a: layer.first_A})
        load_tensors(model, tensors)
