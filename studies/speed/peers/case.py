"""The whole job against other systems: FederatedScope and Flower.

For each model and number of clients the same job is run by us (one process, and a process for each core) and by each
peer in an environment of its own, in turn. Of a peer's two settings the one that was faster in its first run counts and
is repeated. With 100 clients or more, whose rounds are long, there is one run of two rounds, with the setting that was
faster with fewer clients.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from benchmark.script import script
from fs_lowrank import UserError
from fs_lowrank.errors import nearest
from fs_lowrank.jobs import shell
from fs_lowrank.jobs.files import read_json

from .. import difference
from .environment import OURS, PEERS, Missing, Peer, Variant, prepared
from .job import SHAPES, describe, make_job

#: losses of the last round further apart than this, relatively, are said to differ
CLOSE = 1e-3
LIMIT = 3600.0
#: clients from which on there is one run of two rounds
MANY = 100
COLUMNS = (
    *("model", "clients", "system", "setting", "rounds/s", "processor s a round", "peak memory"),
    *("whole job: seconds", "of the processor", "loss", "apart"),
)
READING = (
    "Rounds a second and processor seconds a round are medians over the rounds but the first, in which systems start "
    "something too; the whole job has everything from the start of the process. Memory (the proportional set size, "
    "where the system has it) and processor seconds are those of all processes of a run. In brackets: how many times "
    "better our faster row is; bold where a goal is missed (ahead everywhere, and twice as fast as FederatedScope and "
    "Flower from 50 clients on). Of a peer's settings the faster one is shown. Apart is the relative difference of the "
    "trained tensors from ours: AdamW's first steps move every number by about the learning rate, also where its "
    "gradient is rounding, so the order of additions alone makes up to 3e-3. Other work means that the number of "
    "samples or the last loss differs from ours."
)
FIGURES = ("rounds_per_second", "processor_seconds_a_round", "peak_bytes", "seconds", "processor_seconds")


def study(clients: str, models: str, peers: str, rounds: int, repeat: int, tiny: bool) -> dict[str, Any]:
    """The result of the command, as plain data."""
    sizes, models_run = [int(n) for n in shell.names(clients)], _chosen("--models", models, SHAPES)
    by_name = {peer.name: peer for peer in PEERS}
    chosen = [] if peers == "none" else [by_name[name] for name in _chosen("--peers", peers, by_name)]
    if rounds < 2:
        raise UserError(f"--rounds {rounds}: expected at least 2 rounds, of which the first does not count")
    settings = {"rounds": rounds, "repeat": repeat, "tiny": tiny, "cpus": os.cpu_count()}
    result: dict[str, Any] = {"settings": settings, "cells": [], "versions": {}, "missing": {}}
    pythons: dict[str, tuple[str, str]] = {OURS.name: (sys.executable, str(Path(__file__).parents[3]))}
    for peer in chosen:
        try:
            python, python_path = prepared(peer)
            pythons[peer.name] = (str(python), python_path)
        except Missing as error:
            result["missing"][peer.name] = str(error)
    systems = [peer for peer in (OURS, *chosen) if peer.name in pythons]
    for model in models_run:
        for size in sizes:
            fewer = [c for c in result["cells"] if c["model"] == model]
            cell = _cell(model, size, settings, systems, pythons, result["versions"], fewer)
            result["cells"].append({"model": model, "clients": size, **cell})
    return result


def _chosen(flag: str, text: str, valid: Iterable[str]) -> list[str]:
    names = list(shell.names(text))
    for name in names:
        if name not in valid:
            raise UserError(f"{flag} {name}: unknown{nearest(name, valid)}; there are: {', '.join(valid)}")
    return names


def _cell(
    model: str,
    clients: int,
    settings: dict[str, Any],
    systems: Sequence[Peer],
    pythons: dict[str, tuple[str, str]],
    versions: dict[str, Any],
    fewer: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """All runs of one model and number of clients, in turn.

    Args:
        fewer: the cells of the model with fewer clients.
    """
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    rounds, repeat, measured = settings["rounds"], settings["repeat"], runs
    if clients >= MANY:
        rounds, repeat = 2, 1
        largest = max(fewer, key=lambda cell: cell["clients"], default=None)
        measured = {(s["system"], s["variant"]): s["runs"] for s in largest["systems"]} if largest else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        make_job(model, folder, clients, rounds, settings["tiny"])
        for turn in range(repeat):
            for peer in systems:
                for variant in _variants(peer, runs if turn else measured):
                    out = Path(name) / f"{peer.name}_{peer.variants.index(variant)}_{turn}"
                    run = _run_once(peer, variant, folder, out, *pythons[peer.name])
                    if run["status"] == "ok":
                        versions[peer.name] = run.pop("versions")
                        run["apart"] = _distance(out, Path(name) / f"{OURS.name}_0_0")
                    runs.setdefault((peer.name, variant.name), []).append(run)
                    figures = {k: v for k, v in run.items() if k in (*FIGURES, "status", "samples", "loss", "apart")}
                    print(f"{model} {clients} {peer.name} ({variant.name}): {json.dumps(figures)}", flush=True)
    systems_run = [{"system": s, "variant": v, "runs": r, **_medians(r)} for (s, v), r in runs.items()]
    return {"rounds": rounds, "repeat": repeat, "systems": systems_run}


def _variants(peer: Peer, runs: dict[tuple[str, str], list[dict[str, Any]]]) -> Sequence[Variant]:
    """The variants to run: all of ours, and all of a peer that ``runs`` does not have; else the peer's faster one."""
    rates = {
        v.name: runs[peer.name, v.name][0].get("rounds_per_second", 0.0)
        for v in peer.variants
        if (peer.name, v.name) in runs
    }
    if peer is OURS or not rates:
        return peer.variants
    return [max(peer.variants, key=lambda v: rates.get(v.name, -1.0))]


def _run_once(peer: Peer, variant: Variant, job: Path, out: Path, python: str, python_path: str) -> dict[str, Any]:
    """The measurements of one run; ``status`` is "ok" or one line with the failure."""
    out.mkdir()
    script = [str(Path(__file__).parent / peer.script), str(job), str(out), json.dumps(variant.settings)]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **({"PYTHONPATH": python_path} if python_path else {}),
        "OMP_NUM_THREADS": str(variant.settings["threads"]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "FS_LOWRANK_FROZEN": str(out / "frozen"),  # no cache of another run
    }
    started = time.perf_counter()
    with (out / "log.txt").open("w") as log:
        process = subprocess.Popen([python, *script], cwd=out, env=environment, stdout=log, stderr=log)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return {"status": f"not done after {LIMIT:.0f} s"}
        finally:  # also after Ctrl-C
            _end(process)
    seconds = time.perf_counter() - started
    if code or not (out / "result.json").exists():
        lines = (out / "log.txt").read_text(errors="replace").strip().splitlines()
        return {"status": f"exit code {code}: {lines[-1][:300] if lines else 'nothing printed'}"}
    measured = read_json(out / "result.json", remedy="run the peer again")
    return {
        "status": "ok",
        **measured,
        "seconds": seconds,
        "rounds_per_second": 1 / statistics.median(measured["round_seconds"][1:]),
        "processor_seconds_a_round": statistics.median(measured["round_processor_seconds"][1:]),
    }


def _end(process: subprocess.Popen) -> None:
    """End a run that is not over, and all that it started."""
    if process.poll() is None:
        started = psutil.Process(process.pid)
        for child in (*started.children(recursive=True), started):
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.wait()


def _distance(out: Path, reference: Path) -> float | None:
    """The relative difference of the trained tensors from ours; None where ours did not end."""
    if not (reference / "final.safetensors").exists():
        return None
    ours, theirs = (
        {name.replace(".default", "").replace(".modules_to_save", ""): t for name, t in load_file(path).items()}
        for path in (reference / "final.safetensors", out / "final.safetensors")
    )
    return difference(theirs, ours)


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    finished = [run for run in runs if run["status"] == "ok"]
    if not finished:
        return {"status": runs[0]["status"]}
    facts = {name: finished[0][name] for name in ("samples", "loss", "apart", "memory")}
    return {"status": "ok", **facts, **{name: statistics.median(run[name] for run in finished) for name in FIGURES}}


def compared(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a cell: the faster setting of each peer and both of ours, with ratios to our faster one.

    A ratio above 1 means that we are ahead. A row whose work was not ours has ``other_work`` and no ratios.
    """
    ours = [s for s in cell["systems"] if s["system"] == OURS.name]
    best = max((s for s in ours if s["status"] == "ok"), key=lambda s: s["rounds_per_second"], default=None)
    rows = []
    for name in dict.fromkeys(s["system"] for s in cell["systems"]):
        variants = [s for s in cell["systems"] if s["system"] == name]
        if name != OURS.name:
            variants = [max(variants, key=lambda s: s.get("rounds_per_second", 0.0))]
        for system in variants:
            row = {k: v for k, v in system.items() if k != "runs"}
            if best and system["status"] == "ok":
                if system["samples"] != best["samples"] or abs(system["loss"] / best["loss"] - 1) > CLOSE:
                    row["other_work"] = True
                elif name != OURS.name:
                    row["speed_ratio"] = best["rounds_per_second"] / system["rounds_per_second"]
                    row["goal"] = 2.0 if cell["clients"] >= 50 and name in ("federatedscope", "flower") else 1.0
                    row["processor_ratio"] = system["processor_seconds_a_round"] / best["processor_seconds_a_round"]
                    row["memory_ratio"] = system["peak_bytes"] / best["peak_bytes"]
            rows.append({"model": cell["model"], "clients": cell["clients"], **row})
    return rows


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    titles = {peer.name: peer.title for peer in (OURS, *PEERS)}
    settings = result["settings"]
    lines = [
        "# The whole job against other systems",
        "",
        f"`python -m studies.speed.peers.case`; {settings['cpus']} cores, {settings['rounds']} rounds, medians of "
        f"{settings['repeat']} runs{', tiny models' if settings['tiny'] else ''}; from {MANY} clients on one run of "
        f"two rounds. {describe()}. {READING}",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "| --- | ---: | --- | --- |" + " ---: |" * (len(COLUMNS) - 4),
    ]
    for row in (row for cell in result["cells"] for row in compared(cell)):
        head = f"| {row['model']} | {row['clients']} | {titles[row['system']]} | {row['variant']} | "
        if row["status"] != "ok":
            lines.append(f"{head}{row['status']} |" + " |" * (len(COLUMNS) - 5))
            continue
        ratios = [("speed_ratio", row.get("goal", 1.0)), ("processor_ratio", 1.0), ("memory_ratio", 1.0)]
        speed, processor, memory = (_times(row.get(name), goal) for name, goal in ratios)
        values = [
            f"{row['rounds_per_second']:.3g}{speed}",
            f"{row['processor_seconds_a_round']:.3g}{processor}",
            f"{row['peak_bytes'] / 1e9:.2f} GB{memory}",
            f"{row['seconds']:.0f}",
            f"{row['processor_seconds']:.0f}",
            f"{row['loss']:.6g}{' (other work)' if row.get('other_work') else ''}",
            "" if row["apart"] is None else f"{row['apart']:.0e}",
        ]
        lines.append(head + " | ".join(values) + " |")
    lines += ["", *(f"- Not measured: {reason}." for reason in result["missing"].values())]
    lines += [f"- {peer.title} needs to start: {peer.mends}." for peer in PEERS if peer.name in result["versions"]]
    for name, packages in result["versions"].items():
        lines.append(f"- {titles[name]}: " + ", ".join(f"{p} {v}" for p, v in packages.items()) + ".")
    return "\n".join(lines) + "\n"


def _times(ratio: float | None, goal: float) -> str:
    return "" if ratio is None else f" ({ratio:.2f}×)" if ratio >= goal else f" (**{ratio:.2f}×**)"


OPTIONS: dict[str, dict[str, Any]] = {
    "--clients": dict(default="10,50,200", help="numbers of clients (default: %(default)s)"),
    "--models": dict(default=",".join(SHAPES), help="default: %(default)s"),
    "--peers": dict(default=",".join(peer.name for peer in PEERS), help="default: %(default)s; none: only ourselves"),
    "--rounds": dict(type=int, default=3, help="default: %(default)s, of which the first does not count"),
    "--repeat": dict(type=int, default=3, help="runs of each, of which the median counts"),
    "--tiny": dict(action="store_true", help="tiny models, to try that everything runs"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, lines=lambda result: [table(result)], out="results/speed/peers")


if __name__ == "__main__":
    raise SystemExit(main())
