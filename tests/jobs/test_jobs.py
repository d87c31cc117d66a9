"""Atomic writes, locks, pools of workers, and exit codes of commands."""

from __future__ import annotations

import argparse
import ast
import os
import re
import time
from pathlib import Path

import pytest

from fs_lowrank import RunFailed, UserError
from fs_lowrank.errors import user_location
from fs_lowrank.jobs import shell, workers
from fs_lowrank.jobs.files import replacing, write_text
from fs_lowrank.jobs.locks import exclusive, take

ROOT = Path(__file__).parents[2]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "new" / "a.txt", "one")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new" / "a.txt") as aside:
        aside.write_text("two")
        1 / 0  # noqa: B018
    assert (tmp_path / "new" / "a.txt").read_text() == "one"
    with replacing(tmp_path / "new") as aside:  # a folder replaces a folder
        aside.mkdir()
        (aside / "b.txt").write_text("four")
    assert [p.name for p in tmp_path.rglob("*")] == ["new", "b.txt"]


def test_waiting_for_a_lock_ends_when_the_caller_says_so(tmp_path):
    path, asked = tmp_path / "locks" / "one.lock", []
    with exclusive(path):
        assert take(path) is None
        with pytest.raises(KeyboardInterrupt), exclusive(path, stop=lambda: bool(asked.append(1)) or len(asked) > 2):
            pass
    assert len(asked) == 3
    assert take(path) is not None


def test_the_width_is_the_terminals_or_that_of_the_environment(monkeypatch):
    assert shell.make_console(120).width == 120
    monkeypatch.setenv("COLUMNS", "80")
    assert shell.make_console(120).width == 80


def command(do, folder, *options, **given):
    """Run a command that calls ``do``; returns its exit code."""

    def make_parser():
        parser = argparse.ArgumentParser(prog="python -m thing")
        commands = parser.add_subparsers()
        commands.add_parser("go").set_defaults(do=do)
        return parser, commands.choices.values()

    return shell.run(make_parser, ["go", *options], shell.make_console(120), folder=lambda args: folder, **given)


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

    assert command(do, tmp_path, again=lambda args: f"; again: {args.again}") == code
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed and line in printed and printed.strip().count("\n") == 0
    bug = isinstance(raised, KeyError)
    for file in tmp_path.iterdir():
        assert bug and str(file) in printed and "in do" in file.read_text() and "KeyError" in file.read_text()
    assert len(list(tmp_path.iterdir())) == bug
    command(do, tmp_path, "--debug")
    assert ("Traceback" in "".join(capsys.readouterr())) == (code in (1, 2))


def test_an_error_of_the_package_is_told_from_one_of_the_users_code(tmp_path, capsys):
    def printed(do):
        assert command(do, tmp_path) == 1
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
    assert user_location(ours["caught"]()) == found


def test_a_traceback_goes_to_the_folder_for_temporary_files_if_the_run_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(shell.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file"):
        assert str(tmp_path / "temporary") in shell.message_of(ValueError("x\ny"), folder)
    assert str(tmp_path / "run") in shell.message_of(ValueError("x"), tmp_path / "run")


class Board:
    """Jobs of which two at most are handed out at a time."""

    def __init__(self, *jobs):
        self.waiting, self.running, self.found = [*jobs], 0, []

    @property
    def remaining(self):
        return len(self.waiting) + self.running

    def claim(self):
        if self.waiting and self.running < 2:
            self.running += 1
            return self.waiting.pop(0)

    def finish(self, job, found):
        self.running -= 1
        self.found.append(found)


@pytest.fixture
def pool_of(monkeypatch):
    """``pool_of(number, **options)`` makes a pool whose workers find this module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return lambda number, **options: workers.worker_pool(number, ["test_jobs"], **options)


@pytest.mark.more
def test_jobs_that_run_when_time_is_up_are_stopped_and_the_others_not_begun(pool_of):
    board, said, began = Board("0.1", "60", "60", "0.1"), [], time.monotonic()
    workers.hand_out(board, wait_as_long, pool_of(2), lambda: "time is up" * ("done" in board.found), said.append)
    assert board.found[0] == "done" and board.found[1:] in ([{}], [{}, {}])
    assert said == ["time is up" + workers.CONTINUED] and board.waiting and time.monotonic() - began < 50


def wait_as_long(text):
    """What a worker does."""
    time.sleep(float(text))
    return "done"


def look_around(folder):
    """What a worker does: it leaves a file, named by the GPU that it sees, of its parent."""
    Path(folder, os.environ["CUDA_VISIBLE_DEVICES"]).write_text(str(os.getppid()))
    time.sleep(1)  # the other one takes the next job
    return "done"


@pytest.mark.more
@pytest.mark.parametrize(
    "given, names", [(None, {"0", "1"}), ("4,5", {"4", "5"}), ("GPU-a, GPU-b", {"GPU-a", "GPU-b"})]
)
def test_workers_see_one_gpu_each_of_those_that_the_command_sees(tmp_path, monkeypatch, pool_of, given, names):
    """Also where they cannot be forked."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "bitsandbytes.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = tmp_path / "told"
    told.mkdir()
    workers.hand_out(Board(*[told] * 6), look_around, pool_of(2, gpus=shell.gpus("all")), lambda: "")
    assert {path.name: path.read_text() for path in told.iterdir()} == dict.fromkeys(names, str(os.getpid()))
    with pytest.raises(UserError, match="--gpus 1,2: expected all, or numbers such as 0,1; the GPUs .* here: 0, 1"):
        shell.gpus("1,2")


@pytest.mark.parametrize("package, others", [("benchmark", ("fs_lowrank", "hpo")), ("hpo", ("fs_lowrank",))])
def test_packages_use_only_what_others_declare_public(package, others):
    found = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in others and not node.level:
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                found += [f"{path.name}: {node.module}: {n}" for n in names if n.startswith("_") and n != "__version__"]
    assert not found
