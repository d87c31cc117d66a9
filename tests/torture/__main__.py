"""``python -m tests.torture``: kills and damages runs at random, and counts how they end.

    python -m tests.torture --kinds kills,damage --number 100 --seed 0

Prints a table, and writes it with the shards that it summarises to ``results/torture``. The same command continues
after an interruption; ``--minutes`` limits its time. To repeat one case: ``--kinds kills --number 1 --seed 17 --show``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from . import shim
from .bench import ROOT, Bench
from .driver import KINDS, bench_folder, module_of, run_kind, table, worked_off


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of: {', '.join(KINDS)}; all by default")
    parser.add_argument("--number", type=int, default=20, help="seeds of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="a case that is running then is begun anew next time"
    )
    parser.add_argument("--results", default=str(ROOT / "results" / "torture"), help="folder of the shards")
    parser.add_argument("--bench", help="working folder; by default one in memory that is removed at the end")
    parser.add_argument("--show", action="store_true", help="print every outcome, and write nothing")
    args = parser.parse_args()
    kinds = [name.strip() for name in args.kinds.split(",") if name.strip()]
    unknown = [name for name in kinds if name not in KINDS]
    if unknown:
        parser.error(f"no kind {unknown[0]!r}; there are: {', '.join(KINDS)}")
    library = shim.preload()
    if library and not shim.loaded():  # it must be loaded before the C library
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, [sys.executable, "-m", "tests.torture", *sys.argv[1:]])
    until, results = started + 60 * args.minutes, Path(args.results)
    folder = bench_folder(args.bench)
    failed = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the working folder is removed
    try:
        _warm(folder)
        for kind in kinds:
            module = module_of(kind)
            if getattr(module, "NEEDS_SHIM", False) and not library:
                print(f"{kind}: left out, there is no C compiler for the shim")
                continue
            if args.show:
                for seed, outcomes, seconds, _ in worked_off(kind, range(args.seed, args.seed + args.number), folder):
                    for o in outcomes:
                        print(f"{kind} {seed} {seconds:.2f} s {o.ending}: {o.what} | {o.reason}", flush=True)
                        failed |= o.ending == "failed"
            elif not run_kind(kind, args.number, args.seed, results, folder, until, lambda t: print(t, flush=True)):
                print(f"{kind}: out of time; the same command goes on", flush=True)
    finally:
        if not args.bench:
            shutil.rmtree(folder, ignore_errors=True)
    if args.show:
        return int(failed)
    text = table(results)
    print("\n" + text)
    (results / "README.md").write_text(HEAD + text)
    return int("Failed:" in text)


#: the text above the table in the README of the results
HEAD = """# Torture

What `make torture` did to runs of tiny models, and how they took it. Every case ends in one of: refused with one line
and exit code 2, or with exit code 1 where only the run itself could find it out; the same result; a resumed run with
the same result; an input that was valid after all. One message has several lines: the keys that a run does not honour,
each in an indented line. Anything else has failed, and its seed repeats it:
`python -m tests.torture --kinds KIND --number 1 --seed SEED --show`.

"""


def _warm(folder: Path) -> None:
    """Prepare the process from which cases are forked: one thread, no network, and a run of every kind of model."""
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    import torch

    from fs_lowrank import cli

    torch.set_num_threads(1)
    bench = Bench(folder)
    for run in ("flora of three ranks", "causal fedlora", "fedhm"):
        with bench.place() as outdir, open(os.devnull, "w") as nowhere:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                code = cli.main(["run", "--cfg", str(bench.configure(run, outdir, outdir.parent))])
            if code:
                raise SystemExit(f"the run {run!r} fails by itself, with exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
