"""Pictures of runs, each as a PNG file and, for papers, as a PDF file beside it.

They are drawn on matplotlib's ``Figure`` objects, so nothing global is changed: no backend, no parameters.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import counted, say_once
from ..jobs.files import cannot_write, replacing
from ..settings.metrics import METRICS, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..settings import Settings

Record = dict[str, Any]
History = Sequence[Record]
#: label (the name of a method) → the records of its runs, one for each seed
Histories = Mapping[str, Sequence[History]]

#: fonts that draw what matplotlib's own does not, such as Chinese
_WIDE = re.compile("CJK|Unicode|Fallback|SimHei|YaHei|PingFang|WenQuanYi|Unifont")
#: of clients that are drawn; the others are counted in the title
MOST_CLIENTS = 100
#: of classes that are drawn as stacked bars, or with numbers in a confusion matrix; more are drawn as an image
MOST_CLASSES = 12
_HALVES: dict[str, tuple[str, Any]] = {
    "lora_A": ("A", "-"),
    "lora_B": ("B", "--"),
    "adapter": ("adapter", "-"),
    "head": ("head", ":"),
    "base": ("base weights", "-."),
}


def setting_of(config: Settings, *, seeds: Sequence[int] = (), rate: bool = True) -> str:
    """What is compared, in one line: data, model, clients, split, rate and seeds; a picture's title."""
    args = config.data.splitter_args[0] if config.data.splitter_args else {}
    how = ", ".join(f"{key} {value}" for key, value in args.items())
    seeds = seeds or [config.seed]
    parts = [
        Path(config.data.type.partition("@")[0]).name,
        Path(config.model.type.partition("@")[0]).name,
        f"{counted(config.taking_part, 'client')}, {config.sampled_per_round} a round",
        f"{config.data.splitter} split" + f" ({how})" * bool(how),
        *([f"lr {config.train.optimizer.lr:g}"] if rate else []),
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
    ]
    return " · ".join(parts)


def plot_curves(
    histories: Mapping[str, History],
    path: Path,
    majority: float | None = None,
    *,
    title: str = "",
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Draw ``curves`` of one run for each label into ``path`` and the PDF beside it; returns ``path``.

    Raises:
        RunFailed: it cannot be written.
    """
    return save(curves({n: [h] for n, h in histories.items()}, majority, title=title, sizes=sizes), path)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, and as PDF beside it; returns ``path``.

    Raises:
        RunFailed: it cannot be written.
    """
    from matplotlib.font_manager import fontManager
    from matplotlib.text import Text

    others = sorted({font.name for font in fontManager.ttflist if _WIDE.search(font.name)})
    for text in figure.findobj(Text) if others else ():
        text.set_fontfamily(["sans-serif", *others])
    # The PNG last, so that where it is, the PDF is, too. Without the date, the same figure is the same file.
    kinds: dict[Path, dict[str, Any]] = {
        path.with_suffix(".pdf"): {"metadata": {"CreationDate": None}},
        path: {"dpi": 120},
    }
    files = {}
    with warnings.catch_warnings(record=True) as caught:
        figure.draw_without_rendering()  # the layout, which takes longer than the rest: once for both files
        figure.set_layout_engine("none")
        for target, options in kinds.items():
            files[target] = io.BytesIO()  # on a full disk matplotlib would raise other errors than those of the disk
            figure.savefig(files[target], format=target.suffix[1:], **options)
    if any("missing from font" in str(warning.message) for warning in caught):
        say_once("pictures have characters that no font here draws; install one that does, such as Noto Sans CJK")
    for target, content in files.items():
        try:
            with replacing(target, durable=False) as aside:
                aside.write_bytes(content.getvalue())
        except OSError as error:
            raise cannot_write(target, error) from error
    return path


def plain(text: str) -> str:
    """``text`` as matplotlib is given it; what stands between two ``$`` would be read as a formula."""
    return text.replace("$", r"\$")


def legend(on: Axes | Figure, handles: Mapping[str, Any], **options: Any) -> None:
    """A legend of ``handles`` by their names; by itself matplotlib leaves out names that begin with ``_``."""
    made = on.legend(list(handles.values()), [str(i) for i in range(len(handles))], **options)
    for text, name in zip(made.get_texts(), handles):
        text.set_text(plain(name))


# -- curves ----------------------------------------------------------------------------------------------


def curves(
    histories: Histories, majority: float | None = None, *, title: str = "", sizes: Mapping[str, int] | None = None
) -> Figure:
    """Held-out score by round, bytes and seconds, the other held-out metric, training loss, norms and drift by round.

    With several runs of a label, lines are means, and bands one standard deviation over the runs; with one, the band of
    an accuracy is one standard error of the held-out data.

    Args:
        majority: fraction of the most frequent class; None for a causal LM, whose score is the loss.
        title: above the figure. sizes: number of held-out samples by split (``test``, ``val``).
    """
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            """What a notebook shows, whatever its backend is."""
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=80)
            return image.getvalue()

    figure = Shown(figsize=(16, 7.4), layout="constrained")
    records = [record for runs in histories.values() for history in runs for record in history]
    split = next((s for r in records for s in ("test", "val", "client_test") if s in r["metrics"]), "")
    there = sorted({m for r in records for m in r["metrics"].get(split, {})})
    accuracy = next((m for m in there if m in ("acc", "token_acc")), "acc")
    first, second = (accuracy, "loss") if majority is not None else ("loss", accuracy)
    # A metric that was asked for takes the place of the second.
    second = next((m for m in there if m in METRICS and m not in ("acc", "loss")), second)
    words = {"loss": "loss", accuracy: "accuracy" if majority is not None else "next-token accuracy"}
    size = (sizes or {}).get(split, 0) if majority is not None else 0
    held_out = [(first, x) for x in _PLACES] + [(second, "round")]
    panels = list(figure.subplots(2, 4).flat)
    named: dict[str, Any] = {}
    for axes, (metric, x) in zip(panels, held_out):
        for i, (label, runs) in enumerate(histories.items()):
            found = [_points(h, x, "metrics", split, metric) for h in runs]
            _line(axes, found, i, size if metric == accuracy else 0, named=label, handles=named)
        if metric == accuracy and majority is not None and axes.lines:
            named["majority class"] = axes.axhline(majority, color="grey", linestyle=":", label="majority class")
        _finish(axes, _PLACES[x][0], f"{split} {words.get(metric, metric)}", x == "round")
        _calm(axes, max(0.1, 8 * math.sqrt(0.25 / size) if size else 0) if metric == accuracy else 0)
    for i, (label, runs) in enumerate(histories.items()):
        _line(panels[4], [_points(h, "round", "loss") for h in runs], i, named=label, handles=named)
        for axes, key in ((panels[5], "adapter_norm"), (panels[6], "drift")):
            for half, (_, style) in _HALVES.items():
                _line(axes, [_points(h, "round", key, half) for h in runs], i, style=style)
    _finish(panels[4], "round", "training loss, on clients' own data", True)
    _calm(panels[4])
    _finish(panels[5], "round", "norm of what is trained", True)
    _finish(panels[6], "round", "drift: norm of a client's change, mean", True)
    rounds = [record["round"] for record in records]
    for axes in panels:
        axes.set_visible(bool(axes.lines))
        if axes.get_xlabel() == "round" and len(set(rounds)) > 1:  # the same rounds in every panel
            pad = 0.05 * (max(rounds) - min(rounds))
            axes.set_xlim(min(rounds) - pad, max(rounds) + pad)
    _legend(panels[-1], named, {half for r in records for half in r.get("adapter_norm", {})})
    seeds = max((len(runs) for runs in histories.values()), default=0)
    band = f"one standard error of {size:,} {split} samples" if size else ""
    if seeds > 1:
        band = (
            f"one standard deviation over {seeds} seeds"
            + f"; the standard error of the {split} set is " * bool(size)
            + (f"{math.sqrt(0.25 / size):.3f} at most" if size else "")
        )
    set_title(figure, title, f"band: {band}" if band else "")
    return figure


def set_title(figure: Figure, *lines: str) -> None:
    """Write lines above a figure, broken to its width."""
    width = int(12.5 * figure.get_figwidth())
    # A blank that does not break keeps the dot at the end of a line.
    parts = [plain(textwrap.fill(line.replace(" · ", "\u00a0· "), width)) for line in lines if line]
    figure.suptitle("\n".join(parts), fontsize=10)


def _sent(record: Record) -> float:
    return float(record["uplink_bytes"] + record["downlink_bytes"]) / 1e6


def _spent(record: Record) -> float:
    return float(sum(record["seconds"].values()))


#: what a curve goes along: its name, and what a round adds
_PLACES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "round": ("round", lambda record: 1),
    "bytes": ("megabytes sent so far, both directions", _sent),
    "seconds": ("seconds so far", _spent),
}


def _points(history: History, x: str, *keys: str) -> list[tuple[float, float]]:
    """Of every record that has a value under ``keys``: where it stands on the axis ``x``, and the value."""
    points, at = [], 0.0
    for record in history:
        at = record["round"] if x == "round" else at + _PLACES[x][1](record)
        value: Any = record
        for key in keys:
            value = (value or {}).get(key)
        if value is not None:
            points.append((at, value))
    return points


def _line(
    axes: Axes,
    runs: Sequence[Sequence[tuple[float, float]]],
    index: int,
    size: int = 0,
    style: str = "-",
    *,
    named: str = "",
    handles: dict[str, Any] | None = None,
) -> None:
    """The mean of runs, with a band: over several of them, or that of an accuracy on ``size`` samples.

    Args:
        named, handles: in which the line is noted for the legend, and by which name.
    """
    count = min(map(len, runs), default=0)
    if not count:
        return
    x = [statistics.fmean(run[i][0] for run in runs) for i in range(count)]
    values = [[run[i][1] for run in runs] for i in range(count)]
    mean = [statistics.fmean(v) for v in values]
    ends = [(m, m) for m in mean]
    if len(runs) > 1:
        spread = [statistics.stdev(v) if all(map(math.isfinite, v)) else 0.0 for v in values]
        ends = [(m - s, m + s) for m, s in zip(mean, spread)]
    elif size:
        ends = [wilson(m, size) for m in mean]
    look: dict[str, Any] = {"color": f"C{index % 10}", "linestyle": style}
    (line,) = axes.plot(x, mean, marker="." if count <= 50 else "", **look)
    if handles is not None:
        handles[named] = line
    low, high = zip(*ends)
    if low != high:
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        if count == 1:  # no band has a width there
            arms = [[mean[0] - low[0]], [high[0] - mean[0]]]
            axes.errorbar(x, mean, arms, ecolor=look["color"], alpha=0.4, fmt="none", capsize=4)


def _finish(axes: Axes, x: str, y: str, rounds: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if rounds:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _calm(axes: Axes, least: float = 0.0) -> None:
    """Make the y axis ``least`` long, by default a quarter of its largest value, so that noise fills no panel."""
    low, high = axes.get_ylim()
    missing = (least or 0.25 * max(abs(low), abs(high))) - (high - low)
    if missing > 0 and axes.lines:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def _legend(axes: Axes, handles: Mapping[str, Any], halves: set[str]) -> None:
    """What the colours and the styles of all panels mean, in ``axes``, which has nothing else."""
    from matplotlib.lines import Line2D

    found = dict(handles)
    for half, (name, style) in _HALVES.items():
        if half in halves:
            found[f"norms: {name}"] = Line2D([], [], color="black", linestyle=style)
    axes.set(visible=True)
    axes.axis("off")
    if found:
        legend(axes, found, loc="center", ncols=1 + len(found) // 13)


# -- clients and classes ---------------------------------------------------------------------------------


def plot_clients(data: Mapping[str, Any], path: Path, title: str = "") -> Path:
    """Draw the samples of each client by class into ``path`` and the PDF beside it; returns ``path``.

    Args:
        data: the content of ``data.json``. title: above the figure.
    Raises:
        RunFailed: it cannot be written.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients = data["clients"][:MOST_CLIENTS]
    names = list(clients[0].get("labels", {}))
    figure = Figure(figsize=(min(6 + 0.15 * len(clients), 14), 4.2), layout="constrained")
    axes = figure.subplots()
    at = [client["client"] for client in clients]
    counts = np.array([[c["labels"][n] for n in names] if names else [c["size"]] for c in clients])
    if len(names) > MOST_CLASSES:
        image = axes.imshow(counts.T, aspect="auto", extent=(0.5, len(at) + 0.5, len(names) - 0.5, -0.5))
        figure.colorbar(image, label="samples")
        axes.set(xlabel="client", ylabel="class")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        base, bars = np.zeros(len(at)), {}
        for name, column in zip(names or ["samples"], counts.T):
            bars[name] = axes.bar(at, column, bottom=base, width=0.85)
            base = base + column
        axes.set(xlabel="client", ylabel="training samples")
        if names:
            legend(figure, bars, loc="outside right center", title="class", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    others = len(data["clients"]) - len(clients)
    more = f"the first {len(clients)} of {len(data['clients'])} clients" if others else ""
    set_title(figure, title, more)
    return save(figure, path)


def plot_test(
    on_test: Mapping[str, Any], path: Path, names: Sequence[str], majority: float | None = None, *, title: str = ""
) -> Path:
    """Draw what was predicted for the test set into ``path`` and the PDF beside it; returns ``path``.

    Args:
        on_test: the confusion matrix and the accuracy by client, of ``Evaluator.on_test``. names: of the classes.
        majority: fraction of the most frequent class. title: above the figure.
    Raises:
        RunFailed: it cannot be written.
    """
    import numpy as np
    from matplotlib.figure import Figure

    counts = np.asarray(on_test["confusion"])
    side = 3.5 + 0.4 * min(len(counts), MOST_CLASSES)
    figure = Figure(figsize=(2 * side + 3, side + 0.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure.colorbar(left.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the class")
    left.set(xlabel="predicted class", ylabel="true class")
    if len(counts) <= MOST_CLASSES:
        short = [plain(name if len(name) <= 16 else name[:15] + "…") for name in names]
        left.set_xticks(range(len(names)), short, rotation=45 if max(map(len, names)) > 4 else 0)
        left.set_yticks(range(len(names)), short)
        for (i, j), count in np.ndenumerate(counts):
            left.text(j, i, f"{count}", ha="center", va="center", color="white" if shares[i, j] > 0.6 else "black")
    scores = sorted(on_test["clients"].items(), key=lambda item: item[1]["acc"])
    accuracies = [score["acc"] for _, score in scores]
    if len(scores) <= MOST_CLIENTS:
        ends = [wilson(s["acc"], int(s["samples"])) for _, s in scores]
        below = [a - low for a, (low, _) in zip(accuracies, ends)]
        above = [high - a for a, (_, high) in zip(accuracies, ends)]
        right.bar(range(len(scores)), accuracies, color="C0")
        right.errorbar(range(len(scores)), accuracies, [below, above], fmt="none", ecolor="black", capsize=2)
    else:  # a bar for each of very many clients takes minutes
        right.stairs(accuracies, fill=True, color="C0")
    few = len(scores) <= 30
    right.set_xticks(range(len(scores)) if few else [], [client for client, _ in scores] if few else [])
    right.tick_params(axis="x", length=0, labelsize=10 if len(scores) <= 12 else 7)
    right.set(xlabel="client, from the lowest to the highest", ylabel="accuracy on its share of the test set")
    right.set_ylim(0, 1.02)
    if majority is not None:
        right.axhline(majority, color="grey", linestyle=":", label="majority class of the test set")
        right.legend(loc="upper left")
    set_title(figure, title, "the global model on the test set; bars: Wilson's interval of one standard error")
    return save(figure, path)
