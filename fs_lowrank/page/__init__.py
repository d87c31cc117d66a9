"""One self-contained HTML file about one run, or several side by side, made from the files that runs leave."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..jobs.files import write_text
from ..runs.plots import setting_of
from .look import contents, document
from .parts import PARTS
from .runs import Shown, read_runs

__all__ = ["Shown", "read_runs", "write_page"]


def write_page(runs: Sequence[Shown], out: str | Path, renew: float = 0.0) -> Path:
    """Write the page.

    Args:
        renew: seconds after which a browser loads it again, while a run goes on; 0: never.
    Raises:
        UserError: plotly is not installed. RunFailed: the file cannot be written.
    """
    sections = [(key, name, content) for key, name, make in PARTS if (content := make(runs))]
    going = [f"{run.name}, round {len(run.history)} of {run.rounds}" for run in runs if not run.ended]
    state = f"still running, or ended early: {'; '.join(going)}; read at {time.strftime('%H:%M:%S')}" if going else ""
    settings = "; ".join(dict.fromkeys(setting_of(run.config) for run in runs))
    try:
        text = document(
            ", ".join(run.name for run in runs),
            "".join(f"<p class=note>{html.escape(line)}</p>" for line in (settings, state) if line)
            + "".join(f'<section id="{key}"><h2>{name}</h2>{content}</section>' for key, name, content in sections),
            nav=contents((key, name) for key, name, _ in sections),
            plots=True,
            renew=renew if going else 0.0,
        )
    except ImportError:
        raise UserError("the report's curves need plotly: pip install 'fs-lowrank[report]'") from None
    write_text(Path(out), text)
    return Path(out)
