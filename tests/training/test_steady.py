"""A model that changes itself while it computes is refused, and others are not."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from fs_lowrank.data import Examples
from fs_lowrank.errors import UserError
from fs_lowrank.training.steady import check_steady
from tests.cases import small_config

#: sparse attention, in batches of more than 14 tokens
BIG_BIRD = {"block_size": 2, "num_random_blocks": 1}
#: positions that are scaled by the longest batch that there was, beyond 16 tokens
DYNAMIC = {
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}


def model_of(kind, **keys):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(small_config(kind, **keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def texts(*lengths):
    draw = np.random.default_rng(0)
    return Examples({"input_ids": [draw.integers(4, 40, n) for n in lengths]}, np.zeros(len(lengths), dtype=int))


@pytest.mark.parametrize("kind, keys", [("big_bird", BIG_BIRD), ("llama", DYNAMIC)])
def test_a_model_that_its_batches_change_is_refused(kind, keys):
    model, data = model_of(kind, **keys), texts(40, 3, 6, 20, 48)
    with pytest.raises(UserError, match="the results of .* depend on the texts computed before: .* another result"):
        check_steady(model.train(), data)
    assert model.training


@pytest.mark.parametrize(
    "kind, keys, lengths",
    [
        ("big_bird", {**BIG_BIRD, "attention_type": "original_full"}, (40, 3, 6)),
        ("big_bird", BIG_BIRD, (4, 14, 6)),
        ("big_bird", BIG_BIRD, (15, 40)),
        ("llama", DYNAMIC, (3, 16, 9)),
        ("esm", {"position_embedding_type": "rotary", "mask_token_id": 1}, (40, 3, 6)),  # keeps the longest table
        ("bert", {}, (40, 3, 6)),
        ("bert", {}, (5,)),
        ("bert", {}, (400, 3)),  # longer than its positions
    ],
)
def test_others_are_not(kind, keys, lengths):
    model = model_of(kind, **keys)
    numbers = torch.get_rng_state()
    check_steady(model, texts(*lengths))
    assert torch.equal(torch.get_rng_state(), numbers)
