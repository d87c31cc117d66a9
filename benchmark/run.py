"""``python -m benchmark run``: checks everything, starts the workers, shows what runs and what remains."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fs_lowrank import UserError

from .plan import Cell, Job, Options, plan
from .store import Store
from .worker import STOPPED, STUCK

#: how often the place of a worker that died is taken by another
_REPLACED = 8


@dataclasses.dataclass
class Outcome:
    """How a call ended."""

    finished: int
    failed: list[dict]
    remaining: int
    skipped: int
    interrupted: bool = False
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)


def run(options: Options, workers: int, gpus: Sequence[str] = (), console: Console | None = None) -> Outcome:
    """Do all jobs of the suites that are not done.

    Raises:
        UserError: something is wrong or missing, before anything trains; or nothing can be written any more.
    """
    from .check import check

    console = console or Console(highlight=False)
    options = dataclasses.replace(options, since=time.time())
    jobs, store = plan(options), options.store
    board = Board(jobs, store)
    board.look()
    for path, why in store.damaged.items():
        console.print(f"damaged, and taken as missing: {path}: {why}", soft_wrap=True, markup=False)
    skipped = board.finished
    if not board.remaining:
        return Outcome(0, [], 0, skipped, damaged=store.damaged)
    check([job for job in jobs if job.key in board.open], options, workers, gpus)
    workers = max(1, min(workers, board.remaining))
    logs = Path(options.work) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{board.remaining} jobs to do, {skipped} done before; {workers} worker{'s' * (workers > 1)}; "
        f"their logs: {logs}",
        soft_wrap=True,
    )
    interrupted = False
    crew = Crew(options, workers, gpus, logs, lambda text: console.print(text, soft_wrap=True, markup=False))
    live = Live(board.table(), console=console, refresh_per_second=2) if console.is_terminal else None
    if live:
        live.start()
    with _ended_like_ctrl_c():
        try:
            while crew.alive():
                for news in board.look():
                    console.print(news, soft_wrap=True, markup=False)
                if live:
                    live.update(board.table())
                time.sleep(0.2)
            interrupted = crew.stopped
        except KeyboardInterrupt:
            interrupted = True
            crew.stop()
        finally:
            if live:
                live.stop()
    for news in board.look():
        console.print(news, soft_wrap=True, markup=False)
    if crew.stuck and not interrupted:
        raise UserError(crew.stuck)
    return Outcome(board.finished - skipped, board.failed, board.remaining, skipped, interrupted, store.damaged)


@contextlib.contextmanager
def _ended_like_ctrl_c():
    """SIGTERM, as a scheduler sends it, and SIGINT, which a background job ignores, do what Ctrl-C does meanwhile."""

    def interrupt(number, frame) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Board:
    """What is finished, runs, and remains."""

    def __init__(self, jobs: Sequence[Job], store: Store):
        self.jobs, self.store = list(jobs), store
        #: key as planned -> job; a cell whose search is done is looked up by its key with the rate
        self.open = {job.key: job for job in self.jobs}
        self.failed: list[dict] = []
        self.finished = 0
        self.began = time.monotonic()

    @property
    def remaining(self) -> int:
        return len(self.open)

    def look(self) -> list[str]:
        """Take what was done since the last look off the list; a line about each."""
        news = []
        for key, job in list(self.open.items()):
            now = (job.rated(self.store) if isinstance(job, Cell) else job) or job
            if not now.done(self.store):
                continue
            del self.open[key]
            record = now.result(self.store)
            if record is None or now.options.redo and now.kind == "cells" and record["finished"] < now.options.since:
                failed = self.store.read("failed", now.key)
                self.failed.append(failed)
                news.append(f"failed  {now.where}  {now.label}: {failed['error']}")
                continue
            self.finished += 1
            news.append(
                f"done    {now.where}  {now.label}  {_headline(record)}  {record['seconds_in_all']:.0f} s  "
                f"({len(self.open)} left)"
            )
        return news

    def running(self) -> list[dict]:
        """The markers of what runs now."""
        found = []
        for job in self.open.values():
            now = (job.rated(self.store) if isinstance(job, Cell) else job) or job
            marker = self.store.marked(now.key)
            if marker and marker["since"] == now.options.since:
                found.append(marker)
        return found

    def table(self) -> Table:
        table = Table(
            title=f"{self.finished} done, {len(self.failed)} failed, {self.remaining} remain; "
            f"{(time.monotonic() - self.began) / 60:.1f} min",
            title_justify="left",
        )
        for column in ("experiment", "cell", "at", "so far", "min"):
            table.add_column(column, overflow="fold")
        for marker in self.running():
            at = marker.get("doing") or (f"{marker['round']}/{marker['rounds']}" if "round" in marker else "starting")
            table.add_row(
                f"{marker['suite']}/{marker['experiment']}",
                marker["label"],
                at,
                _headline(marker),
                f"{(time.time() - marker['began']) / 60:.1f}",
            )
        return table


def _headline(record: dict) -> str:
    """A few figures of a result, or of a marker."""
    if "winner" in record:
        return (
            ", ".join(f"{k.rpartition('.')[2]} {v:g}" for k, v in record["winner"]["point"].items())
            + " "
            + ", ".join(f"{k} {v:.3f}" for k, v in record["winner"]["values"].items())
        )
    found = {**record, **record.get("metrics", {})}
    shown = [f"{k} {found[k]:.3f}" for k in ("loss", "val_acc", "val_loss", "test_acc", "test_loss") if k in found]
    return " ".join(shown[-2:])


class Crew:
    """The worker processes."""

    def __init__(self, options: Options, workers: int, gpus: Sequence[str], logs: Path, say: Callable[[str], None]):
        self.options, self.gpus, self.logs, self.say = options, list(gpus), logs, say
        self.threads = max(1, (os.cpu_count() or 1) // workers)
        self.replaced, self.stopped, self.stuck = 0, False, ""
        self.processes = {index: self._start(index) for index in range(workers)}

    def _start(self, index: int) -> subprocess.Popen:
        environment = dict(os.environ)
        root = str(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        options = dataclasses.asdict(self.options)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[index % len(self.gpus)]
            options["overrides"] = {**options["overrides"], "use_gpu": True, "device": 0}
        with (self.logs / f"worker_{index}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmark.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
            )
        json.dump({**options, "threads": int(environment["OMP_NUM_THREADS"])}, process.stdin)
        process.stdin.close()
        return process

    def alive(self) -> bool:
        """Whether any works; one that died is replaced."""
        for index, process in list(self.processes.items()):
            code = process.poll()
            if code is None:
                continue
            del self.processes[index]
            if code == STUCK:
                self.stuck = self.stuck or self._last_words(index)
                self.stop()
            elif code == STOPPED:
                self.stopped = True
            elif code and not self.stuck:
                self.replaced += 1
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                self.say(
                    f"worker {index} died ({how}{': out of memory, perhaps' if code == -9 else ''}); "
                    "another takes its place"
                )
                if self.replaced > _REPLACED:
                    self.stuck = f"workers died {self.replaced} times; see {self.logs}"
                    self.stop()
                else:
                    self.processes[index] = self._start(index)
        return bool(self.processes)

    def _last_words(self, index: int) -> str:
        lines = (self.logs / f"worker_{index}.log").read_text(errors="replace").splitlines()
        told = [line.removeprefix("stuck: ") for line in lines if line.startswith("stuck: ")]
        return told[-1] if told else f"worker {index} could not go on; see {self.logs}"

    def stop(self, patience: float = 15.0) -> None:
        """End all workers; their checkpoints are there for the next call."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = {}
