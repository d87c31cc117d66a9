"""The shipped generic suite: which checks a method is asked, and what is said of a defective one."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from fs_lowrank import Averaging, Gathering, UserError, register_method
from fs_lowrank.methods import registry
from fs_lowrank.testing import CHECKS, asked_of, check_method

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("own_methods")


class Median(Gathering):
    def aggregate(self, updates, state, round):
        message = {n: torch.stack([u.tensors[n] for u in updates]).median(0).values for n in updates[0].tensors}
        return {**state, **message}, message


class Remembers(Averaging):
    """Keeps its state in an attribute."""

    def settle(self, mean, state, round):
        self.rounds = getattr(self, "rounds", 0) + 1
        mean = {n: t * self.rounds for n, t in mean.items()}
        return {**state, **mean}, mean


class Overwrites(Averaging):
    def aggregate(self, updates, state, round):
        for tensor in updates[0].tensors.values():
            tensor.mul_(0.5)
        return super().aggregate(updates, state, round)


class Equal(Averaging):
    """Weights all clients equally, whatever is configured."""

    def weights(self, updates):
        return [1 / len(updates)] * len(updates)


class Noisy(Averaging):
    """Draws from a generator that does not depend on the seed."""

    def settle(self, mean, state, round):
        mean = {n: t + 1e-3 * torch.randn(t.shape, generator=_GENERATOR) for n, t in mean.items()}
        return {**state, **mean}, mean


class Frozen(Averaging):
    """Discards what was trained."""

    def aggregate(self, updates, state, round):
        return state, {n: state[n] for n in updates[0].tensors}


class Tailors(Averaging):
    """Sends more than ``expected`` declares."""

    def upload(self, model, round, client):
        return {n: torch.cat([t, t]) for n, t in super().upload(model, round, client).items()}


_GENERATOR = torch.Generator()


@pytest.mark.more
@pytest.mark.parametrize(
    "cls, check, said",
    [
        (Remembers, "resume", "after resuming, the state differs in .*; keep what lasts in the state"),
        (Overwrites, "arguments", "aggregate changed an update in place"),
        (Equal, "weights", "head|classifier"),
        (Noisy, "resume", "the same configuration and seed gave another result"),
        (Noisy, "arguments", "two results for one input"),
        (Frozen, "learns", "expected below 0.99"),
        (Frozen, "one client", "Tensor-likes are not close"),
        (Tailors, "bytes", "RunFailed.*shape"),
    ],
)
def test_a_defective_method_fails_the_check_for_its_defect(cls, check, said):
    method = register_method(f"with_a_defect_{cls.__name__.lower()}")(type(cls.__name__, (cls,), {}))
    with pytest.raises(AssertionError, match="fails 1 of 1 checks|fails [1-3] of 3 checks") as failed:
        check_method(method, only=check)
    assert re.search(said, str(failed.value)), str(failed.value)


def test_the_checks_depend_on_the_kind_of_method():
    class ForImages(Averaging):
        @classmethod
        def requires(cls, params):
            from fs_lowrank import Requires

            return Requires(tasks=("ImageClassification",))

    register_method("for_images")(ForImages)
    assert {name.partition(" (")[2] for name in asked_of("for_images")} == {"vision)"}
    assert {"run (encoder)", "run (causal)", "run (vision)", "bytes (encoder)"} <= asked_of("rolora").keys()
    assert all(text.endswith(".") for text in asked_of("rolora").values())


@pytest.mark.more
def test_a_sum_of_products_is_not_asked_for_a_weighted_mean(capsys):
    register_method("some_median")(Median)
    assert check_method(Median, only="weights") == ["weights (encoder)"]
    lines = []
    assert check_method("some_median", only="server optimizer", say=lines.append) == ["server optimizer (encoder)"]
    assert len(lines) == 1 and lines[0].startswith("passed  server optimizer (encoder): An averaging method")


def test_wrong_use_is_named():
    class Unregistered(Averaging):
        pass

    for method in (Unregistered, type("Child", (registry.registered()["rolora"],), {}), 3):
        with pytest.raises(UserError, match="register_method|is not a registered method|no method"):
            check_method(method)
    with pytest.raises(UserError, match="no check 'bites'; there are: run, seed, learns"):
        check_method("rolora", only="bites")
    with pytest.raises(UserError, match="did you mean 'mix'"):
        check_method("rolora", {"mixx": 1})


@pytest.mark.more
def test_hyperparameters_and_keys_reach_the_runs():
    start = {"llm.adapter.args.0.init_lora_weights": "pissa"}
    with pytest.raises(
        AssertionError, match="pissa': it moves a part of the base into the pair, and clients of smaller ranks"
    ):
        check_method("flora", {"ranks": (1, 3, 2)}, keys=start, only="seed")


def test_the_guide_lists_every_check():
    guide = (ROOT / "docs" / "guides" / "own_method.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| {check.name} | {check.asks} |" in guide


@pytest.mark.more
def test_the_method_of_the_page_passes_whose_clients_keep_what_they_learn(monkeypatch):
    """Of FedSA-LoRA's pairs the server averages A alone; B, without which A does nothing, stays with its client."""
    page = (ROOT / "docs" / "guides" / "own_method.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "class FedSA" in code)
    module = types.ModuleType("of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look up its types
    exec(code, vars(module))
    check_method("fedsa", {"warm": 0}, only="run")
    with pytest.raises(UserError, match=r"lowrank.warm = -1: expected .*0"):
        check_method("fedsa", {"warm": -1}, only="run")
