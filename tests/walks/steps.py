"""What a walk consists of: commands with an exit code and words that they must print, and the user's files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def does(command: str, *said: str, code: int = 0) -> str:
    """Run a command of the shell; returns what it printed.

    Ends the walk if its exit code or its words are others, or if a library's warning or a traceback is among them.
    """
    done = _run(command)
    printed = done.stdout + done.stderr
    missing = [words for words in said if _plain(words) not in _plain(printed)]
    noise = [words for words in ("Traceback", "Warning: ", "warnings.warn") if words in printed]
    if done.returncode != code or missing or noise:
        print(printed)
        sys.exit(f"walk: exit code {done.returncode}, expected {code}; not printed: {missing}; printed: {noise}")
    return printed


def refuses(command: str, *said: str) -> None:
    """Run a command that must end with exit code 2 and nothing but one line on the standard error."""
    done = _run(command)
    missing = [words for words in said if _plain(words) not in _plain(done.stderr)]
    one_line = len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("error:")
    if done.returncode != 2 or not one_line or missing or "Traceback" in done.stdout:
        print(done.stdout + done.stderr)
        sys.exit(f"walk: exit code {done.returncode}, expected 2 and one line; not printed: {missing}")
    print(f"  {done.stderr.strip()}", flush=True)


def is_killed(command: str, after: str) -> None:
    """Start a command, and kill it with all its processes (SIGKILL) as soon as a line has the words ``after``."""
    print(f"$ {command}    # killed after: {after}", flush=True)
    shown = []
    with subprocess.Popen(
        f"exec {command}",
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line)
            if after in " ".join(line.split()):
                os.killpg(process.pid, signal.SIGKILL)
                break
    if process.returncode != -signal.SIGKILL:
        print("".join(shown))
        sys.exit(f"walk: ended with exit code {process.returncode} before it printed {after!r}")


def file(name: str, content: str) -> None:
    """A file that the user writes."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content, encoding="utf-8")


def exists(*names: str) -> None:
    """Ends the walk if a file is not there."""
    gone = [name for name in names if not Path(name).exists()]
    if gone:
        sys.exit(f"walk: not written: {', '.join(gone)}")


def same(one: str, other: str) -> None:
    """Ends the walk if two files differ."""
    exists(one, other)
    if Path(one).read_bytes() != Path(other).read_bytes():
        sys.exit(f"walk: {one} and {other} differ")


def _run(command: str) -> subprocess.CompletedProcess[str]:
    print(f"$ {command}", flush=True)
    begun = time.monotonic()
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
    print(f"  {time.monotonic() - begun:.0f} s", flush=True)
    return done


def _plain(text: str) -> str:
    return " ".join(text.split())
