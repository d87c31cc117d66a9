"""The last layer for the positions that are read gives what the plain forward gives, with all gradients."""

import contextlib
import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from fs_lowrank.data import Examples
from fs_lowrank.errors import say_once
from fs_lowrank.models.adapters import add_adapter
from fs_lowrank.models.shortcuts.reads import OnlyRead
from fs_lowrank.settings import AdapterSpec
from tests.cases import enlarge, small_config

pytestmark = pytest.mark.more

_BERT = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: name -> all modules that can be adapted
FAMILIES = {
    **{"bert": _BERT, "roberta": _BERT, "llama": _LLAMA, "qwen2": _LLAMA},
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
}
ENCODERS = ("bert", "roberta")
CASES = [(name, "classes") for name in FAMILIES] + [(name, "answers") for name in FAMILIES if name not in ENCODERS]


def settings_of(name, dropout):
    if name in ENCODERS:
        return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if name == "gpt2":
        return {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return {"attention_dropout": dropout}


def make(name, task, dropout=0.0, modules=None, lora_dropout=0.0, attention="sdpa", dtype=torch.float64, **spec):
    torch.manual_seed(0)
    loader = AutoModelForCausalLM if task == "answers" else AutoModelForSequenceClassification
    config = small_config(name, layers=3, **settings_of(name, dropout))
    model = loader.from_config(config, attn_implementation=attention)
    enlarge(model, 0.2)
    if modules != "base":
        chosen = tuple(modules or FAMILIES[name])
        model = add_adapter(
            model, AdapterSpec(r=2, lora_alpha=4, lora_dropout=lora_dropout, target_modules=chosen, **spec), seed=0
        )
        enlarge(model, 0.2, "lora_B")
    return model.eval().to(dtype)


def examples(task):
    draw, lengths = np.random.default_rng(0), (9, 4, 12, 7, 4, 15, 6)
    rows = [draw.integers(4, 40, n) for n in lengths]
    if task == "classes":
        return Examples({"input_ids": rows}, draw.integers(0, 2, len(rows)))
    answers = [np.where(np.arange(n) < n - draw.integers(1, n // 2), -100, row) for n, row in zip(lengths, rows)]
    return Examples({"input_ids": rows, "labels": answers})


def flipped(batch):
    """The same batch, padded on the left."""
    lengths = batch["attention_mask"].sum(1).tolist()
    return {
        k: torch.stack([row.roll(row.shape[0] - n, 0) for row, n in zip(v, lengths)]) if v.ndim == 2 else v
        for k, v in batch.items()
    }


def results(model, batch, context, training=False):
    """Loss, logits that are read, and gradients."""
    model.train(training)
    model.zero_grad()
    torch.manual_seed(5)
    with context:
        output = model(**batch)
    loss, logits = output.loss, output.logits
    loss.backward()
    if logits.ndim == 3:
        logits = logits[:, :-1][batch["labels"][:, 1:] != -100]
    return loss, logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def equal(one, other, relative):
    """Whatever differs does so by ``relative`` of its norm in ``one`` at most."""
    assert one[2].keys() == other[2].keys() and one[2]
    # Some gradients are zero but for rounding, such as those of the keys' bias.
    least = 0.1 * max(g.norm() for g in one[2].values())
    pairs = {"loss": (one[0], other[0], 0), "logits": (one[1], other[1], 0)}
    pairs |= {name: (gradient, other[2][name], least) for name, gradient in one[2].items()}
    for name, (a, b, least) in pairs.items():
        assert (a - b).norm() <= relative * max(a.norm(), least), name


def checked(model, data):
    reads = OnlyRead(model)
    reads.check(data)
    assert reads, "the plain forward is used"
    return reads


def count_rows(model, reads):
    """How many positions each module of the last layer computes, from now on."""
    rows = {}

    def note(name):
        return lambda module, args, output: rows.__setitem__(name, rows.get(name, 0) + args[0].shape[:-1].numel())

    for name, module in reads.layer.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and "lora_" not in name:
            module.register_forward_hook(note(name))
    return rows


# transformers' own attention without sdpa computes in single precision.
@pytest.mark.parametrize("attention, dtype, relative", [("sdpa", torch.float64, 1e-9), ("eager", torch.float32, 1e-5)])
@pytest.mark.parametrize("name, task", CASES)
def test_equal_to_the_plain_forward(name, task, attention, dtype, relative):
    model, data = make(name, task, attention=attention, dtype=dtype), examples(task)
    reads = checked(model, data)
    for batch in (data.batch(np.arange(7)), data.batch([1, 4]), data.batch([3]), flipped(data.batch(np.arange(7)))):
        plain = results(model, batch, contextlib.nullcontext())
        equal(plain, results(model, batch, reads.reading(batch)), relative)
        with torch.no_grad(), reads.reading(batch):
            logits = model(**batch).logits
        if task == "classes":
            torch.testing.assert_close(logits, plain[1])
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name, task", CASES)
def test_dropout_draws_the_masks_of_all_positions(name, task):
    model, data = make(name, task, dropout=0.2, lora_dropout=0.3), examples(task)
    reads = checked(model, data)
    for batch in (data.batch(np.arange(7)), data.batch([1, 4])):
        plain = results(model, batch, contextlib.nullcontext(), training=True)
        number = torch.rand(())
        equal(plain, results(model, batch, reads.reading(batch), training=True), 1e-9)
        assert torch.rand(()) == number, "the same numbers are drawn"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_positions_that_are_computed(name):
    model, data = make(name, "classes"), examples("classes")
    reads = checked(model, data)
    rows = count_rows(model, reads)
    batch = data.batch(np.arange(7))
    with reads.reading(batch):
        model(**batch)
    everything, read = 7 * 15, 7
    wide = {n: count for n, count in rows.items() if count == everything}
    assert {count for count in rows.values()} <= {everything, read}
    # GPT-2 has one matrix for queries, keys and values.
    parts = {n.removesuffix(".base_layer").rpartition(".")[2] for n in wide}
    assert parts in ({"key", "value"}, {"k_proj", "v_proj"}, {"c_attn"})


@pytest.mark.parametrize(
    "modules", [["q_proj"], ["k_proj"], ["v_proj"], ["o_proj"], ["down_proj"], ["q_proj", "v_proj"], "base"]
)
def test_whatever_trains(modules):
    model, data = make("llama", "answers", modules=modules), examples("answers")
    reads, batch = checked(model, data), data.batch(np.arange(7))
    equal(results(model, batch, contextlib.nullcontext()), results(model, batch, reads.reading(batch)), 1e-9)


@pytest.mark.parametrize("method", ["loha", "lokr"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_other_adapters(method, dropout):
    model = make("bert", "classes", modules=["query", "value"], lora_dropout=dropout, method=method)
    data = examples("classes")
    reads, batch = checked(model, data), data.batch(np.arange(7))
    for training in (False, True):
        plain = results(model, batch, contextlib.nullcontext(), training)
        equal(plain, results(model, batch, reads.reading(batch), training), 1e-9)


def test_a_norm_that_trains_gets_its_gradient():
    model = make("llama", "answers", extra={"modules_to_save": ["model.norm", "post_attention_layernorm"]})
    data = examples("answers")
    reads, batch = checked(model, data), data.batch(np.arange(7))
    plain = results(model, batch, contextlib.nullcontext())
    assert any("norm" in n for n in plain[2])
    equal(plain, results(model, batch, reads.reading(batch)), 1e-9)


def test_most_positions_read_is_the_plain_forward():
    model, data = make("llama", "answers"), examples("answers")
    every = Examples({"input_ids": data.columns["input_ids"], "labels": data.columns["input_ids"]})
    reads, batch = checked(model, data), every.batch(np.arange(7))
    rows = count_rows(model, reads)
    with reads.reading(batch):
        model(**batch)
    assert set(rows.values()) == {7 * 15}


def test_a_copy_needs_no_check():
    import copy

    model, data = make("bert", "classes"), examples("classes")
    reads, other, batch = checked(model, data), copy.deepcopy(model), data.batch(np.arange(7))
    equal(
        results(model, batch, contextlib.nullcontext()),
        results(other, batch, OnlyRead(other, reads.checked).reading(batch)),
        1e-9,
    )


def test_an_error_in_the_layer_leaves_the_model_as_it_was():
    model, data = make("bert", "classes", dropout=0.1), examples("classes")
    reads, batch = checked(model, data), data.batch(np.arange(7))
    hook = reads.layer.intermediate.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    model.train()
    with pytest.raises(RuntimeError, match="stop"), reads.reading(batch):
        model(**batch)
    hook.remove()
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.overrides._get_current_function_mode_stack() == []


def test_half_precision():
    model, data = make("llama", "answers", dtype=torch.bfloat16), examples("answers")
    reads, batch = checked(model, data), data.batch(np.arange(7))
    equal(results(model, batch, contextlib.nullcontext()), results(model, batch, reads.reading(batch)), 0.1)


# -- where it cannot be --------------------------------------------------------------------------------


def classifier(kind):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(small_config(kind, layers=3)).eval()


def refused(model, data, caplog):
    say_once.cache_clear()
    reads = OnlyRead(model)
    with caplog.at_level(logging.WARNING, "fs_lowrank"):
        reads.check(data)
        OnlyRead(model).check(data)
    said = [r.getMessage() for r in caplog.records if r.name == "fs_lowrank"]
    assert not reads and len(said) == 1 and said[0].startswith("train.only_read: the last layer of ")
    batch = data.batch(np.arange(7))
    with torch.no_grad(), reads.reading(batch):
        logits = model(**batch).logits
    with torch.no_grad():
        assert torch.equal(logits, model(**batch).logits)
    return said[0]


@pytest.mark.parametrize("kind, said", [("fnet", "FNetForSequenceClassification"), ("distilbert", "to no cache")])
def test_layers_without_keys_and_values_or_without_a_cache_are_computed_for_all_positions(kind, said, caplog):
    assert said in refused(classifier(kind), examples("classes"), caplog)


class Flat(torch.nn.Module):
    """A layer whose dropout sees all positions as one side, as in some mixtures of experts."""

    def __init__(self, dense):
        super().__init__()
        self.dense, self.drop = dense, torch.nn.Dropout(0.4)

    def forward(self, states):
        return self.drop(self.dense(states).flatten(0, 1)).view(*states.shape[:-1], -1)


def test_with_dropout_that_no_mask_fits_training_computes_all_positions(caplog):
    model, data = make("bert", "classes"), examples("classes")
    layer = model.base_model.model.bert.encoder.layer[-1].intermediate
    layer.dense = Flat(layer.dense)
    reads, batch = checked(model, data), data.batch(np.arange(7))
    said = "the last layer of BertForSequenceClassification cannot be computed for some positions only in training"
    assert not reads.checked.usable_in_training and said in caplog.text
    plain = results(model, batch, contextlib.nullcontext(), training=True)
    equal(plain, results(model, batch, reads.reading(batch), training=True), 0.0)


def test_a_head_that_reads_other_positions_is_found(caplog):
    model = classifier("bert")

    class Mean(torch.nn.Module):
        def forward(self, states):
            return states.mean(1)

    model.bert.pooler = Mean()
    assert "differ by" in refused(model, examples("classes"), caplog)


def test_a_layer_that_uses_queries_for_its_keys_is_found(caplog):
    """What the second pass would compute from other rows is seen in the comparison."""
    model = classifier("bert")
    model.bert.encoder.layer[-1].attention.self.key.register_forward_hook(
        lambda module, args, output: output + output.mean(1, keepdim=True)
    )
    reads = OnlyRead(model)
    reads.check(examples("classes"))
    assert reads, "keys of all positions are computed once, from all"
    model.bert.encoder.layer[-1].intermediate.register_forward_hook(
        lambda module, args, output: output - output.mean(1, keepdim=True)
    )
    assert "differ by" in refused(model, examples("classes"), caplog)
