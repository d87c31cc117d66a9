"""Progress of a run on one line, for whoever looks on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from ..settings import Settings
from ..settings.metrics import chief
from .summary import for_people

OnRound = Callable[[dict[str, Any]], object]
OnClient = Callable[[int, int, int], object]


def watched() -> bool:
    """Whether somebody looks on: standard error is a terminal, or this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return "IPKernelApp" in (getattr(shell, "config", None) or ()) or bool(sys.stderr and sys.stderr.isatty())


@contextmanager
def shown(
    config: Settings, name: str, show: bool | None, on_round: OnRound | None, on_client: OnClient | None
) -> Iterator[tuple[OnRound | None, OnClient | None]]:
    """The two functions that an engine calls; they also move a bar on standard error.

    Args:
        config: of the run. name: before the bar.
        show: None: if somebody looks on.
    """
    if not (watched() if show is None else show):
        yield on_round, on_client
        return
    rounds, language = config.federate.total_round_num, config.is_language
    with tqdm(total=rounds, desc=name, unit="round", dynamic_ncols=True) as bar:
        said = ""

        def of_round(record: dict[str, Any]) -> object:
            nonlocal said
            said = chief_scores(record["metrics"], language) or said
            bar.set_postfix_str(said, refresh=False)
            bar.update(record["round"] - bar.n)
            return on_round(record) if on_round else None

        def of_client(round: int, done: int, of: int) -> object:
            bar.set_postfix_str(", ".join(filter(None, (said, f"client {done + 1} of {of}"))))
            return on_client(round, done, of) if on_client else None

        yield of_round, of_client


def chief_scores(metrics: Mapping[str, Mapping[str, float]], language: bool) -> str:
    """The chief metric of each split, such as ``test acc 0.812  val acc 0.799``."""
    chiefs = {split: {chief(of): of[chief(of)]} for split, of in metrics.items()}
    shown = [(split, *item) for split, of in chiefs.items() for item in for_people(of, language).items()]
    return "  ".join(f"{split} {name.replace('_', ' ')} {value:.3f}" for split, name, value in shown)
