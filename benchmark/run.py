"""``fs-lowrank benchmark run``: checks everything, starts the workers, and shows their progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fs_lowrank import UserError
from fs_lowrank.jobs.crew import run_workers, stop_signals
from fs_lowrank.jobs.shell import make_console
from fs_lowrank.runs.summary import for_people

from .blocks import value_of
from .job import Job, Options, Search
from .plan import plan
from .store import Store

#: seconds after which a worker that does not stop is killed; the next call continues from its checkpoint
_PATIENCE = 15.0


@dataclasses.dataclass
class Outcome:
    """The number of jobs that this call finished, left unfinished, and skipped because they were done; the failures;
    whether the user interrupted it; damaged files and the reasons."""

    finished: int
    failed: list[dict]
    remaining: int
    skipped: int
    interrupted: bool = False
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)


def run(options: Options, workers: int, gpus: Sequence[str] = (), console: Console | None = None) -> Outcome:
    """Run all jobs of the suites that are not done.

    Raises:
        UserError: before any training, if something is wrong or missing.
        RunFailed: results cannot be written, or too many workers died.
    """
    from .check import check

    console = console or make_console(140)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    options = dataclasses.replace(options, since=time.time())
    jobs, store = [cell_of(options)] if options.cell else plan(options), options.store
    board = Board(jobs, store)
    board.look()
    for path, why in store.damaged.items():
        say(f"damaged, and taken as missing: {path}: {why}")
    skipped = board.finished
    if not board.remaining:
        return Outcome(0, [], 0, skipped, damaged=store.damaged)
    check([job for job in jobs if job.key in board.open], options, workers, gpus)
    workers = max(1, min(workers, board.remaining))
    logs = Path(options.work) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    say(
        f"{board.remaining} jobs to do, {skipped} done before; {workers} worker{'s' * (workers > 1)}; "
        f"their logs: {logs}"
    )
    order = {"options": options, "jobs": [job for job in jobs if job.key in board.open]}
    shown = Live(board.table(), console=console, refresh_per_second=2) if console.is_terminal else None

    def look() -> None:
        for news in board.look():
            say(news)
        if shown:
            shown.update(board.table())

    with stop_signals() as stopped, shown or contextlib.nullcontext():
        given = f"{__package__}.worker:main", order, workers, stopped
        interrupted = run_workers(*given, gpus=gpus, logs=logs, patience=_PATIENCE, meanwhile=look, say=say)
    look()
    return Outcome(board.finished - skipped, board.failed, board.remaining, skipped, interrupted, store.damaged)


def cell_of(options: Options) -> Job:
    """The cell of the suites with the hash of ``--cell``, which its result has, ready to run.

    Raises:
        UserError: there is no such cell, or its learning rate is not searched yet.
    """
    for job in plan(dataclasses.replace(options, cell=""), extra=True):
        if not isinstance(job, Search) and (ready := job.rated(options.store)) and ready.key == options.cell:
            return ready
    raise UserError(
        f"--cell {options.cell}: {', '.join(options.suites)} ({options.size}) has no cell of that hash; its result in "
        f"{options.results}/cells has it, and the searches of learning rates run first"
    )


def verify(options: Options, progress: Callable[[dict], None]) -> list[tuple[str, float | None, float | None]]:
    """Run the cell of ``--cell`` again, in a folder of its own; its metrics that differ from those of its result.

    Raises:
        UserError: there is no such cell, or it has no result.
    """
    import torch

    from .execute import execute

    Path(options.work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        job = cell_of(dataclasses.replace(options, work=folder))
        before = job.result(options.store)
        if before is None:
            raise UserError(f"--verify {options.cell}: this cell has no result yet; give --cell to run it")
        threads = torch.get_num_threads()
        torch.set_num_threads(before.get("machine", {}).get("threads", threads))
        try:
            again = json.loads(json.dumps(execute(job, progress)))
        finally:
            torch.set_num_threads(threads)
    names = [name for name in before["metrics"] if before["metrics"][name] != again["metrics"].get(name)]
    return [(name, before["metrics"][name], again["metrics"].get(name)) for name in names]


class Board:
    """The state of all jobs: finished, failed, running, or not started."""

    def __init__(self, jobs: Sequence[Job], store: Store):
        self.jobs, self.store = list(jobs), store
        #: key -> job, for jobs that are not done; a cell that waits for a search has another key afterwards
        self.open = {job.key: job for job in self.jobs}
        self.failed: list[dict] = []
        self.finished = 0
        self.began = time.monotonic()

    @property
    def remaining(self) -> int:
        return len(self.open)

    def look(self) -> list[str]:
        """Remove the jobs that were done since the last call from ``open``; returns a line about each."""
        news: list[str] = []
        for key, job in list(self.open.items()):
            now = job.rated(self.store) or job
            if not now.done(self.store):
                continue
            del self.open[key]
            record, failed = now.result(self.store), self.store.read("failed", now.key)
            if record is None or (failed and failed["finished"] >= now.options.since):
                failed = failed or {**now.identity(), "error": "its record cannot be read"}
                self.failed.append(failed)
                news.append(f"failed  {now.where}  {now.label}: {failed['error']}")
                continue
            self.finished += 1
            news.append(
                f"done    {now.where}  {now.label}  {_headline(record, now)}  {record['seconds_in_all']:.0f} s  "
                f"({len(self.open)} left)"
            )
        return news

    def _progress(self, job: Job) -> dict | None:
        """The progress of a job that runs now, or whose process died in this call; None of others."""
        marker = self.store.marked(job.key)
        return marker if marker and marker["since"] == job.options.since else None

    def running(self) -> list[tuple[dict, Job]]:
        """The progress of each job that runs now, and the job."""
        jobs = [job.rated(self.store) or job for job in self.open.values()]
        return [(marker, now) for now in jobs if (marker := self._progress(now))]

    def table(self) -> Table:
        table = Table(
            title=f"{self.finished} done, {len(self.failed)} failed, {self.remaining} remain; "
            f"{(time.monotonic() - self.began) / 60:.1f} min",
            title_justify="left",
        )
        for column in ("experiment", "cell", "at", "so far", "min"):
            table.add_column(column, overflow="fold")
        for marker, now in self.running():
            at = marker.get("doing") or (f"{marker['round']}/{marker['rounds']}" if "round" in marker else "starting")
            table.add_row(
                f"{marker['suite']}/{marker['experiment']}",
                marker["label"],
                at,
                _headline(marker, now),
                f"{(time.time() - marker['began']) / 60:.1f}",
            )
        return table


def _headline(record: dict, job: Job) -> str:
    """A few figures of a result, or of the progress of ``job``."""
    config = getattr(job, "config", None)  # a script has none
    language = config is not None and config.is_language
    if "winner" in record:
        return (
            ", ".join(f"{k.rpartition('.')[2]} {value_of(v)}" for k, v in record["winner"]["point"].items())
            + " "
            + ", ".join(f"{k} {v:.3f}" for k, v in for_people(record["winner"]["values"], language).items())
        )
    found = {**record, **record.get("metrics", {})}
    shown = {k: found[k] for k in ("loss", "val_acc", "val_loss", "test_acc", "test_loss") if k in found}
    return " ".join(f"{k} {v:.3f}" for k, v in for_people(dict(list(shown.items())[-2:]), language).items())
