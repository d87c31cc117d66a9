"""A command in a forked child of a process that has imported everything: how it ended, and what it left."""

from __future__ import annotations

import csv
import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: seconds after which a command counts as hanging; the time that it waited for a processor does not count
HANG = 60.0
#: the limit including that time is this factor larger
BUSY = 5.0
_PR_SET_PDEATHSIG = 1
#: the only message of several lines: keys that do nothing, each in an indented line
LISTED = re.compile(r"[^\n]+; remove:(\n  \S[^\n]*)+")
#: how a command says that it is not the user's fault (``fs_lowrank.jobs.shell.message_of``)
OURS = ("an error in fs-lowrank; please report", "which is not of fs-lowrank")


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends, so that no process outlives an interrupted torture."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; minus the signal that ended it; None if it was stopped after ``HANG`` seconds.
        out: standard output. err: standard error, without progress bars.
        seconds: how long it took.
    """

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def refused(self) -> bool:
        """Whether it ended with an error of one line and exit code 2."""
        return self.code == 2 and not self.fault

    @property
    def fault(self) -> str:
        """What no command may do: hang, print a traceback, die, say that the package has an error, or fail without a
        reason of one line; else empty.
        """
        if self.code is None:
            frames = re.findall(r'File ".*/(\S+)", line (\d+) in (\S+)', self.err)[:4]
            at = ", ".join(f"{file}:{line} {name}" for file, line, name in frames)
            return f"did not end within {self.seconds:.0f} s" + (f": {at}" if at else "")
        if "Traceback (most recent call last)" in self.out + self.err:
            return f"a traceback: {last_line(self.err) or last_line(self.out)}"
        ours = [line for line in f"{self.err}\n{self.out}".splitlines() if any(said in line for said in OURS)]
        if ours:
            return f"an error of the package: {ours[0].strip()[:300]}"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        if not self.code:
            return ""
        errors = [line for line in self.err.splitlines() if re.match(r"(fs-lowrank.*: )?error: ", line)]
        if len(errors) != 1:
            return f"exit code {self.code} with {len(errors)} lines of errors: {last_line(self.err)}"
        said = self.err[self.err.index(errors[0]) :].partition("error: ")[2].rstrip()
        return "" if is_one_line(said) else f"exit code {self.code} with several lines, or none: {said[:300]}"


def is_one_line(message: str) -> bool:
    """Whether an error has one line, or the one known form of several."""
    return bool(message.strip()) and (len(message.splitlines()) == 1 or bool(LISTED.fullmatch(message)))


def last_line(text: str) -> str:
    """The first 300 characters of the last line that is not blank."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def fork(work: Callable[[], int | None], out: Path, limit: float = HANG, kill_at: float | None = None) -> Ended:
    """Run ``work`` in a forked child, whose working folder is that of ``out``.

    Args:
        work: returns the exit code.
        out: the file for standard output; that for standard error is beside it.
        limit: seconds after which it counts as hanging and is killed; waiting for a processor does not count.
        kill_at: seconds after which it is killed, if it has not ended by itself.
    """
    err = out.with_suffix(".err")
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            die_with_parent()
            os.setpgid(0, 0)
            for descriptor, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            os.chdir(out.parent)  # what a broken configuration leaves is removed with the case
            sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")
            sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")
            faulthandler.enable(2)
            code = work() or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
    return _wait(child, started, out, err, limit, kill_at)


def spawn(
    argv: Sequence[str], out: Path, env: dict[str, str], limit: float = HANG, kill_at: float | None = None
) -> Ended:
    """Run ``argv`` as a command in a new process; the other arguments are those of ``fork``."""
    return fork(lambda: os.execve(argv[0], [argv[0], "-X", "faulthandler", *argv[1:]], env), out, limit, kill_at)


def _wait(child: int, started: float, out: Path, err: Path, limit: float, kill_at: float | None) -> Ended:
    """Wait until ``child`` has ended, and kill it after ``limit``."""
    status, pause, hanging = None, 0.001, False
    while status is None:
        pid, ended = os.waitpid(child, os.WNOHANG)
        passed = time.monotonic() - started
        if pid:
            status = ended
            break
        hanging = passed > limit * BUSY or (passed > limit and passed - _waited(child) > limit)
        if hanging or (kill_at is not None and passed >= kill_at):
            if hanging:
                os.kill(child, signal.SIGABRT)  # its stack is written to standard error
                time.sleep(0.5)
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        else:
            time.sleep(pause if kill_at is None else min(pause, kill_at - passed))
            pause = min(pause * 1.5, 0.05)
    seconds = time.monotonic() - started
    try:
        os.killpg(child, signal.SIGKILL)  # processes that it started and did not end
    except ProcessLookupError:
        pass
    code = os.waitstatus_to_exitcode(status)
    return Ended(None if hanging else code, _read(out), _without_bars(_read(err)), seconds)


def _waited(process: int) -> float:
    """Seconds in which the first thread of ``process`` was ready to run while other processes ran."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="backslashreplace") if path.exists() else ""


def _without_bars(text: str) -> str:
    lines = re.split(r"[\r\n]+", text)
    return "\n".join(line for line in lines if line.strip() and not re.search(r"\d+%\|.*\||\d+it \[", line))


# -- what a run leaves ---------------------------------------------------------------------------------

#: columns of ``summary.csv`` that differ between any two runs
_DURATIONS = ("training s total", "aggregation ms a round")
#: files whose content may differ between a run and the same run resumed, by durations and the number of threads; only
#: their existence is compared
_DIFFER = (".lock", "environment.json", "curves.png", "curves.pdf", "summary.tex", "events")


def _no_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is no JSON")


def difference(folder: Path, reference: Path, former: Path | None = None) -> str:
    """The first difference between the files of a run in ``folder`` and those in ``reference``; empty: none.

    Args:
        former: the folder in which the run began, if it has been moved; older files name it.
    """
    left, wanted = (_files(f) for f in (folder, reference))
    for name in sorted(wanted - left):
        return f"{name} is missing"
    for name in sorted(left - wanted):
        return f"{name} is left behind"
    for name in sorted(left):
        if name.name not in _DIFFER:
            named = (folder, reference, former or folder, folder.parent, reference.parent)
            where = _compare(folder / name, reference / name, named)
            if where:
                return f"{name}: {where}"
    return ""


def _files(folder: Path) -> set[Path]:
    """The files below ``folder``; TensorBoard's, whose names have the time and the process in them, count as one."""
    files = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
    events = {name for name in files if name.parts[0] == "tensorboard"}
    return files - events | ({Path("tensorboard", "events")} if events else set())


def _compare(path: Path, other: Path, folders: tuple[Path, ...]) -> str:
    import torch
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        mine, theirs = load_file(path), load_file(other)
        if mine.keys() != theirs.keys():
            return f"tensors {sorted(mine.keys() ^ theirs.keys())[:3]}"
        unequal = [n for n in mine if mine[n].dtype != theirs[n].dtype or not torch.equal(mine[n], theirs[n])]
        return f"tensor {unequal[0]} and {len(unequal) - 1} more" if unequal else ""
    if path.suffix in (".png", ".pdf", ".npz"):
        return "" if path.read_bytes() == other.read_bytes() else "other bytes"
    text, wanted = (p.read_text(encoding="utf-8") for p in (path, other))
    for folder in folders:
        text, wanted = text.replace(str(folder), "OUTDIR"), wanted.replace(str(folder), "OUTDIR")
    if path.suffix == ".jsonl":
        return _unequal([_record(line) for line in text.splitlines()], [_record(line) for line in wanted.splitlines()])
    if path.name == "meta.json":
        # Its checksums cover the folder's name, the order of tensors in a file, and the records with their seconds.
        read = [{**json.loads(t), "sha256": "", "records": ""} for t in (text, wanted)]
        return _unequal(*({**meta, "files": sorted(meta["files"])} for meta in read))
    if path.name == "checksums.json":  # they cover the folder's name, too
        return _unequal(*(sorted(json.loads(t)) for t in (text, wanted)))
    if path.suffix == ".json":
        return _unequal(json.loads(text), json.loads(wanted))
    if path.name == "summary.csv":
        return _unequal(*map(_without_durations, (text, wanted)))
    return "" if text == wanted else "another text"


def _without_durations(table: str) -> list[dict[str, str]]:
    rows = csv.DictReader(table.splitlines())
    return [{name: cell for name, cell in row.items() if name not in _DURATIONS} for row in rows]


def _record(line: str) -> dict[str, Any]:
    """A record without durations."""
    record = json.loads(line, parse_constant=_no_constant)
    return {key: value for key, value in record.items() if key not in ("seconds", "client_seconds")}


def _unequal(mine: Any, theirs: Any, at: str = "") -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = sorted(mine.keys() | theirs.keys())
        found = (_unequal(mine.get(k, "nothing"), theirs.get(k, "nothing"), f"{at}.{k}") for k in keys)
        return next(filter(None, found), "")
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        return next(filter(None, (_unequal(a, b, f"{at}.{i}") for i, (a, b) in enumerate(zip(mine, theirs)))), "")
    return "" if mine == theirs else f"{at.lstrip('.')} is {str(mine)[:80]}, expected {str(theirs)[:80]}"
