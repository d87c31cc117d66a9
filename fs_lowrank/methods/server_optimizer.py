"""Server optimizers: the averaged change is a pseudo-gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2; Hsu et al. 2019 for FedAvgM.

    Δ = mean(x_k) − x        m ← β₁ m + (1 − β₁) Δ
    FedAdagrad  v ← v + Δ²
    FedAdam     v ← β₂ v + (1 − β₂) Δ²
    FedYogi     v ← v − (1 − β₂) Δ² sign(v − Δ²)
    x ← x + η m / (√v + τ)

``SGD`` is FedAvg (lr 1, momentum 0) and FedAvgM: ``m ← β m + Δ``, ``x ← x + η m``. As in the paper there is
no bias correction, and ``v`` starts at τ². What is remembered lies in the method's state, so it is saved
and resumed with it; a tensor that was not sent in a round keeps its memory untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError, nearest
from ..models.names import is_statistic
from ..settings import server_lr

_PREFIX = "server_optimizer:"
_V_RULES = {
    "adagrad": lambda v, d, beta: v + d * d,
    "adam": lambda v, d, beta: beta * v + (1 - beta) * d * d,
    "yogi": lambda v, d, beta: v - (1 - beta) * d * d * torch.sign(v - d * d),
}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class ServerOptimizer:
    """One step of a server optimizer over named tensors; callable as ``Method.combine``."""

    type: str = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3

    @classmethod
    def from_config(cls, values: Mapping[str, object]) -> ServerOptimizer:
        """From ``fedopt.optimizer``: ``type`` SGD | Adam | Adagrad | Yogi, ``lr``, ``momentum``, ``betas``, ``tau``.

        Without ``lr``, or with None, it is ``server_lr`` of the type: 1 for SGD, 0.01 for the others.

        Raises:
            UserError: an unknown key or type (with the nearest), a value that is no number or out of range.
        """
        known = {f: None for f in cls.__dataclass_fields__}
        for key in values:
            if key not in known:
                raise UserError(f"fedopt.optimizer.{key}: no such key{nearest(key, known)}; known: {', '.join(known)}")
        kind = str(values.get("type", "sgd")).lower().removeprefix("fed")
        kind = "sgd" if kind in ("avg", "avgm") else kind
        if kind not in ("sgd", *_V_RULES):
            raise UserError(
                f"fedopt.optimizer.type = {values['type']!r}: expected SGD, Adam, Adagrad or Yogi"
                f"{nearest(kind, _V_RULES)}"
            )
        if values.get("lr") is None:
            values = {**values, "lr": server_lr(kind)}
        for key in ("lr", "momentum", "tau"):
            if key in values and not _is_number(values[key]):
                raise UserError(f"fedopt.optimizer.{key} = {values[key]!r}: expected a number")
        betas = values.get("betas", cls.betas)
        if not isinstance(betas, (list, tuple)) or len(betas) != 2 or not all(map(_is_number, betas)):
            raise UserError(f"fedopt.optimizer.betas = {betas!r}: expected two numbers, such as {list(cls.betas)}")
        made = cls(**{**values, "type": kind, "betas": tuple(betas)})
        if not made.lr > 0 or not made.tau > 0 or not all(0 <= b < 1 for b in (*made.betas, made.momentum)):
            raise UserError(
                "fedopt.optimizer: lr and tau must be positive, momentum and betas in [0, 1); "
                f"got lr {made.lr}, tau {made.tau}, momentum {made.momentum}, betas {made.betas}"
            )
        return made

    def __call__(self, mean: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> tuple[dict, dict]:
        """The new tensors and the memory to keep, both by name; ``state`` is not changed."""
        new, memory = {}, {}
        for name, average in mean.items():
            if is_statistic(name):
                new[name] = average  # no gradient has moved it, and a step could make a variance negative
                continue
            delta = average - state[name]
            m_name, v_name = f"{_PREFIX}m:{name}", f"{_PREFIX}v:{name}"
            m = state.get(m_name, torch.zeros_like(delta))
            if self.type == "sgd":
                if self.momentum == 0 and self.lr == 1:
                    new[name] = average  # FedAvg itself, without the rounding of x + (mean − x)
                    continue
                m = self.momentum * m + delta
                new[name] = state[name] + self.lr * m
            else:
                m = self.betas[0] * m + (1 - self.betas[0]) * delta
                v = _V_RULES[self.type](state.get(v_name, torch.full_like(delta, self.tau**2)), delta, self.betas[1])
                new[name] = state[name] + self.lr * m / (v.sqrt() + self.tau)
                memory[v_name] = v
            memory[m_name] = m
        return new, memory
