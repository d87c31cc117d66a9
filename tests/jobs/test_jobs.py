"""Atomic writes, processes that end with their parent, the members of a pool, and exit codes of commands."""

from __future__ import annotations

import argparse
import ast
import atexit
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from fs_lowrank import RunFailed, UserError
from fs_lowrank.errors import own_place
from fs_lowrank.jobs import crew, shell
from fs_lowrank.jobs import nursery as nurseries
from fs_lowrank.jobs.files import replacing, write_text
from fs_lowrank.jobs.locks import claimed, exclusive
from fs_lowrank.jobs.nursery import AVAILABLE, Nursery
from fs_lowrank.jobs.pool import Member, Pool

FORKS = pytest.mark.skipif(not AVAILABLE, reason="no nursery on this system")
ROOT = Path(__file__).parents[2]
#: seconds that a member may be silent; it is to start within them on a busy machine, too
LIMIT = 3.0


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "new" / "a.txt", "one")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new" / "a.txt") as aside:
        aside.write_text("two")
        1 / 0  # noqa: B018
    with pytest.raises(
        RunFailed, match="a.txt/b.txt cannot be written: File exists; move away what is in its place or"
    ):
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
            time.sleep(5)
        if item == b"leave":
            raise SystemExit(7)
        if item == b"fail":
            atexit.register(print, "left in order", flush=True)
            raise ValueError("said")
        if item == b"who":
            known = [os.getppid(), os.getsid(0) == os.getpid(), os.environ.get("BORN"), os.environ.get("NAME")]
            item = json.dumps([*known, sys.stdin.read()]).encode()
        connection.send_bytes(item.upper())


@pytest.fixture(params=["started", pytest.param("forked", marks=FORKS)])
def pool(request, monkeypatch):
    """A pool; ``pool.join(timeout)`` adds a member that runs ``echo``, started by itself or forked from a nursery."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pool = Pool()
    pool.nursery = Nursery(["test_jobs"], {"BORN": "here"}) if request.param == "forked" else None

    def join(timeout):
        pool.members.append(Member("test_jobs:echo", timeout, nursery=pool.nursery))
        return pool.members[-1]

    pool.join = join
    yield pool
    pool.end()
    assert all(member.process.poll() is not None for member in pool.members)
    if pool.nursery:
        pool.nursery.end()


@pytest.mark.more
def test_members_that_answer_die_or_hang(pool):
    for _ in range(3):
        pool.join(LIMIT)
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
@pytest.mark.more
def test_a_member_that_works_for_longer_than_its_timeout_is_heard_of(pool, by_pool):
    """The limit is on its silence, not on the time it takes."""
    member = pool.join(LIMIT)
    member.send(b"word")
    assert member.receive() == b"WORD"
    member.send(b"dream")
    started = time.monotonic()
    while by_pool and not pool.heard(0.2):
        assert pool.silent() is None and time.monotonic() - started < 60
    assert member.receive() == b"DREAM" and time.monotonic() - started > LIMIT


@pytest.mark.parametrize("item", [b"dream", b"word"])
@pytest.mark.more
def test_what_a_member_has_sent_while_nobody_listened_counts(pool, item):
    """Signs of life while it works, and its answer; whoever listens was busy for longer than its limit."""
    member = pool.join(LIMIT)
    member.send(b"word")
    assert member.receive() == b"WORD"
    member.send(item)
    time.sleep(LIMIT + 0.5)
    assert pool.silent() is None
    deadline = time.monotonic() + 60
    while not (heard := pool.heard(0.2)):
        assert pool.silent() is None and time.monotonic() < deadline
    assert heard == [member] and member.receive() == item.upper() and not member.news


@FORKS
def test_what_is_forked_is_a_process_of_its_own(nursery_of_echo, tmp_path):
    """It has a session, variables and a log of its own, and its end is known: a code, an error, a signal."""
    nursery, log, ended = nursery_of_echo, tmp_path / "log.txt", {}
    for item, environment in ((b"leave", {}), (b"fail", {}), (b"die", {}), (b"who", {"NAME": "one"})):
        member = Member("test_jobs:echo", 60.0, nursery=nursery, environment=environment, log=log)
        member.send(item)
        answer = member.receive()
        if item == b"who":
            parent, leads, born, name, read = json.loads(answer.lower())
            assert (parent, leads, born, name, read) == (nursery.process.pid, True, "here", "one", "")
            member.end()
        ended[item] = member.process.wait(60)
    assert ended == {b"leave": 7, b"fail": 1, b"die": -9, b"who": ended[b"who"]}
    assert "ValueError: said" in log.read_text() and "left in order" in log.read_text()
    with pytest.raises(subprocess.TimeoutExpired):
        thinks = Member("test_jobs:echo", 60.0, nursery=nursery)
        thinks.send(b"think")
        thinks.process.wait(0.2)
    thinks.process.terminate()
    assert thinks.process.wait(60) == -signal.SIGTERM
    killed = Member("test_jobs:echo", 60.0, nursery=nursery)
    killed.process.kill()
    assert killed.process.wait(60) == -signal.SIGKILL
    for _ in range(20):  # it may have no session of its own yet
        young = Member("test_jobs:echo", 60.0, nursery=nursery)
        young.kill()
        assert young.process.returncode == -signal.SIGKILL


@FORKS
def test_members_outlive_the_nursery_and_others_are_started_without_it(nursery_of_echo):
    nursery = nursery_of_echo
    before = [Member("test_jobs:echo", 60.0, nursery=nursery) for _ in range(2)]
    for member in before:
        member.send(b"word")
        assert member.receive() == b"WORD"
    nursery.process.kill()
    nursery.process.wait()
    for member, item in zip(before, (b"word", b"die")):
        member.send(item)
        assert member.receive() == (b"WORD" if item == b"word" else None)
    assert before[1].process.wait(60) == -9 and before[0].process.poll() is None
    after = Member("test_jobs:echo", 60.0, nursery=nursery)
    after.send(b"word")
    assert after.receive() == b"WORD" and isinstance(after.process, subprocess.Popen)
    for member in (before[0], after):
        member.end()
        assert member.process.poll() is not None


@FORKS
def test_a_nursery_that_cannot_import_ends_what_was_asked_of_it(monkeypatch):
    nursery = Nursery(["no_such_module"], {})
    member = Member("test_jobs:echo", 60.0, nursery=nursery)
    assert member.process.wait(60) == -9 and member.receive() is None
    nursery.end()


@pytest.fixture
def nursery_of_echo(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    nursery = Nursery(["test_jobs"], {"BORN": "here"})
    yield nursery
    nursery.end()


@pytest.mark.parametrize("nursery", ["None", pytest.param("Nursery(['test_jobs'], {})", marks=FORKS)])
def test_a_process_ends_with_the_one_that_started_it(tmp_path, nursery):
    code = (
        "import time; from fs_lowrank.jobs.pool import Member; from fs_lowrank.jobs.nursery import Nursery\n"
        f"member = Member('test_jobs:echo', 60.0, nursery={nursery}); member.send(b'word'); member.receive()\n"
        "member.send(b'think')\n"
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
            "error: KeyError: '[x]' (in test_jobs.py, line ",
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


def test_an_error_of_the_package_is_told_from_one_of_the_users_code(tmp_path, capsys):
    def printed(do):
        def make_parser():
            parser = argparse.ArgumentParser(prog="python -m thing")
            commands = parser.add_subparsers()
            commands.add_parser("go").set_defaults(do=do)
            return parser, commands.choices.values()

        assert shell.run(make_parser, ["go"], shell.make_console(120), folder=lambda args: tmp_path) == 1
        return capsys.readouterr().err

    assert "(an error in fs-lowrank; please report it, with the traceback in " in printed(shell.names)
    users = printed(lambda args: shell.names(args))  # raised in the package, as the user's code has called it
    assert re.search(r"\(in test_jobs.py, line \d+, which is not of fs-lowrank; the traceback is in .*\.txt\)", users)


@pytest.mark.parametrize(
    "place, found",
    [
        ("mine.py", "mine.py, line 2"),
        ("lib/python3/dist-packages/torch/mine.py", ""),
        (".venv/lib64/python3.11/site-packages/mine.py", ""),
    ],
)
def test_what_is_installed_is_not_the_users_code(tmp_path, place, found):
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("def broken():\n    raise KeyError\n")
    code: dict = {"__name__": "mine"}
    exec(compile(file.read_text(), file, "exec"), code)
    ours: dict = {"__name__": "fs_lowrank.somewhere", "broken": code["broken"]}
    exec("def caught():\n    try:\n        broken()\n    except KeyError as error:\n        return error\n", ours)
    assert own_place(ours["caught"]()) == found


@pytest.mark.parametrize("text", ["out/x[/y]", "[red]", "a[bold]b[/bold]", ":x:", r"\[red]"])
def test_what_comes_from_users_is_not_markup(text, capsys):
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    console = shell.make_console(120)
    for shown in (text, Text(text, "bold"), table):
        console.print(shown, soft_wrap=True)
    out = capsys.readouterr().out
    assert out.count(text) == 5, out
    shell.explain(UserError(text))
    assert capsys.readouterr().err == f"error: {text}\n"


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


@FORKS
@pytest.mark.parametrize("installed, gpus, forks", [(False, 2, True), (True, 0, True), (True, 2, False)])
def test_nothing_is_forked_from_what_has_asked_cuda(monkeypatch, installed, gpus, forks):
    """PEFT imports bitsandbytes where it is installed, and that asks for GPUs."""
    monkeypatch.setattr(nurseries, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    made = nurseries.nursery("test_jobs", {})
    if made:
        made.end()
    assert bool(made) == forks


def tell(options):
    """The function that the worker runs: it leaves a file, named by what it sees, of what it is."""
    seen = os.environ["CUDA_VISIBLE_DEVICES"]
    Path(options["folder"], seen).write_text(json.dumps([os.getppid(), options["overrides"]]))
    return shell.OK


@pytest.mark.parametrize("given, seen", [(None, {"0", "1"}), ("4,5", {"4", "5"}), ("GPU-a, GPU-b", {"GPU-a", "GPU-b"})])
def test_workers_see_one_gpu_each_of_those_that_the_command_sees(tmp_path, monkeypatch, given, seen):
    """Also where they cannot be forked."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "bitsandbytes.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus, told = shell.gpus("all"), tmp_path / "told"
    told.mkdir()
    crew.check_gpus(gpus)
    assert not crew.Crew("test_jobs:tell", {"folder": str(told)}, 2, gpus=gpus).run([])
    found = {path.name: json.loads(path.read_text()) for path in told.iterdir()}
    assert found == dict.fromkeys(seen, [os.getpid(), {"use_gpu": True, "device": 0}])


@pytest.mark.parametrize("package, others", [("benchmark", ("fs_lowrank", "hpo")), ("hpo", ("fs_lowrank",))])
def test_packages_use_only_what_others_declare_public(package, others):
    found = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in others and not node.level:
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                found += [f"{path.name}: {node.module}: {n}" for n in names if n.startswith("_") and n != "__version__"]
    assert not found


def test_a_line_of_a_million_characters_is_shortened():
    """As the name of a module that a file gives can be; what is before and after the value is still there."""
    from fs_lowrank.errors import UserError
    from fs_lowrank.jobs.shell import LONGEST_LINE, message_of

    said = message_of(UserError(f"this model has no module '{'a' * 10**6}'; it has: query\n  a second line"))
    first, second = said.split("\n")
    assert first.startswith("this model has no module 'aaa") and first.endswith("aaa'; it has: query")
    assert "characters left out" in first and len(first) < LONGEST_LINE + 100 and second == "  a second line"
