"""Small real models and small data that every test may use; built once a session, in seconds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

GOOD = "good great fine happy superb lovely bright clever".split()
BAD = "bad poor awful sad dull broken grim silly".split()
PLAIN = "the a film book day it was is very quite and story room walk tea".split()
DOMAINS = ("films", "books", "tea")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """One thread, because multithreading slows down such small models."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def frozen_states_apart(tmp_path_factory):
    """Frozen layers' states that the tests keep for other runs are not those of the user's own runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FS_LOWRANK_FROZEN", str(tmp_path_factory.mktemp("frozen")))
        yield


@pytest.fixture
def no_curves(monkeypatch):
    """Runs plot no ``curves.png``, which takes longer than the runs."""
    import fs_lowrank.rounds.keeper as keeper

    monkeypatch.setattr(keeper, "plot_curves", lambda histories, path, majority: path)


def _tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *PLAIN]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
    )
    tokenizer.save_pretrained(str(folder))
    return len(words)


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory):
    """A folder with a BERT of 3 layers, width 32; its ``intermediate.dense`` is 48 × 32, not square."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny_encoder")
    vocabulary = _tokenizer(folder)
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
        )
    ).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_causal(tmp_path_factory):
    """A folder with a Llama of 3 layers, width 32; with two key-value heads its ``v_proj`` is 16 × 32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_causal")
    vocabulary = _tokenizer(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    ).save_pretrained(str(folder))
    return folder


def make_reviews(rows: int, seed: int = 0) -> pd.DataFrame:
    """Reviews whose label is determined by some of their words; columns text, label, domain."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, rows)
    texts = []
    for label in labels:
        words = list(draw.choice(PLAIN, draw.integers(2, 9))) + list(draw.choice(GOOD if label else BAD, 2))
        texts.append(" ".join(draw.permutation(words)))
    return pd.DataFrame({"text": texts, "label": labels, "domain": draw.choice(DOMAINS, rows, p=(0.5, 0.3, 0.2))})


@pytest.fixture(scope="session")
def reviews_csv(tmp_path_factory):
    """300 labelled reviews in a CSV file."""
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    make_reviews(300).to_csv(path, index=False)
    return path


@pytest.fixture(scope="session")
def instructions_jsonl(tmp_path_factory):
    """120 instructions with answers, in Alpaca's form."""
    frame = make_reviews(120, seed=1)
    rows = pd.DataFrame(
        {
            "instruction": "it was",
            "input": frame["text"],
            "category": frame["domain"],
            "output": np.where(frame["label"] == 1, "good and happy", "bad and sad"),
        }
    )
    path = tmp_path_factory.mktemp("instructions") / "instructions.jsonl"
    rows.to_json(path, orient="records", lines=True)
    return path


@pytest.fixture
def settings(tiny_encoder, reviews_csv, tmp_path):
    """A small classification run as a mapping for ``load_config``: 5 unequal clients, 4 rounds."""
    return {
        "outdir": str(tmp_path / "run"),
        "seed": 3,
        "federate": {"method": "fedlora", "client_num": 5, "total_round_num": 4},
        "data": {
            "type": str(reviews_csv),
            "splitter": "lda",
            "splitter_args": [{"alpha": 0.5, "min_size": 4}],
            "splits": [0.7, 0.1, 0.2],
        },
        "model": {"type": f"{tiny_encoder}@transformers"},
        "llm": {
            "tok_len": 24,
            "adapter": {"args": [{"r": 2, "alpha": 6, "modules": ["query", "intermediate.dense"], "layers": [1, 2]}]},
        },
        "dataloader": {"batch_size": 8},
        "train": {"local_update_steps": 3, "optimizer": {"type": "AdamW", "lr": 5e-3, "weight_decay": 0.01}},
        "eval": {"split": ["test", "val"]},
    }


@pytest.fixture
def causal_settings(settings, tiny_causal, instructions_jsonl):
    """The same as an instruction-tuning run of a causal LM."""
    return {
        **settings,
        "data": {"type": str(instructions_jsonl), "splitter": "iid", "splits": [0.8, 0.1, 0.1]},
        "model": {"type": f"{tiny_causal}@huggingface_llm"},
        "llm": {
            "tok_len": 64,
            "adapter": {"args": [{"r": 2, "alpha": 6, "modules": ["q_proj", "v_proj"], "layers": [1, 2]}]},
        },
    }


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory):
    """A folder of class folders: 210 gray images of 16 × 16 with stripes, checks or no pattern, with noise."""
    from PIL import Image

    folder, draw = tmp_path_factory.mktemp("tiny_images"), np.random.default_rng(0)
    rows, columns = np.mgrid[:16, :16]
    patterns = {"blank": np.zeros((16, 16)), "checked": (rows // 2 + columns // 2) % 2, "striped": rows // 2 % 2}
    for kind, pattern in patterns.items():
        (folder / kind).mkdir()
        for i in range(70):
            noisy = 60 + 120 * pattern + draw.integers(-40, 40, (16, 16))
            Image.fromarray(noisy.astype(np.uint8)).save(folder / kind / f"{i:03}.png")
    return folder


@pytest.fixture
def vision_settings(settings, tiny_images, monkeypatch):
    """The same as a run of a narrow ResNet-10 with batch-norm, from scratch."""
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tiny_images.parent / "home"))
    flip = [
        ["RandomHorizontalFlip"],
        ["RandomCrop", {"size": 16, "padding": 1}],
        ["ToTensor"],
        ["Normalize", {"mean": [0.4], "std": [0.25]}],
    ]
    return {
        **settings,
        "data": {**settings["data"], "type": str(tiny_images), "transform": flip},
        "model": {"type": "resnet10"},
        "lowrank": {"width": 1 / 16},
        "llm": {"adapter": {"args": [{"r": 2, "alpha": 6}]}},
    }


def pytest_terminal_summary(terminalreporter):
    """The reasons of skipped tests, one line per reason instead of one per test."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
