"""The generated parts of the page of the results and the README: what is between ``<!-- NAME -->`` marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fs_lowrank.jobs.files import write_text

from .conditions import UNTESTED
from .frame import frame
from .methods_table import FRONT, IMAGES, TEXT, draw, table
from .store import Store
from .template import markdown
from .verdicts import Row

PICTURE = "methods.svg"


def write_pages(root: Path, store: Store, rows: Sequence[Row]) -> list[Path]:
    """Write the generated parts of ``README.md`` below the results and beside them; those that have none stay."""
    here, front = root / "README.md", root.parent / "README.md"
    if not (here.is_file() and front.is_file()):
        return []
    cells = frame(store)
    draw(cells, root / PICTURE)
    shown = [row for row in rows if row.suite.size == "small" or not row.suite.sized]
    larger = {(row.suite.name, row.name): row for row in rows if row not in shown and row.verdict != UNTESTED}
    text, images = table(cells, TEXT, "fedlora"), table(cells, IMAGES, "fedavg")
    lines = [("claim", "verdict", "the comparison that is met least (95 % interval)", "seeds")]
    lines += [(f"[{row.claim['says']}](#{row.anchor})", row.verdict_here, row.gap, row.seeded) for row in shown]
    parts = {
        here: {
            "methods": markdown("methods", text, images, PICTURE),
            "table": markdown("table", lines, "verdict"),
            "claims": markdown("sections", shown, larger),
        },
        front: {"methods": markdown("table", table(cells, FRONT, "fedlora"))},
    }
    for path, of_page in parts.items():
        before = page = path.read_text(encoding="utf-8")
        for name, part in of_page.items():
            head, mark, rest = page.partition(f"<!-- {name} -->\n")
            _, end, tail = rest.partition(f"<!-- /{name} -->")
            if mark and end:
                page = head + mark + part + end + tail
        if page != before:
            write_text(path, page)
    return [here, front]
