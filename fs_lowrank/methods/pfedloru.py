"""pFedLoRU: besides the shared pair, every client has a pair of its own, which is never sent.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", appendix "Personalized FedLoRU", Algorithm 2. Client k's model is ``W + s B A + s_per U_k L_k``.

    a round:  E_per of (L, U) with (A, B) fixed,  then E_global of (A, B) with (L, U) fixed
    sent:     A and B, averaged and accumulated as FedLoRU does

``pmfedloru`` is the same with mFedLoRU in place of FedLoRU, so clients send pairs of different ranks.
"""

from dataclasses import dataclass

from ..models.adapters import add_beside
from ..settings import key
from .base import Averaging
from .fedloru import FedLoRU
from .mfedloru import MFedLoRU
from .registry import register_method
from .terms import Phase


@dataclass(frozen=True)
class _PersonalParams:
    personal_steps: int = key(
        0, min=0, help="E_per, in units of train.batch_or_epoch; 0: as train.local_update_steps, which is E_global"
    )
    personal_rank: int = key(0, min=0, help="rank of the client's own pair; 0: that of the shared pair")


class _Personal(Averaging):
    """Adds a pair of the client's own to a method."""

    params: _PersonalParams

    def adapt(self, model):
        return add_beside(super().adapt(model), "personal", self.setting.seed, r=self.params.personal_rank or None)

    def phases(self, round, client=None):
        return [Phase(train=("personal",), steps=self.params.personal_steps or None), *super().phases(round, client)]


@register_method("pfedloru")
class PFedLoRU(_Personal, FedLoRU):
    source = "Park and Klabjan, 2024, Algorithm 2"
    sends = "A and B; a pair of its own stays with the client"

    @dataclass(frozen=True)
    class Params(FedLoRU.Params, _PersonalParams):
        pass

    params: Params


@register_method("pmfedloru")
class PMFedLoRU(_Personal, MFedLoRU):
    source = "Park and Klabjan, 2024, Algorithms 2 and 3"
    sends = "nested pairs inside A and B; a pair of its own stays with the client"

    @dataclass(frozen=True)
    class Params(MFedLoRU.Params, _PersonalParams):
        pass

    params: Params
