"""What decides a client's training is in the key under which it is kept, whatever of the model or its data it is."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fs_lowrank import load_config
from fs_lowrank.data import Examples, ImageExamples
from fs_lowrank.data.images import Pipeline
from fs_lowrank.methods import Phase, create_method
from fs_lowrank.models.adapters import add_beside, load_tensors
from fs_lowrank.models.names import all_tensors
from fs_lowrank.rounds.reuse import Reuse
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training import train_client


class Net(nn.Module):
    config = SimpleNamespace(use_return_dict=True, model_type="net")  # PEFT asks for it

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.classifier = nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, input_ids, labels, **others):
        logits = self.classifier(torch.tanh(self.up(self.words(input_ids)))).mean(1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


TEXTS = Examples({"input_ids": [np.arange(i, i + 4) for i in range(6)]}, np.arange(6) % 3)


PHASES = [Phase(("adapter", "nested", "personal", "head"))]


def configured():
    return load_config({"federate.client_num": 1, "federate.method": "fedlora", "train.local_update_steps": 3})


def key_of(model, examples=TEXTS):
    return Reuse.key(configured(), model, examples, PHASES, lr=1.0, seed=1)


def trained(model):
    """The key of ``model``, and the loss of a copy of it that is trained."""
    return key_of(model), train_client(copy.deepcopy(model), TEXTS, PHASES, configured(), lr=1.0, seed=1).loss


@pytest.mark.parametrize("method", ["mfedloru", "pmfedloru"])
def test_the_scale_of_nested_pairs(method):
    found = []
    for scale in (0.5, 4.0, 0.5):
        adapter = AdapterSpec(r=3, lora_alpha=6, target_modules=("up",))
        made = create_method(method, adapter=adapter, rounds=2, seed=4, nested_ranks=(2,), nested_scale=scale)
        model = made.adapt(Net())
        load_tensors(model, made.view(made.initial_state(model), 1))
        found.append((trained(model), all_tensors(model)))
    (first, start), (other, same), (again, _) = found
    assert start.keys() == same.keys() and all(torch.equal(start[n], same[n]) for n in start)
    assert first == again and first[0] != other[0] and first[1] != other[1]


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"lora_alpha": 12}])
def test_what_an_adapter_beside_the_shared_one_applies(options):
    adapter = AdapterSpec(r=3, lora_alpha=6, target_modules=("up",))
    made = create_method("fedlora", adapter=adapter, rounds=2, seed=4)
    one, other = (add_beside(made.adapt(Net()), "personal", 4, **own) for own in ({}, options))
    a, b = all_tensors(one), all_tensors(other)
    assert all(torch.equal(a[n], b[n]) for n in a | b)
    assert trained(one) == trained(one) and all(x != y for x, y in zip(trained(one), trained(other), strict=True))


def test_counted_batches():
    one, other = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)) for _ in range(2))
    other.load_state_dict(one.state_dict())
    assert key_of(one) == key_of(other)
    other[1].num_batches_tracked += 3
    assert key_of(one) != key_of(other)


def test_the_usual_normalisation_of_images():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 5, 5), np.uint8)

    def images(mean):
        pipeline = Pipeline([["RandomHorizontalFlip"], ["Normalize", {"mean": [mean], "std": [0.3]}]])
        return ImageExamples(pixels, np.arange(4), np.arange(4) % 2, pipeline)

    assert key_of(Net(), images(0.5)) == key_of(Net(), images(0.5)) != key_of(Net(), images(0.1))
