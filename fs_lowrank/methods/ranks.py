"""For methods whose clients have different ranks: the list of ranks, and the first rows of a pair."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..models.layers import Layer, adapted_layers
from ..models.merging import check_products
from ..settings import AdapterSpec, key
from .base import Gathering, State
from .terms import ONE_SCALE, Requires, Tensors

T = TypeVar("T")


def of_client(values: Sequence[T], client: int) -> T:
    """The value for ``client`` (from 1) in a list that is repeated in turn if there are more clients than values."""
    return values[(client - 1) % len(values)]


@dataclass(frozen=True)
class RankedParams:
    ranks: tuple[int, ...] = key(
        (), min=1, help="rank of every client, repeated in turn if shorter; empty: the adapter's r for all"
    )


class RankedMethod(Gathering):
    """A method whose clients may hold a pair at different ranks."""

    Params = RankedParams
    params: RankedParams

    @classmethod
    def requires(cls, params: RankedParams) -> Requires:
        ranks = tuple(params.ranks)
        return dataclasses.replace(super().requires(params), adapter="lora", without=ONE_SCALE, ranks=ranks)

    def __init__(self, params, setting):
        super().__init__(params, setting)
        self.averaged = self.whole

    def adapt(self, model):
        model = super().adapt(model)
        check_products(model, self.name, merges=self.needs.changes_base)
        return model

    def rank(self, client: int | None = None) -> int:
        """The rank of ``client``; None: of the server, which has the largest."""
        r = self.setting.adapter.r
        return max((r, *self.params.ranks)) if client is None else of_client(self.params.ranks or (r,), client)

    @property
    def adapter(self) -> AdapterSpec:
        return dataclasses.replace(self.setting.adapter, r=self.rank())

    def rank_now(self, client: int, state: State) -> int:
        """The rank of ``client`` in the round that begins with ``state``."""
        return self.rank(client)

    def tailor(self, tensors: Tensors, client: int, state: State) -> Tensors:
        """The first ``r_k`` rows of A and columns of B, scaled such that ``s_k B_k A_k`` remains ``s B A``."""
        rank = self.rank_now(client, state)
        rescale = self.adapter.scale(self.rank()) / self.adapter.scale(rank)
        cut = dict(tensors)
        for layer in adapted_layers(tensors):
            if layer.A is not None:
                cut |= Layer(layer.name, A=layer.A[:rank], B=layer.B[:, :rank] * rescale).named()
        return cut
