"""mFedLoRU: clients with few resources train low-rank updates of the low-rank pair.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", appendix "Model-heterogeneous FedLoRU", Algorithm 3.

    client k trains    W + s (B + s' B_d B_u)(A + s' A_d A_u),  with B_d = A_d = 0 at the start of every round
    and sends          A_d (r × r_A), A_u (r_A × d_in), B_d (d_out × r_B), B_u (r_B × r)
    the server takes   A_k = A + s' A_d A_u,  B_k = B + s' B_d B_u,  then goes on as FedLoRU

A client sends ``r_B (d_out + r) + r_A (d_in + r)`` values per layer instead of ``r (d_out + d_in)``. A client of
rank 0 opts out and trains the pair itself. ``s' = α_A / r_A = α_B / r_B = 1/2`` as in the paper's experiments.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import UserError
from ..models.adapters import load_tensors
from ..models.layers import Layer, adapted_layers
from ..models.names import named_tensors, tags
from ..models.nested import add_nested, cut_nested, nested_product, nested_shapes
from ..settings import key
from .base import State
from .fedloru import FedLoRU
from .ranks import of_client
from .registry import register_method
from .terms import Phase, Tensors, Update


@register_method("mfedloru")
class MFedLoRU(FedLoRU):
    source = "Park and Klabjan, 2024, Algorithm 3"
    sends = "nested pairs inside A and B, of the client's rank"
    shared = ("adapter", "head", "nested")

    @dataclass(frozen=True)
    class Params(FedLoRU.Params):
        nested_ranks: tuple[int, ...] = key(
            (),
            min=0,
            help="r_A of every client, repeated in turn if shorter; 0: it trains the pair itself; empty: 0 for all",
        )
        nested_ranks_b: tuple[int, ...] = key((), min=0, help="r_B of every client, if other than r_A")
        nested_scale: float = key(0.5, above=0.0, help="s' = alpha_A / r_A = alpha_B / r_B")

        def __post_init__(self):
            of_a, of_b = self.nested_ranks, self.nested_ranks_b
            if of_b and (len(of_a) != len(of_b) or any((a == 0) != (b == 0) for a, b in zip(of_a, of_b))):
                raise ValueError(
                    f"nested_ranks {of_a} and nested_ranks_b {of_b}: expected one of each for every client; one that "
                    "opts out has 0 in both lists"
                )

    params: Params

    @classmethod
    def requires(cls, params: Params):
        needs = super().requires(params)
        idle = {} if any(params.nested_ranks) else {"lowrank.nested_scale": "no client has nested_ranks above 0"}
        return replace(needs, adapter="lora", idle={**needs.idle, **idle})

    def __init__(self, params, setting):
        super().__init__(params, setting)
        if wide := [r for r in (*params.nested_ranks, *params.nested_ranks_b) if r >= self.adapter.r]:
            raise UserError(
                f"lowrank.nested_ranks: {wide[0]} is not below the adapter's rank, {self.adapter.r}, so nesting saves "
                "nothing; with 0 the client trains the pair itself"
            )

    def ranks(self, client: int | None = None) -> tuple[int, int]:
        """``r_A`` and ``r_B`` of ``client``, (0, 0) if it opts out; None: the largest of all."""
        of_a = self.params.nested_ranks or (0,)
        of_b = self.params.nested_ranks_b or of_a
        return (max(of_a), max(of_b)) if client is None else (of_client(of_a, client), of_client(of_b, client))

    def adapt(self, model):
        return add_nested(super().adapt(model), self.params.nested_scale)

    def initial_nested(self, tensors: Tensors, round: int) -> dict[str, Tensor]:
        """Nested pairs of the largest ranks for the round after ``round``: ``A_d = B_d = 0``, the others random."""
        nested: dict[str, Tensor] = {}
        for pair in adapted_layers(tensors):
            shapes = nested_shapes(pair.A.shape, pair.B.shape, *self.ranks())
            drawn = {u: self.draw_down(pair.key(u), shapes[u], round).to(pair.A) for u in ("A_u", "B_u")}
            zeros = {d: pair.A.new_zeros(shapes[d]) for d in ("A_d", "B_d")}
            nested |= Layer(pair.name, **zeros, **drawn).named()
        return nested

    def initial_state(self, model):
        state = super().initial_state(model)
        return {**state, **self.initial_nested(self.view(state), 0)}

    def phases(self, round, client=None):
        nests = client is not None and self.ranks(client)[0] > 0
        return [Phase(train=("nested" if nests else "adapter", *self.whole))]

    def tailor(self, tensors, client, state):
        nested = [layer for layer in adapted_layers(tensors) if layer.A_u is not None]
        return {**tensors, **cut_nested(nested, *self.ranks(client))}

    def recover(self, update: Update, state: State) -> Update:
        """The update as if the client had trained the pair itself: ``A + s' A_d A_u`` and ``B + s' B_d B_u``."""
        pairs, scale = {pair.name: pair for pair in adapted_layers(self.view(state))}, self.params.nested_scale
        tensors = {n: t for n, t in update.tensors.items() if "nested" not in tags(n)}
        for layer in adapted_layers(update.tensors):
            if layer.A_d is not None:
                pair = pairs[layer.name]
                a = pair.A + scale * nested_product(layer.A_d, layer.A_u, pair.A)
                b = pair.B + scale * nested_product(layer.B_d, layer.B_u, pair.B)
                tensors |= Layer(layer.name, A=a, B=b).named()
        return replace(update, tensors=tensors)

    def recovered(self, updates, state):
        return [self.recover(u, state) for u in updates]

    def settle(self, mean, state, round):
        state, message = super().settle(mean, state, round)
        return {**state, **self.initial_nested(self.view(state), round)}, message

    def apply(self, model, message, round):
        super().apply(model, message, round)
        # The nested pairs of this copy start again, at the ranks that they have.
        layer = adapted_layers(named_tensors(model, ("nested",)))[0]
        initial = adapted_layers(self.initial_nested(named_tensors(model, ("adapter",)), round))
        load_tensors(model, cut_nested(initial, len(layer.A_u), len(layer.B_u)))
