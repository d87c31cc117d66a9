"""Fisher estimates and Gram matrices compared with brute-force autograd."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fs_lowrank.errors import UserError
from fs_lowrank.models import curvature
from fs_lowrank.models.curvature import (
    diagonal_fisher,
    full_fisher,
    input_grams,
    kronecker_fisher,
    matrix_layers,
)
from fs_lowrank.models.machine import autocast


class Net(nn.Module):
    """A convolution with padding and stride, then two linear layers; optionally with biases and a norm."""

    def __init__(self, bias=False, norm=False):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=bias)
        self.norm = nn.GroupNorm(1, 3) if norm else nn.Identity()
        self.fc, self.last = nn.Linear(12, 5, bias=bias), nn.Linear(5, 3, bias=bias)

    def forward(self, pixel_values, labels=None):
        x = torch.tanh(self.norm(self.conv(pixel_values))).flatten(1)
        return SimpleNamespace(logits=self.last(torch.tanh(self.fc(x))))


class Sequences(nn.Module):
    """A linear layer over positions, as in a transformer."""

    def __init__(self):
        super().__init__()
        self.over, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, input_ids, labels=None):
        return SimpleNamespace(logits=self.last(torch.tanh(self.over(input_ids)).mean(1)))


class Words(nn.Module):
    """An embedding with repeated words and padding, positions that are looked up once for all samples, and a norm."""

    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(6, 4, padding_idx=0), nn.Embedding(5, 4)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, input_ids, labels=None):
        x = self.word(input_ids) + self.place(torch.arange(input_ids.shape[1])[None])
        return SimpleNamespace(logits=self.last(torch.tanh(self.norm(x)).mean(1)))


class Normed(nn.Module):
    """A batch-norm that uses its running statistics."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 3)
        self.train()(torch.randn(20, 2, 4, 4))

    def forward(self, pixel_values, labels=None):
        return SimpleNamespace(logits=self.last(torch.tanh(self.norm(self.conv(pixel_values))).flatten(1)))


class Own(nn.Module):
    """A parameter outside any layer, which requires one sample at a time."""

    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(2)), nn.Linear(32, 3)

    def forward(self, pixel_values, labels=None):
        return SimpleNamespace(logits=self.last((pixel_values * self.scale[:, None, None]).flatten(1)))


class Odd(nn.Module):
    """Layers whose inputs and outputs are not what they look like, as ``what`` says."""

    def __init__(self, what="", dropout=0.0):
        super().__init__()
        self.what = what
        self.word, self.first, self.second = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.last = nn.ReLU(inplace=what == "in place"), nn.Linear(4, 3)
        self.place, self.drop = nn.Embedding(7, 4), nn.Dropout(dropout)
        if what == "tied":
            self.second.weight = self.first.weight

    def forward(self, input_ids, labels=None):
        x = self.drop(self.word(input_ids) + self.place(torch.arange(input_ids.shape[1])[None]))
        x = self.act(self.second(self.act(self.first(x))))
        return SimpleNamespace(logits=self.last(self.act(self.second(x)) if self.what == "twice" else x).mean(1))


def make(kind=Net, **options):
    torch.manual_seed(0)
    model = kind(**options).eval()
    name, shape = ("input_ids", (5, 4)) if kind is Sequences else ("pixel_values", (2, 4, 4))
    x, y = torch.randn(11, *shape), torch.randint(0, 3, (11,))
    if kind in (Words, Odd):
        name, x = "input_ids", torch.randint(0, 6, (11, 5))
    return model, [{name: x[i : i + 4], "labels": y[i : i + 4]} for i in (0, 4, 8)]


def outer(model, batches):
    """The exact Fisher over all parameters in sorted order, in float64, one sample and class at a time."""
    model = model.double()
    own = dict(sorted(model.named_parameters()))
    total, count = 0, 0
    for batch in batches:
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in batch.items() if k != "labels"}
        for i in range(len(batch["labels"])):
            logs = model(**{k: v[i : i + 1] for k, v in inputs.items()}).logits.log_softmax(-1)[0]
            for log in logs:
                flat = torch.cat([g.flatten() for g in torch.autograd.grad(log, own.values(), retain_graph=True)])
                total = total + log.exp().detach() * torch.outer(flat, flat)
            count += 1
    model.float()
    return total / count


CASES = [(Net, {}), (Net, {"bias": True, "norm": True}), (Sequences, {}), (Words, {}), (Normed, {}), (Own, {})]


@pytest.mark.parametrize("kind, options", CASES)
def test_the_exact_diagonal(kind, options):
    model, batches = make(kind, **options)
    names = sorted(dict(model.named_parameters()))
    found = diagonal_fisher(model, batches, names, draws=0)
    flat = torch.cat([found[n].flatten() for n in names])
    torch.testing.assert_close(flat.double(), outer(model, batches).diag(), atol=1e-7, rtol=1e-4)
    assert all(found[n].shape == p.shape and not found[n].isnan().any() for n, p in model.named_parameters())


@pytest.mark.parametrize("what", ["in place", "tied", "twice"])
def test_layers_that_are_used_otherwise_than_they_look(what, caplog):
    model, batches = make(Odd, what=what)
    names = sorted(dict(model.named_parameters()))
    for _ in range(2):
        found = diagonal_fisher(model, batches, names, draws=0)
    flat = torch.cat([found[n].flatten() for n in names])
    torch.testing.assert_close(flat.double(), outer(model, batches).diag(), atol=1e-7, rtol=1e-4)
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("the diagonal Fisher of Odd is computed sample by sample, which takes longer; by layers it")


@pytest.mark.parametrize("draws", [0, 2])
@pytest.mark.parametrize("kind, options", [*CASES, (Odd, {"dropout": 0.5})])
def test_a_look_at_two_samples_first_changes_no_bit(kind, options, draws, monkeypatch, caplog):
    model, batches = make(kind, **options)
    names, state = sorted(dict(model.named_parameters())), torch.random.get_rng_state()
    model.train()
    found = diagonal_fisher(model, batches, names, draws=draws, seed=5)
    assert torch.equal(torch.random.get_rng_state(), state) and model.training and not caplog.records
    monkeypatch.setattr(curvature, "_layers_differ", lambda *given: False)
    plain = diagonal_fisher(model, batches, names, draws=draws, seed=5)
    assert all(torch.equal(found[n], plain[n]) for n in names)


@pytest.mark.more
@pytest.mark.parametrize("kind, options", CASES)
def test_drawn_labels_approximate_it_and_follow_the_seed(kind, options):
    model, batches = make(kind, **options)
    names = sorted(dict(model.named_parameters()))
    exact, near = (diagonal_fisher(model, batches, names, draws=d, seed=3) for d in (0, 100))
    a, b = (torch.cat([t[n].flatten() for n in names]) for t in (exact, near))
    assert (a - b).norm() < 0.25 * a.norm()
    one, same, other = (diagonal_fisher(model, batches, names, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(one[n], same[n]) for n in names) and any(not torch.equal(one[n], other[n]) for n in names)


def test_the_labels_of_the_data_are_not_used():
    model, batches = make()
    flipped = [{**b, "labels": (b["labels"] + 1) % 3} for b in batches]
    names = sorted(dict(model.named_parameters()))
    a, b = (diagonal_fisher(model, data, names, seed=1) for data in (batches, flipped))
    assert all(torch.equal(a[n], b[n]) for n in names)
    layers = matrix_layers(model, names)
    a, b = (kronecker_fisher(model, data, layers, seed=1) for data in (batches, flipped))
    assert all(torch.equal(x, y) for n in layers for x, y in zip(a[n], b[n]))


def test_the_full_fisher():
    model, batches = make(bias=True)
    names = sorted(dict(model.named_parameters()))
    torch.testing.assert_close(full_fisher(model, batches, names), outer(model, batches), atol=1e-7, rtol=1e-4)
    assert curvature.LARGEST_FULL >= 1000
    with pytest.raises(UserError, match="choose kfac or diag"):
        full_fisher(nn.Linear(100, 100), batches, ["weight"])


def by_hand(model, batches):
    """K-FAC's factors of every layer by definition: ``E[a aᵀ]`` and ``E[g gᵀ]``, over positions for a convolution."""
    model = model.double()
    inputs, grads, factors = {}, {}, {}
    for name in ("conv", "fc", "last"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, out, n=name: inputs.update({n: a[0]}) or grads.update({n: out})
        )
    count = sum(len(b["labels"]) for b in batches)
    for batch in batches:
        logs = model(batch["pixel_values"].double()).logits.log_softmax(-1)
        for n, x in inputs.items():
            layer = model.get_submodule(n)
            if n == "conv":
                x = nn.functional.unfold(x, 3, stride=2, padding=1).transpose(1, 2).flatten(0, 1)
            x = torch.cat([x, torch.ones(len(x), 1)], 1) if layer.bias is not None else x
            a, g = factors.get(n, (0, 0))
            locations = len(x) // len(batch["labels"])
            a = a + x.T @ x / count / locations
            for c in range(3):
                scalar = (logs[:, c] * logs[:, c].detach().exp().sqrt()).sum()
                (d,) = torch.autograd.grad(scalar, grads[n], retain_graph=True)
                d = d.flatten(2).transpose(1, 2).flatten(0, 1) if n == "conv" else d
                g = g + d.T @ d / count
            factors[n] = (a, g)
    for module in model.modules():
        module._forward_hooks.clear()
    model.float()
    return factors


@pytest.mark.parametrize("bias", [False, True])
def test_kronecker_factors_are_their_definition(bias):
    model, batches = make(bias=bias)
    layers = matrix_layers(model, dict(model.named_parameters()))
    assert layers == dict.fromkeys(("conv", "fc", "last"), bias)
    wanted, found = by_hand(model, batches), kronecker_fisher(model, batches, layers, draws=0)
    for name in layers:
        # Only the product of the factors is defined.
        torch.testing.assert_close(
            torch.kron(*found[name]).double(), torch.kron(*wanted[name]).detach(), atol=1e-7, rtol=1e-3
        )
        assert found[name][0].dtype == torch.float32 and torch.equal(found[name][0], found[name][0].T)


def test_grams_of_inputs():
    model, batches = make()
    x = torch.cat([b["pixel_values"] for b in batches])
    into = torch.tanh(model.conv(x)).flatten(1)
    found = input_grams(model, batches, ["fc"])
    torch.testing.assert_close(found["fc"], into.T @ into / len(x), atol=1e-5, rtol=1e-5)
    model, batches = make(Sequences)
    x = torch.cat([b["input_ids"] for b in batches]).flatten(0, 1)
    torch.testing.assert_close(input_grams(model, batches, ["over"])["over"], x.T @ x / len(x), atol=1e-5, rtol=1e-5)


def test_autocast_does_not_round_what_is_summed():
    model, batches = make(bias=True)
    names = ["fc.weight", "fc.bias"]

    def found():
        grams, factors = input_grams(model, batches, ["fc"]), kronecker_fisher(model, batches, {"fc": True}, draws=0)
        return [grams["fc"], *factors["fc"], *diagonal_fisher(model, batches, names, draws=0).values()]

    plain = found()
    autocast(model, torch.bfloat16)
    for a, b in zip(plain, found(), strict=True):
        assert b.dtype == torch.float32 and torch.equal(a, b)
    assert vars(model)["autocast"] == torch.bfloat16
    assert model(**{k: v for k, v in batches[0].items() if k != "labels"}).logits.dtype == torch.bfloat16


def test_the_model_is_not_changed():
    model, batches = make()
    model.train()
    model.conv.weight.requires_grad_(False)
    names = ["fc.weight"]
    diagonal_fisher(model, batches, names)
    kronecker_fisher(model, batches, {"fc": False})
    input_grams(model, batches, ["fc"])
    assert model.training and model.fc.training and not model.conv.weight.requires_grad
    assert model.fc.weight.requires_grad and all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_without_curvlinops(monkeypatch):
    monkeypatch.setattr(curvature.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"fs-lowrank\[oneshot\].*--no-deps curvlinops"):
        kronecker_fisher(*make(), {"fc": False})
