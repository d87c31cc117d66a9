"""Broken configurations: the examples, with tiny models and data, and with one or two mutations by the schema.

A file that loads is run. What the schema forbids must be refused; everything else is refused, ends with one line that
says why (exit code 1), or runs to its end, twice with the same result. A refusal has one line, but for one that lists
keys that do nothing, each in an indented line below it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import yaml

from .bench import ROOT, Bench, Outcome, by_command_line
from .child import Ended, difference, fork, is_one_line, limited, unsound
from .mutations import MUTATIONS, Document, keys_of
from .tiny import settings

SHARD = 100
#: the share of the runs that draw pictures, which take ten times as long as all else that a tiny run does
PICTURES = 0.125
#: the example, and the kind of tiny model that replaces its own
EXAMPLES = {
    "demo": "encoder",
    "own_data": "encoder",
    "rolora_rte": "encoder",
    "qlora": "causal",
    "smollm2": "causal",
    "fashion_mnist": "vision",
    "one_shot": "vision",
}
#: limit in processor seconds for reading a file
READING = 20.0
#: limit in bytes for the memory of a run, in addition to that of its parent
MEMORY = 6 << 30


def example(name: str, bench: Bench, outdir: Path) -> dict[str, Any]:
    """An example with a tiny model, tiny data and few rounds."""
    tree = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    tiny = settings(bench.inputs, outdir, kind=EXAMPLES[name])
    tree |= {"outdir": str(outdir), "use_gpu": False}
    tree["federate"] |= {"client_num": 3, "total_round_num": 1}
    tree["federate"] |= {"sample_client_num": 2} if "sample_client_num" in tree["federate"] else {}
    tree["data"] |= tiny["data"]
    tree["data"] |= {"subsample": 1.0, "splitter": "iid", "splitter_args": []}
    tree["data"].pop("args", None)
    tree["model"] = tiny["model"]
    tree["train"] |= {"local_update_steps": 1, "batch_or_epoch": "batch"}
    tree["llm"] = {**tree.get("llm", {}), **tiny["llm"]}
    tree["dataloader"] = {"batch_size": 8}
    tree["eval"] = {"split": ["test"]}
    if EXAMPLES[name] == "vision":
        tree["data"].pop("transform", None)
        tree["lowrank"] = {**tree.get("lowrank", {}), "width": 0.25}
        tree["lowrank"] |= {"fisher": "diag", "steps": 5} if name == "one_shot" else {}
    return tree


def case(seed: int, bench: Bench) -> list[Outcome]:
    draw = random.Random(seed)
    name = draw.choice(sorted(EXAMPLES))
    with bench.place() as outdir:
        tree = example(name, bench, outdir)
        tree.setdefault("lowrank", {})["pictures"] = draw.random() < PICTURES
        doc = Document(tree, draw, keys_of(tree["federate"]["method"]))
        kinds = draw.choices(sorted(MUTATIONS), k=1 if draw.random() < 0.8 else 2)
        for kind in kinds:
            before = len(doc.done)
            while len(doc.done) == before:  # if a mutation finds nothing to change, another is drawn
                MUTATIONS[kind](doc)
        what, file = f"{name}: {'; '.join(doc.done)}", outdir.with_name("config.yaml")
        file.write_bytes(doc.content())
        seen = kinds[0] if len(kinds) == 1 else "two"
        forbidden = doc.forbidden if len(kinds) == 1 else None
        outcome = _run(file, outdir, bench, what, seen, by_command_line(seed))
        if outcome.ending == "valid" and forbidden:
            return [Outcome("failed", what, "the schema forbids it, and it was accepted", seen)]
        return [outcome]


def _run(file: Path, outdir: Path, bench: Bench, what: str, seen: str, command_line: bool) -> Outcome:
    from fs_lowrank import UserError, load_config

    if not command_line:
        logging.getLogger("fs_lowrank").setLevel(logging.ERROR)
        try:
            with limited(READING):
                load_config(file)
        except UserError as error:
            if not is_one_line(str(error)):
                return Outcome("failed", what, f"refused in several lines: {error}"[:400], seen)
            return Outcome("refused", what, str(error)[:300], seen)
        except Exception as error:
            return Outcome("failed", what, f"load_config raised {type(error).__name__}: {str(error)[:200]}", seen)
    ended = _start(file, outdir, bench, command_line)
    if ended.fault:
        return Outcome("failed", what, ended.fault, seen)
    if ended.code:
        return Outcome("refused", what, ended.err[-300:], seen)
    left = next((path.parent for path in sorted(file.parent.rglob("rounds.jsonl"))), outdir)
    if not left.exists():  # a byte of the path itself was changed
        left = Path(load_config(file).outdir)
    try:
        return _again(left, file, outdir, bench, what, seen)
    finally:
        if not left.is_relative_to(file.parent):
            shutil.rmtree(left, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.removedirs(left.parent)


def _again(left: Path, file: Path, outdir: Path, bench: Bench, what: str, seen: str) -> Outcome:
    """The outcome of a run that has ended in ``left``, after it is run once more."""
    if wrong := unsound(left):
        return Outcome("failed", what, f"a result that cannot be used: {wrong}", seen)
    first = file.with_name("first")
    left.rename(first)
    again = _start(file, outdir, bench, False)
    if again.fault or again.code:
        return Outcome("failed", what, f"the second time: {again.fault or again.err[-300:]}", seen)
    if unlike := difference(left, first):
        return Outcome("failed", what, f"another result the second time: {unlike}", seen)
    return Outcome("valid", what, "", seen)


def _start(file: Path, outdir: Path, bench: Bench, command_line: bool) -> Ended:
    argv, out = ["run", "--cfg", str(file)], outdir.with_name("printed.out")
    if command_line:
        return bench.command(argv, out)

    def work() -> int:
        from fs_lowrank import cli

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        return cli.main(argv)

    return fork(work, out)
