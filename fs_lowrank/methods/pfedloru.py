"""pFedLoRU: beside the shared pair every client keeps a pair of its own, which never leaves it.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", appendix "Personalized FedLoRU", Algorithm 2. Client k's model is ``W + s B A + s_per U_k L_k``.

    a round:  E_per of (L, U) with (A, B) fixed,  then E_global of (A, B) with (L, U) fixed
    sent:     A and B, averaged and accumulated as FedLoRU does

``pmfedloru`` is the same over mFedLoRU, with ranks of the shared pair that differ by client.
"""

from dataclasses import dataclass, field

from torch import nn

from ..models.adapters import add_beside
from .base import Phase
from .fedloru import FedLoRU
from .mfedloru import MFedLoRU
from .registry import register_method


@dataclass(frozen=True)
class _Personal:
    personal_steps: int = field(
        default=0,
        metadata={
            "min": 0,
            "help": "E_per, in units of train.batch_or_epoch; 0: as train.local_update_steps, which is E_global",
        },
    )
    personal_rank: int = field(default=0, metadata={"min": 0, "help": "rank of the own pair; 0: the shared pair's"})


class _Own:
    """What a pair of one's own adds to a method."""

    def adapt(self, model: nn.Module) -> nn.Module:
        return add_beside(super().adapt(model), "personal", self.setting.seed, r=self.params.personal_rank or None)

    def phases(self, round: int, client: int | None = None) -> list[Phase]:
        return [Phase(train=("personal",), steps=self.params.personal_steps or None), *super().phases(round, client)]


@register_method("pfedloru")
class PFedLoRU(_Own, FedLoRU):
    source = "Park and Klabjan, 2024, Algorithm 2"
    sends = "A and B; a pair of its own stays with the client"

    @dataclass(frozen=True)
    class Params(FedLoRU.Params, _Personal):
        pass


@register_method("pmfedloru")
class PMFedLoRU(_Own, MFedLoRU):
    source = "Park and Klabjan, 2024, Algorithms 2 and 3"
    sends = "nested pairs inside A and B; a pair of its own stays with the client"

    @dataclass(frozen=True)
    class Params(MFedLoRU.Params, _Personal):
        pass
