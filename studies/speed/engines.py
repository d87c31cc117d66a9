"""Rounds per second and memory of one job on three engines: embedded, framework standalone, framework distributed.

    python -m studies.speed.engines [--clients 10,50,200] [--rounds 6] [--out results/engines]

The job is small (a random encoder of four layers, two local steps, every client in every round), so that the
engine is measured and not the training. Memory is the proportional set size of all processes of a run,
sampled while it runs: memory shared by several processes counts once. Rounds per second are wall-clock
figures and depend on other load on the machine; processor seconds, summed over all processes, hardly do. A
distributed run that would not fit into memory is not started, and the table says so.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmark.script import script

WORDS = "good great fine happy bad poor awful sad the a film book day it was is very quite and story".split()
#: (label, engine, further keys)
ENGINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("local", "local", {}),
    ("standalone, one model", "federatedscope", {"federate.share_local_model": True}),
    ("standalone, a model each", "federatedscope", {}),
    ("distributed", "federatedscope", {"federate.mode": "distributed", "distribute.use": True}),
)


def make_job(folder: Path, rows: int) -> None:
    """A model, its tokenizer and ``rows`` labelled sentences."""
    import pandas as pd
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(str(folder / "model"))
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=64,
        )
    ).save_pretrained(str(folder / "model"))
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, rows)
    texts = [" ".join(draw.permutation([*draw.choice(WORDS[8:], 10), WORDS[4 * (1 - label)]])) for label in labels]
    pd.DataFrame({"text": texts, "label": labels}).to_csv(folder / "data.csv", index=False)


def settings(folder: Path, clients: int, rounds: int) -> dict:
    return {
        "federate": {"method": "rolora", "client_num": clients, "total_round_num": rounds},
        "data": {"type": str(folder / "data.csv"), "splitter": "iid", "splits": [0.9, 0.0, 0.1]},
        "model": {"type": f"{folder / 'model'}@transformers"},
        "llm": {
            "tok_len": 24,
            "adapter": {"args": [{"r": 4, "alpha": 8, "modules": ["query", "value"], "layers": [2, 3]}]},
        },
        "dataloader": {"batch_size": 8},
        "train": {"local_update_steps": 2, "optimizer": {"type": "SGD", "lr": 0.05}},
        "eval": {"split": ["test"], "freq": 0, "best_res_update_round_wise_key": "test_loss"},
        "lowrank": {"checkpoint_freq": 0, "timeout": 300.0},
    }


def _process(config: dict, keys: dict, engine: str, answers: Any) -> None:
    """One process of a run; puts the end time and processor seconds of each round into ``answers``."""
    import torch

    torch.set_num_threads(1)
    import fs_lowrank

    ended, worked = [], []

    def on_round(record):
        ended.append(time.perf_counter())
        worked.append(time.process_time())

    def on_client(round, *_):
        if keys.get("distribute.role") == "client":
            worked.append(time.process_time())

    try:
        fs_lowrank.run(fs_lowrank.load_config(config, keys), engine, on_round=on_round, on_client=on_client)
        answers.put((ended, float(np.median(np.diff(worked)))))
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


def pss(pid: int) -> int:
    """Proportional set size in bytes (Linux); 0 if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).memory_full_info().pss
    return 0


class Memory(threading.Thread):
    """Samples the sum of the proportional set sizes of some processes and keeps its maximum, ``peak``, in bytes."""

    def __init__(self, pids: list[int]):
        super().__init__(daemon=True)
        self.pids, self.peak, self.over = pids, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(max(0.1, 0.004 * len(self.pids))):
            self.peak = max(self.peak, sum(map(pss, self.pids)))


def _ports(count: int) -> list[int]:
    """Free ports: all are bound at the same time, so that no port is returned twice."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


def measure(
    context: Any, config: dict, clients: int, engine: str, keys: dict, outdir: str, a_client: float
) -> dict[str, Any]:
    """Rounds per second and peak bytes of one run; ``a_client``: bytes of a client process, as measured before."""
    jobs = [dict(keys, outdir=outdir)]
    if keys.get("federate.mode") == "distributed":
        needed = a_client * clients
        if needed > 0.8 * psutil.virtual_memory().available:
            return {"status": f"not run: {clients} client processes need about {needed / 1e9:.0f} GB"}
        ports = _ports(clients + 1)
        jobs[0].update(
            {"distribute.role": "server", "distribute.server_port": ports[0], "distribute.server_host": "127.0.0.1"}
        )
        jobs += [
            dict(
                jobs[0],
                **{
                    "distribute.role": "client",
                    "distribute.client_port": ports[i],
                    "distribute.client_host": "127.0.0.1",
                    "distribute.data_idx": i,
                },
            )
            for i in range(1, clients + 1)
        ]
    started = []
    for job in jobs:
        answers = context.Queue()
        process = context.Process(target=_process, args=(config, job, engine, answers), daemon=True)
        process.start()
        started.append((process, answers))
    memory = Memory([process.pid for process, _ in started])
    memory.start()
    try:
        answer, others = started[0][1].get(timeout=1800), []
        for process, answers in started[1:]:
            with contextlib.suppress(queue.Empty):
                others.append(answers.get(timeout=60))
            process.join(60)
    finally:
        memory.over.set()
        memory.join()
        for process, _ in started:
            if process.is_alive():
                process.kill()
            process.join()
    failed = [a for a in (answer, *others) if isinstance(a, str)]
    if failed:
        return {"status": f"failed: {failed[0]}"}
    # Differences between the ends of rounds, because the first round includes the start.
    ended, work = answer[0], answer[1] + sum(work for _, work in others)
    seconds = float(np.median(np.diff(ended)))
    return {
        "status": "ok",
        "rounds_per_second": 1 / seconds,
        "processor_seconds_a_round": work,
        "peak_bytes": memory.peak,
        "processes": len(jobs),
        "rounds": len(ended),
    }


def table(result: dict) -> str:
    """A Markdown table: rows are engines, columns are numbers of clients."""
    cells = result["cells"]
    sizes = sorted({cell["clients"] for cell in cells})
    lines = [
        "# Engines side by side",
        "",
        f"`{result['command']}`; {result['cpus']} processors, one thread a process, "
        f"torch {result['versions']['torch']}. {result['job']}",
        "",
        "| engine | " + " | ".join(f"{n} clients: rounds/s | processor s a round | memory" for n in sizes) + " |",
        "| --- |" + " ---: | ---: | ---: |" * len(sizes),
    ]
    for label in dict.fromkeys(cell["engine"] for cell in cells):
        row: list[str] = []
        for size in sizes:
            cell: Any = next((c for c in cells if (c["engine"], c["clients"]) == (label, size)), {"status": "not run"})
            row += (
                [
                    f"{cell['rounds_per_second']:.2f}",
                    f"{cell['processor_seconds_a_round']:.2f}",
                    f"{cell['peak_bytes'] / 1e9:.2f} GB",
                ]
                if cell["status"] == "ok"
                else [cell["status"], "", ""]
            )
        lines.append(f"| {label} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def study(clients: str, rounds: int) -> dict:
    """The result of the command, as plain data."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that it starts
    import fs_lowrank.engines.federatedscope  # noqa: F401 - says what is missing before anything runs

    context = multiprocessing.get_context("forkserver")
    # Modules are imported once and processes forked, so that 200 clients fit into a small machine.
    context.set_forkserver_preload(
        [
            "fs_lowrank.engines.federatedscope.run",
            "fs_lowrank.draw.runs",
            "pandas",
            "transformers.models.bert.modeling_bert",
            "peft.tuners.lora",
        ]
    )
    sizes = [int(n) for n in clients.split(",")]
    cells, a_client = [], 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_job(folder, rows=max(sizes) * 16)
        for size in sizes:
            config = settings(folder, size, rounds)
            for label, engine, keys in ENGINES:
                cell = measure(context, config, size, engine, keys, str(folder / f"{label}_{size}"), a_client)
                if label == "distributed" and cell["status"] == "ok":
                    a_client = cell["peak_bytes"] / (size + 1)
                cells.append({"engine": label, "clients": size, **cell})
                print(json.dumps(cells[-1]), flush=True)
    return {
        "cpus": os.cpu_count(),
        "job": "RoLoRA on an encoder of 4 layers and width 128, r 4 in the query and value of the last two; 2 "
        "steps of 8 samples a client and round, every client in every round; memory is the proportional "
        "set size of all processes, with what they import in common counted once. Rounds per second are "
        "by the clock and suffer from other load; processor seconds, summed over all processes, hardly do.",
        "cells": cells,
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "--clients": dict(default="10,50,200", help="numbers of clients, separated by commas"),
    "--rounds": dict(type=int, default=6),
}
main = script(__spec__.name, __doc__, OPTIONS, study, readme=table, out="results/engines")


if __name__ == "__main__":
    raise SystemExit(main())
