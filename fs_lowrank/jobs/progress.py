"""Progress of long work, by tqdm: a live line on a terminal and in a notebook, a line every 30 seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import Any, TypeVar

Item = TypeVar("Item")

#: seconds until work has a live line, and between two lines of a log
SOON, LOG_EVERY = 1.0, 30.0
#: options of the bars of this program; None: it shows none
_LOOK: ContextVar[dict[str, Any] | None] = ContextVar("look", default=None)


class _Log:
    """Standard error, on which a bar is a line of its own, at most one every ``LOG_EVERY`` seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def write(self, text: str) -> None:
        line = text.replace("\x1b[A", "").strip()
        if line and time.monotonic() - self.last >= LOG_EVERY:
            self.last = time.monotonic()
            print(line, file=sys.stderr, flush=True)


def watched() -> bool:
    """Whether somebody looks on: standard error is a terminal, or this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return "IPKernelApp" in (getattr(shell, "config", None) or ()) or bool(sys.stderr and sys.stderr.isatty())


@contextmanager
def showing(live: bool) -> Iterator[None]:
    """During the block ``steps`` and ``line`` show progress: ``live``, or as lines of a log."""
    shape = f"{{desc}}: {'{bar} ' * live}{{n:.10g}} of {{total}}, {{remaining}} left{{postfix}}"
    look: dict[str, Any] = {"leave": False, "dynamic_ncols": True, "bar_format": shape, "delay": SOON}
    look |= {"mininterval": SOON / 10, "miniters": 0, "file": None if live else _Log()}
    token = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(token)


def line(label: str, total: int, at_once: bool = False, **options: Any) -> AbstractContextManager[Any]:
    """A bar of ``total`` parts (``tqdm.tqdm``), which the caller moves; None where nothing is shown.

    tqdm is imported with the first bar: its import takes longer than most commands.

    Args:
        at_once: a live line from the start on, moved at every call.
    """
    look = _LOOK.get()
    if look is None:
        return nullcontext()
    if at_once:
        options |= {"delay": 0, "mininterval": 0}
    bar: AbstractContextManager[Any] = import_module("tqdm").tqdm(total=total, desc=label, **{**look, **options})
    return bar


def steps(items: Collection[Item], label: str) -> Iterator[Item]:
    """The items, which are the parts of long work: a line shows how many of them are done, and the time left."""
    with line(label, len(items)) as bar:
        for item in items:
            yield item
            if bar is not None:
                bar.update()


def above_lines() -> AbstractContextManager[None]:
    """Output during the block goes above the live lines."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return tqdm.external_write_mode(file=sys.stderr) if getattr(tqdm, "_instances", ()) else nullcontext()
