"""On a GPU: one local step of each of 50 clients that train together, as ``train.cohort: auto`` has it, relative to the
same one by one, and the part of the GPU's peak at which the matrix products of the model are computed.

The models have the shapes of known ones and weights that are drawn at random, on whose values no time depends, so
nothing has to be downloaded. Dropout draws other masks on a GPU where clients train together, so the two are not
compared by their results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fs_lowrank import Config, UserError, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.adapters import layer_stack
from fs_lowrank.testing import small

from . import cohort, row
from .whole import peak_rate, products

CLIENTS = 50
#: tokens of a sample that are not of its text: those of the template's words, and of the answer
_AROUND = 64


@dataclass(frozen=True)
class Case:
    """A model's shape and how it is trained: ``layers`` are adapted, on batches of ``batch`` × ``tokens``; ``least`` is
    the bound for the ratio."""

    shape: Mapping[str, Any]
    layers: tuple[int, ...]
    batch: int
    tokens: int
    least: float
    dtype: str = "bfloat16"

    @property
    def causal(self) -> bool:
        return "num_labels" not in self.shape

    @property
    def modules(self) -> list[str]:
        return ["q_proj", "k_proj", "v_proj", "o_proj"] if self.causal else ["query", "value"]


def _llama(vocabulary: int, width: int, layers: int, heads: int, keys: int, inner: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "tie_word_embeddings": tied,
    }


_MINILM = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_labels": 2,
}
CASES = {
    "MiniLM's shape, layers 4 and 5 of 6, float32": Case(_MINILM, (4, 5), 16, 64, 5, "float32"),
    "SmolLM2-135M's shape, layers 20 to 29 of 30, bfloat16": Case(
        _llama(49152, 576, 30, 9, 3, 1536, True), tuple(range(20, 30)), 4, 256, 2
    ),
    "Llama 3.2 1B's shape, all 16 layers, bfloat16": Case(
        _llama(128256, 2048, 16, 32, 8, 8192, True), tuple(range(16)), 4, 512, 1
    ),
    "Llama 2 7B's shape, layers 24 to 31 of 32, bfloat16": Case(
        _llama(32000, 4096, 32, 32, 32, 11008, False), tuple(range(24, 32)), 1, 512, 1
    ),
}


def build(case: Case, device: str) -> Any:
    """The model of ``case`` with weights drawn from seed 0, on ``device``; ``meta``: without weights."""
    from transformers import AutoModel, AutoModelForCausalLM, BertConfig, LlamaConfig

    torch.manual_seed(0)
    with torch.device(device):
        if case.causal:
            special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
            config = LlamaConfig(max_position_embeddings=2 * case.tokens, **case.shape, **special)
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
        return AutoModel.from_config(BertConfig(max_position_embeddings=2 * case.tokens, **case.shape))


def bytes_of(case: Case) -> int:
    """Of the weights of the model."""
    return sum(p.nbytes for p in build(case, "meta").parameters())


def prepare(case: Case, folder: Path, device: str = "cuda") -> dict[str, Any]:
    """Write the model, its tokenizer and data into ``folder``; the keys of a run with them."""
    build(case, device).save_pretrained(folder / "model")
    small.save_tokenizer(folder / "model")
    words = " ".join(small.make_reviews(200)["text"]).split()
    text = " ".join((words * (1 + case.tokens // len(words)))[: max(8, case.tokens - _AROUND * case.causal)])
    rows = pd.DataFrame({"instruction": "it was", "input": [text] * 400, "output": " ".join(words[:24])})
    if not case.causal:
        rows = pd.DataFrame({"text": [text] * 400, "label": [0, 1] * 200})
    rows.to_csv(folder / "rows.csv", index=False)
    adapter = {"r": 8, "alpha": 16, "modules": case.modules, "layers": list(case.layers)}
    return {
        "federate": {"method": "rolora", "client_num": CLIENTS, "total_round_num": 1},
        "data": {"type": str(folder / "rows.csv"), "splitter": "iid", "splits": [0.9, 0.0, 0.1]},
        "model": {"type": f"{folder / 'model'}@{'huggingface_llm' if case.causal else 'transformers'}"},
        "llm": {"tok_len": case.tokens, "adapter": {"args": [adapter]}},
        "lowrank": {"dtype": case.dtype},
        "dataloader": {"batch_size": case.batch},
        "train": {"local_update_steps": 1, "optimizer": {"type": "SGD", "lr": 0.05}, "cohort": "auto"},
        "eval": {"split": ["test"]},
        "use_gpu": True,
    }


def measure(config: Config, repeats: int, clients: int = CLIENTS) -> dict[str, Any]:
    """``cohort.measure`` with cohorts of the size that the run of ``config`` has, and ``utilisation``: the operations
    of a plain training step's matrix products on the real tokens, but for those of the layers whose states are kept,
    ÷ what a large product reaches in the same time.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(config.replace(outdir=folder))
    size, device, depth = engine.site.cohort, engine.site.device, engine.site.prefix.depth if engine.site.prefix else 0
    dtype = next(p.dtype for p in engine.model.parameters())
    model = engine.model.to("meta").train()
    del engine
    found = cohort.measure(config, repeats, clients, size)
    stack = layer_stack(model)
    assert stack is not None
    operations = _operations(model, list(stack[1])[:depth], found["tokens"])
    operations /= clients * config.train.local_update_steps
    peak = peak_rate(8192 if device.type == "cuda" else 1024, device=device, dtype=dtype)
    taken = found["seconds_a_clients_step"]
    reached = {name: operations / seconds / peak for name, seconds in taken.items()}
    return {**found, "size": size, "operations": operations, "peak": peak, "utilisation": reached}


def _operations(model: torch.nn.Module, frozen: list[torch.nn.Module], tokens: Mapping[int, int]) -> float:
    """Of the products of a step with ``tokens[n]`` samples of n tokens."""
    return float(sum(count * products(model, frozen, length)[0] for length, count in tokens.items()))


def run() -> dict:
    """Measure the cases whose weights take at most half of the GPU's memory.

    Raises:
        UserError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("gpu: torch finds no GPU here; the other parts need none")
    device, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    rows, results = [], {}
    for name, case in CASES.items():
        if (size := bytes_of(case)) > memory / 2:
            print(f"gpu: {name}: left out, its {size / 1e9:.1f} GB are more than half of the GPU's memory")
            continue
        with tempfile.TemporaryDirectory() as folder:
            keys = prepare(case, Path(folder))
            torch.cuda.empty_cache()
            found = results[name] = measure(load_config(keys), 3)
        step = {k: f"{1e3 * v:.4g} ms" for k, v in found["seconds_a_clients_step"].items()}
        print(f"gpu: {name}: {step['alone']} ÷ {step['together']}", flush=True)
        about = f"{name}, {CLIENTS} clients, {case.batch} × {found['lengths'][1]} tokens, {device}"
        rows += [
            row(
                about,
                f"a client's round of one step, one by one ÷ {found['size']} clients together",
                found["speed_up"],
                f"{step['alone']} ÷ {step['together']}",
                least=case.least,
            ),
            row(
                about,
                "matrix products of the real tokens a second, together ÷ the GPU's peak",
                found["utilisation"]["together"],
                f"peak {found['peak'] / 1e12:.3g} TFLOP/s by a product of 8192 × 8192; one by one "
                f"{found['utilisation']['alone']:.2g}",
            ),
        ]
    return {"device": device, "rows": rows, "results": results}
