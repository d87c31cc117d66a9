"""Atomic writes, processes that end with their parent, the members of a pool, and exit codes of commands."""

from __future__ import annotations

import argparse
import ast
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from fs_lowrank import RunFailed, UserError
from fs_lowrank.jobs import crew, shell
from fs_lowrank.jobs.files import replacing, write_text
from fs_lowrank.jobs.locks import claimed, exclusive
from fs_lowrank.jobs.pool import Member, Pool

ROOT = Path(__file__).parents[2]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "new" / "a.txt", "one")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new" / "a.txt") as aside:
        aside.write_text("two")
        1 / 0  # noqa: B018
    with pytest.raises(RunFailed, match="a.txt/b.txt cannot be written: File exists; make room"):
        write_text(tmp_path / "new" / "a.txt" / "b.txt", "three")
    assert (tmp_path / "new" / "a.txt").read_text() == "one"
    with replacing(tmp_path / "new") as aside:  # a folder replaces a folder
        aside.mkdir()
        (aside / "b.txt").write_text("four")
    assert [p.name for p in tmp_path.rglob("*")] == ["new", "b.txt"]


def test_waiting_for_a_lock_ends_when_the_caller_says_so(tmp_path):
    path, asked = tmp_path / "locks" / "one.lock", []
    with exclusive(path):
        with claimed(path) as ours:
            assert not ours
        with pytest.raises(KeyboardInterrupt), exclusive(path, stop=lambda: bool(asked.append(1)) or len(asked) > 2):
            pass
    assert len(asked) == 3
    with claimed(path) as ours:
        assert ours


def echo(connection):
    """The function that members of the pools run."""
    while True:
        item = connection.recv_bytes()
        if item == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if item == b"think":
            time.sleep(60)
        if item == b"dream":
            time.sleep(2.5)
        connection.send_bytes(item.upper())


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pool = Pool()
    yield pool
    pool.end()
    assert all(member.process.poll() is not None for member in pool.members)


def test_members_that_answer_die_or_hang(pool):
    pool.members += [Member("test_jobs:echo", 1.0) for _ in range(3)]
    for member, item in zip(pool.members, (b"word", b"die", b"stop")):
        member.waiting.append(item)
        assert member.next() == item and not member.idle and member.next() is None
    heard, deadline = {}, time.monotonic() + 60
    while len(heard) < 2 and time.monotonic() < deadline:
        for member in pool.heard(1.0):
            heard[pool.members.index(member)] = member.receive()
            member.idle = True
    assert heard == {0: b"WORD", 1: None}
    while pool.silent() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pool.silent() is pool.members[2] and not pool.idle
    os.kill(pool.members[2].process.pid, signal.SIGCONT)


@pytest.mark.parametrize("by_pool", [True, False])
def test_a_member_that_works_for_longer_than_its_timeout_is_heard_of(pool, by_pool):
    """The limit is on its silence: it answers after two and a half times as long."""
    pool.members.append(Member("test_jobs:echo", 1.0))
    (member,) = pool.members
    member.send(b"word")
    assert member.receive() == b"WORD"
    member.send(b"dream")
    started = time.monotonic()
    while by_pool and not pool.heard(0.2):
        assert pool.silent() is None and time.monotonic() - started < 60
    assert member.receive() == b"DREAM" and time.monotonic() - started > 2


@pytest.mark.parametrize("item", [b"dream", b"word"])
def test_what_a_member_has_sent_while_nobody_listened_counts(pool, item):
    """Signs of life while it works, and its answer; whoever listens was busy for longer than its limit."""
    pool.members.append(Member("test_jobs:echo", 1.0))
    (member,) = pool.members
    member.send(b"word")
    assert member.receive() == b"WORD"
    member.send(item)
    time.sleep(1.5)
    assert pool.silent() is None
    deadline = time.monotonic() + 60
    while not (heard := pool.heard(0.2)):
        assert pool.silent() is None and time.monotonic() < deadline
    assert heard == [member] and member.receive() == item.upper() and not member.news


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    code = (
        "import time; from fs_lowrank.jobs.pool import Member\n"
        "member = Member('test_jobs:echo', 60.0); member.send(b'word'); member.receive(); member.send(b'think')\n"
        "print(member.process.pid, flush=True); time.sleep(60)\n"
    )
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
    )
    assert wait([parent.stdout], 60), "no member within a minute"
    member = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _runs(member):
        time.sleep(0.1)
    assert not _runs(member)


def _runs(number: int) -> bool:
    try:
        os.kill(number, 0)
        state = Path(f"/proc/{number}/stat")
        return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
    except ProcessLookupError:
        return False


@pytest.mark.parametrize(
    "raised, code, line",
    [
        (None, 0, ""),
        (UserError("[no] such thing"), 2, "error: [no] such thing"),
        (RunFailed("no room"), 1, "error: no room"),
        (OSError(28, "No space left on device", "x.json"), 1, "No space left on device: 'x.json'"),
        (
            KeyError("[x]"),
            1,
            "error: KeyError: '[x]' (an error in fs-lowrank; please report it, with the traceback in ",
        ),
        (KeyboardInterrupt(), 130, "interrupted; again: python -m thing go"),
    ],
    ids=["success", "wrong use", "failure", "disk full", "bug", "Ctrl-C"],
)
def test_exit_codes_and_messages_of_a_command(raised, code, line, capsys, tmp_path):
    def do(args):
        if raised:
            raise raised

    def make_parser():
        parser = argparse.ArgumentParser(prog="python -m thing")
        commands = parser.add_subparsers()
        commands.add_parser("go").set_defaults(do=do)
        return parser, commands.choices.values()

    console = shell.make_console(120)
    assert shell.run(make_parser, ["go"], console, lambda args: f"; again: {args.again}", lambda args: tmp_path) == code
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed and line in printed and printed.strip().count("\n") == 0
    bug = isinstance(raised, KeyError)
    for file in tmp_path.iterdir():
        assert bug and str(file) in printed and "in do" in file.read_text() and "KeyError" in file.read_text()
    assert len(list(tmp_path.iterdir())) == bug
    root, ours = logging.getLogger(), logging.getLogger("fs_lowrank")
    before = [*root.handlers], root.level, ours.level, logging.raiseExceptions
    shell.run(make_parser, ["go", "--debug"], console, folder=lambda args: tmp_path)
    assert ("Traceback" in "".join(capsys.readouterr())) == (code in (1, 2))
    assert ([*root.handlers], root.level, ours.level, logging.raiseExceptions) == before


def test_a_traceback_goes_to_the_folder_for_temporary_files_if_the_run_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(shell.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file"):
        assert str(tmp_path / "temporary") in shell.message_of(ValueError("x\ny"), folder)
    error = ValueError("x")
    error.run_folder = tmp_path / "run"
    assert str(tmp_path / "run") in shell.message_of(error, tmp_path / "other")


def broken(options):
    """The function that the worker runs."""
    raise ZeroDivisionError("division by zero")


def test_a_worker_with_a_bug_prints_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    ours, theirs = multiprocessing.Pipe()
    ours.send_bytes(json.dumps({"target": "test_jobs:broken", "options": {}, "logs": str(tmp_path)}).encode())
    assert crew.serve(theirs) == shell.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    (file,) = tmp_path.iterdir()
    assert "ZeroDivisionError: division by zero" in line and str(file) in line and "in broken" in file.read_text()


@pytest.mark.parametrize("package, others", [("benchmark", ("fs_lowrank", "hpo")), ("hpo", ("fs_lowrank",))])
def test_packages_use_only_what_others_declare_public(package, others):
    found = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in others and not node.level:
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                found += [f"{path.name}: {node.module}: {n}" for n in names if n.startswith("_") and n != "__version__"]
    assert not found
