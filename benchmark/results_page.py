"""The generated parts of the page of the results and the README: what is between ``<!-- NAME -->`` marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fs_lowrank.jobs.files import write_text

from . import methods_table
from .blocks import Block, Heading, Image, PlainTable, markdown
from .conditions import FAILS, UNTESTED
from .frame import frame
from .plan import command
from .store import Store
from .verdicts import Row, said_of

PICTURE = "methods.svg"


def write_pages(root: Path, store: Store, rows: Sequence[Row]) -> list[Path]:
    """Write the generated parts of ``README.md`` below the results and beside them; those that have none stay."""
    here, front = root / "README.md", root.parent / "README.md"
    if not (here.is_file() and front.is_file()):
        return []
    cells = frame(store)
    methods_table.draw(cells, root / PICTURE)
    shown = [row for row in rows if row.suite.size == "small" or not row.suite.sized]
    larger = {(row.suite.name, row.name): row for row in rows if row not in shown and row.verdict != UNTESTED}
    parts: dict[Path, dict[str, Sequence[Block]]] = {
        here: {"methods": methods(cells), "table": [claims(shown)], "claims": sections(shown, larger)},
        front: {"methods": [methods_table.table(cells, methods_table.FRONT, "fedlora")]},
    }
    for path, of_page in parts.items():
        before = text = path.read_text(encoding="utf-8")
        for name, blocks in of_page.items():
            head, mark, rest = text.partition(f"<!-- {name} -->\n")
            _, end, tail = rest.partition(f"<!-- /{name} -->")
            if mark and end:
                text = head + mark + markdown([block for block in blocks if block]) + end + tail
        if text != before:
            write_text(path, text)
    return [here, front]


def methods(cells: pd.DataFrame) -> list[Block]:
    """Which method, for text and for images."""
    return [
        "Text, MiniLM on SST-2 and four-domain sentiment: the settings that a method shares with LoRA.",
        methods_table.table(cells, methods_table.TEXT, "fedlora"),
        "Images, small networks from scratch on Fashion-MNIST and CIFAR-10: the settings that it shares with FedAvg.",
        methods_table.table(cells, methods_table.IMAGES, "fedavg"),
        Image("accuracy against the bytes that a client sends up, for each method", PICTURE),
    ]


def claims(rows: Sequence[Row]) -> PlainTable:
    """All claims, each with its least gap."""
    lines = [("claim", "verdict", "the comparison that is met least (95 % interval)", "seeds")]
    lines += [(f"[{row.claim['says']}](#{_anchor(row)})", _verdict(row), row.gap, row.seeded) for row in rows]
    return PlainTable(lines, claims=True)


def _verdict(row: Row) -> str:
    """The verdict; what does not hold in a smaller setting does not hold *here*."""
    return row.verdict.replace(FAILS, f"{FAILS} here") if row.suite.sized else row.verdict


def _anchor(row: Row) -> str:
    return f"{row.suite.name}-{row.name}"


def sections(rows: Sequence[Row], larger: Mapping[tuple[str, str], Row]) -> list[Block]:
    """A section for each claim, by suite.

    Args:
        larger: (suite, claim) -> the row of the paper's own size, if it was tested.
    """
    blocks: list[Block] = []
    suites: list[str] = []
    for row in rows:
        suite, claim = row.suite, row.claim
        if suite.name not in suites:
            suites.append(suite.name)
            blocks += [Heading(suite.title, 2), suite.source, suite.note]
        blocks += [f'<a id="{_anchor(row)}"></a>', Heading(claim["says"], 3, _verdict(row)), *said_of(row)]
        if paper := larger.get((suite.name, row.name)):
            blocks.append(f"With `--size paper`: {paper.verdict}; {paper.gap}.")
        there = [e for e in claim["experiments"] if row.runs.get(e)]
        blocks.append(f"`{_command(row, there or [claim['experiments'][0]])}`")
    return blocks


def _command(row: Row, experiments: Sequence[str]) -> str:
    first = row.suite.experiments[experiments[0]] if experiments[0] in row.suite.experiments else None
    if first is not None and first.script.startswith("studies."):
        return f"python -m {first.script} {' '.join(first.args)}".strip()
    if first is None:
        return f"fs-lowrank benchmark run {row.suite.name} --size paper --only {experiments[0]} --data FOLDER"
    whole = command(row.suite, first, "local").replace(f"--only {first.name}", f"--only {','.join(experiments)}")
    return f"{whole} --data FOLDER --workers 2"
