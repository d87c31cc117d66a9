"""Additive secret sharing: the server sees only the sum of the clients' updates.

A secret is a fixed-point number modulo 2^64; its shares are random numbers whose sum is the secret. The framework's
shares are numbers modulo 2^61 + 1 in 64-bit arithmetic, which overflows with four or more clients, so that the result
is wrong. Modulo 2^64, overflow is part of the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...algebra import on_device
from ...methods import Update
from ...rounds.intake import Intake, RunningMean, TooFewClients, mean_as_update
from ...rounds.workspace import Workspace

#: fixed point: 2^-30 is below the rounding of a float32 between -64 and 64, and leaves 2^33 for the sum
_SCALE = 2.0**30
_LARGEST = 2.0**33


def split_secret(tensors: Mapping[str, Tensor], weight: float, parties: int) -> list[dict[str, Tensor]]:
    """Shares of ``weight`` times the tensors, one for each of ``parties``: int64, of the same names and shapes.

    Raises:
        ValueError: a value is too large for the fixed-point numbers, or not finite.
    """
    shares: list[dict[str, Tensor]] = [{} for _ in range(parties)]
    for name, tensor in tensors.items():
        scaled = tensor.detach().cpu().double() * weight
        if not (scaled.abs() * parties < _LARGEST).all():
            raise ValueError(f"{name} times {weight:g} does not fit the fixed-point numbers of secret sharing")
        last = (scaled * _SCALE).round().to(torch.int64)
        for share in shares[1:]:
            share[name] = torch.frombuffer(bytearray(os.urandom(8 * last.numel())), dtype=torch.int64).view(last.shape)
            last = last - share[name]
        shares[0][name] = last
    return shares


def add_shares(shares: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of ``shares``, modulo 2^64."""
    total = {name: tensor.clone() for name, tensor in shares[0].items()}
    for share in shares[1:]:
        for name in total:
            total[name] += share[name]
    return total


def recover(total: Mapping[str, Tensor], weight: float, templates: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weighted mean, in the dtypes of ``templates``, from the sum of all shares and the sum of all weights."""
    return {name: (tensor.double() / (_SCALE * weight)).to(templates[name].dtype) for name, tensor in total.items()}


class Shares(Intake):
    """The intake of a round in which each client sends a sum of shares.

    Args:
        parties: the number of clients that share; the shares of all of them are needed.
        uniform: all clients have the same weight, whatever their number of samples (``federate.ignore_weight``).
        device: of the mean.
    """

    sees_values = False

    def __init__(self, parties: int, uniform: bool, device: torch.device):
        self.parties, self.uniform, self.device = parties, uniform, device
        self.copies = parties
        self.sums: list[Mapping[str, Tensor]] = []
        self.samples = 0
        self._expected: Mapping[str, Tensor] = {}

    def expects(self, expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._expected = expected
        return {n: torch.empty(t.shape, dtype=torch.int64, device="meta") for n, t in expected.items()}

    def add(self, update: Update) -> None:
        self.sums.append(update.tensors)
        self.samples += update.num_samples

    def close(self, without: Collection[int] = ()) -> list[Update]:
        if len(self.sums) < self.parties or without:
            raise TooFewClients("with federate.use_ss the shares of every client are needed")
        mean = recover(add_shares(self.sums), self.parties if self.uniform else self.samples, self._expected)
        return [mean_as_update(on_device(mean, self.device), self.samples)]


def intake_of(cfg: Any, workspace: Workspace) -> Intake | None:
    """Where the updates of a round go by the framework's configuration; None: they are stored.

    Within one machine nothing is hidden by shares, so there the server adds up the updates themselves.
    """
    uniform = workspace.method.setting.uniform
    if cfg.federate.use_ss and cfg.federate.mode == "distributed":
        return Shares(cfg.federate.client_num, uniform, workspace.device)
    return RunningMean(uniform) if cfg.federate.online_aggr or cfg.federate.use_ss else None
