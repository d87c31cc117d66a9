"""Studies of the theory behind the methods. Each module is a command that writes a JSON file and a PNG."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

import fs_lowrank
from fs_lowrank import Config
from fs_lowrank.methods import get_method_class

Seen = TypeVar("Seen")


class ServerStep(NamedTuple):
    """One server step.

    Attributes:
        round: counts from 1.
        tensors: of each client, by name.
        weights: of each client.
        mean: of the clients' tensors, before the method merges or draws new pairs.
        before: the state before the step.
        scale: the factor s of s B A.
    """

    round: int
    tensors: Sequence[Mapping[str, Tensor]]
    weights: Sequence[float]
    mean: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    scale: float


def watch(method: str, look: Callable[[ServerStep], None]) -> str:
    """Register a copy of ``method`` that calls ``look`` with every server step; returns its name."""
    base: Any = get_method_class(method)

    class Watched(base):
        source = f"{base.source}, watched"

        def aggregate(self, updates, state, round):
            tensors, mean = [u.tensors for u in updates], self.mean(updates, state)
            look(ServerStep(round, tensors, self.weights(updates), mean, state, self.adapter.scale()))
            return super().aggregate(updates, state, round)

    name = f"watched_{method}"
    fs_lowrank.register_method(name)(Watched)
    return name


def watched_run(config: Config, rounds: int, seed: int, look: Callable[[ServerStep], Seen]) -> tuple[float, list[Seen]]:
    """Run ``config``; returns the final test accuracy, and what ``look`` returned for every server step."""
    seen: list[Seen] = []
    with tempfile.TemporaryDirectory() as folder:
        method = watch(config.federate.method, lambda step: seen.append(look(step)))
        keys = {"federate.method": method, "federate.total_round_num": rounds, "seed": seed, "outdir": folder}
        return fs_lowrank.run(config.replace(keys)).final["test_acc"], seen


def moments(values: Sequence[float]) -> dict[str, float | None]:
    """``mean`` and ``std`` (with n - 1; None for one value)."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def panels(count: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A Matplotlib figure (size in inches) with a row of ``count`` axes with a grid, and the row of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    row = figure.subplots(1, count, squeeze=False, **options)[0]
    for axes in row:
        axes.grid(alpha=0.3)
    return figure, row


def band(axes: Any, x: Iterable[float], curves: Tensor, color: str, label: str, **style: Any) -> None:
    """Plot the mean of ``curves (seeds, points)`` as a line, and their range as a band."""
    axes.plot(x, curves.mean(0), lw=2, color=color, label=label, **style)
    axes.fill_between(x, curves.amin(0), curves.amax(0), color=color, alpha=0.15)


def label(axes: Any, title: str, x: str, y: str, log: str = "", **keys: Any) -> None:
    """Title, names and legend of axes; ``log``: those of ``xy`` that are logarithmic. ``keys``: as of ``axes.set``."""
    axes.set(title=title, xlabel=x, ylabel=y, **{f"{axis}scale": "log" for axis in log}, **keys)
    axes.legend(fontsize=9)


def seeds_option(default: int) -> dict[str, Any]:
    """The option ``--seeds``."""
    return dict(type=int, default=default, help="number of seeds, 0 to seeds - 1")
