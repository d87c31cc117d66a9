"""The generated parts of the page of the results and the README, each between ``<!-- NAME -->`` marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fs_lowrank.jobs.files import write_text

from .conditions import UNTESTED
from .methods_table import FRONT, IMAGES, TEXT, draw, table
from .template import markdown
from .verdicts import Row

PICTURE = "methods.svg"


def has_page(root: Path) -> bool:
    """Whether the page of the committed results is below ``root``, with places for its generated parts."""
    page = root / "README.md"
    return page.is_file() and "<!-- methods -->" in page.read_text(encoding="utf-8")


def which_method(root: Path, cells: pd.DataFrame) -> str:
    """A summary of the committed cells by method, in Markdown, with the picture ``PICTURE`` below ``root``."""
    draw(cells, root / PICTURE)
    return markdown("methods", table(cells, TEXT, "fedlora"), table(cells, IMAGES, "fedavg"), PICTURE)


def write_pages(root: Path, cells: pd.DataFrame, rows: Sequence[Row], methods: str) -> list[Path]:
    """Write the generated parts of ``README.md`` below the results and beside them; a page without them stays.

    Args:
        cells: the frame of the results that the suites use. methods: which method, with the picture ``PICTURE``.
    """
    readme, front = root / "README.md", root.parent / "README.md"
    listed = [row for row in rows if row.suite.size == "small" or not row.suite.sized]
    larger = {(row.suite.name, row.name): row for row in rows if row not in listed and row.verdict != UNTESTED}
    lines = [("claim", "verdict", "the comparison that is met least (95 % interval)", "seeds")]
    lines += [(f"[{row.claim['says']}](#{row.anchor})", row.verdict_here, row.gap, row.seeded) for row in listed]
    parts = {
        readme: {
            "methods": methods,
            "table": markdown("table", lines, "verdict"),
            "claims": markdown("sections", listed, larger),
        },
        front: {"methods": markdown("table", table(cells, FRONT, "fedlora"))},
    }
    written = [path for path in parts if path.is_file()]
    for path in written:
        page = path.read_text(encoding="utf-8")
        for name, part in parts[path].items():
            marked = rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)"
            page = re.sub(marked, part.replace("\\", r"\\"), page, flags=re.DOTALL)
        write_text(path, page)
    return written
