"""Which method: a summary of the committed cells, in the settings that a method shares with LoRA, or with FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fs_lowrank.draw.panels import Panel

from .figures import draw_on_white, point

SENT = ["uplink_without_head", "downlink_without_head"]
#: kind of data -> the suites whose settings count, of the leaderboard those with texts
SUITES = {"texts": ("glue", "leaderboard"), "images": ("vision", "costs")}
LEADERBOARD_IMAGES = "fmnist"
#: rows of tables: kind of data, method, take it if, exact, unequal ranks
TEXT = (
    ("texts", "fedlora", "you have no reason for another one", "no", "no"),
    ("texts", "rolora", "bytes matter", "yes", "no"),
    ("texts", "ffa_lora", "only one matrix of the pair may change", "yes", "no"),
    ("texts", "flexlora", "clients need unequal ranks", "but for the cut to the rank", "yes"),
    ("texts", "flora", "the same, with an exact mean, where downlink is cheap", "yes", "yes"),
)
IMAGES = (
    ("images", "fedavg", "you can send all weights", "yes", "no"),
    ("images", "fedhm", "image networks start from scratch, at unequal ranks", "but for the cut", "yes"),
    ("images", "fedlora", "bytes matter", "no", "no"),
    ("images", "fedloru", "the rank has to grow over the rounds", "no", "no"),
)
FRONT = (*TEXT, IMAGES[1])


def by_setting(cells: pd.DataFrame, base: str) -> pd.DataFrame:
    """The means over seeds of each method and setting with two or more. Without cells of a curve over the learning
    rate, of which most are not at a method's best one, and settings in which ``base`` is no better than the majority
    class.
    """
    cells = cells[cells["test_acc"].notna() & ~cells["setting"].str.contains("(?:^|; )rate ")]
    keys = ["suite", "size", "experiment", "setting"]
    base_cells = cells[cells["method"] == base]
    learned = (base_cells["test_acc"] > base_cells["majority"]).groupby([base_cells[name] for name in keys]).all()
    groups = cells.groupby(["method", *keys])
    means = groups[["test_acc", "aggregation", *SENT]].mean()[groups.size() > 1]
    return means[means.index.droplevel("method").isin(learned.index[learned])]


def against(cells: pd.DataFrame, kind: str, method: str, base: str) -> pd.DataFrame:
    """By setting: ``gap`` of accuracy in points, and the quotients ``up``, ``down`` and ``server`` to ``base``."""
    suites = (cells["suite"] != "leaderboard") | (cells["experiment"] != LEADERBOARD_IMAGES)
    settings = by_setting(cells[suites & cells["suite"].isin(SUITES[kind])], base)
    joined = settings.loc[method].join(settings.loc[base].add_suffix("_of_base"), how="inner")
    quotients = {
        name: joined[metric] / joined[f"{metric}_of_base"]
        for name, metric in zip(("up", "down", "server"), (*SENT, "aggregation"))
    }
    return pd.DataFrame({"gap": 100 * (joined["test_acc"] - joined["test_acc_of_base"]), **quotients})


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _times(ratios: pd.Series) -> str:
    low, high = ratios.round(1).min(), ratios.round(1).max()
    return f"{low:g}×" if low == high else f"{low:g} to {high:g}×"


def table(cells: pd.DataFrame, methods: Sequence[Sequence[str]], base: str) -> list[tuple[str, ...]]:
    """By method the median gap to ``base`` with the worst and the best, the bytes, and the server's step."""
    head = ("method", "take it if", f"points against `{base}`", "bytes up, down", "server step")
    rows: list[tuple[str, ...]] = [(*head, "exact mean", "unequal ranks")]
    for kind, method, reason, *traits in methods:
        frame = against(cells, kind, method, base)
        gap = "0"
        if method != base:
            spread = map(signed, (frame["gap"].median(), frame["gap"].min(), frame["gap"].max()))
            gap = "{} ({} to {})".format(*spread) + f", ahead in {(frame['gap'] > 0).sum()} of {len(frame)} settings"
        sent = f"{_times(frame['up'])}, {_times(frame['down'])}"
        rows.append((f"`{method}`", reason, gap, sent, f"{frame['server'].median():.2g}×", *traits))
    return rows


def draw(cells: pd.DataFrame, path: Path) -> None:
    """Draw the gap of accuracy against the bytes up, a point a method with the middle half of its settings."""
    panels = []
    for base, methods in (("fedlora", TEXT), ("fedavg", IMAGES)):
        marks = []
        for index, (kind, method, *_) in enumerate(methods):
            frame = against(cells, kind, method, base)
            low, middle, high = frame["gap"].quantile([0.25, 0.5, 0.75])
            marks.append(point(method, index, float(frame["up"].median()), middle, (low, high)))
        panels.append(Panel(kind, "", f"bytes up, as a multiple of {base}'s", "points of accuracy", marks))
    draw_on_white(panels, "median and middle half of the settings", path, size=(4.5, 3.4), in_a_row=2)
