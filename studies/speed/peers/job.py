"""A job for ourselves and the peers: a model with random weights, texts, tokens by client, and the first tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from safetensors.torch import save_file

from fs_lowrank import load_config
from fs_lowrank.data import Examples
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.testing.small import save_tokenizer

from .fedjob import Job

#: (shape, vocabulary) of the two models; the encoder has the size of MiniLM, the Llama 21 million parameters
SHAPES: dict[str, dict[str, int]] = {
    "encoder": dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, words=30518),
    "llama": dict(hidden_size=384, num_hidden_layers=10, num_attention_heads=6, intermediate_size=1024, words=8188),
}
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, words=96)
TEST_ROWS = 8
BATCH, STEPS, RANK, ALPHA = 8, 2, 8, 16
OPTIMIZER, LEARNING_RATE = "AdamW", 1e-3


def describe() -> str:
    """The job in a few words."""
    return (
        "The encoder has the size of MiniLM, the Llama 21 million parameters, both with random weights; texts have "
        f"about 24 words. LoRA of rank {RANK} on the query and value of every layer; {STEPS} steps of {BATCH} samples "
        f"a client and round, every client in every round; {OPTIMIZER}, no dropout; batches in the order of the data"
    )


def make_job(kind: str, folder: Path, clients: int, rounds: int, tiny: bool = False) -> Job:
    """Write the job into ``folder``: ``job.json``, its files, and ``ours.json``, our configuration of the same.

    Args:
        kind: ``encoder``, which classifies sentences of about 24 words, or ``llama``, which is tuned on about as many
            words of instruction and answer.
        tiny: models of two narrow layers, to try the scripts.
    """
    shape = dict(TINY if tiny else SHAPES[kind])
    words = [f"w{i}" for i in range(shape.pop("words"))]
    folder.mkdir(parents=True)
    vocabulary = save_tokenizer(folder / "model", words)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "model"))
    tokenizer.bos_token = "[CLS]"  # FederatedScope adds a token to the model for each role that none has
    tokenizer.save_pretrained(str(folder / "model"))
    modules = _save_model(kind, folder / "model", vocabulary, shape)
    data = _save_texts(kind, folder, words, clients * STEPS * BATCH + TEST_ROWS)
    ours: dict[str, Any] = {
        "federate": {"method": "fedlora", "client_num": clients, "total_round_num": rounds},
        "data": {"splitter": "iid", "splits": _splits(clients), **data},
        "model": {"type": f"{folder / 'model'}@{'transformers' if kind == 'encoder' else 'huggingface_llm'}"},
        "llm": {"tok_len": 96, "adapter": {"args": [{"r": RANK, "alpha": ALPHA, "modules": modules}]}},
        "dataloader": {"batch_size": BATCH, "shuffle": False},
        "train": {
            "local_update_steps": STEPS,
            "optimizer": {"type": OPTIMIZER, "lr": LEARNING_RATE, "weight_decay": 0.0},
        },
        "eval": {"split": ["test"], "freq": 0},
    }
    (folder / "ours.json").write_text(json.dumps(ours, indent=1) + "\n")
    engine = LocalEngine(load_config(ours, outdir=str(folder / "unused")))
    initial = {n: t.clone() for n, t in engine.ledger.state.items() if isinstance(t, torch.Tensor)}
    save_file(initial, folder / "initial.safetensors")
    owned = [examples for examples in engine.workspace.data.clients if isinstance(examples, Examples)]
    _save_tokens(folder / "data.npz", owned)
    job = Job(
        model=str(folder / "model"),
        task="classification" if kind == "encoder" else "causal",
        data=str(folder / "data.npz"),
        initial=str(folder / "initial.safetensors"),
        clients=clients,
        clients_per_round=clients,
        rounds=rounds,
        batch_size=BATCH,
        local_steps=STEPS,
        rank=RANK,
        alpha=ALPHA,
        target_modules=modules,
        optimizer=OPTIMIZER,
        learning_rate=LEARNING_RATE,
        pad_id=owned[0].pad_id,
        seed=0,
    )
    job.write(folder)
    return job


def _splits(clients: int) -> list[float]:
    test = TEST_ROWS / (clients * STEPS * BATCH + TEST_ROWS)
    return [1 - test, 0.0, test]


def _save_model(kind: str, folder: Path, vocabulary: int, shape: dict[str, int]) -> list[str]:
    """Write a model with weights from seed 0; returns the modules that are adapted."""
    torch.manual_seed(0)
    if kind == "encoder":
        no = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config: Any = transformers.BertConfig(vocab_size=vocabulary, num_labels=2, pad_token_id=0, **no, **shape)
        transformers.BertForSequenceClassification(config).save_pretrained(str(folder))
        return ["query", "value"]
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=256, **special, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(str(folder))
    return ["q_proj", "v_proj"]


def _save_texts(kind: str, folder: Path, words: list[str], rows: int) -> dict[str, Any]:
    """Write texts of unequal length; returns the keys of ``data`` that read them."""
    draw = np.random.default_rng(0)

    def text(mean: float, longest: int) -> str:
        length = int(np.clip(draw.lognormal(np.log(mean), 0.5), 4, longest))
        return " ".join(draw.choice(words, length))

    if kind == "encoder":
        labels = draw.integers(0, 2, rows)
        texts = [f"{text(23, 62)} {words[int(label)]}" for label in labels]
        pd.DataFrame({"text": texts, "label": labels}).to_csv(folder / "data.csv", index=False)
        return {"type": str(folder / "data.csv")}
    frame = pd.DataFrame({"instruction": [text(15, 48) for _ in range(rows)], "input": ""})
    frame["output"] = [text(9, 32) for _ in range(rows)]
    frame.to_json(folder / "data.jsonl", orient="records", lines=True)
    return {"type": str(folder / "data.jsonl"), "args": [{"template": "{instruction} {output}"}]}


def _save_tokens(path: Path, clients: list[Examples]) -> None:
    """Write the tokens as each client of our run has them."""
    inputs = [row for examples in clients for row in examples.columns["input_ids"]]
    labels: list[np.ndarray] = []
    for examples in clients:
        labels += examples.columns["labels"] if examples.labels is None else list(examples.labels[:, None])
    if {len(examples) for examples in clients} != {STEPS * BATCH}:
        raise RuntimeError(f"clients have {sorted({len(e) for e in clients})} samples, not {STEPS * BATCH}")
    arrays: dict[str, Any] = {"owners": np.repeat(np.arange(len(clients)), [len(e) for e in clients])}
    for name, rows in {"input_ids": inputs, "labels": labels}.items():
        arrays[name] = np.concatenate(rows).astype(np.int64)  # as a tokenizer's, and as PyTorch's losses ask for
        arrays[f"{name}_lengths"] = np.array([len(row) for row in rows])
    np.savez(path, **arrays)
