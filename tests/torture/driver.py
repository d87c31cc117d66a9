"""Runs the cases of a kind, in shards that can be resumed, with a limit on every case.

A forked child of this process, which has imported everything, runs the cases of a shard in order. A case whose process
dies, or that takes longer than its limit, counts as failed, and another child continues with the next case.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import resource
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from .bench import ROOT, Bench, Outcome
from .child import die_with_parent

#: the kinds, in the order of the table: name of the module, and what its cases are
KINDS = {
    "kills": "kills at random instants",
    "writes": "faults inside the writing",
    "commands": "faults inside the writing of comparisons, searches and suites",
    "damage": "damaged files",
    "records": "damaged records of searches and suites",
}
ENDINGS = ("refused", "same", "resumed", "valid", "failed")
#: seconds after which a case counts as hanging; the limits of its commands are shorter
LIMIT = 420.0
#: kinds with more sorts of cases than these are not listed below the table
SORTS = 12


#: a seed, its outcomes, seconds of wall-clock time, processor seconds
Done = tuple[int, list[Outcome], float, float]


def module_of(kind: str) -> ModuleType:
    return importlib.import_module(f".{kind}", __package__)


def code_fingerprint(kind: str) -> str:
    """A hash of the source of the package and of the torture of ``kind``: counts belong to one version of the code."""
    digest, others = hashlib.sha256(), set(KINDS) - {kind}
    own = [path for path in Path(__file__).parent.glob("*.py") if path.stem not in others]
    for path in sorted([*(ROOT / "fs_lowrank").rglob("*.py"), *own]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def worked_off(kind: str, seeds: range, folder: Path, until: float = math.inf) -> Iterator[Done]:
    """The outcomes of every seed, with its wall-clock and processor seconds.

    Args:
        folder: the working folder, which all shards use.
        until: the time (``time.monotonic``) at which the case that is running is ended, and no other begins.
    """
    left = list(seeds)
    while left:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _work(kind, left, folder, writer)
        os.close(writer)
        limit = getattr(module_of(kind), "LIMIT", LIMIT)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            for done in _heard(pipe, left, limit, child, until):
                left.remove(done[0])
                yield done
        if time.monotonic() >= until:
            return


def _work(kind: str, seeds: list[int], folder: Path, writer: int) -> None:
    """In the child: run the cases in order, and write each result as a line of JSON."""
    code = 99
    try:
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        module, bench = module_of(kind), Bench(folder)
        for seed in seeds:
            started, used = time.monotonic(), _processor()
            try:
                outcomes = module.case(seed, bench)
            except Exception as error:
                import traceback

                at = traceback.extract_tb(error.__traceback__)[-1]
                reason = f"the case itself: {type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
                outcomes = [Outcome("failed", f"seed {seed}", reason[:500])]
            seconds = time.monotonic() - started, _processor() - used
            content = json.dumps([seed, [asdict(o) for o in outcomes], *seconds]).encode() + b"\n"
            while content:
                content = content[os.write(writer, content) :]
        code = 0
    finally:
        os._exit(code)


def _processor() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _heard(pipe: Any, seeds: list[int], limit: float, child: int, until: float) -> Iterator[Done]:
    """The results from the child; a case in which it hung or died is a failure, but not one that had no more time."""
    waiting, buffer, started = list(seeds), b"", time.monotonic()
    while waiting:
        ready, _, _ = select.select([pipe], [], [], max(min(started + limit, until) - time.monotonic(), 0))
        content = pipe.read(1 << 16) if ready else b""
        if not ready and time.monotonic() >= until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        if not content:
            os.killpg(child, signal.SIGKILL) if not ready else None
            status = os.waitpid(child, 0)[1]
            how = f"took longer than {limit:.0f} s" if not ready else f"ended its process, status {status}"
            yield waiting[0], [Outcome("failed", f"seed {waiting[0]}", how)], time.monotonic() - started, 0.0
            return
        *lines, buffer = (buffer + content).split(b"\n")
        for line in lines:
            seed, outcomes, seconds, used = json.loads(line)
            waiting.remove(seed)
            yield seed, [Outcome(**o) for o in outcomes], seconds, used
            started = time.monotonic()
    os.waitpid(child, 0)


# -- shards --------------------------------------------------------------------------------------------


def shard_file(results: Path, kind: str, first: int) -> Path:
    return results / kind / f"{first:08d}.json"


def run_kind(
    kind: str, number: int, seed: int, results: Path, folder: Path, until: float, say: Callable[[str], None]
) -> bool:
    """Run ``number`` cases from ``seed`` on, in shards; those that are done for this version of the code are left out.

    Args:
        until: the time (``time.monotonic``) at which all is ended; a shard that is not complete is begun anew later.
    Returns:
        Whether all are done.
    """
    module, code = module_of(kind), code_fingerprint(kind)
    size = module.SHARD
    for first in range(seed, seed + number, size):
        seeds = range(first, min(first + size, seed + number))
        file = shard_file(results, kind, first)
        done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if done.get("code") == code and done["seeds"] == len(seeds):
            continue
        shard = _shard(kind, seeds, folder, say, until)
        if not shard["seeds"]:
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps({"code": code, **shard}, indent=1) + "\n")
        aside.replace(file)
        if shard["seeds"] < len(seeds):
            return False
    return True


def _shard(kind: str, seeds: range, folder: Path, say: Callable[[str], None], until: float) -> dict[str, Any]:
    endings: Counter[str] = Counter()
    seen: dict[str, Counter[str]] = {}
    failures, total, processor, longest, number = [], 0.0, 0.0, 0.0, 0
    for seed, outcomes, seconds, used in worked_off(kind, seeds, folder, until):
        number += 1
        total, processor, longest = total + seconds, processor + used, max(longest, seconds)
        for outcome in outcomes:
            endings[outcome.ending] += 1
            seen.setdefault(outcome.seen, Counter())[outcome.ending] += 1
            if outcome.ending == "failed":
                failures.append({"seed": seed, "what": outcome.what, "reason": outcome.reason})
                say(f"{kind} seed {seed}: {outcome.what}: {outcome.reason}")
    return {
        "kind": kind,
        "first": seeds.start,
        "seeds": number,
        "cases": sum(endings.values()),
        "endings": dict(sorted(endings.items())),
        "seen": {name: dict(sorted(counts.items())) for name, counts in sorted(seen.items())},
        "seconds": round(total, 1),
        "processor": round(processor, 1),
        "longest": round(longest, 1),
        "failures": failures,
    }


# -- the table -----------------------------------------------------------------------------------------


def table(results: Path) -> str:
    """The table in Markdown: a row for every kind, the sorts of cases, and the failures with their seeds."""
    rows, notes, sorts = [], [], []
    for kind, words in KINDS.items():
        shards = [json.loads(p.read_text()) for p in sorted((results / kind).glob("*.json"))]
        if not shards:
            continue
        endings: Counter[str] = Counter()
        for shard in shards:
            endings.update(shard["endings"])
        cases, seconds, processor = (sum(s[what] for s in shards) for what in ("cases", "seconds", "processor"))
        codes = {s["code"] for s in shards}
        cells = [words, str(cases), *(str(endings[e]) for e in ENDINGS)]
        cells += [f"{each / max(cases, 1):.2f}" for each in (seconds, processor)]
        cells += [f"{max(s['longest'] for s in shards):.0f}", ", ".join(sorted(codes))]
        rows.append(cells)
        seen: Counter[str] = Counter()
        for shard in shards:
            seen.update({name: sum(counts.values()) for name, counts in shard["seen"].items() if name})
        if 0 < len(seen) <= SORTS:
            listed = "; ".join(f"{name} {count}" for name, count in sorted(seen.items(), key=lambda item: -item[1]))
            sorts.append(f"- {words}: {listed}")
        for failure in (f for s in shards for f in s["failures"]):
            notes.append(f"- **{kind}**, seed {failure['seed']}: {failure['reason']}")
    head = ["what", "cases", *ENDINGS, "seconds a case", "of the processor", "longest", "code"]
    lines = [head, ["---", *["---:"] * (len(head) - 2), "---"], *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text += "\n\nAmong them:\n" + "\n".join(sorts) if sorts else ""
    return text + ("\n\nFailed:\n" + "\n".join(notes) if notes else "\n\nNothing failed.") + "\n"


def bench_folder(given: str | None) -> Path:
    """The default folder to work in: in memory if the machine has such a file system."""
    if given:
        return Path(given).resolve()
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"fs-lowrank-torture-{os.getpid()}"
