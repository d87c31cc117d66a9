"""FedHM: clients train a factorised network of the rank they can afford; the server averages full weights.

Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021.

    client k gets     U √Σ and √Σ Vᵀ of every W, cut to its rank, in place of W
    and trains them   with Frobenius decay, c (U V Vᵀ, UᵀU V) added to the two gradients
    the server takes  W_k = U_k V_k,  W ← Σ_k p_k W_k,  p_k = 1/K or n_k / Σ n_j

A client of rank factor 1 holds, trains and sends ``W`` itself, without Frobenius decay, as in both authors' codes.
Weights that are not factorised (first layer, downsampling, norms, head) are trained and averaged in full. The original
averages uniformly; ``average_by: samples`` is the rule of the FedLoRU authors' port, which has no Frobenius decay.

``master: True`` does what the original's code does and the paper does not mention: in a round in which no client has
the smallest rank factor of all, the server's own model is averaged as one more client, so that the components beyond
the ranks of these clients are not lost at once. By samples, it has the weight of an average client of the round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..algebra import factor_matrices, factorise, stack_pairs, weighted_mean, wide
from ..algebra.factorise import from_matrix
from ..models.adapters import load_tensors, target_modules
from ..models.factorised import empty_factors, factorise_layers, frobenius, full_shape
from ..models.layers import Layer, adapted_layers
from ..models.names import entries, entries_of, select
from ..settings import key
from .base import Averaging, State, tensors_of
from .ranks import of_client
from .registry import register_method
from .terms import Phase, Tensors, Update


@register_method("fedhm")
class FedHM(Averaging):
    source = "Yao et al., 2021"
    sends = "the factors of every adapted layer at the client's rank, everything else in full"
    shared = ("base", "head", "factor")
    #: 2: rank factor 1 was a factorised layer too, cut to rank d_out
    revision = 2

    @dataclass(frozen=True)
    class Params:
        rank_factors: tuple[float, ...] = key(
            (4.0,),
            min=1.0,
            help="a layer's rank is round(d_out / rank_factor), and 1 is the full layer; one for every client, "
            "repeated in turn",
        )
        decay: float = key(1e-4, min=0.0, help="c of the Frobenius decay")
        average_by: str = key("uniform", choices=("uniform", "samples"), help="weights of the clients in the average")
        master: bool = key(False, help="the server's model is one more client if none has the smallest rank factor")

    params: Params

    @classmethod
    def requires(cls, params: Params):
        idle = {}
        if set(params.rank_factors) == {1}:
            idle["lowrank.decay"] = "no client has factors"
        if len(set(params.rank_factors)) == 1:
            idle["lowrank.master"] = "all clients have one rank factor"
        if params.average_by == "uniform":
            idle["federate.ignore_weight"] = "lowrank.average_by is uniform"
        if params.decay and 1 not in params.rank_factors:
            idle["lowrank.reuse_clients"] = "lowrank.decay adds a penalty to the loss, and such clients are not stored"
        return replace(super().requires(params), layers=True, idle=idle)

    @classmethod
    def revision_of(cls, params: Params):
        return cls.revision if min(params.rank_factors, default=0) == 1 else 1

    def adapt(self, model):
        return factorise_layers(model, target_modules(model, self.adapter))

    def factor(self, client: int) -> float:
        """The rank factor of ``client``; 1 is the full layer."""
        return of_client(self.params.rank_factors, client)

    @staticmethod
    def rank(shape: Sequence[int], factor: float) -> int:
        """Rank of the factors of a weight of ``shape``."""
        out, into, k1, k2 = (*shape, 1, 1)[:4]
        return min(max(round(out / factor), 1), out * k1, into * k2)

    # -- what a client gets, trains and sends --------------------------------------------------------

    def factors(self, tensors: Tensors) -> dict[str, Tensor]:
        """``svd:…`` entries: the factors of every full weight in ``tensors``, at the largest rank of any client."""
        factors: dict[str, Tensor] = {}
        divisors = [f for f in self.params.rank_factors if f > 1]
        for layer in adapted_layers(tensors) if divisors else ():
            left, right = factorise(layer.W.float(), self.rank(layer.W.shape, min(divisors)))
            factors |= Layer(layer.name, U=left.to(layer.W), V=right.to(layer.W)).named()
        return entries("svd", factors)

    def initial_state(self, model):
        state = super().initial_state(model)
        return {**state, **self.factors(self.view(state))}

    def view(self, state, client=None):
        if client is None:
            return super().view(state)
        return self.tailor({n: state[n] for n in select(state, (*self.shared, "svd"))}, client, state)

    def tailor(self, tensors, client, state):
        """The factors cut to the client's rank in place of the full weights; or the full weights only."""
        if self.factor(client) == 1:
            return {n: t for n, t in tensors.items() if ":" not in n}
        tailored = {n: tensors[n] for n in select(tensors, ("rest", "head"))}
        for layer in adapted_layers(entries_of("svd", tensors)):
            rank = self.rank(full_shape(layer.U, layer.V), self.factor(client))
            tailored |= Layer(layer.name, U=layer.U[:, :rank], V=layer.V[:rank]).named()
        return tailored

    def phases(self, round, client=None):
        if client is not None and self.factor(client) == 1:
            return [Phase(train=("base", "head"))]
        c = self.params.decay
        return [Phase(train=("factor", "rest", "head"), penalty=(lambda model: c * frobenius(model)) if c else None)]

    # -- what the server takes -----------------------------------------------------------------------

    def weights(self, updates):
        return [1 / len(updates)] * len(updates) if self.params.average_by == "uniform" else super().weights(updates)

    def with_master(self, updates: Sequence[Update], state: State) -> Sequence[Update]:
        """``updates``, and the server's model as the update of a client 0 if ``master`` asks for it."""
        if not self.params.master or min(self.factor(u.client) for u in updates) == min(self.params.rank_factors):
            return updates
        master = tensors_of({n: state[n] for n in select(state, ("base", "head"))})
        return [*updates, Update(0, max(sum(u.num_samples for u in updates) // len(updates), 1), master)]

    def recovered(self, updates, state):
        """Full weights for the factors: ``W_k = U_k V_k``."""
        shapes = {layer.name: layer.W for layer in adapted_layers(self.view(state))}
        return [self.recover(u, shapes) for u in updates]

    def robust_mean(self, robust, updates, state):
        # The master is honest and has not moved, so the rule neither judges it nor measures the clients by it.
        mean, joined = super().robust_mean(robust, updates, state), self.with_master(updates, state)
        if len(joined) == len(updates):
            return mean
        share = self.weights(joined)[-1]
        return weighted_mean([mean, joined[-1].tensors], [1 - share, share])

    def recover(self, update: Update, weights: Tensors) -> Update:
        """The update with the products in place of the factors; ``weights`` gives their shapes by layer."""
        tensors = {n: update.tensors[n] for n in select(update.tensors, ("base", "head"))}
        for layer in adapted_layers(update.tensors):
            if layer.U is not None:
                left, right = factor_matrices(layer.U, layer.V)
                tensors |= Layer(layer.name, W=from_matrix(left @ right, weights[layer.name].shape)).named()
        return replace(update, tensors=tensors)

    def mean(self, updates, state):
        # The same as the mean of ``recovered`` and the master, in one product per layer.
        updates = self.with_master(updates, state)
        mean, weights = self.mean_of(updates, ("rest", "head")), self.weights(updates)
        for layer, *layers in zip(adapted_layers(self.view(state)), *(adapted_layers(u.tensors) for u in updates)):
            mean |= Layer(layer.name, W=self.mean_weight(weights, layers, layer.W)).named()
        return mean

    @staticmethod
    def mean_weight(weights: Sequence[float], layers: Sequence[Layer], template: Tensor) -> Tensor:
        """``Σ p_k W_k`` of one layer, where ``W_k`` is ``U_k V_k`` of the clients that hold factors."""
        dtype = wide(template.dtype)  # in half precision the weights would not add up to 1
        mean = torch.zeros_like(template, dtype=dtype)
        pairs = [(p, *factor_matrices(k.U, k.V)) for p, k in zip(weights, layers) if k.U is not None]
        if factorised := [(p, left.to(dtype), right.to(dtype)) for p, left, right in pairs]:
            shares, lefts, rights = zip(*factorised)
            left, right = stack_pairs(lefts, rights, shares)
            mean = from_matrix(left @ right, template.shape)
        for p, layer in zip(weights, layers):
            if layer.W is not None:
                mean = mean + p * layer.W.to(dtype)
        return mean.to(template.dtype)

    def settle(self, mean, state, round):
        message = {**mean, **self.factors(mean)}
        return {**state, **message}, message

    def apply(self, model, message, round):
        tensors = {n: t for n, t in message.items() if ":" not in n}
        for layer in adapted_layers(tensors):
            if layer.W is not None:
                left, right = empty_factors(layer.W)
                tensors |= Layer(layer.name, U=left, V=right).named()
        load_tensors(model, tensors)
