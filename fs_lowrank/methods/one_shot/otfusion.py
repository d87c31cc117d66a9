"""OTFusion: the clients' neurons are reordered to match the first client's by optimal transport, then averaged.

Singh and Jaggi, "Model Fusion via Optimal Transport", NeurIPS 2020, Algorithm 1.

    layer by layer    Ŵ_k = W_k T_k of the layer below
                      T_k = the exact transport between the neurons of Ŵ_k and those of client 1
                      W = Σ_k p_k T_kᵀ Ŵ_k

Neurons are compared by their weights, or by their outputs for the validation samples (``by: activations``). The outputs
of the last layer are classes and are not reordered. ``correction`` divides a plan by its marginal, so that it moves
neurons instead of shrinking them; ``past_correction`` averages ``T_kᵀ Ŵ_k`` instead of ``T_kᵀ W_k``. ``tune`` selects
by validation data, as Jhunjhunwala et al. 2024 do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ...algebra import exact_transport, move_inputs, move_outputs
from ...algebra.match import require
from ...models.chain import chain
from ...settings import key
from ..registry import register_method
from ..terms import Tensors
from .base import WITHOUT_ADAPTER, OneShot, best, logits_of

_SWITCH = {"on": (True,), "off": (False,), "tune": (True, False)}


@register_method("otfusion")
class OTFusion(OneShot):
    source = "Singh and Jaggi, NeurIPS 2020"
    sends = "all weights"

    @dataclass(frozen=True)
    class Params:
        by: str = key("weights", choices=("weights", "activations"), help="what neurons are compared by")
        correction: str = key("tune", choices=tuple(_SWITCH), help="divide plans by their marginals")
        past_correction: str = key("tune", choices=tuple(_SWITCH), help="average weights whose inputs have been moved")

    params: Params

    @classmethod
    def requires(cls, params: Params):
        needs = replace(super().requires(params), adapter="none", idle=WITHOUT_ADAPTER)
        chooses = "tune" in (params.correction, params.past_correction)
        return replace(needs, tasks=("ImageClassification",), validation=chooses or params.by == "activations")

    def __init__(self, params, setting):
        super().__init__(params, setting)
        require("POT", "ot", "otfusion")

    def adapt(self, model):
        self.chain = chain(model, "otfusion")
        return super().adapt(model)

    def aggregate(self, updates, state, round):
        weights, (first, *peers) = self.weights(updates), [u.tensors for u in updates]
        outputs = [self.activations(u.tensors) if self.params.by == "activations" else None for u in updates]

        def fused(*correct: bool) -> dict[str, Tensor]:
            aligned = [self.align(t, first, output, outputs[0], *correct) for t, output in zip(peers, outputs[1:])]
            return {n: sum(p * t[n] for p, t in zip(weights, (first, *aligned))) for n in self.chain}

        choices = list(product(_SWITCH[self.params.correction], _SWITCH[self.params.past_correction]))
        if not peers:
            message = dict(first)
        elif len(choices) == 1:
            message = fused(*choices[0])
        else:
            message = best(self.workbench, (fused(*choice) for choice in choices))
        return {**state, **message}, message

    def align(self, source, target, outputs, target_outputs, correction: bool, past_correction: bool):
        """``source`` with its neurons in the order of those of ``target``; without outputs, weights are compared."""
        plan, moved = None, {}
        for name in self.chain:
            entering = source[name] if plan is None else move_inputs(source[name], plan)
            if name == self.chain[-1]:
                moved[name] = entering
                break
            neurons, goals = (entering, target[name]) if outputs is None else (outputs[name], target_outputs[name])
            plan = exact_transport(neurons.flatten(1), goals.flatten(1))
            if correction:
                plan = plan * len(plan)
            moved[name] = move_outputs(entering if past_correction else source[name], plan)
        return moved

    @torch.no_grad()
    def activations(self, tensors: Tensors) -> dict[str, Tensor]:
        """The outputs of every neuron for the validation samples, ``(neurons, samples · positions)`` by weight."""
        model = self.workbench.model
        outputs: dict[str, list[Tensor]] = {n: [] for n in self.chain}
        model.eval()
        hooks = [
            model.get_submodule(n.removesuffix(".weight")).register_forward_hook(
                lambda module, args, output, n=n: outputs[n].append(output.transpose(0, 1).flatten(1))
            )
            for n in self.chain
        ]
        try:
            for batch in self.workbench.validation():
                logits_of(model, tensors, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return {n: torch.cat(parts, 1) for n, parts in outputs.items()}
