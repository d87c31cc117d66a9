"""Which classes can be registered, what methods require, and what wrappers remember."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from fs_lowrank.errors import UserError
from fs_lowrank.methods import (
    Averaging,
    Gathering,
    Method,
    Requires,
    Setting,
    Update,
    Wrapper,
    create_method,
    list_methods,
    register_method,
    requirements,
)

pytestmark = pytest.mark.usefixtures("own_methods")


class Median(Gathering):
    def aggregate(self, updates, state, round):
        message = {n: torch.stack([u.tensors[n] for u in updates]).median(0).values for n in updates[0].tensors}
        return {**state, **message}, message


@pytest.mark.parametrize(
    "flag, value, instead",
    [
        ("averages", False, "Averaging .* Gathering"),
        ("additive", None, r"replace\(super\(\).requires\(params\), sums="),
        ("needs_only_sums", classmethod(lambda cls: True), r"replace\(super\(\).requires\(params\), sums="),
        ("plans_ahead", property(lambda self: True), r"replace\(super\(\).requires\(params\), rounds="),
        ("average", lambda self, updates, state: ({}, {}), r"mean\(updates, state\)"),
    ],
)
@pytest.mark.parametrize("base", [Averaging, Median])
def test_an_attribute_of_the_former_contract_is_refused_with_the_new_spelling(base, flag, value, instead):
    parent = type("Parent", (base,), {flag: value})
    for cls in (parent, type("Child", (parent,), {})):
        with pytest.raises(
            UserError, match=f"method 'old': the attribute {flag} is no longer read; instead, .*{instead}"
        ):
            register_method("old")(cls)
    assert "old" not in list_methods()


def test_an_attribute_of_the_former_contract_on_an_instance_is_refused():
    @register_method("sets_it_later")
    class SetsItLater(Averaging):
        def __init__(self, params, setting):
            super().__init__(params, setting)
            self.selects = True

    with pytest.raises(UserError, match=r"the attribute selects is no longer read; .*requires\(params\), validation="):
        create_method("sets_it_later")


def test_a_class_without_a_server_step_is_refused():
    for cls in (type("Bare", (Method,), {}), type("Own", (Method,), {"aggregate": Median.aggregate}), Gathering):
        with pytest.raises(UserError, match="does not define its server step; derive it from Averaging"):
            register_method("unclear")(cls)


def test_a_server_optimizer_that_would_not_be_applied_is_refused():
    class Own(Averaging):
        def aggregate(self, updates, state, round):
            return Median.aggregate(self, updates, state, round)

    register_method("own_step")(Own)
    register_method("median")(Median)
    create_method("own_step")
    # It does not get a sum in place of the updates either.
    assert not requirements("own_step").sums and not requirements("median").sums and requirements("fedlora").sums
    with pytest.raises(UserError, match="own_step has an aggregate of its own.*override mean or settle"):
        create_method("own_step", server_optimizer={"type": "Adam"})
    with pytest.raises(UserError, match="median's server step is not a weighted mean"):
        create_method("median", server_optimizer={"type": "Adam"})


def test_a_message_names_what_is_not_at_its_default():
    @dataclass(frozen=True)
    class Params:
        steps: list = field(default_factory=lambda: [1, 2])
        share: float = 0.5

    class Timed(Averaging):
        @classmethod
        def requires(cls, params):
            return replace(super().requires(params), rounds=True)

    Timed.Params = Params
    register_method("timed")(Timed)
    with pytest.raises(UserError, match="^timed needs the number of rounds"):
        create_method("timed")
    with pytest.raises(UserError, match="^timed with lowrank.steps = .3. needs the number of rounds"):
        create_method("timed", steps=[3])


# -- what is required ------------------------------------------------------------------------------------


def test_shared_tags_determine_whether_there_is_an_adapter():
    found = {n: requirements(n).adapter for n in list_methods()}
    # Other tests register methods of their own, so only those of this package are checked.
    halves = ("fedsa_lora", "ffa_lora", "flexlora", "flora", "mfedloru", "pmfedloru", "rolora")
    assert {found[n] for n in halves} == {"lora"}
    assert {found[n] for n in ("fedloru", "pfedloru")} == {"any"} and found["fedlora"] == "every"
    assert {found[n] for n in ("fedavg", "fedhm", "pfedlora", "dense", "otfusion", "pfnm")} == {"none"}
    assert {found[n] for n in ("fedfisher", "fisher_merge", "regmean")} == {"optional"}
    for needs, use, adapts in (
        ("any", None, True),
        ("none", True, False),
        ("optional", True, True),
        ("optional", None, False),
    ):
        assert Requires(adapter=needs).adapts(use) is adapts


@pytest.mark.parametrize(
    "name, params, said",
    [
        ("flora", {}, "flora"),
        ("fedhm", {}, "fedhm"),
        ("regmean", {}, "regmean"),
        ("fedfisher", {"compress": True}, "fedfisher with lowrank.compress = True"),
        *(("fedfisher", {"fisher": form}, f"fedfisher with lowrank.fisher = {form}") for form in ("kfac", "full")),
        ("fisher_merge", {"rule": "target"}, "fisher_merge with lowrank.rule = target"),
    ],
)
def test_a_server_that_sees_only_sums_is_refused_if_the_method_needs_each_update(name, params, said):
    with pytest.raises(UserError, match=f"sees only the sum of the updates .* cannot take the step of {said}$"):
        create_method(name, only_sums=True, **params)


# -- wrappers --------------------------------------------------------------------------------------------


class Counts(Wrapper):
    """Remembers how often a tensor was stepped, and halves each change."""

    prefix = "counts:"

    def step(self, mean, state):
        stepped = {n: state[n] + (t - state[n]) / 2 for n, t in mean.items()}
        return stepped, {f"counts:of:{n}": state.get(f"counts:of:{n}", 0) + 1 for n in mean}


def test_wrappers_forget_replaced_tensors():
    @register_method("restarts")
    class Restarts(Averaging):
        def settle(self, mean, state, round):
            return {**state, **({"a": torch.zeros(2)} if round == 2 else {}), "own:of:a": round}, {"b": mean["b"]}

    method = create_method("restarts")
    method.wrappers = (Counts(), Counts())
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    update = Update(1, 5, {"a": torch.full((2,), 8.0), "b": torch.full((3,), 4.0)})
    state, message = method.aggregate([update], state, 1)
    # Two wrappers in sequence halve the change twice.
    assert torch.equal(state["a"], torch.full((2,), 2.0)) and torch.equal(message["b"], torch.ones(3))
    assert state["counts:of:a"] == state["counts:of:b"] == 1
    state, _ = method.aggregate([update], state, 2)
    assert "counts:of:a" not in state and state["counts:of:b"] == 2 and state["own:of:a"] == 2
    assert torch.equal(state["a"], torch.zeros(2))


# -- values of a wrong type ------------------------------------------------------------------------------


def test_a_number_under_the_name_of_a_shared_tensor_is_refused():
    method = create_method("fedavg")
    assert method.view({"net.weight": torch.ones(2), "own:round": 3}).keys() == {"net.weight"}
    with pytest.raises(TypeError, match="net.weight of the state is 3, expected a tensor"):
        method.view({"net.weight": 3})


def test_hyperparameters_are_a_dataclass():
    with pytest.raises(TypeError, match="hyperparameters of the type dict, expected FedAvg.Params"):
        type(create_method("fedavg"))({}, Setting())
