"""Image examples stored as bytes, and the steps of ``data.transform``, applied to tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fs_lowrank.errors import UserError
from fs_lowrank.settings import Key, Origin, check_keys, check_value, keys_of

_CHUNK = 4096


# Steps. Each takes a batch (n, channels, height, width) of bytes or floats, and a generator; without one, flips are
# skipped, and crops are of the middle. Further arguments and defaults are torchvision's, so that a configuration has
# the same meaning.

Rng = np.random.Generator | None
Size = Annotated[
    int | tuple[int, int], {"min": 1, "words": "a size in pixels, or [height, width]", "help": "height and width"}
]
Chance = Annotated[float, {"min": 0.0, "max": 1.0, "help": "probability that an image is flipped"}]
Padding = Annotated[
    int, {"min": 0, "words": "a number of pixels for all four sides", "help": "pixels added on each side"}
]
PaddingMode = Annotated[
    str, {"choices": ("constant", "reflect"), "help": "what is added: zeros, or the image's mirror"}
]
Channels = Annotated[int, {"choices": (1, 3), "help": "channels of the result"}]
_BY_CHANNEL = {"words": "a number for each channel"}
Numbers = Annotated[float | list[float], {**_BY_CHANNEL, "help": "subtracted from a channel"}]
Deviations = Annotated[float | list[float], {**_BY_CHANNEL, "above": 0.0, "help": "what a channel is then divided by"}]


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _to_tensor(x: Tensor, rng: Rng) -> Tensor:
    return x if x.is_floating_point() else x.float() / 255


def _normalize(x: Tensor, rng: Rng, mean: Numbers, std: Deviations) -> Tensor:
    shift, scale = (torch.tensor(value if isinstance(value, list) else [value])[:, None, None] for value in (mean, std))
    if not {len(shift), len(scale)} <= {1, x.shape[1]}:
        raise ValueError(f"mean and std have {len(shift)} and {len(scale)} numbers, the images {x.shape[1]} channel(s)")
    return (_to_tensor(x, rng) - shift) / scale


def _flip(x: Tensor, rng: Rng, axis: int, p: float) -> Tensor:
    if rng is None:
        return x
    chosen = torch.from_numpy(rng.random(len(x)) < p)
    return torch.where(chosen[:, None, None, None], x.flip(axis), x)


def _random_horizontal_flip(x: Tensor, rng: Rng, p: Chance = 0.5) -> Tensor:
    return _flip(x, rng, 3, p)


def _random_vertical_flip(x: Tensor, rng: Rng, p: Chance = 0.5) -> Tensor:
    return _flip(x, rng, 2, p)


def _pad(x: Tensor, rng: Rng, padding: Padding, padding_mode: PaddingMode = "constant") -> Tensor:
    # torch mirrors no bytes
    return torch.nn.functional.pad(x.float(), [padding] * 4, mode=padding_mode).to(x.dtype)


def _random_crop(
    x: Tensor, rng: Rng, size: Size, padding: Padding = 0, padding_mode: PaddingMode = "constant"
) -> Tensor:
    height, width = _pair(size)
    windows = _pad(x, rng, padding, padding_mode).unfold(2, height, 1).unfold(3, width, 1)
    free = windows.shape[2:4]
    starts = (np.full(len(x), f // 2) if rng is None else rng.integers(0, f, len(x)) for f in free)
    tops, lefts = map(torch.from_numpy, starts)
    return windows[torch.arange(len(x)), :, tops, lefts].contiguous()


def _center_crop(x: Tensor, rng: Rng, size: Size) -> Tensor:
    height, width = _pair(size)
    if height > x.shape[2] or width > x.shape[3]:
        raise ValueError(f"cannot cut {height} × {width} out of {x.shape[2]} × {x.shape[3]}")
    top, left = round((x.shape[2] - height) / 2), round((x.shape[3] - width) / 2)
    return x[:, :, top : top + height, left : left + width]


def _resize(x: Tensor, rng: Rng, size: Size) -> Tensor:
    # one number is that of the shorter side
    target = size if isinstance(size, tuple) else tuple(size * s // min(x.shape[2:]) for s in x.shape[2:])
    resized = torch.nn.functional.interpolate(x.float(), target, mode="bilinear", antialias=True)
    return resized if x.is_floating_point() else resized.round().clamp(0, 255).to(x.dtype)


def _grayscale(x: Tensor, rng: Rng, num_output_channels: Channels = 1) -> Tensor:
    if x.shape[1] > 1:
        gray = (x.float() * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        x = gray if x.is_floating_point() else gray.round().to(x.dtype)
    return x.expand(-1, num_output_channels, -1, -1)


STEPS: dict[str, Callable[..., Tensor]] = {
    "ToTensor": _to_tensor,
    "Normalize": _normalize,
    "Resize": _resize,
    "CenterCrop": _center_crop,
    "Pad": _pad,
    "Grayscale": _grayscale,
    "RandomCrop": _random_crop,
    "RandomHorizontalFlip": _random_horizontal_flip,
    "RandomVerticalFlip": _random_vertical_flip,
}


class Pipeline:
    """The steps of ``data.transform``, ``data.val_transform`` or ``data.test_transform``, in order.

    Args:
        steps: each ``[name]`` or ``[name, arguments]``, as in FederatedScope.
        key: the config key, for messages.
        origin: where the key came from, for messages.

    Raises:
        UserError: an unknown step or argument (the message suggests the nearest), or a value out of range.
    """

    def __init__(self, steps: Sequence[Any], key: str = "data.transform", origin: Origin | None = None):
        self.key = key
        origin = origin or Origin()
        self.steps: list[tuple[str, Callable]] = []
        for i, step in enumerate(steps):
            parts, step_key = [step] if isinstance(step, str) else step, f"{key}.{i}"
            if not isinstance(parts, (list, tuple)) or not 1 <= len(parts) <= 2:
                origin.wrong(step_key, step, "[NAME] or [NAME, {ARGUMENT: VALUE}]")
            name = check_value(f"{step_key}.0", parts[0], Key(str, {"choices": tuple(STEPS)}), origin)
            keys = keys_of(STEPS[name], 2)
            args = check_keys(parts[1] if len(parts) == 2 else {}, keys, origin, f"{step_key}.1")
            self.steps.append((name, partial(STEPS[name], **args)))

    def __call__(self, x: Tensor, rng: np.random.Generator | None = None) -> Tensor:
        """Transform bytes ``(n, channels, height, width)`` to float32 of that form.

        Args:
            rng: for random steps; without it they are skipped, and random crops become center crops.
        """
        for name, step in self.steps:
            try:
                x = step(x, rng)
            except (ValueError, RuntimeError) as error:  # of torch, where a size does not fit
                raise UserError(f"{self.key}: {name}: {error}") from None
        return _to_tensor(x, rng).contiguous()


@dataclass
class ImageExamples:
    """``n`` images with one class each, with the interface of ``Examples``.

    Attributes:
        images: uint8 ``(m, channels, height, width)``, shared by all selections.
        rows: int64 ``(n,)``, indices into ``images``.
        labels: int64 ``(n,)``.
        pipeline: transforms a batch of bytes to floats.
    """

    images: np.ndarray = field(repr=False)
    rows: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)
    pipeline: Pipeline = field(repr=False)

    def __post_init__(self) -> None:
        self.rows = np.asarray(self.rows, dtype=np.int64)
        self.labels = np.asarray(self.labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Ones, int64 ``(n,)``: all images have the same size."""
        return np.ones(len(self.rows), dtype=np.int64)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)`` of the images of ``batch``."""
        channels, height, width = self.batch([0])["pixel_values"].shape[1:]
        return channels, height, width

    def select(self, indices: Sequence[int] | np.ndarray) -> ImageExamples:
        """The images at ``indices``, in that order; nothing is copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return ImageExamples(self.images, self.rows[chosen], self.labels[chosen], self.pipeline)

    def batch(
        self, indices: Sequence[int] | np.ndarray, augment: np.random.Generator | None = None
    ) -> dict[str, Tensor]:
        """One batch.

        Args:
            augment: draws the random steps of the pipeline; without it there are none.
        Returns:
            ``pixel_values``, float32 ``(batch, channels, height, width)``, and ``labels``, int64 ``(batch,)``.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        pixels = torch.from_numpy(self.images[self.rows[chosen]])
        return {"pixel_values": self.pipeline(pixels, augment), "labels": torch.from_numpy(self.labels[chosen])}

    def fingerprint(self) -> str:
        """SHA-256 in hex over images and labels; equal contents give equal fingerprints on every machine."""
        digest = hashlib.sha256(np.array([len(self), *self.images.shape[1:]], "<i8").tobytes())
        for start in range(0, len(self), _CHUNK):
            digest.update(self.images[self.rows[start : start + _CHUNK]].tobytes())
        digest.update(b"classes\0" + self.labels.astype("<i8").tobytes())
        return digest.hexdigest()
