"""Progress of a run: its rounds, its clients and its scores on one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from ..jobs.progress import line, showing, watched
from ..settings import Settings
from ..settings.metrics import chief
from .summary import for_people

OnRound = Callable[[dict[str, Any]], object]
OnClient = Callable[[int, int, int], object]


@contextmanager
def progress_bar(
    config: Settings, name: str, show: bool | None, on_round: OnRound | None, on_client: OnClient | None
) -> Iterator[tuple[OnRound | None, OnClient | None]]:
    """The two functions that an engine calls; they also move a bar on standard error.

    Args:
        config: of the run. name: before the bar.
        show: None: if somebody looks on; else as the command does of which this is a part, if any.
    """
    live = watched() if show is None else show
    rounds = config.federate.total_round_num
    # It begins with the first client: until then, data and model have lines of their own.
    soon: dict[str, Any] = {"delay": 1e-9, "mininterval": 0} if live else {}
    with showing(live=True) if live else nullcontext(), line(name, rounds, **soon) as bar:
        if bar is None:
            yield on_round, on_client
            return
        scores = ""

        def move(to: float, text: str) -> None:
            if not bar.n:  # rounds before a resumed one cost no time, so the time left does not count them
                bar.n = bar.initial = bar.last_print_n = round(to, 1)
            bar.set_postfix_str(text, refresh=False)
            bar.update(round(to, 1) - bar.n)

        def of_round(record: dict[str, Any]) -> object:
            nonlocal scores
            scores = chief_scores(record["metrics"], config.is_language) or scores
            move(record["round"], scores)
            return on_round(record) if on_round else None

        def of_client(round: int, done: int, total: int) -> object:
            move(round - 1 + done / total, scores)
            return on_client(round, done, total) if on_client else None

        yield of_round, of_client


def chief_scores(metrics: Mapping[str, Mapping[str, float]], language: bool) -> str:
    """The chief metric of each split, such as ``test acc 0.812  val acc 0.799``."""
    chiefs = {split: {chief(values): values[chief(values)]} for split, values in metrics.items()}
    items = [(split, *item) for split, values in chiefs.items() for item in for_people(values, language).items()]
    return "  ".join(f"{split} {name.replace('_', ' ')} {value:.3f}" for split, name, value in items)
