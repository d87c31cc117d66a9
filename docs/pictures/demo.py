"""The picture of the README: ``python docs/pictures/demo.py``, after a demo ``python docs/pictures/demo.py runs/demo``.

It is drawn from ``results/demo/rounds.json``, which is written anew from the folder of a demo, together with the other
files of ``results/demo``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fs_lowrank.draw.figures import INK, PAPER, drawn, figure
from fs_lowrank.draw.panels import Line, Panel
from fs_lowrank.jobs.files import read_json, write_text
from fs_lowrank.runs.records import read_records

ROUNDS = Path("results/demo/rounds.json")
PICTURES = Path("docs/pictures")
#: background -> the colour of texts and axes, and the background's own
_LOOKS = {"light": ("#24292f", "#ffffff"), "dark": ("#d0d7de", "#0d1117")}


def main(folders: Sequence[str]) -> None:
    for folder in folders:
        take(Path(folder))
    draw(read_json(ROUNDS))


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
    lines = [
        Line(method, [sent / 1e6 for sent, _ in points], [accuracy for _, accuracy in points], colour=number)
        for number, (method, points) in enumerate(rounds.items())
    ]
    panel = Panel("demo", "", "MB sent, up and down, by all clients", "accuracy on held-out data", lines)
    text = drawn(figure([panel], size=(7.2, 3.4)), "svg").decode()
    for name, (ink, paper) in _LOOKS.items():
        coloured = text.replace(INK, ink).replace(PAPER, paper)
        # Texts without a colour of their own, as matplotlib writes black ones.
        coloured = coloured.replace('<style type="text/css">', f'<style type="text/css">text{{fill: {ink}}} ', 1)
        write_text(PICTURES / f"demo-{name}.svg", coloured)


if __name__ == "__main__":
    main(sys.argv[1:])
