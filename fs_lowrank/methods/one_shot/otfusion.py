"""OTFusion: the clients' neurons are put in the order of the first client's by optimal transport, then averaged.

Singh and Jaggi, "Model Fusion via Optimal Transport", NeurIPS 2020, Algorithm 1.

    layer by layer    Ŵ_k = W_k T_k of the layer below
                      T_k = the exact transport between the neurons of Ŵ_k and those of client 1
                      W = Σ_k p_k T_kᵀ Ŵ_k

Neurons are compared by their weights, or by what they answer to the validation samples (``by: activations``). The last
layer's outputs are classes and stay where they are. ``correction`` divides a plan by its marginal, so that it moves
neurons instead of shrinking them; ``past_correction`` averages ``T_kᵀ Ŵ_k`` and not ``T_kᵀ W_k``. With ``tune``
validation data choose, as Jhunjhunwala et al. 2024 do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from ...algebra import exact_transport, move_inputs, move_outputs
from ...algebra.match import require
from ...models.chain import chain
from ..registry import register_method
from .base import OneShot, best, logits_of

_SWITCH = {"on": (True,), "off": (False,), "tune": (True, False)}


@register_method("otfusion")
class OTFusion(OneShot):
    source = "Singh and Jaggi, NeurIPS 2020"
    sends = "all weights"

    @dataclass(frozen=True)
    class Params:
        by: str = field(
            default="weights", metadata={"choices": ("weights", "activations"), "help": "what neurons are compared by"}
        )
        correction: str = field(
            default="tune", metadata={"choices": tuple(_SWITCH), "help": "divide plans by their marginals"}
        )
        past_correction: str = field(
            default="tune", metadata={"choices": tuple(_SWITCH), "help": "average weights whose inputs have been moved"}
        )

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), adapter="none", tasks=("ImageClassification",), validation=True)

    def __init__(self, params, setting):
        super().__init__(params, setting)
        require("POT", "ot", "otfusion")

    def adapt(self, model):
        self.chain = chain(model, "otfusion")
        return model

    def aggregate(self, updates, state, round):
        weights, parts = self.weights(updates), [u.tensors for u in updates]
        answers = [self.activations(part) for part in parts] if self.params.by == "activations" else [None] * len(parts)
        first, *rest = parts

        def fused(correction: bool, past_correction: bool) -> dict[str, Tensor]:
            aligned = [first] + [
                self.align(part, first, answer, answers[0], correction, past_correction)
                for part, answer in zip(rest, answers[1:])
            ]
            return {n: sum(p * a[n] for p, a in zip(weights, aligned)) for n in self.chain}

        choices = product(_SWITCH[self.params.correction], _SWITCH[self.params.past_correction])
        message = dict(first) if not rest else best(self.workbench, (fused(*choice) for choice in choices))
        return {**state, **message}, message

    def align(self, mine, theirs, my_answers, their_answers, correction: bool, past_correction: bool):
        """``mine`` with its neurons where those of ``theirs`` are."""
        plan, moved = None, {}
        for name in self.chain:
            weight = mine[name]
            entering = weight if plan is None else move_inputs(weight, plan)
            if name == self.chain[-1]:
                moved[name] = entering
                break
            compared = (entering, theirs[name]) if my_answers is None else (my_answers[name], their_answers[name])
            plan = exact_transport(compared[0].flatten(1), compared[1].flatten(1))
            if correction:
                plan = plan * len(plan)
            moved[name] = move_outputs(entering if past_correction else weight, plan)
        return moved

    @torch.no_grad()
    def activations(self, tensors) -> dict[str, Tensor]:
        """What every neuron of ``tensors`` answers to the validation samples, ``(neurons, samples · positions)``."""
        model, seen = self.workbench.model, {n: [] for n in self.chain}
        model.eval()
        hooks = [
            model.get_submodule(n.removesuffix(".weight")).register_forward_hook(
                lambda module, args, output, n=n: seen[n].append(output.transpose(0, 1).flatten(1))
            )
            for n in self.chain
        ]
        try:
            for batch in self.workbench.validation():
                logits_of(model, tensors, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return {n: torch.cat(parts, 1) for n, parts in seen.items()}
