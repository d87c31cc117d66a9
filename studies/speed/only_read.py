"""Speed of local steps whose last layer is computed for what the loss reads, in blocks of similar length, relative to
steps that compute it for all positions. The states of the frozen layers are kept in all, and but for one form the keys
and values of the first adapted layer, too."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fs_lowrank import Config, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.frozen import FrozenPrefix
from fs_lowrank.training import train_client

from . import difference, race, row, threads
from .frozen_cache import MINILM, SHORT_ANSWERS, write_questions


def measure(config: Config, samples: int, repeats: int) -> dict:
    """``train.local_update_steps`` steps on the same ``samples`` samples, in four ways in turn."""
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(config.replace(outdir=folder))
    site, model = engine.site, engine.model
    data: Any = site.data.clients[0]
    examples = data.select(np.arange(min(samples, len(data))))
    kept, states = (
        FrozenPrefix(model, {*engine.method.shared}, limit=4e9, changing=changing)
        for changing in (engine.method.changed_base(model), None)
    )
    for prefix in (kept, states):
        prefix.plan({"client": (examples, float("inf"))})
    ways = {
        "all": (kept, None, 1),
        "read": (kept, site.reads, 1),
        "states": (states, site.reads, 1),
        "blocks": (kept, site.reads, 0),
    }
    trained: dict[str, dict] = {}

    def steps(name):
        prefix, reads, blocks = ways[name]
        load_tensors(model, engine.ledger.state)
        train_client(
            model,
            examples,
            engine.method.phases(1, 1),
            config.replace(**{"train.blocks": blocks}),
            lr=config.train.optimizer.lr,
            seed=1,
            owner="client",
            prefix=prefix,
            reads=reads,
        )
        trained[name] = {n: t.detach().clone() for n, t in engine.method.upload(model, 1, site.clients[0]).items()}

    count = config.train.local_update_steps
    seconds = {name: taken / count for name, taken in race({n: partial(steps, n) for n in ways}, repeats).items()}
    lengths = [
        examples.lengths[i : i + config.dataloader.batch_size]
        for i in range(0, len(examples), config.dataloader.batch_size)
    ]
    return {
        "seconds_a_step": seconds,
        "used": bool(site.reads),
        "speed_up": seconds["all"] / seconds["read"],
        "speed_up_in_blocks": seconds["all"] / seconds["blocks"],
        "speed_up_of_keys_and_values": seconds["states"] / seconds["read"] if kept.parts else None,
        "padding": 1 - float(examples.lengths.sum()) / sum(len(part) * int(part.max()) for part in lengths),
        "difference": max(difference(trained[n], trained["all"]) for n in ways),
    }


def of_minilm(tokens: int, batch: int, layers: list[int]) -> dict:
    """MiniLM with other sizes."""
    adapter = {"r": 4, "alpha": 8, "modules": ["query", "value"], "layers": layers}
    return {
        **MINILM,
        "llm": {"tok_len": tokens, "adapter": {"args": [adapter]}},
        "dataloader": {"batch_size": batch},
    }


def run() -> dict:
    cases: tuple[tuple[str, dict[str, Any], int, int], ...] = (
        ("MiniLM, layers 4 and 5 of 6, 4 × 32 tokens", of_minilm(32, 4, [4, 5]), 32, 9),
        ("MiniLM, layers 4 and 5 of 6, 16 × 32 tokens", of_minilm(32, 16, [4, 5]), 128, 9),
        ("MiniLM, layers 4 and 5 of 6, 8 × 64 tokens", of_minilm(64, 8, [4, 5]), 64, 9),
        ("MiniLM, layer 5 of 6, 16 × 32 tokens", of_minilm(32, 16, [5]), 128, 9),
        ("SmolLM2-135M, layers 20 to 29 of 30, answers of a word", SHORT_ANSWERS, 32, 5),
    )
    rows, results = [], {}
    for name, settings, samples, repeats in cases:
        with threads(1), tempfile.TemporaryDirectory() as folder:
            config = load_config({**settings, "data": {"type": f"{folder}/questions.jsonl", **settings["data"]}})
            if settings is SHORT_ANSWERS:
                write_questions(Path(folder) / "questions.jsonl", 100)
            found = results[name] = measure(config, samples, repeats)
        step = {k: f"{1e3 * v:.4g} ms" for k, v in found["seconds_a_step"].items()}
        rows.append(
            row(
                name,
                "local step, the last layer for all positions ÷ for those that are read",
                found["speed_up"],
                f"{step['all']} ÷ {step['read']}",
                found["difference"],
            )
        )
        if found["speed_up_of_keys_and_values"]:
            rows.append(
                row(
                    "the same",
                    "local step, keys and values of the first adapted layer computed ÷ kept",
                    found["speed_up_of_keys_and_values"],
                    f"{step['states']} ÷ {step['read']}",
                    found["difference"],
                )
            )
        rows.append(
            row(
                "the same",
                "the last layer for all positions ÷ in blocks of similar length, too, as by `train.blocks: auto`",
                found["speed_up_in_blocks"],
                f"{step['all']} ÷ {step['blocks']}; {found['padding']:.0%} of the tokens are padding",
                found["difference"],
            )
        )
    return {"threads": 1, "rows": rows, "results": results}
