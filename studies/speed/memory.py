"""Memory of a base by the dtype of its weights, and of a step by what it keeps, each measured in a new process."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fs_lowrank.models.quantised import require_bitsandbytes

from . import ONE_THREAD, in_a_process, row
from .clients import peak_bytes

#: the model: a Llama of random weights
SHAPE = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 2816}
#: rows of the embedding, of which the words of the small data need few
VOCABULARY = 8000
SETTINGS = {
    "federate": {"method": "fedlora", "client_num": 2, "total_round_num": 1},
    "data": {"splits": [0.9, 0.0, 0.1]},
    "llm": {"tok_len": 64, "adapter": {"args": [{"r": 8, "alpha": 16, "modules": ["all-linear"]}]}},
    "dataloader": {"batch_size": 16},
    "train": {"local_update_steps": 1, "optimizer": {"type": "AdamW", "lr": 1e-3}},
    "eval": {"split": ["test"]},
}
#: label → keys
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"lowrank.dtype": "bfloat16"},
    "int8": {"lowrank.dtype": "int8"},
    "nf4": {"lowrank.dtype": "nf4"},
    "nf4, double_quant": {"lowrank.dtype": "nf4", "lowrank.double_quant": True},
    "float32, checkpointing": {"train.checkpointing": True},
    "nf4, checkpointing": {"lowrank.dtype": "nf4", "train.checkpointing": True},
}


def prepare(folder: Path, shape: Mapping[str, int] = SHAPE, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Write the model and data into ``folder``; the settings of a run with them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fs_lowrank.testing import small

    small.save_tokenizer(folder / "model")
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **shape, **special)).save_pretrained(folder / "model")
    data = small.save_instructions(folder)
    return {**SETTINGS, "model.type": f"{folder / 'model'}@huggingface_llm", "data.type": str(data)}


def measure(settings: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of the base, bytes that a step keeps for its backward pass, and the peak memory of this process."""
    from fs_lowrank import load_config
    from fs_lowrank.estimate import largest_batch, step
    from fs_lowrank.models.quantised import beside
    from fs_lowrank.rounds.site import Site

    imported = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(load_config(settings, outdir=folder))
        weights = {n: p for n, p in site.model.named_parameters() if n not in site.initial_state}
        held = [*weights.values(), *beside(site.model).values()]
        kept = step(site, largest_batch(site.data.clients[0], site.config))
        return {
            "base_bytes": sum(t.nbytes for t in held),
            "kept_bytes": kept,
            "peak_bytes": peak_bytes(),
            "imported_peak_bytes": imported,
        }


def in_fresh_process(settings: Mapping[str, Any]) -> dict[str, float]:
    """``measure`` in a new process with one thread."""
    return json.loads(in_a_process("-m", __name__, json.dumps(settings), **ONE_THREAD).splitlines()[-1])


def run() -> dict:
    require_bitsandbytes("the memory of int8 and nf4")
    with tempfile.TemporaryDirectory() as folder:
        settings = prepare(Path(folder))
        results = {label: in_fresh_process({**settings, **keys}) for label, keys in VARIANTS.items()}
    rows, plain = [], results["float32"]
    model = f"Llama of {plain['base_bytes'] / 4e6:.0f} M weights"
    for label, found in results.items():
        peak = (
            f"peak of the process {found['peak_bytes'] / 1e6:.0f} MB, {found['imported_peak_bytes'] / 1e6:.0f} before"
        )
        for what, name in (("base_bytes", "bytes of the base"), ("kept_bytes", "bytes kept for a backward pass")):
            if label != "float32" and (what == "base_bytes") == ("checkpointing" in label):
                continue
            note = f"{found[what] / 1e6:.1f} MB; {peak}"
            rows.append(row(f"{model}, {label}", f"{name} ÷ float32's", found[what] / plain[what], note))
    return {"threads": 1, "rows": rows, "results": results}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
