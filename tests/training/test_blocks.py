"""A cohort's batch in blocks of similar length; that they give the gradients of the batch is in ``test_cohorts``."""

import copy
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from fs_lowrank.config import load_config
from fs_lowrank.data import Examples
from fs_lowrank.methods import Phase
from fs_lowrank.models.adapters import add_adapter
from fs_lowrank.models.shortcuts.frozen import FrozenPrefix
from fs_lowrank.models.shortcuts.reads import OnlyRead
from fs_lowrank.models.shortcuts.trials import Unfit
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training import train_client
from fs_lowrank.training.blocks import ClientMasks, divide, overhead
from tests.cases import SIZES, enlarge

pytestmark = pytest.mark.more


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


def make(dropout):
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    spec = AdapterSpec(r=2, lora_alpha=4, lora_dropout=dropout, target_modules=("query", "value"), layers=(1, 2))
    model = add_adapter(AutoModelForSequenceClassification.from_config(config), spec, seed=0)
    return enlarge(model, 0.2, "lora_B").double()


def examples(count=11):
    draw = np.random.default_rng(3)
    rows = [draw.integers(4, 40, n) for n in draw.integers(3, 20, count)]
    return Examples({"input_ids": rows}, draw.integers(0, 2, count))


def trained(model, data, phase, shortcuts=True):
    """All tensors that training changes, from the same start."""
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
        }
    )
    kept = {}
    if shortcuts:
        prefix, reads = FrozenPrefix(model, {"adapter", "head"}, 1e9), OnlyRead(model)
        prefix.plan({"a": (data, 9)})
        reads.check(data)
        kept = {"owner": "a", "prefix": prefix, "reads": reads}
    train_client(model, data, [phase], config, lr=0.1, seed=4, **kept)
    return {n: p.detach() for n, p in model.named_parameters() if not torch.equal(p, before[n])}


class Flat(torch.nn.Module):
    """A layer whose dropout sees all positions as one side, as in some mixtures of experts."""

    def __init__(self, dense):
        super().__init__()
        self.dense, self.drop = dense, torch.nn.Dropout(0.4)

    def forward(self, states):
        return self.drop(self.dense(states).flatten(0, 1)).view(*states.shape[:-1], -1)


def test_dropout_that_no_mask_fits(caplog):
    model, data, phase = make(0.0), examples(), Phase(("adapter", "head"))
    layer = model.base_model.model.bert.encoder.layer[-1].intermediate
    layer.dense = Flat(layer.dense)
    plain, ours = trained(model, data, phase, shortcuts=False), trained(model, data, phase)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, atol=1e-7, rtol=1e-5)
    assert "train.only_read: the last layer of BertForSequenceClassification cannot be computed for some" in caplog.text
    assert "in training" in caplog.text


@pytest.mark.parametrize("part", [[0, 1, 2, 3, 4], [4, 0]])
def test_each_client_draws_the_masks_that_it_draws_alone(part):
    lengths, part = [np.array([3, 2]), np.array([4, 1, 2])], np.array(part)
    masks = ClientMasks(lengths, [torch.Generator().manual_seed(seed) for seed in (0, 1)])
    sides = (len(part), int(np.concatenate(lengths)[part].max()), 6)
    with masks.masks(part):
        ours = torch.nn.functional.dropout(torch.ones(sides), 0.5)
    alone = [
        torch.empty(len(own), int(own.max()), 6).bernoulli_(0.5, generator=torch.Generator().manual_seed(seed)) * 2
        for seed, own in enumerate(lengths)
    ]
    rows = [row for client in alone for row in client]
    for mask, i in zip(ours, part):
        both = min(len(mask), len(rows[i]))
        assert torch.equal(mask[:both], rows[i][:both])
    with pytest.raises(Unfit, match="is not drawn sample by sample"), masks.masks(part):
        torch.nn.functional.dropout(torch.ones(7, 6), 0.5)


def test_auto_divides_where_layers_are_wide():
    """The decision follows from the sizes of the layers and the lengths."""
    lengths = np.array([8, 60, 9, 61, 8, 62, 9, 60])
    assert len(divide(lengths, overhead(make(0.0)))) == 1, "a narrow layer costs nothing but its overhead"
    with torch.device("meta"):
        wide = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_hidden_layers=2))
    assert len(divide(lengths, overhead(wide))) == 1, "an unknown device is taken for a GPU"
    wide = wide.to_empty(device="cpu")
    parts = divide(lengths, overhead(wide))
    assert [sorted(lengths[p]) for p in sorted(parts, key=len)] in (
        [[8, 8, 9, 9], [60, 60, 61, 62]],
        [[60, 60, 61, 62], [8, 8, 9, 9]],
    )
