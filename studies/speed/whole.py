"""Whole jobs with everything that saves work, and the same jobs without: the four methods of ``make demo``, a search
of 16 trials and a suite of 12 cells over the demo's data. The demo is also compared with one process, and its training
with the time that its matrix products need at this machine's peak.

"Without" is one process whose clients train one by one, on whole batches and all positions, and which takes nothing
from other runs; the states of frozen layers are kept within a run. Every job begins with nothing kept on disk.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from fs_lowrank.models.machine import wait
from fs_lowrank.settings.reading import read_yaml
from fs_lowrank.settings.tree import flatten

from . import ROOT, in_a_process, row

DEMO = ROOT / "examples" / "demo.yaml"
METHODS = ("rolora", "ffa_lora", "fedlora", "flexlora")
PLAIN = {"train.cohort": "off", "train.only_read": "off", "train.blocks": 1, "train.cache_frozen_shared": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"federate.process_num": "auto"},
    "one process": {},
    "without": PLAIN,
}
#: of the search and the suite, whose runs are shorter than the demo's
SHORT = {"federate.total_round_num": 6, "eval.freq": 3, "eval.split": ["val"]}
RATES = [float(f"{10 ** (-3.5 + 0.15 * i):.3g}") for i in range(16)]


def demo(settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run the demo's methods here, one after the other; for each its seconds from the first training step to its end,
    those of its ``training`` phases, the clients of each round, and the samples that they trained on.
    """
    from fs_lowrank import load_config, run
    from fs_lowrank.jobs.kept import keeping

    found = []
    with keeping():
        for method in METHODS:
            steps: list[float] = []
            keys = {"federate.method": method, "lowrank.pictures": False, **settings}
            result = run(
                load_config(DEMO, keys, outdir=str(folder / method)),
                progress=False,
                on_client=lambda *given, seen=steps: seen.append(time.perf_counter()),
            )
            found.append(
                {
                    "method": method,
                    "seconds": time.perf_counter() - steps[0],
                    "training": sum(record["seconds"]["training"] for record in result.history),
                    "clients": [record["clients"] for record in result.history],
                    "samples": [record["samples"] for record in result.history],
                    "test_acc": result.history[-1]["metrics"]["test"]["acc"],
                }
            )
    return found


def command(kind: str, settings: dict[str, Any], folder: Path) -> list[str]:
    """The command of a search or a suite, whose files are written to ``folder``."""
    keys = {**SHORT, **settings}
    if kind == "search":
        (folder / "rates.yaml").write_text(yaml.safe_dump({"train.optimizer.lr": {"grid": RATES}}))
        given = ["--cfg", str(DEMO), "--space", str(folder / "rates.yaml"), "--dir", str(folder / "hpo")]
        words = [text for key, value in keys.items() for text in (key, str(value))]
        return ["hpo", "tune", *given, "--methods", "rolora", "--workers", "2", "--confirm", "0", *words]
    config = {**flatten(read_yaml(DEMO)[1]), **keys}
    suite = {"config": config, "methods": list(METHODS), "seeds": [0, 1, 2], "test": "none", "metrics": ["val_acc"]}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    places = ["--results", str(folder / "results"), "--work", str(folder / "work")]
    return ["benchmark", "run", str(folder / "suite.yaml"), "--workers", "2", *places]


def _with_nothing_kept(arguments: Sequence[str], folder: Path) -> str:
    """What a Python process printed that found nothing kept on disk."""
    return in_a_process(*arguments, HF_HUB_OFFLINE="1", FS_LOWRANK_FROZEN=str(folder / "frozen"))


def _demo(setting: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        return json.loads(_with_nothing_kept(["-m", __name__, setting, name], Path(name)).splitlines()[-1])


def _job(kind: str, setting: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        arguments, started = command(kind, SETTINGS[setting], Path(name)), time.perf_counter()
        _with_nothing_kept(["-m", "fs_lowrank", *arguments], Path(name))
        return time.perf_counter() - started


# -- the physical limit ----------------------------------------------------------------------------------


def products(model: torch.nn.Module, frozen: Sequence[torch.nn.Module], length: int) -> tuple[int, int]:
    """Operations of the matrix products of a training step on one sample of ``length`` tokens, without padding: all but
    those of the layers ``frozen``, and theirs.

    Args:
        model: on the device ``meta``, which computes shapes and no values.
    """
    from torch.utils.flop_counter import FlopCounterMode

    spent = 0

    def before(module: torch.nn.Module, given: Any) -> None:
        nonlocal spent
        spent -= counter.get_total_flops()

    def after(module: torch.nn.Module, given: Any, result: Any) -> None:
        nonlocal spent
        spent += counter.get_total_flops()

    hooks = [hook for m in frozen for hook in (m.register_forward_pre_hook(before), m.register_forward_hook(after))]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, length, dtype=torch.long, device="meta")).logits.sum().backward()
    for hook in hooks:
        hook.remove()
    return counter.get_total_flops() - spent, spent


def limit(runs: Sequence[dict[str, Any]], peak: float) -> float:
    """Seconds that the matrix products of ``runs`` need at ``peak`` operations a second: those of every real token that
    was trained on, and of the frozen layers once for every distinct sample.

    A client's batches are drawn from its data, so a sample of its batches has the mean of its data's lengths.
    """
    from fs_lowrank import load_config
    from fs_lowrank.models.adapters import layer_stack
    from fs_lowrank.rounds.site import Site

    with tempfile.TemporaryDirectory() as folder:
        site = Site(load_config(DEMO, {"federate.method": "fedlora"}, outdir=folder))
    model = site.model.to("meta").train()
    stack = layer_stack(model)
    assert stack is not None and site.prefix is not None
    frozen = list(stack[1])[: site.prefix.depth]
    lengths = sorted({int(n) for data in site.data.clients for n in data.lengths})
    cost = {length: products(model, frozen, length) for length in lengths}
    mean = [
        [statistics.mean(cost[int(n)][part] for n in data.lengths) for part in (0, 1)] for data in site.data.clients
    ]
    config = site.config
    sizes = [len(data) for data in site.data.clients]
    most = config.train.local_update_steps * config.dataloader.batch_size
    operations, unseen = 0.0, [1.0] * len(sizes)
    for number, run in enumerate(runs):
        for clients, samples in zip(run["clients"], run["samples"]):
            operations += samples * statistics.mean(mean[client - 1][0] for client in clients)
            for client in clients if number == 0 else ():  # the other methods ask for the same samples
                unseen[client - 1] *= 1 - min(most, sizes[client - 1]) / sizes[client - 1]
    operations += sum((1 - new) * size * each[1] for new, size, each in zip(unseen, sizes, mean))
    return operations / peak


def peak_rate(
    size: int = 2048, repeats: int = 20, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> float:
    """Operations a second of a large matrix product, on a CPU with all cores."""
    one, other = torch.randn(2, size, size, device=device, dtype=dtype)
    taken = []
    for _ in range(repeats):
        wait(one.device)
        started = time.perf_counter()
        one @ other
        wait(one.device)
        taken.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(taken)


# -- the table -------------------------------------------------------------------------------------------


def run(turns: int = 1) -> dict:
    """Measure the demo ``turns`` times in turn, and the search and the suite once: all are of many runs."""
    demos: dict[str, list[list[dict[str, Any]]]] = {setting: [] for setting in SETTINGS}
    for _ in range(turns):
        for setting in SETTINGS:
            demos[setting].append(_demo(setting))
            seconds = sum(method["seconds"] for method in demos[setting][-1])
            print(f"whole: the demo, {setting}: {seconds:.0f} s", flush=True)
    jobs: dict[tuple[str, str], float] = {}
    for kind in ("search", "suite"):
        for setting in ("one process", "without"):  # a search and a suite have a process for each worker
            jobs[kind, setting] = _job(kind, setting)
            print(f"whole: the {kind}, {setting}: {jobs[kind, setting]:.0f} s", flush=True)
    whole = {s: statistics.median(sum(m["seconds"] for m in found) for found in demos[s]) for s in SETTINGS}
    training = statistics.median(sum(m["training"] for m in found) for found in demos["all"])
    peak = peak_rate()
    least = limit(demos["all"][0], peak)
    cores = os.cpu_count()
    accuracies = {s: [m["test_acc"] for m in demos[s][0]] for s in SETTINGS}
    rows = [
        row(
            "the demo's four methods, from the first step to the end",
            "one process, clients one by one, whole batches, nothing kept for other runs ÷ ours",
            whole["without"] / whole["all"],
            f"{whole['without']:.0f} s ÷ {whole['all']:.0f} s; each method "
            + ", ".join(f"{m['method']} {p['seconds'] / m['seconds']:.2g}×" for m, p in zip(*_first(demos))),
            least=3,
        ),
        row(
            "the same",
            f"one process with {cores} threads ÷ {cores} processes",
            whole["one process"] / whole["all"],
            f"{whole['one process']:.0f} s ÷ {whole['all']:.0f} s",
            least=1.2,
        ),
        row(
            "the same, training alone",
            "ours ÷ its matrix products at the peak of all cores",
            training / least,
            f"{training:.0f} s ÷ {least:.0f} s, at {peak / 1e9:.0f} GFLOP/s; real tokens alone, frozen layers once for "
            "each distinct sample",
            most=1.2,
        ),
    ]
    for kind, name in (("search", "a search of 16 trials"), ("suite", "a suite of 12 cells")):
        plain, ours = jobs[kind, "without"], jobs[kind, "one process"]
        rows.append(
            row(
                f"{name} over the demo's data, two workers, the whole command",
                "clients one by one, whole batches, nothing kept for other runs ÷ ours",
                plain / ours,
                f"{plain:.0f} s ÷ {ours:.0f} s",
                least=3,
            )
        )
    kept = {f"{kind}, {setting}": seconds for (kind, setting), seconds in jobs.items()}
    results = {"demo": demos, "jobs": kept, "test_acc": accuracies, "peak": peak, "limit_seconds": least}
    return {"threads": cores, "rows": rows, "results": results}


def _first(demos: dict[str, list[list[dict[str, Any]]]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return demos["all"][0], demos["without"][0]


if __name__ == "__main__":
    print(json.dumps(demo(SETTINGS[sys.argv[1]], Path(sys.argv[2]))))
