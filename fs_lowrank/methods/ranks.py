"""What methods with a rank per client share: the list of ranks, and cutting a pair to its first rows."""

import dataclasses
from dataclasses import dataclass, field

from ..errors import UserError
from ..models.layers import Layer, adapted_layers
from ..settings import AdapterSpec
from .base import Gathering, Tensors


@dataclass(frozen=True)
class RankedParams:
    ranks: tuple[int, ...] = field(
        default=(),
        metadata={
            "min": 1,
            "help": "rank of every client, repeated in turn if shorter; empty: the adapter's r for all",
        },
    )


def check_one_rank(adapter: AdapterSpec, method: str) -> None:
    """For methods that compute a pair's scale from its rank and the adapter's one alpha, and know of no bias.

    Raises:
        UserError: the adapter has ranks or alphas by layer, or a bias.
    """
    odd = [name for name in ("rank_pattern", "alpha_pattern", "lora_bias") if adapter.extra.get(name)]
    if odd:
        raise UserError(
            f"llm.adapter.args: {odd[0]}: {method} needs one alpha for all layers, ranks that differ by "
            "client only, and pairs without a bias; take it out, or take another method"
        )


class RankedMethod(Gathering):
    """A method whose clients may hold different ranks of one pair."""

    @classmethod
    def requires(cls, params):
        return dataclasses.replace(super().requires(params), adapter="lora")

    def __init__(self, params, setting):
        super().__init__(params, setting)
        check_one_rank(setting.adapter, self.name)
        self.averaged = self.whole

    def rank(self, client: int | None = None) -> int:
        """The rank of ``client`` (from 1), or the server's: the largest of all."""
        ranks = self.params.ranks or (self.setting.adapter.r,)
        return max(*ranks, self.setting.adapter.r) if client is None else ranks[(client - 1) % len(ranks)]

    @property
    def adapter(self) -> AdapterSpec:
        return dataclasses.replace(self.setting.adapter, r=self.rank())

    def tailor(self, tensors: Tensors, client: int) -> Tensors:
        """The client's first ``r_k`` rows of A and columns of B, rescaled so that ``s_k B_k A_k`` stays ``s B A``."""
        rank = self.rank(client)
        rescale = self.adapter.scale(self.rank()) / self.adapter.scale(rank)
        cut = dict(tensors)
        for layer in adapted_layers(tensors):
            if layer.A is not None:
                cut |= Layer(layer.name, A=layer.A[:rank], B=layer.B[:, :rank] * rescale).named()
        return cut
