"""Fed-SB: between frozen A and B, which approximate a first step of full fine-tuning, clients train a small matrix R.

Singhal et al., "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in (Private) Federated
LoRA Fine-Tuning", TMLR 2026; the start is that of LoRA-SB (Ponkshe et al. 2024).

    round 1, first    client k sends     G_k, the gradient of its loss with respect to W, of ``samples`` drawn samples
                      and is told        −η sign(Σ_k p_k G_k) = U S Vᵀ,   B = U_r,   A = V_rᵀ,   R = S_r / s
    every round       client k trains    R in  W + s B R A,  and sends it: r² values a matrix
                      server             R ← Σ_k p_k R_k

Exact, since the product is linear in R; the server needs only sums. Training starts from the first step, not from the
function of the base: η is ``first_step``. The authors' code has s = 1 and takes the gradients of all clients' data in
one place; here the clients of round 1 send them, once, as large as the weights of the layers.
"""

from dataclasses import dataclass, replace

import torch

from ..algebra import signed, top_components
from ..models.adapters import base_weight_name, module_of
from ..models.curvature import mean_gradients
from ..models.names import named_tensors, pairs
from ..seeds import derive
from ..settings import key
from .base import Averaging, State
from .ravan import Ravan, small_of
from .registry import register_method
from .terms import TRAIN


@register_method("fed_sb")
class FedSB(Ravan):
    source = "Singhal et al., TMLR 2026"
    sends = "the small matrix; in round 1 the gradients of the layers, too"
    weighted = False
    #: 2: the samples of the gradients are drawn; they were a client's shortest texts, or its first images
    revision = 2

    @dataclass(frozen=True)
    class Params:
        samples: int = key(50, min=1, help="the most samples of a client for the gradients of round 1")
        first_step: float = key(1e-6, min=0.0, help="size of the first step, which A, B and R approximate; 0: R is 0")

    params: Params

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), float_base=True)

    def initial_state(self, model):
        state = super().initial_state(model)
        return {**state, **{b: torch.zeros_like(state[b]) for b, _ in pairs(state)}}

    def exchanges(self, state, round):
        return (TRAIN,) if any(state[b].any() for b, _ in pairs(state)) else ("gradients", TRAIN)

    def upload(self, model, round, client):
        if client.exchange == TRAIN:
            return Averaging.upload(self, model, round, client)
        weights = {b: base_weight_name(b) for b in named_tensors(model, ("lora_B",))}
        generator = torch.Generator().manual_seed(derive(self.setting.seed, "gradients", round, client.id))
        rows = torch.randperm(client.num_samples, generator=generator)[: self.params.samples]  # they come by length
        gradients = mean_gradients(model, client.batches(), weights.values(), rows)
        transposed = {b: getattr(model.get_submodule(module_of(b)), "fan_in_fan_out", False) for b in weights}
        return {f"grad:{b}": gradients[n].T if transposed[b] else gradients[n].flatten(1) for b, n in weights.items()}

    def expected(self, state, round, client, exchange=TRAIN):
        if exchange == TRAIN:
            return super().expected(state, round, client)
        return {f"grad:{b}": state[b].new_empty(len(state[b]), state[a][0].numel()) for b, a in pairs(state)}

    def tell(self, updates, state, round, exchange):
        zero: State = {n: torch.zeros_like(t) for n, t in updates[0].tensors.items()}
        told = {}
        mean = self.robust_mean(self.robust, updates, zero) if self.robust else self.mean_of(updates)
        for b, a in pairs(state):
            down = state[a].flatten(1)
            step = -torch.sign(mean[f"grad:{b}"])
            u, s, vh = signed(*torch.linalg.svd(step, full_matrices=False))
            u, s, vh = top_components(u, s, vh, len(down), fill=down)
            told[b], told[a] = u.reshape(state[b].shape), vh.reshape(state[a].shape)
            told[small_of(a, "H")] = torch.diag(s * self.params.first_step / self.adapter.scale())[None]
        return told
