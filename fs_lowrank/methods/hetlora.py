"""HetLoRA: clients of different ranks, which shrink while their last components do not grow.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024, section 3.

    a client gets the first r_k rows of A and columns of B, and adds to its loss
        λ Σ_layers ‖B_k[:, q:]‖ ‖A_k[q:, :]‖ ,   q = ⌊γ r_k⌋
    r_k ← q, and it sends no more than that, where the sum is smaller than at the start of the round
    B ← Σ_k w_k [B_k, 0],   A ← Σ_k w_k [A_k; 0],   w_k = s_k ‖B_k A_k‖_F / Σ_j s_j ‖B_j A_j‖_F  of the layer

Inexact, as FedLoRA. The halves are weighted by the size of a client's change instead of its number of samples, so
that a client of a small rank, whose change is often smaller, does not water down the components that it lacks.
``B_k`` is padded in the scale of the server's pair. A layer that no client has changed gets the mean by samples.
Rows of A that no client of the round holds stay: their columns of B become zero, and two zeros would never train again.
A client's weight grows with its update: set ``lowrank.max_update_norm`` if clients are not trusted.

The paper leaves some choices open. Here a client has one rank for all layers, and each layer has its own weights. The
authors' code is not public.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..algebra import product_norm_squared, weighted_mean
from ..models.names import named_tensors, pairs
from ..settings import key
from .ranks import RankedMethod, RankedParams
from .registry import register_method
from .terms import Phase, RefusedUpdate, Tensors


def _padded(tensor: Tensor, template: Tensor) -> Tensor:
    """``tensor`` in the shape of ``template``, with zeros behind it."""
    padded = torch.zeros_like(template)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


@register_method("hetlora")
class HetLoRA(RankedMethod):
    source = "Cho et al., EMNLP 2024"
    sends = "A and B, at the rank that the client shrinks to in the round"
    revision = 3

    @dataclass(frozen=True)
    class Params(RankedParams):
        prune: float = key(0.99, above=0.0, max=1.0, help="the part γ of its rank that a client shrinks to; 1: never")
        tail_penalty: float = key(1e-3, min=0.0, help="λ, the weight of the last components' norm in a client's loss")

    params: Params

    @classmethod
    def requires(cls, params):
        idle = {"lowrank.tail_penalty": "lowrank.prune = 1 leaves every rank as it is"} if params.prune == 1 else {}
        return replace(super().requires(params), idle=idle, own_ranks=params.prune < 1, own_upload=False)

    def __init__(self, params, setting):
        super().__init__(params, setting)
        self.shrinking: set[int] = set()  # the clients of this process that send fewer components in this round

    def pruned_rank(self, rank):
        return max(1, int(self.params.prune * rank))

    def tail(self, tensors: Tensors) -> Tensor:
        """``Σ_layers ‖B[:, q:]‖ ‖A[q:, :]‖``, a scalar."""
        norms = torch.zeros(())
        for b, a in pairs(tensors):
            q = self.pruned_rank(len(tensors[a]))
            norms = norms + tensors[b][:, q:].norm() * tensors[a][q:].norm()
        return norms

    def phases(self, round, client=None):
        if self.params.prune == 1:
            return super().phases(round, client)
        start: list[Tensor] = []

        def penalty(model):
            tail = self.tail(named_tensors(model, ("adapter",)))
            if not start:
                start.append(tail.detach())
            return self.params.tail_penalty * tail

        def ended(model, steps, lr):
            smaller = self.tail(named_tensors(model, ("adapter",))) < start[0]
            (self.shrinking.add if smaller else self.shrinking.discard)(client)

        return [Phase(train=self.shared, penalty=penalty, ended=ended)]

    def upload(self, model, round, client):
        sent = super().upload(model, round, client)
        if client.id in self.shrinking:
            self.shrinking.remove(client.id)
            for b, a in pairs(sent):
                q = self.pruned_rank(len(sent[a]))
                sent |= {b: sent[b][:, :q], a: sent[a][:q]}
        return sent

    def check(self, update):
        super().check(update)
        ranks = {len(update.tensors[a]) for _, a in pairs(update.tensors)}
        if len(ranks) > 1:
            raise RefusedUpdate(f"client {update.client}: its pairs have the ranks {sorted(ranks)}, expected one rank")

    def rank_now(self, client, state):
        return state.get(f"x:rank:{client}", self.rank(client))

    def aggregate(self, updates, state, round):
        new, by_samples, scale = self.mean_of(updates, self.averaged), self.weights(updates), self.adapter.scale
        scales = [scale(self.rank_now(u.client, state)) for u in updates]
        for b, a in pairs(state):
            halves = [(u.tensors[b], u.tensors[a]) for u in updates]
            sizes = [s * product_norm_squared(*(h.flatten(1) for h in pair)).sqrt() for s, pair in zip(scales, halves)]
            learned = torch.stack(sizes).double()
            weights = (learned / learned.sum()).tolist() if learned.any() else by_samples
            padded = [
                {b: _padded(s / scale(self.rank()) * up, state[b]), a: _padded(down, state[a])}
                for s, (up, down) in zip(scales, halves)
            ]
            new |= weighted_mean(padded, weights)
            held = max(len(down) for _, down in halves)
            new[a][held:] = state[a][held:]
        sent = {u.client: len(u.tensors[a]) for u in updates for _, a in pairs(state)}
        return {**state, **new, **{f"x:rank:{c}": r for c, r in sent.items() if r < self.rank_now(c, state)}}, new
