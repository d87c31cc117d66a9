"""What a walk consists of: commands with an exit code and words that they must print, and the user's files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def does(command: str, *said: str, code: int = 0) -> str:
    """Run a command of the shell; ends the walk if its exit code or its words are others. Returns what it printed."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
    printed = done.stdout + done.stderr
    missing = [words for words in said if " ".join(words.split()) not in " ".join(printed.split())]
    if done.returncode != code or missing or "Traceback" in printed:
        print(printed)
        sys.exit(f"walk: exit code {done.returncode}, expected {code}; not printed: {missing}; or a traceback")
    return printed


def offered(printed: str) -> str:
    """The last command that something printed offers."""
    return re.findall(r"(?:with|next): (fs-lowrank .+)", printed)[-1]


def refuses(command: str, *said: str) -> None:
    """Run a command that must end with exit code 2 and one line on the standard error."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    missing = [words for words in said if words not in done.stderr]
    if done.returncode != 2 or len(lines) != 1 or missing or "Traceback" in done.stderr:
        print(done.stdout + done.stderr)
        sys.exit(f"walk: exit code {done.returncode}, expected 2 and one line; not printed: {missing}")


def file(name: str, content: str) -> None:
    """A file that the user writes."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content, encoding="utf-8")


def exists(*names: str) -> None:
    """Ends the walk if a file is not there."""
    gone = [name for name in names if not Path(name).exists()]
    if gone:
        sys.exit(f"walk: not written: {', '.join(gone)}")
