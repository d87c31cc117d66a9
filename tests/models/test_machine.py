"""The device that a model computes on, autocast there, and what torch draws there."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn

import fs_lowrank
from fs_lowrank import UserError, load_config
from fs_lowrank.finished import load_run
from fs_lowrank.methods.one_shot.base import logits_of
from fs_lowrank.models.curvature import count_classes
from fs_lowrank.models.machine import autocast, device_of, input_device
from fs_lowrank.seeds import drawing
from fs_lowrank.training.generate import continue_prompts


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(count)``: what torch then says of this machine."""

    def found(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return found


def test_a_gpu_that_is_not_there_is_refused(settings, gpus):
    def asked(device):
        return device_of(load_config(settings, {"use_gpu": True, "device": device}))

    gpus(2)
    assert [asked(device) for device in (-1, 0, 1, "cpu")] == [
        *map(torch.device, ("cuda:0", "cuda:0", "cuda:1", "cpu"))
    ]
    with pytest.raises(UserError, match="device = 2: torch finds 2 GPUs; give 0 to 1, or -1"):
        asked(2)
    gpus(0)
    with pytest.raises(UserError, match="torch finds no GPU"):
        asked(-1)


def computed_in(model, do):
    """The dtypes of the products of ``model`` while ``do()`` runs."""
    seen, linear = set(), [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [module.register_forward_hook(lambda _, args, output: seen.add(output.dtype)) for module in linear]
    with torch.no_grad():
        do()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.more
def test_autocast_is_that_of_a_finished_run_and_of_what_it_generates_too(causal_settings, no_curves):
    keys = {"train.autocast": "bfloat16", "federate.total_round_num": 1}
    result = fs_lowrank.run(load_config(causal_settings, keys))
    run, few = load_run(result.outdir), {"batch_size": 1, "max_new_tokens": 2}
    for model in (result.model, run.model):
        for do in (
            lambda m: m(input_ids=torch.tensor([[1, 2, 3]])),
            lambda m: continue_prompts(m, run.tokenizer, [[1, 2, 3]], **few),
        ):
            assert computed_in(model, partial(do, model)) == {torch.bfloat16}
            assert not torch.is_autocast_enabled("cpu")


def test_autocast_ends_where_one_module_calls_the_other():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def get_base_model(self):
            return self.inner

        def forward(self, x):
            first = self.inner(x)
            return first @ first.float().mT, torch.is_autocast_enabled("cpu")

    model = Wrapped()
    autocast(model, torch.bfloat16)
    product, still = model(torch.randn(3, 2))
    assert still and product.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert not torch.is_autocast_enabled("cpu")


def test_what_is_drawn_apart_leaves_the_generators_of_all_gpus_as_they_were(monkeypatch):
    """Those of the CPU are asked of every run in ``tests/test_api.py``."""
    kept = []

    @contextlib.contextmanager
    def fork(devices):
        kept.extend(devices)
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.random, "fork_rng", fork)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    with drawing(3):
        assert kept == [0, 1], "a seed is that of all GPUs"


class Placed(nn.Module):
    """A classifier whose first weight lies on the disk."""

    def __init__(self):
        super().__init__()
        self.away, self.head = nn.Parameter(torch.empty(2, device="meta")), nn.Linear(3, 2)
        self.hf_device_map = {"away": "disk", "head": "cpu"}

    def forward(self, x):
        return type("Output", (), {"logits": self.head(x)})


def test_inputs_go_where_the_model_computes_if_its_first_weight_is_on_the_disk():
    model, batch = Placed(), {"x": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.int64)}
    assert input_device(model) == torch.device("cpu")
    assert logits_of(model, {}, batch).device == torch.device("cpu")
    assert count_classes(model, [batch]) == 2
