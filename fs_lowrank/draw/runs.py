"""The panels of a run: its curves, its clients, and its predictions for the test set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import counted
from ..settings.metrics import METRICS, wilson
from .figures import COLOURS, GREY, figure
from .panels import Bars, Line, Matrix, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..settings import Settings

Record = dict[str, Any]
History = Sequence[Record]
#: label (the name of a method) → the records of its runs, one for each seed
Histories = Mapping[str, Sequence[History]]

#: of clients that are drawn; the others are counted in the title
MOST_CLIENTS = 100
#: of classes that are drawn as stacked bars, or with numbers in a confusion matrix
MOST_CLASSES = len(COLOURS)
_PARTS: dict[str, tuple[str, Any]] = {
    "lora_A": ("matrix A", "-"),
    "lora_B": ("matrix B", "--"),
    "adapter": ("adapter", "-"),
    "head": ("head", (0, (5, 1, 1, 1, 1, 1))),
    "base": ("base weights", "-."),
}
_WORDS = {"acc": "accuracy", "token_acc": "next-token accuracy", "f1": "F1", "matthews": "Matthews' correlation"}
SPLITS = ("test", "val", "client_test")
#: the axes of x of a curve, with their labels
_AXES = {"round": "round", "bytes": "MB sent so far by all clients, up and down"}


def setting_of(config: Settings, *, seeds: Sequence[int] = ()) -> str:
    """The setting of a run in one line: data, model, clients, split, rate and seeds; a picture's title."""
    args = config.data.splitter_args[0] if config.data.splitter_args else {}
    details = f" ({', '.join(f'{key} {value}' for key, value in args.items())})" if args else ""
    seeds = seeds or [config.seed]
    parts = [
        Path(config.data.type.partition("@")[0]).name,
        Path(config.model.type.partition("@")[0]).name,
        f"{counted(config.taking_part, 'client')}, {config.sampled_per_round} a round",
        f"{config.data.splitter} split{details}",
        f"lr {config.train.optimizer.lr:g}",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
    ]
    return " · ".join(parts)


# -- curves ----------------------------------------------------------------------------------------------


def words(split: str, metric: str) -> str:
    """The name of a split's metric, for people."""
    return f"{split} {_WORDS.get(metric, metric)}".replace("_", " ")


def main_metric(histories: Histories, language: bool) -> tuple[str, str]:
    """The split and the metric that runs are judged by: of a language model the loss, otherwise the accuracy if any.

    Both are empty if nothing was evaluated.
    """
    measured = [r["metrics"] for runs in histories.values() for history in runs for r in history]
    ranked = ("loss", "acc") if language else ("acc", "loss")
    choices = ((s, m) for s in SPLITS for m in ranked if any(m in metrics.get(s, {}) for metrics in measured))
    return next(choices, ("", ""))


def curve_panels(
    histories: Histories,
    majority: float | None = None,
    sizes: Mapping[str, int] | None = None,
    splits: Sequence[str] = SPLITS,
    *,
    language: bool = False,
) -> list[Panel]:
    """The metric that counts by round and by bytes; other metrics, training loss, norms and drift by round.

    With several runs of a label, lines are means, and bands one standard deviation over the runs; where every label has
    one, the band of an accuracy is one standard error of the held-out data.

    Args:
        majority: fraction of the most frequent class of the test set, if there is one.
        sizes: number of held-out samples by split (``test``, ``val``). splits: of which metrics are shown.
        language: whether the runs are of language models, whose accuracy is that of the next token.
    """
    counts = main_metric(histories, language)
    panels = []
    for split, metric in [counts, *((s, m) for s in splits for m in (*METRICS, "token_acc") if (s, m) != counts)]:
        shares = metric in ("acc", "token_acc")
        size = (sizes or {}).get(split, 0) if metric == "acc" and not language else 0
        name = words(split, "token_acc" if shares and language else metric)
        for axis in _AXES if (split, metric) == counts else ("round",):
            lines = _lines(histories, axis, ("metrics", split, metric), size)
            if lines and (split, metric) == ("test", "acc") and majority is not None:
                ends = [end(x for line in lines for x in line.x) for end in (min, max)]
                lines.append(Line("majority class", ends, [majority] * 2, colour=GREY, style=":"))
            least = max(0.1, 8 * math.sqrt(0.25 / size) if size else 0) if shares else None
            panels.append(_curve(name, axis, lines, least, share=shares, main=(split, metric) == counts))
    panels.append(_curve("training loss, clients' own data", "round", _lines(histories, "round", ("loss",))))
    for key, name in (("adapter_norm", "norm of the trained tensors"), ("drift", "mean norm of a client's change")):
        lines = [line for part in _PARTS for line in _lines(histories, "round", (key, part))]
        panels.append(_curve(name, "round", lines))
    # One evaluation is no curve, but it may be the result.
    return [
        panel
        for panel in panels
        if any(panel.main or len({*line.x}) > 1 for line in panel.marks if isinstance(line, Line))
    ]


def _curve(name: str, axis: str, lines: Sequence[Line], least: float | None = None, **options: Any) -> Panel:
    """A panel whose axis of y is ``least`` long, by default a quarter of its largest value."""
    if least is None:
        least = 0.25 * max((abs(y) for line in lines for y in line.y if math.isfinite(y)), default=0.0)
    key, title = f"{name}-{axis}".replace(" ", "-").replace("'", ""), f"{name} by {axis}"
    return Panel(key, title, _AXES[axis], name, lines, least=least, whole=axis == "round", **options)


def _lines(histories: Histories, axis: str, keys: Sequence[str], size: int = 0) -> list[Line]:
    """For each label the mean over its runs of the records' values under ``keys``, with a band.

    Labels without a value are left out, and by bytes the labels that send nothing.
    """
    (means, style), several = _PARTS.get(keys[-1], ("", "-")), any(len(runs) > 1 for runs in histories.values())
    lines = []
    for index, (label, runs) in enumerate(histories.items()):
        points = np.array([*zip(*(_points(history, axis, keys) for history in runs))])  # to the end of the shortest
        if not len(points) or axis == "bytes" and not points[..., 0].any():
            continue
        x, y = points.mean(axis=1).T.tolist()
        ends = np.empty((2, 0))
        if len(runs) > 1:
            ends = np.array(y) + [[-1], [1]] * points[..., 1].std(axis=1, ddof=1)
        elif size and not several:
            ends = np.transpose([wilson(mean, size) for mean in y])  # NaN of NaN
        low, high = ends.tolist()
        lines.append(Line(label, x, y, low, high, colour=index, style=style, means=means))
    return lines


def _points(history: History, axis: str, keys: Sequence[str]) -> list[tuple[float, float]]:
    """Of every record that has a value under ``keys``: its place on the axis, and the value."""
    points, sent = [], 0.0
    for record in history:
        sent += (record["uplink_bytes"] + record["downlink_bytes"]) / 1e6
        value: Any = record
        for key in keys:
            value = (value or {}).get(key)
        if value is not None:
            points.append((record["round"] if axis == "round" else sent, value))
    return points


def band_of(histories: Histories, sizes: Mapping[str, int] | None, *, language: bool) -> str:
    """The meaning of the bands of ``curve_panels``; empty if there are none."""
    seeds = max((len(runs) for runs in histories.values()), default=0)
    split, metric = main_metric(histories, language)
    size = (sizes or {}).get(split, 0) if metric == "acc" and not language else 0
    if seeds > 1:
        return f"bands: one standard deviation over {seeds} seeds"
    return f"bands: one standard error of {size:,} {split} samples" if size else ""


def curves(
    histories: Histories,
    majority: float | None = None,
    *,
    title: str = "",
    sizes: Mapping[str, int] | None = None,
    language: bool = False,
) -> Figure:
    """``curve_panels`` of the split that counts, as a figure, with ``title`` and ``band_of`` above."""
    split, _ = main_metric(histories, language)
    panels = curve_panels(histories, majority, sizes, [split], language=language)
    return figure(panels, "\n".join(filter(None, (title, band_of(histories, sizes, language=language)))))


# -- clients and classes ---------------------------------------------------------------------------------


def _ticks(clients: Sequence[str]) -> dict[int, str]:
    """As many clients as there is room for, by their places."""
    step = -(-len(clients) // 15)
    return {i: client for i, client in enumerate(clients) if i % step == 0}


def client_panel(data: Mapping[str, Any]) -> Panel:
    """The training samples of each client by class, from the content of ``data.json``."""
    count = len(data["clients"])
    clients = data["clients"][:MOST_CLIENTS]
    names, ticks = [*clients[0].get("labels", {})], _ticks([str(client["client"]) for client in clients])
    subject = f"the first {len(clients)} of {count} clients" if count > len(clients) else "each client"
    title = f"training samples of {subject}" + " by class" * bool(names)
    counts = {name: [client["labels"][name] for client in clients] for name in names}
    if len(names) > MOST_CLASSES:
        return Panel("clients", title, "client", "class", [Matrix([*counts.values()], "training samples")], ticks=ticks)
    bars = Bars(counts or {"": [client["size"] for client in clients]})
    return Panel("clients", title, "client", "training samples", [bars], ticks=ticks)


def confusion_panel(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Panel:
    """The predictions for the test set, as counts by true class and predicted class; ``names`` are the classes'."""
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    small = len(counts) <= MOST_CLASSES
    matrix = Matrix(shares, "share of the true class", 1.0, [[*map(str, row)] for row in counts] if small else ())
    ticks = {i: name if len(name) <= 16 else name[:15] + "…" for i, name in enumerate(names) if small}
    title = "predictions for the test set"
    return Panel("confusion", title, "predicted class", "true class", [matrix], ticks=ticks, rows=ticks)


def score_panel(scores: Mapping[str, Mapping[str, Mapping[str, float]]], majority: float | None = None) -> Panel:
    """The accuracy on each client's share of the test set, with intervals of one standard error.

    Args:
        scores: by model and client ``acc`` and ``samples``; clients are in the order of the first model's accuracy.
        majority: fraction of the most frequent class.
    """
    first = next(iter(scores.values()))
    clients = sorted(first, key=lambda client: first[client]["acc"])
    clients += sorted({client for by_client in scores.values() for client in by_client} - first.keys(), key=int)
    marks = []
    for index, (label, by_client) in enumerate(scores.items()):
        scored = {position: by_client[client] for position, client in enumerate(clients) if client in by_client}
        low, high = zip(*(wilson(score["acc"], int(score["samples"])) for score in scored.values()))
        y = [score["acc"] for score in scored.values()]
        marks.append(Line(label, [*scored], y, low, high, colour=index, style="", band=False))
    if majority is not None:
        ends = [-0.5, len(clients) - 0.5]
        marks.append(Line("majority class of the test set", ends, [majority] * 2, colour=GREY, style=":"))
    along = "client, by accuracy" + f" of {next(iter(scores))}" * (len(scores) > 1)
    title = "accuracy on each client's share of the test set"
    return Panel("client-scores", title, along, "accuracy", marks, share=True, ticks=_ticks(clients))


def predictions(
    on_test: Mapping[str, Any], names: Sequence[str], majority: float | None = None, *, title: str = ""
) -> Figure:
    """The predictions for the test set, as a figure.

    Args:
        on_test: the confusion matrix and the accuracy by client, of ``Evaluator.on_test``. names: of the classes.
        majority: fraction of the most frequent class. title: above the figure.
    """
    panels = [confusion_panel(on_test["confusion"], names), score_panel({"": on_test["clients"]}, majority)]
    note = "the global model on the test set; intervals: one standard error"
    side = 3.0 + 0.3 * min(len(names), MOST_CLASSES)
    return figure(panels, "\n".join(filter(None, (title, note))), size=(side + 1.8, side))
