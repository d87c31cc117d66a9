"""The picture of the README: ``python -m benchmark.front``, after a demo with ``--demo runs/demo``.

It is drawn from ``results/demo/rounds.json``, which ``--demo`` writes anew, together with the other files of
``results/demo``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fs_lowrank.jobs import shell
from fs_lowrank.jobs.files import read_json, write_text
from fs_lowrank.runs.records import read_records

ROUNDS = Path("results/demo/rounds.json")
PICTURES = Path("docs/pictures")
#: background: text, then the lines; the two sets of colours of Okabe and Ito that can be told apart on it
_COLOURS = {
    "light": ("#24292f", "#0072B2", "#D55E00", "#009E73", "#AA4499"),
    "dark": ("#d0d7de", "#56B4E9", "#E69F00", "#2FC79A", "#E69FC8"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.front", description=__doc__.split("\n")[0])
    parser.add_argument("--demo", type=Path, metavar="FOLDER", help="the folder of a demo that has ended")
    args = parser.parse_args(argv)
    if args.demo:
        take(args.demo)
    draw(read_json(ROUNDS))
    return shell.OK


def take(folder: Path) -> None:
    """Copy the results of a demo: its comparison and picture, and by method the bytes and accuracies by round."""
    for name in ("comparison.json", "curves.png"):
        shutil.copyfile(folder / name, ROUNDS.parent / name)
    rounds = {
        method: curve(read_records(folder / method / "rounds.jsonl", up_to=sys.maxsize))
        for method in read_json(folder / "comparison.json")
    }
    write_text(ROUNDS, json.dumps(rounds, indent=1) + "\n")


def curve(records: Sequence[Mapping]) -> list[tuple[int, float]]:
    """The bytes of all clients, up and down, until each evaluation, and the accuracy on the test data."""
    points, sent = [], 0
    for record in records:
        sent += record["uplink_bytes"] + record["downlink_bytes"]
        if "test" in record["metrics"]:
            points.append((sent, record["metrics"]["test"]["acc"]))
    return points


def draw(rounds: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Write the picture for light and for dark pages, as SVG that is the same for the same data."""
    with matplotlib.rc_context({"svg.hashsalt": "front", "svg.fonttype": "none", "font.size": 11}):
        for name, (ink, *colours) in _COLOURS.items():
            figure = Figure(figsize=(7.2, 3.4), layout="constrained")
            axes = figure.subplots()
            for (method, points), colour in zip(rounds.items(), colours, strict=True):
                megabytes, accuracies = [sent / 1e6 for sent, _ in points], [acc for _, acc in points]
                axes.plot(megabytes, accuracies, "o-", color=colour, markersize=4, label=method)
            axes.legend(loc="lower right", frameon=False, labelcolor=ink)  # every curve has risen there
            axes.set_xlabel("MB sent, up and down, by all clients", color=ink)
            axes.set_ylabel("accuracy on held-out data", color=ink)
            axes.tick_params(colors=ink)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(ink)
            axes.grid(color=ink, alpha=0.15)
            PICTURES.mkdir(exist_ok=True)
            figure.savefig(PICTURES / f"demo-{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
