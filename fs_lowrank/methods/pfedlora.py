"""pFedLoRA: the whole model is shared, a low-rank pair stays with its client.

Wu et al., "FedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning", 2024, as Park and
Klabjan compare with it: "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to
Implicit Regularization", appendix "pFedLoRA", Algorithm 4. Client k's model is ``W + s_per U_k L_k``.

    variant 1:  E_per of (L, U) with W fixed,  then E_global of W with (L, U) fixed
    variant 2:  E_per + E_global of both together, one optimizer for the whole length (equation 86)
    sent:       W, averaged as FedAvg does
"""

from dataclasses import dataclass

from ..settings import key
from .base import Averaging
from .registry import register_method
from .terms import Phase


@register_method("pfedlora")
class PFedLoRA(Averaging):
    source = "Wu et al., 2024; Park and Klabjan, 2024, Algorithm 4"
    sends = "all weights; a pair of its own stays with the client"
    shared = ("base", "head")
    personal = ("adapter",)
    #: 2: variant 2 was two phases, each with a new optimizer
    revision = 2

    @dataclass(frozen=True)
    class Params:
        variant: int = key(1, min=1, max=2, help="1: one after the other; 2: together")
        personal_steps: int = key(
            0, min=0, help="E_per, in units of train.batch_or_epoch; 0: as train.local_update_steps"
        )
        global_steps: int = key(0, min=0, help="E_global; 0: as train.local_update_steps")

    params: Params

    @classmethod
    def revision_of(cls, params: Params):
        return cls.revision if params.variant == 2 else 1

    def phases(self, round, client=None):
        e_per, e_global, default = self.params.personal_steps, self.params.global_steps, self.setting.steps(client)
        if self.params.variant == 2:
            return [Phase(train=(*self.personal, *self.shared), steps=(e_per or default) + (e_global or default))]
        return [Phase(train=self.personal, steps=e_per or None), Phase(train=self.shared, steps=e_global or None)]
