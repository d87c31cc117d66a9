"""python -m studies.speed [PART] [--out FOLDER]

PART: server_step, clients, scale, capacity, frozen_cache, only_read, cohort, memory, overhead, vision,
one_shot, startup, busy, whole, gpu, or all of them; without a GPU all but gpu

    python -m studies.speed peers [options]: the whole job against other systems, alone and not in "all"

Needs: fs-lowrank fetch minilm sentiment smollm2 alpaca_demo fashion_mnist
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from fs_lowrank.jobs import shell
from fs_lowrank.jobs.files import read_json, write_text
from fs_lowrank.versions import SCHEMA

from . import machine

PARTS = (
    "server_step",
    "clients",
    "scale",
    "capacity",
    "frozen_cache",
    "only_read",
    "cohort",
    "memory",
    "overhead",
    "vision",
    "one_shot",
    "startup",
    "busy",
    "whole",
    "gpu",
)


#: what the table uses of the file of a part
_READ = {"rows": list, "machine": dict, "machine.cpus": int, "machine.versions": dict, "seconds": int | float}


def table(folder: Path) -> str:
    """The README's text, from all results in ``folder``."""
    lines = [
        "# Speed",
        "",
        "Written by `python -m studies.speed`. Figures are medians of runs taken in turn on a shared machine, but "
        "for `scale`, `overhead` and `whole`, which are run once: compare within a line, not between lines. Seconds "
        "are the clock's in `server_step`, `overhead`, `whole` and `gpu`, the processor's in the others. Agreement is "
        "the relative difference between the results of the fast and the slow form.",
        "",
        "| case | figure | value | target | holds | times | agreement |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    about = []
    for part in PARTS:
        found = read_json(folder / f"{part}.json", fields=_READ, missing={}, remedy=f"measure it again: {part}")
        if not found:
            continue
        for line in found["rows"]:
            holds = "–" if line["target"] == "–" else "yes" if line["holds"] else "**no**"
            agreement = "" if line["agreement"] is None else f"{line['agreement']:.0e}"
            lines.append(
                f"| {line['case']} | {line['figure']} | {line['value']:.3g} | {line['target']} | {holds} | "
                f"{line['note']} | {agreement} |"
            )
        on = found["machine"]
        about.append(
            f"- `{part}`: {on['cpus']} cores, {found.get('threads', on['threads'])} thread(s), torch "
            f"{on['versions']['torch']}, {found['seconds']:.0f} s."
        )
    if (folder / "peers.md").exists():
        about.append("- [Against other systems](peers.md): FederatedScope, Flower, pfl.")
    return "\n".join([*lines, "", *about, ""])


def _parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="python -m studies.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="all", choices=(*PARTS, "all"))
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder for the results")
    parser.set_defaults(do=_run)
    return parser, [parser]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one part or all of them; returns the exit code, as ``fs-lowrank`` does."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["peers"]:  # it has options of its own
        return int(import_module(".peers.case", __package__).main(given[1:]))
    return shell.run(_parser, argv, shell.make_console(140), folder=lambda args: args.out)


def _run(args: argparse.Namespace) -> None:
    parts: Sequence[str] = (args.part,)
    if args.part == "all":
        parts = PARTS if torch.cuda.is_available() else [part for part in PARTS if part != "gpu"]
        if len(parts) < len(PARTS):
            print("gpu: left out, torch finds no GPU here", flush=True)
    for part in parts:
        started = time.perf_counter()
        found = import_module(f".{part}", __package__).run()
        result = {
            "schema": SCHEMA,
            "command": f"python -m studies.speed {part}",
            "seconds": time.perf_counter() - started,
            "machine": machine(),
            **found,
        }
        write_text(args.out / f"{part}.json", json.dumps(result, indent=1) + "\n")
        for line in found["rows"]:
            print(
                f"{part}: {line['case']}: {line['figure']}: {line['value']:.3g} ({line['target']}) {line['note']}",
                flush=True,
            )
    write_text(args.out / "README.md", table(args.out))


if __name__ == "__main__":
    raise SystemExit(main())
