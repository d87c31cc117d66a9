"""Ravan: between frozen A and B of several heads, clients train a small matrix of each head, and its weight.

Raje, Askin, Jhunjhunwala and Joshi, "Ravan: Multi-Head Low-Rank Adaptation for Federated Fine-Tuning", NeurIPS 2025.

    client k   W + s Σ_h s_h B_h H_h A_h    trains H_h (r × r, zero at first) and s_h (1 in every round)
    and sends  s_h H_h of every head: heads · r² values a matrix
    server     H_h ← Σ_k p_k s_{k,h} H_{k,h}

Exact, since the product is linear in ``s_h H_h``; the server needs the sum only. The rows of all ``A_h`` together are
orthonormal, and so are the columns of all ``B_h``; they come from the seed and are never sent. ``r`` is that of one
head, and ``s = alpha / r``; the paper has no such factor, which is ``alpha`` equal to ``r``. The model is saved as a
pair of rank ``heads · r``: A, and the columns ``B_h H_h``.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import CannotContinue
from ..models.adapters import load_tensors, module_of
from ..models.heads import Heads
from ..models.merging import check_products
from ..models.names import all_tensors, entries, entries_of, named_tensors, pairs
from ..settings import key
from .base import Averaging
from .registry import register_method
from .terms import ONE_SCALE, Phase, Tensors


@register_method("ravan")
class Ravan(Averaging):
    source = "Raje et al., NeurIPS 2025"
    sends = "of every head, its small matrix times its weight"
    shared = ("lora_A", "lora_B", "nested", "head")

    @dataclass(frozen=True)
    class Params:
        heads: int = key(4, min=1, help="number of heads; the rank of each is the adapter's r")

    #: whether each head has a weight that trains
    weighted: ClassVar[bool] = True

    @classmethod
    def requires(cls, params):
        without = (*ONE_SCALE, "init_lora_weights")
        return replace(super().requires(params), without=without, alone=True, own_upload=False)

    def __init__(self, params, setting):
        super().__init__(params, setting)
        self.heads = getattr(params, "heads", 1)

    @property
    def adapter(self):
        spec, rank = self.setting.adapter, self.heads * self.setting.adapter.r
        return replace(spec, r=rank, lora_alpha=spec.scale() * rank, use_rslora=False)

    def adapt(self, model):
        model = super().adapt(model)
        check_products(model, self.name, merges=False)
        for a, down in named_tensors(model, ("lora_A",)).items():
            load_tensors(model, {a: self.frame(a, down.shape)})
            layer = model.get_submodule(module_of(a))
            layer.nested = Heads(layer.lora_A["default"], self.heads, self.weighted)
        return model

    def frame(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Rows of ``shape`` that are orthonormal, as far as there are as many in this width."""
        drawn = self.draw_down(name, shape, 0).flatten(1).double()
        return torch.cat([torch.linalg.qr(rows.T)[0].T for rows in drawn.split(drawn.shape[1])]).reshape(shape)

    # -- a client's model has A, B, H and s; the global one is a pair, A and the fold B H ------------------

    def initial_state(self, model):
        state: dict[str, Any] = dict(super().initial_state(model))
        for b, a in pairs(state):
            up, rank, small = state[b], len(state[a]), small_of(a, "H")
            state[b] = self.frame(b, (rank, len(up))).T.reshape(up.shape).to(up).contiguous()
            state[f"fold:{b}"], state[small] = torch.zeros_like(up), up.new_zeros(self.heads, *state[small].shape[1:])
        return state

    def view(self, state, client=None):
        view, folds = super().view(state), entries_of("fold", state)
        if not folds:
            raise CannotContinue(f"an earlier version of fs-lowrank began this run of {self.name}; start it anew")
        return view if client is not None else folded({**view, **entries("fold", folds)})

    def tailor(self, tensors, client, state):
        return {n: t for n, t in tensors.items() if not n.startswith("fold:")}

    def phases(self, round, client=None):
        return [Phase(train=("nested", *self.whole))]

    def sent(self, names, round, client=None):
        return [n for n in super().sent(names, round, client) if not n.endswith(".nested.s")]

    def upload(self, model, round, client):
        tensors, sent = all_tensors(model), super().upload(model, round, client)
        weights = {n: tensors[n.removesuffix("H") + "s"] for n in sent if n.endswith(".nested.H")}
        return {n: t * weights[n][:, None, None] if n in weights else t for n, t in sent.items()}

    def settle(self, mean, state, round):
        fold = {}
        for b, a in pairs(state):
            fold[f"fold:{b}"] = (state[b].flatten(1) @ torch.block_diag(*state[small_of(a, "H")])).reshape(
                state[b].shape
            )
        return {**state, **fold}, {**mean, **fold}

    def apply(self, model, message, round):
        load_tensors(model, folded(message))
        with torch.no_grad():
            for n, weights in named_tensors(model, ("nested",)).items():
                if n.endswith(".nested.s"):
                    weights.fill_(1)


def folded(tensors: Tensors) -> dict[str, Tensor]:
    """The global model's pairs, if ``tensors`` have folds, which clients do not receive; else the tensors."""
    folds = entries_of("fold", tensors)
    plain = {n: t for n, t in tensors.items() if not n.startswith("fold:")}
    return {**{n: t[:0] if folds and n.endswith(".nested.H") else t for n, t in plain.items()}, **folds}


def small_of(a: str, part: str) -> str:
    """The name of ``H`` or ``s`` in the layer whose A is called ``a``."""
    return a.replace("lora_A.default.weight", f"nested.{part}")
