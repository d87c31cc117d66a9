"""Images as vectors, for the studies of small networks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fs_lowrank.data import load_raw

DATA = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "digits": "scikit-learn digits (8 x 8)"}


@dataclass(frozen=True)
class Data:
    """Training set ``x (n, d)`` float32 in [0, 1] and ``y (n,)`` int64, and the test set likewise."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def load(name: str, root: Path | None = None) -> Data:
    """Load a data set of ``DATA``.

    Args:
        root: a folder with the four IDX files, plain or gzipped; default: where ``fs-lowrank fetch`` put them.

    Raises:
        ValueError: unknown name.
        UserError: files are missing or damaged.
    """
    if name not in DATA:
        raise ValueError(f"unknown data {name!r}, expected one of {', '.join(DATA)}")
    if name == "digits":
        from sklearn.datasets import load_digits

        raw = load_digits()
        x, y = torch.tensor(raw.data / 16.0, dtype=torch.float32), torch.tensor(raw.target)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        test, train = order[:360], order[360:]
        return Data(x[train], y[train], x[test], y[test])
    raw = load_raw(SimpleNamespace(type={"fashion": "fashion_mnist"}.get(name, name), root=root or "", args=[]))
    images: Any = raw.images

    def vectors(rows: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor(images[rows["image"]]).flatten(1).float() / 255, torch.tensor(rows["label"].to_numpy())

    return Data(*vectors(raw.train), *vectors(raw.test))


def data_options(default: str) -> dict[str, dict[str, Any]]:
    """The options ``--data`` and ``--root`` of a command that loads a data set."""
    root = dict(type=Path, help="folder with IDX files, instead of the fetched ones")
    return {"--data": dict(choices=tuple(DATA), default=default), "--root": root}
