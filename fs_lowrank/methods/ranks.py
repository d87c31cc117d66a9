"""For methods whose clients have different ranks: the list of ranks, and the first rows of a pair."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import UserError
from ..models.layers import Layer, adapted_layers
from ..models.merging import check_products
from ..settings import AdapterSpec, key
from .base import Gathering, State
from .terms import Requires, Setting, Tensors

T = TypeVar("T")


def of_client(values: Sequence[T], client: int) -> T:
    """The value for ``client`` (from 1) in a list that is repeated in turn if there are more clients than values."""
    return values[(client - 1) % len(values)]


@dataclass(frozen=True)
class RankedParams:
    ranks: tuple[int, ...] = key(
        (), min=1, help="rank of every client, repeated in turn if shorter; empty: the adapter's r for all"
    )


def check_one_rank(adapter: AdapterSpec, method: str) -> None:
    """For methods that compute the scale of a pair from its rank and one alpha, and support no bias.

    Raises:
        UserError: the adapter has ranks or alphas by layer, or a bias.
    """
    unsupported = [name for name in ("rank_pattern", "alpha_pattern", "lora_bias") if adapter.extra.get(name)]
    if unsupported:
        raise UserError(
            f"llm.adapter.args: {unsupported[0]}: {method} needs one alpha for all layers, ranks that differ by "
            "client only, and pairs without a bias; remove it, or choose another method"
        )


def check_accumulated(setting: Setting, method: str) -> None:
    """For methods that keep products beside the base instead of merging them (``lowrank.merge = False``).

    Raises:
        UserError: the model is trained from scratch, the adapter's products do not add up to one LoRA adapter, or its
            initialisation changes the base.
    """
    if setting.from_scratch or setting.adapter.method != "lora":
        reason = (
            "this model is trained from scratch"
            if setting.from_scratch
            else f"llm.adapter.args asks for {setting.adapter.method}, whose products do not add up to one adapter"
        )
        raise UserError(f"lowrank.merge = False keeps LoRA pairs beside a pre-trained base; {reason}")
    check_one_rank(setting.adapter, f"lowrank.merge = False of {method}")
    if start := setting.adapter.moves_base:
        raise UserError(
            f"llm.adapter.args: init_lora_weights = {start} changes the base, and lowrank.merge = False keeps LoRA "
            "pairs beside one that does not change; take gaussian, or leave one of the two out"
        )


class RankedMethod(Gathering):
    """A method whose clients may hold a pair at different ranks."""

    Params = RankedParams
    params: RankedParams

    @classmethod
    def requires(cls, params: RankedParams) -> Requires:
        return dataclasses.replace(super().requires(params), adapter="lora", ranks=tuple(params.ranks))

    def __init__(self, params, setting):
        super().__init__(params, setting)
        check_one_rank(setting.adapter, self.name)
        smallest = min(map(self.pruned_rank, params.ranks or (self.rank(),)))
        if (start := setting.adapter.moves_base) and smallest < self.rank():
            raise UserError(
                f"llm.adapter.args: init_lora_weights = {start} moves a part of the base into pairs of rank "
                f"{self.rank()}. Clients of rank {smallest} would lack some of it; take gaussian, or one rank for all"
            )
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

    def pruned_rank(self, rank: int) -> int:
        """The rank, at least 1, to which a client of ``rank`` may shrink in a round."""
        return rank

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
