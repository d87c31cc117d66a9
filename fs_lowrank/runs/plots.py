"""Plots of learning curves."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..jobs.files import cannot_write, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_curves(histories: Mapping[str, Sequence[dict]], path: Path, majority: float | None = None) -> Path:
    """Write ``curves`` to the image file ``path``, which is returned.

    Raises:
        RunFailed: it cannot be written.
    """
    figure = curves(histories, majority)
    try:
        with replacing(path, durable=False) as aside:
            figure.savefig(aside, format="png", dpi=120)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def curves(histories: Mapping[str, Sequence[dict]], majority: float | None = None) -> Figure:
    """Plot held-out accuracy (for a causal LM: loss) by round and by bytes, and training loss by round.

    Args:
        histories: records by label (the name of a method).
        majority: fraction of the most frequent class; None for a causal LM.
    Returns:
        A figure without pyplot; a notebook shows it.
    """
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            """What a notebook shows, whatever its backend is."""
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=80)
            return image.getvalue()

    figure = Shown(figsize=(13, 4), layout="constrained")
    accuracy, traffic, loss = figure.subplots(1, 3)
    split = next((s for h in histories.values() for r in h for s in ("test", "val") if s in r["metrics"]), None)
    metric = "acc" if majority is not None else "loss"
    for label, history in histories.items():
        points = [(r["round"], r["metrics"][split][metric]) for r in history if split in r["metrics"]]
        sent, total = [], 0
        for record in history:
            total += record["uplink_bytes"] + record["downlink_bytes"]
            if split in record["metrics"]:
                sent.append(total / 1e6)
        accuracy.plot(*zip(*points), marker=".", label=label)
        traffic.plot(sent, [y for _, y in points], marker=".", label=label)
        loss.plot([r["round"] for r in history], [r["loss"] for r in history], label=label)
    if majority is not None:
        for axes in (accuracy, traffic):
            axes.axhline(majority, color="grey", linestyle=":", label="majority class")
    name = {"acc": "accuracy", "loss": "loss"}[metric]
    for axes, x, y in (
        (accuracy, "round", f"{split} {name}"),
        (traffic, "megabytes sent so far, both directions", f"{split} {name}"),
        (loss, "round", "mean training loss"),
    ):
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
    if accuracy.lines:
        accuracy.legend()
    return figure
