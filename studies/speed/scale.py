"""Few clients of very many: what set-up, memory, a round and the files of a run cost with 10,000 to 1,000,000 clients.

    python -m studies.speed.scale [--clients 1000000] [--sampled 1000] [--rows 1100000] [--rounds 3] [--profile]

measures one number of clients in this process; ``python -m studies.speed scale`` measures three, each in a process
of its own, over the same synthetic file.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from . import ONE_THREAD, in_a_process, row
from .clients import ALLOWED, peak_bytes

CLIENTS = (10_000, 100_000, 1_000_000)
SAMPLED, ROWS, ROUNDS = 1000, 1_100_000, 3
#: different texts in the file
PHRASES = 4096
#: what counts as reading the data, by the module that calls it: the file, and its texts as tokens
READING = (
    ("fs_lowrank.rounds.site", "load_raw"),
    ("fs_lowrank.data.build", "check_vocabulary"),
    ("fs_lowrank.data.build", "tokenize_classification"),
)
#: what trains clients, one by one and together
TRAINING = (("fs_lowrank.rounds.site", "train_client"), ("fs_lowrank.rounds.site", "train_cohort"))


def write_data(folder: Path, rows: int) -> dict[str, str]:
    """A file of ``rows`` short texts of two classes, and a BERT of 3 layers and width 32, made without a network."""
    from fs_lowrank.testing.small import BAD, GOOD, PLAIN, save_encoder

    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, PHRASES)
    phrases = np.array(
        [f"{' '.join(draw.choice(PLAIN, 2))} {draw.choice(GOOD if label else BAD)},{label}" for label in labels]
    )
    path = folder / "texts.csv"
    with path.open("w", encoding="utf-8") as file:
        file.write("text,label\n")
        for start in range(0, rows, 1 << 16):
            chosen = draw.integers(0, PHRASES, min(1 << 16, rows - start))
            file.write("\n".join(phrases[chosen]) + "\n")
    return {"data": str(path), "model": str(save_encoder(folder / "model"))}


def settings(paths: dict[str, str], clients: int, sampled: int, rounds: int, splitter: str = "iid") -> dict[str, Any]:
    """One step of at most two samples for ``sampled`` clients a round; the test set is evaluated at the end."""
    return {
        "federate": {
            "method": "fedlora",
            "client_num": clients,
            "sample_client_num": sampled,
            "total_round_num": rounds,
        },
        "data": {"type": paths["data"], "splitter": splitter, "splits": [0.99, 0.0, 0.01]},
        "model": {"type": f"{paths['model']}@transformers"},
        "llm": {"tok_len": 8, "adapter": {"args": [{"r": 4, "alpha": 8, "modules": ["query", "value"]}]}},
        "dataloader": {"batch_size": 2},
        "train": {"cohort": "off", "local_update_steps": 1, "optimizer": {"type": "SGD", "lr": 0.05}},
        "eval": {"split": ["test"], "freq": rounds, "batch_size": 256},
    }


class Clock:
    """Seconds spent in the functions that were given to ``timed``, of the clock and of the processor."""

    def __init__(self) -> None:
        self.spent = {"clock": 0.0, "processor": 0.0}

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent = {kind: self.spent[kind] + seconds for kind, seconds in between(began, now()).items()}

        return wrapper

    @contextlib.contextmanager
    def timing(self, *places: tuple[str, str]) -> Iterator[None]:
        """A context in which functions are timed, each given by a module and its name there."""
        with contextlib.ExitStack() as stack:
            for module, name in places:
                function = getattr(importlib.import_module(module), name)
                stack.enter_context(patch(f"{module}.{name}", self.timed(function)))
            yield


def now() -> dict[str, float]:
    return {"clock": time.perf_counter(), "processor": time.process_time()}


def between(first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
    return {kind: last[kind] - first[kind] for kind in first}


def measure(keys: dict[str, Any], profile: bool = False) -> dict[str, Any]:
    """One run in this process.

    Returns:
        By the clock and by the processor, seconds of ``reading`` (the file and its tokens), of ``setup`` beyond it
        until the first client trains, of each of the ``rounds`` without its evaluation, with the part of ``training``,
        and of the ``end``. Bytes of the ``base`` model, of the ``peak`` of memory, ``after_setup`` and in all, and of
        the ``files`` that the run left.
    """
    from fs_lowrank import load_config
    from fs_lowrank.engines.local import LocalEngine

    imported, reading, training, evaluation = peak_bytes(), Clock(), Clock(), Clock()
    profiler = cProfile.Profile()
    marks: list[dict[str, dict[str, float]]] = []
    peaks: list[int] = []

    def mark() -> None:
        marks.append({"whole": now(), "training": training.spent, "evaluation": evaluation.spent})

    def on_client(round: int, done: int, clients: int) -> None:
        if not marks:
            profiler.disable()
            peaks.append(peak_bytes())
            mark()

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = load_config(keys, outdir=folder)
        stack.enter_context(reading.timing(*READING))
        stack.enter_context(training.timing(*TRAINING))
        stack.enter_context(evaluation.timing(("fs_lowrank.rounds.evaluator", "evaluate")))
        if profile:
            profiler.enable()
        began = now()
        engine = LocalEngine(config, lambda record: mark(), on_client)
        engine.run()
        ended = now()
        files = {str(p.relative_to(folder)): p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()}
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    rounds = []
    for first, last in zip(marks, marks[1:]):
        spent = {what: between(first[what], last[what]) for what in first}
        rounds.append({"whole": between(spent["evaluation"], spent["whole"]), "training": spent["training"]})
    model, state = engine.model, engine.ledger.state
    return {
        "clients": config.federate.client_num,
        "sampled": config.sampled_per_round,
        "reading": reading.spent,
        "setup": between(reading.spent, between(began, marks[0]["whole"])),
        "rounds": rounds,
        "end": between(marks[-1]["whole"], ended),
        "base_bytes": sum(p.numel() * p.element_size() for n, p in model.named_parameters() if n not in state),
        "imported_peak_bytes": imported,
        "after_setup_peak_bytes": peaks[0],
        "peak_bytes": peak_bytes(),
        "file_bytes": sum(files.values()),
        "files": dict(sorted(files.items(), key=lambda item: -item[1])[:8]),
    }


def in_fresh_process(keys: dict[str, Any]) -> dict[str, Any]:
    """``measure`` in a new process with one thread."""
    printed = in_a_process("-m", __name__, "--settings", json.dumps(keys), **ONE_THREAD)
    return json.loads(printed.splitlines()[-1])


def round_seconds(found: dict[str, Any], kind: str = "processor") -> float:
    """The median seconds of a round."""
    return statistics.median(r["whole"][kind] for r in found["rounds"])


def own_share(found: dict[str, Any]) -> float:
    """The median share of a round outside the training of clients."""
    return statistics.median(1 - r["training"]["processor"] / r["whole"]["processor"] for r in found["rounds"])


def described(found: dict[str, Any]) -> str:
    return (
        f"reading {found['reading']['processor']:.1f} s, set-up beyond it {found['setup']['processor']:.1f} s, "
        f"{(found['peak_bytes'] - found['base_bytes']) / 1e6:.0f} MB above the base at most "
        f"({(found['after_setup_peak_bytes'] - found['base_bytes']) / 1e6:.0f} MB after set-up, libraries alone "
        f"{found['imported_peak_bytes'] / 1e6:.0f} MB), a round of {found['sampled']:,} {round_seconds(found):.2f} s, "
        f"{own_share(found):.3f} of it the engine's own, {found['file_bytes'] / 1e6:.2f} MB of files"
    )


def run(
    clients: Sequence[int] = CLIENTS, sampled: int = SAMPLED, rows: int = ROWS, rounds: int = ROUNDS, turns: int = 1
) -> dict[str, Any]:
    """Measure every number of clients ``turns`` times in turn, over the same file."""
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in clients}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_data(Path(folder), rows)
        for _ in range(turns):
            for number in clients:
                found[number].append(in_fresh_process(settings(paths, number, sampled, rounds)))
    few, many = clients[0], clients[-1]
    last = found[many]
    over = max(f["peak_bytes"] - f["base_bytes"] for f in last)
    setup = {n: statistics.median(f["setup"]["processor"] for f in of) for n, of in found.items()}
    a_round = {n: statistics.median(map(round_seconds, of)) for n, of in found.items()}
    left = max(f["file_bytes"] for f in last)
    case = f"{many:,} clients, {sampled:,} a round, {rows:,} rows, a tiny BERT"

    def each(values: Mapping[int, float], unit: str) -> str:
        return "; ".join(f"{n:,} clients: {value:.3g} {unit}" for n, value in values.items())

    peaks = {n: max(f["peak_bytes"] - f["base_bytes"] for f in of) / 1e6 for n, of in found.items()}
    sizes = {n: max(f["file_bytes"] for f in of) / 1e6 for n, of in found.items()}
    shares = {n: statistics.median(map(own_share, of)) for n, of in found.items()}
    read = statistics.median(f["reading"]["processor"] for f in last)
    rows_of = [
        row(
            case,
            "set-up beyond reading the data, s",
            setup[many],
            each(setup, "s") + f"; reading {read:.3g} s",
            most=20,
        ),
        row(
            "the same",
            f"peak memory ÷ (base + {ALLOWED / 1e9:g} GB)",
            over / ALLOWED,
            each(peaks, "MB above the base"),
            most=1,
        ),
        row(
            "the same",
            f"a round ÷ one with {few:,} clients",
            a_round[many] / a_round[few],
            each(a_round, "s"),
            most=1.1,
        ),
        row("the same", "share of a round outside the clients' training", shares[many], each(shares, "")),
        row("the same", "MB of files that the run leaves", left / 1e6, each(sizes, "MB"), most=20),
    ]
    return {"threads": 1, "rows": rows_of, "results": {str(n): of for n, of in found.items()}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=CLIENTS[-1])
    parser.add_argument("--sampled", type=int, default=SAMPLED, help="clients in a round")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--splitter", default="iid")
    parser.add_argument("--data", type=Path, help="folder of an earlier file and model; default: a temporary one")
    parser.add_argument("--profile", action="store_true", help="print where set-up spends its time")
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = _parser().parse_args()
    if args.settings:
        print(json.dumps(measure(args.settings)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / "texts.csv"
        paths = {"data": str(made), "model": str(folder / "model")} if made.exists() else write_data(folder, args.rows)
        keys = settings(paths, args.clients, args.sampled, args.rounds, args.splitter)
        found = measure(keys, args.profile)
    print(json.dumps(found, indent=1))
    print(f"{args.clients:,} clients: {described(found)}")


if __name__ == "__main__":
    main()
