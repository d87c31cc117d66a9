"""A cohort's batch in blocks of similar length; that they give the gradients of the batch is in ``test_cohorts``."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from fs_lowrank.models.shortcuts.trials import Unfit
from fs_lowrank.training.blocks import ClientMasks, divide, overhead
from tests.cases import small_config

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
    narrow = AutoModelForSequenceClassification.from_config(small_config("bert"))
    assert len(divide(lengths, overhead(narrow))) == 1, "a narrow layer costs nothing but its overhead"
    with torch.device("meta"):
        wide = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_hidden_layers=2))
    assert len(divide(lengths, overhead(wide))) == 1, "an unknown device is taken for a GPU"
    wide = wide.to_empty(device="cpu")
    parts = divide(lengths, overhead(wide))
    assert [sorted(lengths[p]) for p in sorted(parts, key=len)] in (
        [[8, 8, 9, 9], [60, 60, 61, 62]],
        [[60, 60, 61, 62], [8, 8, 9, 9]],
    )
