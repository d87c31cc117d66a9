"""A batch in blocks of similar length gives the gradients of the whole batch."""

import copy
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fs_lowrank.config import load_config
from fs_lowrank.data import Examples
from fs_lowrank.methods import Phase
from fs_lowrank.models.adapters import add_adapter
from fs_lowrank.models.shortcuts.frozen import FrozenPrefix
from fs_lowrank.models.shortcuts.reads import OnlyRead
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training import train_client
from fs_lowrank.training.blocks import Blocks, divide, overhead

pytestmark = pytest.mark.more

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def cost(lengths, parts, overhead=0.0):
    return sum(len(p) * lengths[p].max() + overhead for p in parts)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("overhead", [0.0, 3.0, 20.0, 1e9])
@pytest.mark.parametrize("number", [0, 2, 3, 50])
def test_the_division_costs_least(seed, overhead, number):
    """Against all divisions of the sorted samples."""
    lengths = np.random.default_rng(seed).integers(3, 12, 7)
    parts = divide(lengths, overhead, number)
    assert sorted(np.concatenate(parts)) == list(range(7))
    order = np.argsort(lengths)
    counts = range(7) if not number else [min(number, len(set(lengths))) - 1]
    every = [np.split(order, cuts) for count in counts for cuts in itertools.combinations(range(1, 7), count)]
    if number:
        overhead = 0.0
    assert cost(lengths, parts, overhead) == min(cost(lengths, other, overhead) for other in every)


def test_a_batch_that_is_not_divided_keeps_its_order():
    assert divide(np.array([5, 3, 5]), 100.0)[0].tolist() == [0, 1, 2]
    assert divide(np.array([5, 5, 5]), 0.0, 3)[0].tolist() == [0, 1, 2]


def make(task, dropout):
    torch.manual_seed(0)
    if task == "opt":
        sizes = {**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 48}
        config = AutoConfig.for_model("opt", **sizes, dropout=dropout, attention_dropout=dropout)
        model, modules = AutoModelForCausalLM.from_config(config), ("q_proj", "v_proj")
    elif task == "classes":
        config = AutoConfig.for_model(
            "bert", **SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
        )
        model, modules = AutoModelForSequenceClassification.from_config(config), ("query", "value")
    else:
        config = AutoConfig.for_model("llama", **SIZES, num_key_value_heads=2, attention_dropout=dropout)
        model, modules = AutoModelForCausalLM.from_config(config), ("q_proj", "v_proj")
    spec = AdapterSpec(r=2, lora_alpha=4, lora_dropout=dropout, target_modules=modules, layers=(1, 2))
    model = add_adapter(model, spec, seed=0)
    for n, parameter in model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def examples(task, count=11):
    draw = np.random.default_rng(3)
    rows = [draw.integers(4, 40, n) for n in draw.integers(3, 20, count)]
    if task == "classes":
        return Examples({"input_ids": rows}, draw.integers(0, 2, count))
    answers = [np.where(np.arange(len(r)) < len(r) - draw.integers(1, len(r)), -100, r) for r in rows]
    return Examples({"input_ids": rows, "labels": answers})


def trained(model, data, phase, shortcuts=True, **keys):
    """All tensors that training changes, from the same start, and its mean loss."""
    model = copy.deepcopy(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = load_config(
        {
            "federate.client_num": 1,
            "federate.method": "fedlora",
            "dataloader.batch_size": 5,
            "train.local_update_steps": 3,
            "train.batch_or_epoch": "epoch",
            "train.optimizer": {"type": "SGD", "momentum": 0.9},
            **keys,
        }
    )
    kept = {}
    if shortcuts:
        prefix, reads = FrozenPrefix(model, {"adapter", "head"}, 1e9), OnlyRead(model)
        prefix.plan({"a": (data, 9)})
        reads.check(data)
        kept = {"owner": "a", "prefix": prefix, "reads": reads}
    result = train_client(model, data, [phase], config, lr=0.1, seed=4, **kept)
    return {n: p.detach() for n, p in model.named_parameters() if not torch.equal(p, before[n])}, result


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("task", ["classes", "answers"])
@pytest.mark.parametrize("keys", [{}, {"grad.grad_clip": 0.01}, {"grad.grad_accum_count": 2}], ids=str)
def test_training_in_blocks_is_training_on_the_batch(task, dropout, keys):
    model, data, phase = make(task, dropout), examples(task), Phase(("adapter", "head"))
    plain, before = trained(model, data, phase, shortcuts=False, **{**keys, "train.blocks": 1})
    # In the layers that only the plain training computes, dropout draws, too.
    for shortcuts in (False, True) if dropout == 0 else (False,):
        for blocks in (2, 20):
            ours, result = trained(model, data, phase, shortcuts, **{**keys, "train.blocks": blocks})
            assert (result.steps, result.samples) == (before.steps, before.samples)
            assert result.loss == pytest.approx(before.loss, rel=1e-6)
            assert ours.keys() == plain.keys() and ours
            for name, value in plain.items():
                torch.testing.assert_close(ours[name], value, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("task", ["classes", "answers"])
def test_blocks_with_kept_states_and_dropout(task):
    model, data, phase = make(task, 0.2), examples(task), Phase(("adapter", "head"))
    whole, _ = trained(model, data, phase, **{"train.blocks": 1})
    blocks, _ = trained(model, data, phase, **{"train.blocks": 4})
    for name, value in whole.items():
        torch.testing.assert_close(blocks[name], value, atol=1e-7, rtol=1e-5)


def test_a_model_whose_dropout_would_be_another_is_trained_on_the_whole_batch(caplog):
    """OPT draws a number of its own in every forward pass in training, so blocks would change what follows."""
    model, data, phase = make("opt", 0.2), examples("answers"), Phase(("adapter", "head"))
    plain, before = trained(model, data, phase, shortcuts=False, **{"train.blocks": 1})
    ours, result = trained(model, data, phase, shortcuts=False, **{"train.blocks": 2})
    assert result.loss == before.loss and ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], value) for name, value in plain.items())
    assert (
        "train.blocks: a batch of OPTForCausalLM is not divided (its blocks draw other random numbers)" in caplog.text
    )


class Flat(torch.nn.Module):
    """A layer whose dropout sees all positions as one side, as in some mixtures of experts."""

    def __init__(self, dense):
        super().__init__()
        self.dense, self.drop = dense, torch.nn.Dropout(0.4)

    def forward(self, states):
        return self.drop(self.dense(states).flatten(0, 1)).view(*states.shape[:-1], -1)


def test_dropout_that_no_mask_fits(caplog):
    model, data, phase = make("classes", 0.0), examples("classes"), Phase(("adapter", "head"))
    layer = model.base_model.model.bert.encoder.layer[-1].intermediate
    layer.dense = Flat(layer.dense)
    plain, _ = trained(model, data, phase, shortcuts=False, **{"train.blocks": 1})
    whole, _ = trained(model, data, phase, **{"train.blocks": 1})
    blocks, _ = trained(model, data, phase, shortcuts=False, **{"train.blocks": 2})
    for name, value in plain.items():
        assert torch.equal(blocks[name], value)
        torch.testing.assert_close(whole[name], value, atol=1e-7, rtol=1e-5)
    assert "train.blocks: a batch of BertForSequenceClassification is not divided" in caplog.text
    assert "train.only_read: the last layer of BertForSequenceClassification cannot be computed for some" in caplog.text
    assert "in training" in caplog.text


def test_a_penalty_counts_once():
    model, data = make("classes", 0.0), examples("classes")

    def penalty(model):
        return sum((p**2).sum() for p in model.parameters() if p.requires_grad)

    phase = Phase(("adapter", "head"), penalty=penalty)
    whole, before = trained(model, data, phase, **{"train.blocks": 1})
    blocks, result = trained(model, data, phase, **{"train.blocks": 3})
    assert result.loss == pytest.approx(before.loss, rel=1e-6)
    for name, value in whole.items():
        torch.testing.assert_close(blocks[name], value, atol=1e-7, rtol=1e-5)


def test_auto_divides_where_layers_are_wide():
    """The decision follows from the sizes of the layers and the lengths."""
    lengths = np.array([8, 60, 9, 61, 8, 62, 9, 60])
    assert len(divide(lengths, overhead(make("classes", 0.0)))) == 1, "a narrow layer costs nothing but its overhead"
    with torch.device("meta"):
        wide = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_hidden_layers=2))
    assert len(divide(lengths, overhead(wide))) == 1, "an unknown device is taken for a GPU"
    wide = wide.to_empty(device="cpu")
    parts = divide(lengths, overhead(wide))
    assert [sorted(lengths[p]) for p in sorted(parts, key=len)] in (
        [[8, 8, 9, 9], [60, 60, 61, 62]],
        [[60, 60, 61, 62], [8, 8, 9, 9]],
    )


def test_a_loss_of_routers_is_not_divided():
    model, data = make("answers", 0.0), examples("answers")
    model.config.output_router_logits = True
    assert len(Blocks(model, 4).of(data, np.arange(5))) == 1


def test_a_sample_without_a_label_has_no_share():
    data = examples("answers", 4)
    data.columns["labels"][0][:] = -100
    parts = Blocks(make("answers", 0.0), 4).of(data, np.arange(4))
    assert sum(share for _, share, _ in parts) == pytest.approx(1) and 0 not in np.concatenate([p for p, _, _ in parts])
