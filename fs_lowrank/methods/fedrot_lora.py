"""FedRot-LoRA: FedLoRA, with the clients' pairs rotated towards the last global pair before they are averaged.

Zhang et al., "FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA", ICML 2026, arXiv 2602.23638.

    A_k ← Rᵀ A_k,  B_k ← B_k R      R: r × r, a rotation, which leaves the product B_k A_k as it is
    R₁ = argmin ‖Rᵀ A_k − A‖ in the second, fourth … round, ‖B_k R − B‖ in the third, fifth …; none in the first
    R = the rotation nearest to (1 − λ) I + λ R₁;  then A and B are averaged

Here the server rotates what it receives: it has A and B of the last round and both matrices of the client, so the
result is that of clients which rotate before they send. R is never a reflection. ``lam: 0`` is FedLoRA.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..models.names import pairs
from ..settings import key
from .base import Averaging
from .registry import register_method
from .terms import Update

#: rounds that were aggregated so far, in the state
_ROUNDS = "x:rounds"


@register_method("fedrot_lora")
class FedRotLoRA(Averaging):
    source = "Zhang et al., ICML 2026"
    sends = "A and B"
    shared = ("lora_A", "lora_B", "head")

    @dataclass(frozen=True)
    class Params:
        lam: float = key(1.0, min=0.0, max=1.0, help="how far a pair is rotated: 0 not at all, 1 all the way")

    params: Params

    def initial_state(self, model):
        return {**super().initial_state(model), _ROUNDS: torch.tensor(0)}

    def recovered(self, updates, state):
        if not state[_ROUNDS]:  # in the first round there is no last one
            return updates
        return [replace(update, tensors=self._rotated(update, state)) for update in updates]

    def _rotated(self, update: Update, state) -> dict[str, Tensor]:
        tensors = dict(update.tensors)
        for b, a in pairs(update.tensors):
            up, down = tensors[b].flatten(1), tensors[a].flatten(1)
            to_a = int(state[_ROUNDS]) % 2
            overlap = down @ state[a].flatten(1).T if to_a else up.T @ state[b].flatten(1)
            turn = nearest_rotation(overlap)
            turn = nearest_rotation((1 - self.params.lam) * torch.eye(len(turn)).to(turn) + self.params.lam * turn)
            tensors[b] = (up @ turn).reshape(tensors[b].shape)
            tensors[a] = (turn.T @ down).reshape(tensors[a].shape)
        return tensors

    def settle(self, mean, state, round):
        return {**state, _ROUNDS: state[_ROUNDS] + 1}, mean


def nearest_rotation(matrix: Tensor) -> Tensor:
    """The rotation ``R``, of determinant 1, that has the largest ``tr(Rᵀ matrix)``; ``matrix``: ``(r, r)``."""
    u, _, vh = torch.linalg.svd(matrix)
    if torch.linalg.det(u @ vh) < 0:
        vh = torch.cat([vh[:-1], -vh[-1:]])
    return u @ vh
