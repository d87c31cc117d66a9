"""A run ends alike however it is computed, in every family of models that transformers can build small.

Plain: clients one by one, no frozen states in memory, all positions, and test texts in batches of one. Against it:
clients together, cached states, the last layer where it is read, batches that are padded, and from round 2 on resumed,
in two processes. Models have dropout, and texts are of 2 to 40 tokens. A family that cannot keep this is refused,
or named, if padding matters to a language model.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

import fs_lowrank
from fs_lowrank.errors import RunFailed, UserError
from fs_lowrank.models.adapters import layer_stack
from fs_lowrank.models.names import all_tensors
from fs_lowrank.testing import small
from tests.cases import enlarge, small_config

pytestmark = pytest.mark.more

#: further keys of some families: the state or the place that once made their results differ
OWN = {
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "phi3": {
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [8.0] * 4,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
        },
    },
}
TASKS = {
    "classes": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "answers": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
}
#: one of each kind of difference that there was: dropout by tokens, positions by length, padding, a state of the model
FEW = [("opt", "answers"), ("phi3", "classes"), ("xlnet", "classes"), ("llama", "classes"), ("big_bird", "classes")]


def configured(kind, task):
    """A small configuration with dropout; decoders that classify name another padding than the tokenizer does."""
    defaults = AutoConfig.for_model(kind).to_dict()
    dropouts = [n for n, v in defaults.items() if "drop" in n and "layer" not in n and type(v) is float]
    pad = 5 if task == "classes" and kind in TASKS["answers"][1] else 0
    return small_config(kind, **{**dict.fromkeys(dropouts, 0.1), "pad_token_id": pad, **OWN.get(kind, {})})


def save(kind, task, folder):
    """Save the model with a tokenizer; returns what to adapt."""
    auto, _ = TASKS[task]
    vocabulary = small.save_tokenizer(folder)
    try:
        config = configured(kind, task)
        config.num_labels = 2
        config.vocab_size = vocabulary
        with torch.device("meta"):
            size = sum(p.numel() for p in auto.from_config(config).parameters())
    except Exception as error:
        pytest.skip(f"no small configuration: {type(error).__name__}")
    if size > 1.2e6:
        pytest.skip("no small configuration")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        enlarge(model, 0.2).save_pretrained(str(folder))
        try:
            assert AutoTokenizer.from_pretrained(folder)("good").input_ids, "a tokenizer of the family's own"
            model.get_input_embeddings()
            for length in range(1, 41, 13):
                model(input_ids=torch.arange(length)[None] % 20 + 5)
        except Exception as error:
            pytest.skip(f"the sizes do not fit together, or it reads more than a text: {type(error).__name__}")
    _, layers = layer_stack(model) or ("", [])
    inside = layers[1].named_modules() if len(layers) > 1 else ()
    # One module alone: with all of them, clients of some families cannot train together, whatever their dropout is.
    linear = next((name for name, module in inside if isinstance(module, (nn.Linear, Conv1D))), "")
    return {"modules": [linear.rpartition(".")[2]], "layers": [1]} if linear else {"modules": "all-linear"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Texts of 2 to 40 words with a class, also as instructions."""
    draw = np.random.default_rng(0)
    words = (*small.GOOD, *small.BAD, *small.PLAIN)
    texts = [" ".join(draw.choice(words, n)) for n in draw.permutation(np.linspace(2, 40, 60).astype(int))]
    table = pd.DataFrame({"text": texts, "label": np.arange(60) % 2})
    folder = tmp_path_factory.mktemp("rows")
    table.to_csv(folder / "classes.csv", index=False)
    asked = pd.DataFrame(
        {"instruction": "it was", "input": texts, "output": np.where(table["label"], "good", "so sad")}
    )
    asked.to_json(folder / "answers.jsonl", orient="records", lines=True)
    return {"classes": folder / "classes.csv", "answers": folder / "answers.jsonl"}


def cases():
    for task, (_, names) in TASKS.items():
        for kind in sorted(names):
            yield pytest.param(kind, task, marks=() if (kind, task) in FEW else pytest.mark.slow, id=f"{kind}-{task}")


PLAIN = {"train.cohort": "off", "train.cache_frozen": "off", "train.only_read": "off", "eval.batch_size": 1}
OURS = {"train.cohort": 3, "eval.batch_size": 16}


@pytest.mark.parametrize("kind, task", list(cases()))
def test_a_run_ends_alike_however_it_is_computed(kind, task, rows, tmp_path, caplog):
    adapted = save(kind, task, tmp_path / "model")
    settings = {
        **small.encoder_settings("", rows[task], ""),
        "federate": {"method": "fedlora", "client_num": 3, "total_round_num": 2},
        "data": {"type": str(rows[task]), "splitter": "iid", "splits": [0.6, 0.1, 0.3]},
        "model": {"type": f"{tmp_path / 'model'}@{'transformers' if task == 'classes' else 'huggingface_llm'}"},
        "llm": {"tok_len": 120, "adapter": {"args": [{"r": 1, **adapted}]}},
        "train": {"local_update_steps": 2, "optimizer": {"type": "SGD", "lr": 0.05}},
        "lowrank": {"checkpoint_freq": 1, "pictures": False},
    }

    def run(name, keys, **more):
        return fs_lowrank.run(fs_lowrank.load_config(settings, {**keys, "outdir": str(tmp_path / name)}), **more)

    try:
        plain = run("plain", PLAIN)
    except UserError as refused:
        if (kind, task) in FEW or isinstance(refused, RunFailed):
            raise
        pytest.skip(f"refused: {str(refused)[:80]}")
    if "depend on the texts of its batch" in caplog.text and (kind, task) not in FEW:
        pytest.skip("named: batches of one are advised")
    run("ours", OURS, on_round=lambda record: record["round"] == 1)
    ours = run("ours", {**OURS, "federate.process_num": 2}, resume=True)
    assert ours.final["test_loss"] == pytest.approx(plain.final["test_loss"], rel=1e-4)
    there = all_tensors(plain.model)
    for name, tensor in all_tensors(ours.model).items():
        torch.testing.assert_close(tensor, there[name], rtol=1e-3, atol=1e-4)
