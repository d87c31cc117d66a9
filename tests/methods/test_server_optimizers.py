"""Server optimizers compared with an independent float64 implementation of Reddi et al., Algorithm 2."""

import numpy as np
import pytest
import torch

from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method
from fs_lowrank.rounds.workspace import method_of
from tests.methods.conftest import equal

SIZES = (3, 10, 27)
AVERAGING = ("fedavg", "fedlora", "ffa_lora", "rolora")


class Reference:
    """The optimizer state of one tensor: Algorithm 2 line by line, and FedAvgM of Hsu et al."""

    def __init__(self, kind, lr, beta1=0.9, beta2=0.99, tau=1e-3, momentum=0.0):
        self.kind, self.lr, self.beta1, self.beta2, self.tau, self.momentum = kind, lr, beta1, beta2, tau, momentum
        self.m, self.v = 0.0, tau**2

    def step(self, x, mean):
        delta = mean - x
        if self.kind == "SGD":
            self.m = self.momentum * self.m + delta
            return x + self.lr * self.m
        self.m = self.beta1 * self.m + (1 - self.beta1) * delta
        if self.kind == "Adagrad":
            self.v = self.v + delta**2
        elif self.kind == "Adam":
            self.v = self.beta2 * self.v + (1 - self.beta2) * delta**2
        elif self.kind == "Yogi":
            self.v = self.v - (1 - self.beta2) * delta**2 * np.sign(self.v - delta**2)
        return x + self.lr * self.m / (np.sqrt(self.v) + self.tau)


OPTIMIZERS = {
    "FedAvgM": {"type": "SGD", "lr": 0.7, "momentum": 0.9},
    "FedAdam": {"type": "Adam", "lr": 0.05},
    "FedAdam with its own constants": {"type": "Adam", "lr": 0.1, "betas": (0.5, 0.9), "tau": 0.01},
    "FedAdagrad": {"type": "Adagrad", "lr": 0.1},
    "FedAdagrad with momentum": {"type": "Adagrad", "lr": 0.1, "betas": (0.9, 0.5)},
    "FedYogi": {"type": "Yogi", "lr": 0.05, "tau": 0.02},
}


def reference(options):
    betas = options.get("betas", (0.0 if options["type"] == "Adagrad" else 0.9, 0.99))
    return Reference(options["type"], options["lr"], *betas, options.get("tau", 1e-3), options.get("momentum", 0.0))


@pytest.mark.parametrize("label", OPTIMIZERS)
@pytest.mark.parametrize("name", AVERAGING)
def test_several_rounds_against_the_reference(toy, federation, name, label):
    options = OPTIMIZERS[label]
    fed = federation(toy.method(name, server_optimizer=options), SIZES)
    x = {n: t.double().numpy() for n, t in fed.ledger.state.items()}
    memory = {n: reference(options) for n in x}
    p = toy.weights(SIZES)
    for round in range(1, 6):
        message = fed.round(round)
        for n in fed.received[0].tensors:
            mean = sum(w * u.tensors[n].double().numpy() for w, u in zip(p, fed.received))
            x[n] = memory[n].step(x[n], mean)
        for n, want in x.items():
            # Adam's step is a quotient, so rounding in float32 matters most where the second moment is tiny.
            np.testing.assert_allclose(fed.ledger.state[n].double().numpy(), want, atol=3e-4, rtol=3e-4)
        assert message.keys() == fed.received[0].tensors.keys(), "the state of the optimizer is not sent"
    for client in fed.copies:
        fed.catch_up(client, 6)
        own = fed.everything(client)
        assert all(torch.equal(own[n], fed.ledger.state[n]) for n in x)


@pytest.mark.parametrize("name", AVERAGING)
def test_a_server_optimizer_without_other_keys_is_fedavg_to_the_bit(toy, federation, name):
    config = load_config({"federate.client_num": 2, "federate.method": "fedlora", "fedopt.use": True})
    plain, wrapped = (federation(toy.method(name), SIZES) for _ in range(2))
    wrapped.method.wrappers = method_of(config).wrappers
    (optimizer,) = wrapped.method.wrappers
    assert (optimizer.type, optimizer.lr) == ("sgd", 1.0)
    for round in (1, 2, 3):
        plain.round(round)
        wrapped.round(round)
    equal(plain.ledger.state, wrapped.ledger.state)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"type": "Adamm"}, "did you mean 'adam'"),
        ({"type": "Adam", "lr": 0.1, "beta": 0.9}, "did you mean 'betas'"),
        ({"type": "Adam", "lr": 0.0}, "lr = 0.0: expected a number, above 0"),
        ({"type": "SGD", "lr": 0.1, "momentum": 1.0}, "momentum = 1.0: expected a number, at least 0 and below 1"),
        (
            {"type": "Yogi", "lr": 0.1, "betas": (0.9, 1.5)},
            "expected a list of 2 numbers or nothing, at least 0 and below 1",
        ),
        ({"type": "Adam", "lr": 0.1, "betas": [0.9]}, r"betas = \[0.9\]: expected a list of 2 numbers"),
        ({"type": "SGD", "lr": 1, "momentum": "abc"}, "momentum = 'abc': expected a number"),
    ],
)
def test_wrong_values_are_named(options, message):
    with pytest.raises(UserError, match=message):
        create_method("fedlora", server_optimizer=options)


def test_a_wrong_value_in_a_file_is_named_with_its_line(tmp_path):
    text = "federate: {client_num: 2, method: fedlora}\nfedopt:\n  use: %s\n  optimizer: {type: Adam, tau: -1}\n"
    for use in (True, False):
        (tmp_path / "a.yaml").write_text(text % use)
        with pytest.raises(UserError, match="a.yaml, line 4: fedopt.optimizer.tau = -1: expected a number, above 0"):
            load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "given, kind, lr",
    [
        *((name, "sgd", 1.0) for name in ("SGD", "FedAvg", "FedAvgM")),
        *((name, "adam", 0.01) for name in ("Adam", "FedAdam")),
        *((name, "adagrad", 0.01) for name in ("Adagrad", "fedadagrad")),
        *((name, "yogi", 0.01) for name in ("Yogi", "FedYogi")),
    ],
)
def test_the_usual_names_and_the_default_learning_rate(given, kind, lr):
    for more in ({}, {"lr": None}):
        (optimizer,) = create_method("fedlora", server_optimizer={"type": given, **more}).wrappers
        assert (optimizer.type, optimizer.lr) == (kind, lr)
