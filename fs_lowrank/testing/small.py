"""Small real models and small data, made in seconds and without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

GOOD = "good great superb happy fine lovely bright clever".split()
BAD = "bad poor awful sad dull broken grim silly".split()
PLAIN = "the a film book day it was is very quite and story room walk tea".split()
DOMAINS = ("films", "books", "tea")


def save_tokenizer(folder: str | Path, words: Sequence[str] = (*GOOD, *BAD, *PLAIN)) -> int:
    """Write a tokenizer of whole ``words`` into ``folder``; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {w: i for i, w in enumerate([*special, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    roles = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special), eos_token="[SEP]")
    PreTrainedTokenizerFast(tokenizer_object=inner, **roles).save_pretrained(str(folder))
    return len(vocabulary)


def _save(folder: str | Path, model: type, config: type, **keys: int) -> Path:
    """Write a model of 3 layers and width 32, drawn from seed 0, and its tokenizer into ``folder``."""
    import torch

    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    vocabulary = save_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model(config(vocab_size=vocabulary, **shape, **keys)).save_pretrained(str(folder))
    return Path(folder)


def save_encoder(folder: str | Path) -> Path:
    """Write a BERT of 3 layers and width 32 with its tokenizer; its ``intermediate.dense`` is 48 × 32, not square."""
    from transformers import BertConfig, BertModel

    return _save(folder, BertModel, BertConfig, max_position_embeddings=64)


def save_causal(folder: str | Path) -> Path:
    """Write a Llama of 3 layers and width 32 with its tokenizer; with two key-value heads its ``v_proj`` is 16 × 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    return _save(folder, LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, max_position_embeddings=128, **special)


def make_reviews(rows: int, seed: int = 0) -> pd.DataFrame:
    """Reviews whose label is determined by some of their words; columns text, label, domain."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, rows)
    texts = []
    for label in labels:
        words = list(draw.choice(PLAIN, draw.integers(2, 9))) + list(draw.choice(GOOD if label else BAD, 2))
        texts.append(" ".join(draw.permutation(words)))
    return pd.DataFrame({"text": texts, "label": labels, "domain": draw.choice(DOMAINS, rows, p=(0.5, 0.3, 0.2))})


def save_reviews(folder: str | Path) -> Path:
    """Write ``reviews.csv`` with 300 labelled reviews."""
    path = Path(folder) / "reviews.csv"
    make_reviews(300).to_csv(path, index=False)
    return path


def save_instructions(folder: str | Path) -> Path:
    """Write ``instructions.jsonl`` with 120 instructions and answers, in Alpaca's form."""
    frame = make_reviews(120, seed=1)
    rows = pd.DataFrame(
        {
            "instruction": "it was",
            "input": frame["text"],
            "category": frame["domain"],
            "output": np.where(frame["label"] == 1, "good and happy", "bad and sad"),
        }
    )
    path = Path(folder) / "instructions.jsonl"
    rows.to_json(path, orient="records", lines=True)
    return path


def save_images(folder: str | Path) -> Path:
    """Write a folder for each class: 210 gray images of 16 × 16 with stripes, checks or no pattern, with noise."""
    from PIL import Image

    folder, draw = Path(folder), np.random.default_rng(0)
    rows, columns = np.mgrid[:16, :16]
    patterns = {"blank": np.zeros((16, 16)), "checked": (rows // 2 + columns // 2) % 2, "striped": rows // 2 % 2}
    for kind, pattern in patterns.items():
        (folder / kind).mkdir(parents=True)
        for i in range(70):
            noisy = 60 + 120 * pattern + draw.integers(-40, 40, (16, 16))
            Image.fromarray(noisy.astype(np.uint8)).save(folder / kind / f"{i:03}.png")
    return folder


def encoder_settings(model: str | Path, data: str | Path, outdir: str | Path) -> dict[str, Any]:
    """A small classification run as a mapping for ``load_config``: 5 unequal clients, 4 rounds."""
    return {
        "outdir": str(outdir),
        "seed": 3,
        "federate": {"method": "fedlora", "client_num": 5, "total_round_num": 4},
        "data": {
            "type": str(data),
            "splitter": "lda",
            "splitter_args": [{"alpha": 0.5, "min_size": 4}],
            "splits": [0.7, 0.1, 0.2],
        },
        "model": {"type": f"{model}@transformers"},
        "llm": {
            "tok_len": 24,
            "adapter": {"args": [{"r": 2, "alpha": 6, "modules": ["query", "intermediate.dense"], "layers": [1, 2]}]},
        },
        "dataloader": {"batch_size": 8},
        "train": {
            "local_update_steps": 3,
            "optimizer": {"type": "AdamW", "lr": 5e-3, "weight_decay": 0.01},
            "cohort": 1,
        },
        "eval": {"split": ["test", "val"]},
    }


def causal_settings(model: str | Path, data: str | Path, outdir: str | Path) -> dict[str, Any]:
    """The same as an instruction-tuning run of a causal language model."""
    return {
        **encoder_settings(model, data, outdir),
        "data": {"type": str(data), "splitter": "iid", "splits": [0.8, 0.1, 0.1]},
        "model": {"type": f"{model}@huggingface_llm"},
        "llm": {
            "tok_len": 64,
            "adapter": {"args": [{"r": 2, "alpha": 6, "modules": ["q_proj", "v_proj"], "layers": [1, 2]}]},
        },
    }


def vision_settings(data: str | Path, outdir: str | Path) -> dict[str, Any]:
    """The same as a run of a narrow ResNet-10 with batch norm, from scratch."""
    base = encoder_settings("", data, outdir)
    augmented = [
        ["RandomHorizontalFlip"],
        ["RandomCrop", {"size": 16, "padding": 1}],
        ["ToTensor"],
        ["Normalize", {"mean": [0.4], "std": [0.25]}],
    ]
    return {
        **base,
        "data": {**base["data"], "transform": augmented},
        "model": {"type": "resnet10"},
        "lowrank": {"width": 1 / 16},
        "llm": {"adapter": {"args": [{"r": 2, "alpha": 6}]}},
    }
