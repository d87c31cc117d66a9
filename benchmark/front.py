"""The picture and the table of the README: ``python -m benchmark.front``, after a demo with ``--demo runs/demo``.

The picture is drawn from ``results/demo/rounds.json``, which ``--demo`` writes anew, together with the other files of
``results/demo``. The table is computed from the committed cells and takes the place of the one in the README.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from fs_lowrank.jobs import shell
from fs_lowrank.jobs.files import read_json, write_text
from fs_lowrank.runs.records import read_records

from .blocks import PlainTable, markdown
from .frame import frame
from .job import Options

ROUNDS = Path("results/demo/rounds.json")
PICTURES = Path("docs/pictures")
#: the table's place in the README
_PLACE = re.compile(r"(?<=<!-- methods -->\n).*?(?=<!-- /methods -->)", re.S)
#: background: text, then the lines; the two sets of colours of Okabe and Ito that can be told apart on it
_COLOURS = {
    "light": ("#24292f", "#0072B2", "#D55E00", "#009E73", "#AA4499"),
    "dark": ("#d0d7de", "#56B4E9", "#E69F00", "#2FC79A", "#E69FC8"),
}
#: what the accuracies are relative to
LORA = "fedlora"
SENT = ["uplink_without_head", "downlink_without_head"]
#: suite -> the rows that it measures: method, take it if, exact, unequal ranks
ROWS = {
    "glue": (
        (LORA, "you have no reason for another one", "no", "no"),
        ("rolora", "bytes matter", "yes", "no"),
        ("ffa_lora", "only one matrix of the pair may change", "yes", "no"),
        ("flexlora", "clients need unequal ranks", "but for the cut to the rank", "yes"),
        ("flora", "the same, an exact mean, and a cheap downlink", "yes", "yes"),
    ),
    "vision": (("fedhm", "image networks start from scratch, at unequal ranks", "but for the cut", "yes"),),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.front", description=__doc__.split("\n")[0])
    parser.add_argument("--demo", type=Path, metavar="FOLDER", help="the folder of a demo that has ended")
    args = parser.parse_args(argv)
    if args.demo:
        take(args.demo)
    draw(read_json(ROUNDS))
    page = Path("README.md")
    write_text(page, with_table(page.read_text(encoding="utf-8"), methods_table()))
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


def with_table(page: str, lines: str) -> str:
    return _PLACE.sub(lambda _: lines + "\n", page)


def methods_table() -> str:
    """The rows of ``ROWS`` with what the committed cells say, as Markdown."""
    rows = [("method", "take it if", "accuracy against LoRA", "bytes up, down", "exact mean", "unequal ranks")]
    cells = frame(Options(()).store)
    for suite, entries in ROWS.items():
        settings = by_setting(cells[cells["suite"] == suite])
        for method, reason, exact, ranks in entries:
            accuracy, sent = against_lora(settings, method) if method != LORA else ("0", "1×, 1×")
            rows.append((f"`{method}`", reason, accuracy, sent, exact, ranks))
    return markdown([PlainTable(rows)]).rstrip()


def by_setting(cells: pd.DataFrame) -> pd.DataFrame:
    """The means over seeds of each method and setting. Without cells of a curve over the learning rate, of which most
    are not at a method's best one, and settings in which LoRA is no better than the majority class.
    """
    cells = cells[cells["test_acc"].notna() & ~cells["setting"].str.contains("(?:^|; )rate ")]
    place = ["size", "experiment", "setting"]
    lora = cells[cells["method"] == LORA]
    learned = (lora["test_acc"] > lora["majority"]).groupby([lora[name] for name in place]).all()
    means = cells.groupby(["method", *place])[["test_acc", *SENT]].mean()
    return means[means.index.droplevel("method").isin(learned.index[learned])]


def against_lora(settings: pd.DataFrame, method: str) -> tuple[str, str]:
    """The median difference to LoRA over the settings, with the worst and the best one; and the quotients of the bytes
    of a client and round, without the head.
    """
    both = settings.loc[method].join(settings.loc[LORA], rsuffix="_of_lora", how="inner")
    gaps = 100 * (both["test_acc"] - both["test_acc_of_lora"])
    signed = (f"{x:+.1f}".replace("-", "−") for x in (gaps.median(), gaps.min(), gaps.max()))
    quotients = []
    for metric in SENT:
        found = (both[metric] / both[f"{metric}_of_lora"]).round(1)
        low, high = found.min(), found.max()
        quotients.append(f"{low:g}×" if low == high else f"{low:g} to {high:g}×")
    return "{} ({} to {}), {} settings".format(*signed, len(gaps)), ", ".join(quotients)


if __name__ == "__main__":
    raise SystemExit(main())
