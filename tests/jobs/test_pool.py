"""Processes of a pool: what they take over, how they end, and what becomes of their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
from tqdm import tqdm

from fs_lowrank import RunFailed, UserError
from fs_lowrank.errors import user_location
from fs_lowrank.jobs import pool as pools
from fs_lowrank.jobs.pool import Pool, print_to
from tests.cases import lives

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent


@pytest.fixture
def made(monkeypatch):
    """``made(...)`` makes a pool, which is ended after the test."""
    monkeypatch.syspath_prepend(str(HERE))
    pools_made = []

    def make(*given, **options):
        pools_made.append(Pool(*given, **options))
        return pools_made[-1]

    yield make
    for each in pools_made:
        each.end()
        assert not any(process.is_alive() for process in each.processes.values())


# -- what the processes call ---------------------------------------------------------------------------

_known: list[str] = []


def note(text):
    _known.append(text)


def told(text):
    print(f"{text} is told")
    return [*_known, text]


def about():
    return {
        "leads": os.getsid(0) == os.getpid(),
        "folder": os.getcwd(),
        "born": os.environ.get("BORN"),
        "path": str(HERE) in sys.path,
        "safe": "PYTHONSAFEPATH" in os.environ,
        "reads": sys.stdin.read(),
    }


def die_unless(path):
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "lives"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail(kind):
    raise {"user": UserError, "run": RunFailed, "other": KeyError}[kind]("said")


class OfTwo(Exception):
    """It can be pickled, and not unpickled."""

    def __init__(self, what, number):
        super().__init__(f"{what} {number}")


def fail_with_two():
    raise OfTwo("number", 2)


def sleep():
    time.sleep(60)


# ------------------------------------------------------------------------------------------------------


def test_a_process_takes_over_what_it_was_started_in_and_keeps_what_it_loads(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BORN", "here")
    pool = made(2, lambda rank: [(print_to, tmp_path / f"{rank}.log"), (note, f"loaded {rank}")])
    assert [pool.result(work) for work in pool.prepared] == [None] * 6
    known = {"leads": True, "folder": str(tmp_path), "born": "here", "path": True, "safe": False, "reads": ""}
    assert [pool.result(pool.submit(rank, about)) for rank in (0, 1)] == [known, known]
    works = [pool.submit(1, told, text) for text in "ab"]
    assert [pool.result(work) for work in works] == [["loaded 1", "a"], ["loaded 1", "b"]]
    pool.end()
    assert (tmp_path / "1.log").read_text() == "a is told\nb is told\n"


def test_work_of_a_process_that_dies_is_done_again_by_one_in_its_place(made, tmp_path):
    said: list[str] = []
    pool = made(1, lambda rank: [(note, "loaded")], name="number {}", say=said.append)
    works = [pool.submit(0, told, "a"), pool.submit(0, die_unless, tmp_path / "dead"), pool.submit(0, told, "b")]
    assert [pool.result(work) for work in works] == [["loaded", "a"], "lives", ["loaded", "b"]]
    assert said == ["number 1 ended (signal 9: out of memory, perhaps); another takes its place"]
    with pytest.raises(RunFailed, match="number 1 ended .*; run again with resume=True"):
        pool.result(pool.submit(0, die))


def test_processes_that_die_while_they_are_prepared_end_the_run(made):
    pool = made(2, lambda rank: [(die,)] if rank else [])
    with pytest.raises(RunFailed, match="process 2 ended"):
        for work in pool.prepared:
            pool.result(work)


def test_errors_are_raised_here(made):
    pool = made(1)
    for kind, raised in (("user", UserError), ("run", RunFailed), ("other", KeyError)):
        with pytest.raises(raised, match="said") as caught:
            pool.result(pool.submit(0, fail, kind))
        assert type(caught.value) is raised
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    assert user_location(caught.value).startswith("test_pool.py, line ")


def test_an_error_that_cannot_be_sent_is_told(made):
    pool = made(1, restarts=0)
    with pytest.raises(RuntimeError, match="OfTwo: number 2") as caught:
        pool.result(pool.submit(0, fail_with_two))
    assert user_location(caught.value).startswith("test_pool.py, line ")
    assert pool.result(pool.submit(0, told, "a")) == ["a"]


def test_a_process_that_works_is_ended(made):
    pool = made(1)
    pool.submit(0, sleep)
    began = time.monotonic()
    pool.end()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "installed, gpus, how", [(False, 2, "forkserver"), (True, 0, "forkserver"), (True, 2, "spawn")]
)
def test_nothing_is_forked_from_what_has_asked_cuda(monkeypatch, installed, gpus, how):
    """PEFT imports bitsandbytes where it is installed, and that asks for GPUs."""
    monkeypatch.setattr(pools, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert pools.import_ahead().get_start_method() == how


@pytest.mark.more
def test_a_script_without_a_guard_and_processes_that_end_with_it(tmp_path):
    """The script is killed while a process works."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time, test_pool\nfrom fs_lowrank.jobs.pool import Pool\nprint('the script runs', flush=True)\n"
        "pool = Pool(1)\nassert pool.result(pool.submit(0, test_pool.told, 'a')) == ['a']\n"
        "pool.submit(0, test_pool.sleep)\nprint(pool.processes[0].pid, flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True)
    assert wait([parent.stdout], 60), "it has said nothing within a minute"
    lines = [parent.stdout.readline() for _ in range(3)]
    assert lines[:2] == ["the script runs\n", "a is told\n"]
    worker = psutil.Process(int(lines[2]))
    parent.kill()
    parent.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while lives(worker):
        assert time.monotonic() < deadline, "a process has outlived the script"
        time.sleep(0.1)


def bar():
    """Show a progress bar, whose lock is a semaphore unless it was replaced."""
    return [*tqdm(range(2), disable=False)]


@pytest.mark.more
def test_a_killed_process_leaves_no_semaphore(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import test_pool\nfrom fs_lowrank.jobs.pool import Pool\npool = Pool(1)\n"
        "assert pool.result(pool.submit(0, test_pool.bar)) == [0, 1]\npool.end()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
    ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "leaked" not in ended.stderr, ended.stderr
