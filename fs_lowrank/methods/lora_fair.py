"""LoRA-FAIR: FedLoRA, and B is corrected so that the pair's product comes near the mean of the products.

Bian et al., "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement", ICCV 2025.

    A ← Σ_k p_k A_k = Ā        B ← B̄ + ΔB,  B̄ = Σ_k p_k B_k,  ΔW = Σ_k p_k s_k B_k A_k
    ΔB = argmin S(ΔW, s (B̄ + ΔB) Ā) + λ ‖ΔB‖

``loss: cosine`` is the paper's: ``S`` is one minus the cosine of the two as vectors, minimised by ``server_steps``
steps of (proximal) gradient descent from zero. It ignores the length of the product. Its slope grows as B̄ gets small,
so that the steps may overshoot; B̄ stays where they end higher than they began. ``loss: frobenius`` is ours: the
squared norm of the difference and of ΔB, whose minimum is the solution of a system of ``r × r``; for ``lam: 0`` it is
the best B for Ā.
Neither forms a matrix of ``d_out × d_in``.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..algebra import wide
from ..models.names import pairs
from ..settings import key
from .base import Gathering
from .registry import register_method
from .terms import ONE_SCALE

_CLOSED = "lowrank.loss is frobenius, whose minimum is computed at once"


@register_method("lora_fair")
class LoRAFAIR(Gathering):
    source = "Bian et al., ICCV 2025"
    sends = "A and B"
    shared = ("lora_A", "lora_B", "head")

    @dataclass(frozen=True)
    class Params:
        lam: float = key(0.01, min=0.0, help="λ, the weight of the size of the correction")
        loss: str = key("cosine", choices=("cosine", "frobenius"), help="the measure of nearness to the mean")
        server_lr: float = key(0.01, above=0.0, help="step of the gradient descent, for cosine")
        server_steps: int = key(1000, min=1, help="number of its steps, for cosine")

    params: Params

    @classmethod
    def requires(cls, params):
        idle = {} if params.loss == "cosine" else dict.fromkeys(("lowrank.server_lr", "lowrank.server_steps"), _CLOSED)
        return replace(super().requires(params), without=ONE_SCALE, idle=idle)

    def aggregate(self, updates, state, round):
        message, weights = self.mean_of(updates), self.weights(updates)
        for b, a in pairs(message):
            up, down = (message[n].flatten(1).to(wide(message[n].dtype)) for n in (b, a))
            ups = [u.tensors[b].flatten(1).to(up) for u in updates]
            downs = [u.tensors[a].flatten(1).to(down) for u in updates]
            # Σ p_k B_k A_k times Āᵀ, and the squared norm of the sum; the scale is the same on both sides.
            onto = torch.stack([p * (x @ (y @ down.T)) for p, x, y in zip(weights, ups, downs)]).sum(0)
            length = _length(torch.cat([p * x for p, x in zip(weights, ups)], 1), torch.cat(downs))
            gram = down @ down.T
            if not length or not (up * (up @ gram)).sum() > 0:
                continue  # one of the two products is zero, and has no direction
            solve = self._closest if self.params.loss == "frobenius" else self._most_similar
            message[b] = solve(up, onto, gram, length).reshape(message[b].shape).to(message[b].dtype)
        return {**state, **message}, message

    def _closest(self, up: Tensor, onto: Tensor, gram: Tensor, length: Tensor) -> Tensor:
        scale = self.adapter.scale()
        system = scale**2 * gram + self.params.lam * torch.eye(len(gram)).to(gram)
        return up + scale**2 * (onto - up @ gram) @ torch.linalg.pinv(system, hermitian=True)

    def _most_similar(self, up: Tensor, onto: Tensor, gram: Tensor, length: Tensor) -> Tensor:
        """By proximal steps on ``−⟨ΔW, X⟩ / (‖ΔW‖ ‖X‖) + λ ‖ΔB‖`` with ``X = (B̄ + ΔB) Ā``: ``‖ΔB‖`` has no gradient at
        zero, where it starts.
        """

        def objective(change: Tensor) -> Tensor:
            corrected = up + change
            size = (corrected * (corrected @ gram)).sum().sqrt()
            return self.params.lam * change.norm() - (corrected * onto).sum() / (length * size)

        change = torch.zeros_like(up)
        for _ in range(self.params.server_steps):
            corrected = up + change
            image = corrected @ gram
            size = (corrected * image).sum().sqrt()
            slope = ((corrected * onto).sum() * image / size**2 - onto) / (length * size)
            moved = change - self.params.server_lr * slope
            shrinks = self.params.server_lr * self.params.lam / moved.norm().clamp(min=torch.finfo(up.dtype).tiny)
            change = moved * (1 - shrinks).clamp(min=0)
        return up + change if objective(change) < objective(torch.zeros_like(up)) else up


def _length(up: Tensor, down: Tensor) -> Tensor:
    """``‖up @ down‖``, Frobenius, without the product."""
    return ((up.T @ up) * (down @ down.T)).sum().clamp(min=0).sqrt()
