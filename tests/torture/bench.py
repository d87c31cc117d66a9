"""What cases work with: inputs, reference runs, and runs of a variant in a forked child or from the command line."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from safetensors import SafetensorError

from .child import HANG, Ended, difference, fork, spawn
from .shim import Mode, arm, armed_environment, count
from .tiny import RUNS, make_inputs, settings

ROOT = Path(__file__).parents[2]
#: one of this many seeds runs from the command line instead of in a forked child; a seed may have several cases, and
#: of these at least 2 % are to
COMMAND_LINE = 25

#: endings of a case: refused with one line and exit code 2; the same result; a resumed run with the same result; an
#: input that was valid, with a correct result; anything else
Ending = Literal["refused", "same", "resumed", "valid", "failed"]


def by_command_line(seed: int) -> bool:
    """Whether a seed runs from the command line, which is drawn, because other things depend on the seed, too."""
    return random.Random(f"command line {seed}").random() < 1 / COMMAND_LINE


@dataclass(frozen=True)
class Outcome:
    """How a run ended after one kind of damage.

    Attributes:
        what: the damage, in words.
        reason: of a failed case, what was wrong; otherwise, the message of the run.
        seen: the sort of the case, for the table; may be empty.
    """

    ending: Ending
    what: str
    reason: str = ""
    seen: str = ""


@dataclass(frozen=True)
class Reference:
    """An undamaged run: its folder, its duration, and its number of calls on the disk."""

    folder: Path
    seconds: float
    calls: int


class Bench:
    """The working folder of cases, for one process at a time; inputs and references in it are used again.

    Args:
        folder: is created, with the inputs.
    """

    def __init__(self, folder: Path):
        self.folder, self.inputs, self.pristine = folder, folder / "inputs", folder / "pristine"
        self._made = 0
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make_inputs(self.pristine)
            (folder / "ready").touch()
        self.restore_inputs()

    def restore_inputs(self) -> None:
        """Restore the inputs to their original state."""
        shutil.rmtree(self.inputs, ignore_errors=True)
        shutil.copytree(self.pristine, self.inputs)

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A path for the files of one case, in a folder that is removed afterwards."""
        self._made += 1
        folder = self.folder / f"case-{os.getpid()}-{self._made}"
        folder.mkdir()
        try:
            yield folder / "run"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def reference(self, run: str) -> Reference:
        """The undamaged run ``run`` (a name in ``tiny.RUNS``); it is run only once."""
        folder = self.folder / "references" / run.replace(" ", "_")
        facts = folder / "facts.yaml"
        if not facts.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            ended = self.start(run, folder / "run", counting=folder / "calls")
            if ended.code:
                raise RuntimeError(f"the run {run!r} fails by itself: {ended.err or ended.out}")
            calls = int((folder / "calls").read_text()) if (folder / "calls").exists() else 0
            facts.write_text(yaml.safe_dump({"seconds": ended.seconds, "calls": calls}))
        return Reference(folder / "run", **yaml.safe_load(facts.read_text()))

    def configure(self, run: str, outdir: Path, beside: Path) -> Path:
        """Write the configuration of ``run`` to the folder ``beside``."""
        file = beside / "config.yaml"
        file.write_text(yaml.safe_dump(settings(self.inputs, outdir, run)), encoding="utf-8")
        return file

    def start(
        self,
        run: str,
        outdir: Path,
        *,
        resume: bool = False,
        command_line: bool = False,
        kill_at: float | None = None,
        fault: tuple[int, Mode] | None = None,
        counting: Path | None = None,
        beside: Path | None = None,
    ) -> Ended:
        """``fs-lowrank run`` of ``run`` into ``outdir``.

        Args:
            command_line: run it as a command in a new process instead of a forked child.
            kill_at: seconds after which it is killed.
            fault: the number of a call on the disk, and the fault that occurs there.
            counting: a file for the number of calls, if the shim is loaded.
            beside: the folder for the configuration and the output; None: the parent of ``outdir``.
        """
        beside = beside or outdir.parent
        argv = ["run", "--cfg", str(self.configure(run, outdir, beside)), *(["--resume"] if resume else [])]
        out = beside / "printed.out"
        if command_line:
            armed = armed_environment(outdir, *fault) if fault else {}
            # The start of Python takes seconds, by which the kill is delayed.
            late = None if kill_at is None else kill_at + STARTUP
            return self.command(argv, out, late, armed)

        def work() -> int:
            from fs_lowrank import cli

            if fault:
                arm(outdir, *fault)
            elif counting:
                with contextlib.suppress(AttributeError):
                    arm(outdir)
            code = cli.main(argv)
            if counting:
                with contextlib.suppress(AttributeError):
                    counting.write_text(str(count()))
            return code

        return fork(work, out, kill_at=kill_at)

    def command(
        self,
        argv: list[str],
        out: Path,
        kill_at: float | None = None,
        env: Mapping[str, str] | None = None,
        limit: float = HANG,
        package: str = "fs_lowrank",
    ) -> Ended:
        """Run ``fs-lowrank``, or the command of another ``package``, in a new process."""
        inherited = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH", ""))))
        full = {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
        return spawn([sys.executable, "-m", package, *argv], out, full, limit, kill_at)

    def judge(
        self, run: str, outdir: Path, ended: Ended, what: str, resumed: bool, seen: str = "", former: Path | None = None
    ) -> Outcome:
        """The outcome of a run that should be refused, or leave the same files as its reference.

        Args:
            former: the folder in which the run began, if it has been moved.
        """
        if ended.fault:
            return Outcome("failed", what, ended.fault, seen)
        if ended.refused:
            return Outcome("refused", what, ended.err, seen)
        if ended.code:
            return Outcome("failed", what, f"exit code {ended.code}: {ended.err}", seen)
        try:
            unlike = difference(outdir, self.reference(run).folder, former)
        except (OSError, ValueError, SafetensorError) as error:
            unlike = f"{type(error).__name__}: {error}"
        if unlike:
            return Outcome("failed", what, f"another result without an error: {unlike}", seen)
        return Outcome("resumed" if resumed else "same", what, seen=seen)


#: seconds that the command line takes before the run begins, approximately
STARTUP = 4.0


def variants(kind: str | None = None) -> list[str]:
    """Names of the runs with a model of ``kind``; None: all."""
    return [name for name, keys in RUNS.items() if kind is None or keys.get("kind", "encoder") == kind]
