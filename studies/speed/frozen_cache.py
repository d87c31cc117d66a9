"""Speed of local steps with cached states below the first adapted layer, relative to computing them in every step."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fs_lowrank import Config, load_config
from fs_lowrank.data import load_raw
from fs_lowrank.data.examples import IGNORED_LABEL
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.frozen import FrozenPrefix
from fs_lowrank.training import train_client

from . import difference, race, row, threads

MINILM = {
    "federate": {"method": "rolora", "client_num": 2, "total_round_num": 1},
    "data": {"type": "sentiment", "splits": [0.9, 0.0, 0.1]},
    "model": {"type": "minilm@transformers"},
    "llm": {
        "tok_len": 64,
        "adapter": {"args": [{"r": 4, "alpha": 8, "modules": ["query", "value"], "layers": [4, 5]}]},
    },
    "dataloader": {"batch_size": 16},
    "train": {"local_update_steps": 8, "optimizer": {"type": "SGD", "lr": 0.05}},
    "eval": {"split": ["test"]},
}
SMOLLM2 = {
    "federate": {"method": "rolora", "client_num": 2, "total_round_num": 1},
    "data": {"type": "alpaca_demo", "splits": [0.9, 0.0, 0.1]},
    "model": {"type": "smollm2@huggingface_llm"},
    "llm": {
        "tok_len": 128,
        "adapter": {"args": [{"r": 8, "alpha": 16, "modules": ["q_proj", "v_proj"], "layers": list(range(20, 30))}]},
    },
    "dataloader": {"batch_size": 4},
    "train": {"local_update_steps": 2, "optimizer": {"type": "SGD", "lr": 0.05}},
    "eval": {"split": ["test"]},
}


SHORT_ANSWERS = {**SMOLLM2, "data": {"splits": [0.9, 0.0, 0.1]}}


def write_questions(path: Path, rows: int) -> None:
    """Write the sentiment data as instructions with one-word answers, as in the commonsense tasks."""
    frame = load_raw(load_config(MINILM).data).train.head(rows)
    questions = frame.assign(
        instruction="Is the opinion in this sentence positive or negative? Answer with one word.",
        input=frame["text"],
        output=frame["label"].map({0: "negative", 1: "positive"}),
    )
    questions[["instruction", "input", "output"]].to_json(path, orient="records", lines=True)


def measure(config: Config, samples: int, repeats: int) -> dict:
    """``train.local_update_steps`` steps on the same ``samples`` samples, with the cache and without, in turn.

    Dropout is off below the first adapted layer in both, as in a run with ``train.cache_frozen: off``.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(config.replace(outdir=folder))
    model: Any = engine.model
    method = engine.method
    data: Any = engine.site.data.clients[0]
    examples = data.select(np.arange(min(samples, len(data))))
    # With a limit of 0 bytes, no states are cached.
    prefixes = {
        "kept": FrozenPrefix(model, {*method.shared}, limit=4e9),
        "computed": FrozenPrefix(model, {*method.shared}, limit=0),
    }
    for prefix in prefixes.values():
        prefix.plan({"client": (examples, float("inf"))})
    started = time.process_time()
    with prefixes["kept"].states("client", examples, np.arange(1)):
        once = time.process_time() - started

    losses: dict[str, float] = {}
    trained: dict[str, dict] = {}

    def steps(name):
        load_tensors(model, engine.ledger.state)
        losses[name] = train_client(
            model,
            examples,
            method.phases(1),
            config,
            lr=config.train.optimizer.lr,
            seed=1,
            owner="client",
            prefix=prefixes[name],
        ).loss
        trained[name] = {n: t.detach().clone() for n, t in method.upload(model, 1, engine.site.clients[0]).items()}

    count, batch = config.train.local_update_steps, config.dataloader.batch_size
    seconds = race({name: partial(steps, name) for name in prefixes}, repeats)
    step = {name: taken / count for name, taken in seconds.items()}
    saved = step["computed"] - step["kept"]
    a_pass = len(examples) / batch
    tokens = int(examples.lengths.sum())
    labelled = sum(int((row != IGNORED_LABEL).sum()) for row in examples.columns.get("labels", ()))
    return {
        "seconds_a_step": step,
        "once_seconds": once,
        "samples": len(examples),
        "batch": batch,
        "tokens": tokens,
        "labelled_tokens": labelled,
        "bytes_kept": tokens * model.config.hidden_size * 4,
        "speed_up": step["computed"] / step["kept"],
        "passes_to_pay_back": once / (saved * a_pass) if saved > 0 else float("inf"),
        "speed_up_with_the_first_pass": {
            str(n): n * a_pass * step["computed"] / (once + n * a_pass * step["kept"]) for n in (2, 5, 10, 30)
        },
        "loss": losses,
        "loss_difference": abs(losses["kept"] - losses["computed"]) / abs(losses["computed"]),
        "difference": difference(trained["kept"], trained["computed"]),
    }


def run() -> dict:
    rows, results = [], {}
    smol = "SmolLM2-135M, layers 20 to 29 of 30"
    cases: tuple[tuple[str, dict[str, Any], int, int], ...] = (
        ("MiniLM, layers 4 and 5 of 6", MINILM, 128, 9),
        (f"{smol}, answers of a word", SHORT_ANSWERS, 32, 5),
        (f"{smol}, answers of sentences", SMOLLM2, 32, 5),
    )
    for name, settings, samples, repeats in cases:
        with threads(1), tempfile.TemporaryDirectory() as folder:
            config = load_config({**settings, "data": {"type": f"{folder}/questions.jsonl", **settings["data"]}})
            if settings is SHORT_ANSWERS:
                write_questions(Path(folder) / "questions.jsonl", 100)
            found = results[name] = measure(config, samples, repeats)
        head = f"; the head works on {found['labelled_tokens']} of {found['tokens']} tokens either way"
        step = {k: f"{1e3 * v:.4g} ms" for k, v in found["seconds_a_step"].items()}
        rows.append(
            row(
                name,
                "local step, states computed ÷ kept",
                found["speed_up"],
                f"{step['computed']} ÷ {step['kept']}" + (head if found["labelled_tokens"] else ""),
                found["difference"],
                least=1.8,
            )
        )
        rows.append(
            row(
                "the same",
                "passes over the data that pay for the first",
                found["passes_to_pay_back"],
                "with the first pass: "
                + ", ".join(f"{v:.2f}× in {n} passes" for n, v in found["speed_up_with_the_first_pass"].items()),
            )
        )
    return {"threads": 1, "rows": rows, "results": results}
