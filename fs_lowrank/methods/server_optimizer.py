"""Server optimizers, for which the averaged change is a pseudo-gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2; Hsu et al. 2019 for FedAvgM.

    Δ = mean(x_k) − x        m ← β₁ m + (1 − β₁) Δ
    FedAdagrad  v ← v + Δ²
    FedAdam     v ← β₂ v + (1 − β₂) Δ²
    FedYogi     v ← v − (1 − β₂) Δ² sign(v − Δ²)
    x ← x + η m / (√v + τ)

``SGD`` is FedAvg (lr 1, momentum 0) and FedAvgM: ``m ← β m + Δ``, ``x ← x + η m``. As in the paper there is no bias
correction, and ``v`` starts at τ². As in the paper's experiments, β₂ is 0.99 and β₁ is 0.9, or 0 for FedAdagrad, since
Adagrad has no momentum. A tensor that was not sent in a round keeps its ``m`` and ``v``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..models.names import is_statistic
from ..settings import Origin, check_keys, key, keys_of, server_lr
from .wrapper import Value, Wrapper

_V_RULES = {
    "adagrad": lambda v, d, beta: v + d * d,
    "adam": lambda v, d, beta: beta * v + (1 - beta) * d * d,
    "yogi": lambda v, d, beta: v - (1 - beta) * d * d * torch.sign(v - d * d),
}
#: default β₁ and β₂
_BETAS = {"adagrad": (0.0, 0.99)}
_OTHER_BETAS = (0.9, 0.99)
#: names of the algorithms in the papers -> ``type``
_ALGORITHMS = {"fedavg": "sgd", "avg": "sgd", "fedavgm": "sgd", "avgm": "sgd", "fedsgd": "sgd"}
_ALGORITHMS.update({f"fed{kind}": kind for kind in _V_RULES})


@dataclass(frozen=True)
class ServerOptimizer(Wrapper):
    """A server optimizer over named tensors. Without ``betas``, they are the defaults of the type."""

    prefix: ClassVar[str] = "server_optimizer:"
    #: as ``Method.revision``, by type. 2: the default β₁ of FedAdagrad was 0.9
    revisions: ClassVar[Mapping[str, int]] = {"adagrad": 2}

    #: the server optimizer; `SGD` with `momentum` 0 is federated averaging
    type: str = key("sgd", choices=("sgd", *_V_RULES), also=_ALGORITHMS, fold=True)
    #: learning rate of the server
    lr: float = key(1.0, above=0.0)
    #: of `SGD`: FedAvgM
    momentum: float = key(0.0, min=0.0, below=1.0)
    #: of the adaptive optimizers: decay of the mean and of the second moment
    betas: tuple[float, float] | None = key(None, min=0.0, below=1.0)
    #: of the adaptive optimizers: what is added to the root of the second moment
    tau: float = key(1e-3, above=0.0)

    @classmethod
    def revision_of(cls, values: Mapping[str, object]) -> int:
        """The revision of ``fedopt.optimizer``; explicit ``betas`` mean the same in every revision."""
        return 1 if "betas" in values else cls.revisions.get(cls.from_config(values).type, 1)

    @classmethod
    def from_config(cls, values: Mapping[str, object], origin: Origin | None = None) -> ServerOptimizer:
        """From ``fedopt.optimizer``: ``type`` SGD | Adam | Adagrad | Yogi, ``lr``, ``momentum``, ``betas``, ``tau``.

        Without ``lr``, or with None, it is ``server_lr`` of the type: 1 for SGD, 0.01 for the others.

        Raises:
            UserError: an unknown key or type (the message suggests the nearest), a value of the wrong type or out of
                range.
        """
        options = {name: value for name, value in values.items() if name != "lr" or value is not None}
        checked = check_keys(options, keys_of(cls), origin or Origin(), "fedopt.optimizer")
        return cls(**{"lr": server_lr(checked.get("type", cls.type)), **checked})

    def step(
        self, mean: Mapping[str, Tensor], state: Mapping[str, Value]
    ) -> tuple[dict[str, Tensor], dict[str, Value]]:
        """The new tensors and the values to remember, both by name; ``state`` is not changed."""
        first, second = self.betas or _BETAS.get(self.type, _OTHER_BETAS)
        new: dict[str, Tensor] = {}
        memory: dict[str, Value] = {}
        for name, average in mean.items():
            if is_statistic(name):
                new[name] = average  # no gradient has changed it, and a step could make a variance negative
                continue
            delta = average - state[name]
            m_name, v_name = f"{self.prefix}m:{name}", f"{self.prefix}v:{name}"
            m = state.get(m_name, torch.zeros_like(delta))
            if self.type == "sgd":
                if self.momentum == 0 and self.lr == 1:
                    new[name] = average  # FedAvg, without the rounding error of x + (mean − x)
                    continue
                m = self.momentum * m + delta
                new[name] = state[name] + self.lr * m
            else:
                m = first * m + (1 - first) * delta
                v = _V_RULES[self.type](state.get(v_name, torch.full_like(delta, self.tau**2)), delta, second)
                new[name] = state[name] + self.lr * m / (v.sqrt() + self.tau)
                memory[v_name] = v
            memory[m_name] = m
        return new, memory
