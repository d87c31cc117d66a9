"""Searches and suites that are killed: exit codes, no process is left, and the same command continues the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import yaml

pytest.importorskip("optuna")

from benchmark.execute import work  # noqa: E402
from benchmark.job import Options  # noqa: E402
from benchmark.plan import plan  # noqa: E402
from benchmark.run import Board  # noqa: E402
from fs_lowrank import load_config  # noqa: E402
from hpo import Search, tune  # noqa: E402
from hpo.search import kind  # noqa: E402
from hpo.space import space_from  # noqa: E402
from hpo.storage import load_study, open_storage  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("no_curves"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]
ROUNDS = 40
#: environment variable by which all processes of a command are found, whatever their parent is
MARK = "FS_LOWRANK_TEST_FAMILY"


class Command:
    """A search or a suite with one run of 40 rounds."""

    def __init__(self, which: str, folder: Path, settings: dict):
        self.which, self.folder, self.mark = which, folder, str(uuid.uuid4())
        run = {
            **{k: settings[k] for k in ("data", "model", "llm", "train")},
            "federate": {"method": "fedlora", "client_num": 2, "total_round_num": ROUNDS},
            "dataloader": {"batch_size": 4},
            "eval": {"freq": 20},
        }
        run["data"] = {**run["data"], "splitter": "iid", "splitter_args": [], "subsample": 0.2}
        if which == "hpo":
            (folder / "run.yaml").write_text(yaml.safe_dump({**run, "outdir": str(folder / "run")}))
            (folder / "space.yaml").write_text("train.optimizer.lr: {grid: [0.01]}")
            self.arguments = "-m hpo tune --cfg run.yaml --space space.yaml --dir hpo --confirm 0 --study s"
        else:
            del run["federate"]["method"]
            search = {"space": {"train.optimizer.lr": {"grid": [0.01]}}, "seeds": 1}
            (folder / "one.yaml").write_text(
                yaml.safe_dump(
                    {
                        "title": "One search and one cell",
                        "config": run,
                        "methods": ["fedlora"],
                        "seeds": [0],
                        "metrics": ["test_acc"],
                        "learning_rates": {"search": search},
                    }
                )
            )
            self.arguments = "-m benchmark run one.yaml --keep"

    def start(self, workers: int) -> subprocess.Popen:
        self.log = (self.folder / "out.txt").open("w+")
        return subprocess.Popen(
            [sys.executable, *self.arguments.split(), "--workers", str(workers)],
            cwd=self.folder,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def alive(self) -> dict[int, str]:
        """The command lines of this command and of the processes that it started, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # of another user, or ended meanwhile
        return found

    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("**/checkpoint/round_*"))

    def busy(self) -> int:
        """The process id of the worker that trains."""
        if self.which == "hpo":
            study = load_study(open_storage(self.folder / "hpo" / "study.db"), "s")
            running = next(t for t in study.get_trials() if kind(t) == "running")
            return int(running.user_attrs["worker"].rpartition(":")[2])
        return next(number for number in self.alive() if os.readlink(f"/proc/{number}/fd/1").endswith("worker_1.log"))

    def finish(self, monkeypatch) -> None:
        """Run the same command again, in this process."""
        monkeypatch.chdir(self.folder)
        if self.which == "hpo":
            options = Search("s", folder=Path("hpo"), confirm=0, workers=0)
            ended = tune(load_config("run.yaml"), space_from({"train.optimizer.lr": {"grid": [0.01]}}), options)
            assert ended.how == "done"
        else:
            options = Options(("one.yaml",), keep=True)
            board = Board(plan(options), options.store)
            while job := board.claim():
                board.finish(job, work(job))
                board.look()
            assert not board.remaining and not board.failed

    def check_finished(self) -> None:
        if self.which == "hpo":
            study = load_study(open_storage(self.folder / "hpo" / "study.db"), "s")
            assert "complete" in [kind(t) for t in study.get_trials()]
        else:
            assert len(list(self.folder.glob("results/cells/*.json"))) == 1
            assert len(list(self.folder.glob("results/searches/*.json"))) == 1


EVENTS = ("SIGTERM", "two SIGINTs", "kill -9 of a worker", "kill -9 of the parent")


@pytest.mark.slow
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("which", ["hpo", "benchmark"])
def test_a_killed_command_leaves_no_process_and_can_be_continued(which, event, settings, tmp_path, monkeypatch):
    command = Command(which, tmp_path, settings)
    # The second worker only waits, and must end when the parent has ended.
    parent = command.start(workers=2 if event == "kill -9 of the parent" else 1)
    try:
        deadline = time.monotonic() + 120
        while not command.checkpoints():
            assert parent.poll() is None and time.monotonic() < deadline, command.said()
            time.sleep(0.05)
        reached = command.checkpoints()[-1]
        records = reached.parents[1] / "rounds.jsonl"
        before = records.read_text().splitlines()[: int(reached.name[-6:])]
        if event == "SIGTERM":
            parent.send_signal(signal.SIGTERM)
        elif event == "two SIGINTs":
            os.kill(command.busy(), signal.SIGSTOP)  # a worker that does not end on request
            parent.send_signal(signal.SIGINT)
            time.sleep(1)
            parent.send_signal(signal.SIGINT)
        elif event == "kill -9 of a worker":
            os.kill(command.busy(), signal.SIGKILL)
        else:
            parent.kill()
        code = parent.wait(120)
        for _ in range(200):  # a worker without a parent ends at its next client
            if not (left := command.alive()):
                break
            time.sleep(0.1)
        expected = {"kill -9 of a worker": 0, "kill -9 of the parent": -9}.get(event, 130)
        assert code == expected, command.said()
        assert not left
        assert "Traceback" not in command.said(), command.said()
        if event == "kill -9 of a worker":
            assert "ended (signal 9: out of memory, perhaps); another takes its place" in command.said()
        else:
            assert len(records.read_text().splitlines()) < ROUNDS, "it went on without a parent"
            command.finish(monkeypatch)
        command.check_finished()
        after = records.read_text().splitlines()
        assert len(after) == ROUNDS and after[: len(before)] == before  # seconds too: not repeated
    finally:
        for number in command.alive():
            os.kill(number, signal.SIGKILL)
        parent.wait(60)
        command.log.close()
