"""One convolution gives the same outputs, gradients and files as the two of PEFT."""

import copy

import pytest
import torch
from peft.tuners.lora.layer import Conv2d
from torch import nn

from fs_lowrank.models import convolution
from fs_lowrank.models.adapters import add_adapter, load_tensors
from fs_lowrank.models.convolution import ComposedLoRA
from fs_lowrank.models.names import named_tensors
from fs_lowrank.settings import AdapterSpec


class Net(nn.Module):
    """Convolutions of all relevant kinds: strides, unequal sides, valid, with bias, 1 × 1."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 10, 3, padding=1)
        self.b = nn.Conv2d(10, 6, (5, 3), stride=2)
        self.c = nn.Conv2d(6, 8, 1, stride=(1, 2), bias=False)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.c(torch.relu(self.b(torch.relu(self.a(x))))).mean((2, 3)))


def pair(method="lora", monkeypatch=None, **spec):
    """The same network with our convolutions and with those of PEFT, and an adapter that is not zero."""
    nets = []
    for ours in (True, False):
        torch.manual_seed(0)
        net = Net()
        with pytest.MonkeyPatch.context() as patch:
            if not ours:
                patch.setattr(convolution, "compose", lambda model: None)
            nets.append(
                add_adapter(
                    net, AdapterSpec(method=method, r=3, lora_alpha=5, target_modules=("a", "b", "c"), **spec), 0
                )
            )
    drawn = {n: torch.randn(t.shape) / 3 for n, t in named_tensors(nets[0], ("adapter",)).items()}
    for net in nets:
        load_tensors(net, drawn)
    return nets


@pytest.fixture(params=[True, False], ids=["composed", "thin"])
def always(request, monkeypatch):
    """Let the cost estimate always choose the same form."""
    monkeypatch.setattr(ComposedLoRA, "_pays", lambda self, x, rank: request.param)
    return request.param


@pytest.mark.parametrize("method", ["lora", "loha", "lokr"])
def test_the_same_function_and_gradients(always, method):
    ours, peft = pair(method)
    assert {type(m).__name__ for m in ours.modules() if hasattr(m, "base_layer")} <= {
        "ComposedLoRA",
        "ComposedLoHa",
        "ComposedLoKr",
    }
    x = torch.randn(4, 3, 13, 11)
    for net in (ours, peft):
        net.train()
        net(x).pow(2).sum().backward()
    torch.testing.assert_close(ours(x), peft(x), atol=1e-5, rtol=1e-5)
    ours, peft = dict(ours.named_parameters()), dict(peft.named_parameters())
    assert ours.keys() == peft.keys()
    for name, parameter in ours.items():
        assert (parameter.grad is None) == (peft[name].grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, peft[name].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["lora", "loha", "lokr"])
def test_an_adapter_pads_with_zeros_whatever_its_layer_does(always, method):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 10, 3, padding=1, padding_mode="reflect")
    model = add_adapter(nn.Sequential(layer), AdapterSpec(method=method, r=3, lora_alpha=5, target_modules=("0",)), 0)
    load_tensors(model, {n: torch.randn(t.shape) / 3 for n, t in named_tensors(model, ("adapter",)).items()})
    x = torch.randn(4, 3, 13, 11)
    kernel = model.base_model.model[0].get_delta_weight("default")
    around = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
    wanted = nn.functional.conv2d(around, layer.weight, layer.bias) + nn.functional.conv2d(x, kernel, padding=1)
    torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=1e-5)


def test_switched_off_and_merged():
    ours, peft = pair()
    x = torch.randn(2, 3, 13, 11)
    with ours.disable_adapter(), peft.disable_adapter():
        torch.testing.assert_close(ours(x), peft(x))
    wanted = peft(x)
    torch.testing.assert_close(copy.deepcopy(ours).merge_and_unload()(x), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["dropout", "hook", "half"])
def test_cases_left_to_peft(monkeypatch, case):
    # Dropout, hooks or biases inside the pair must not be bypassed, nor must the sum lose precision.
    ours, _ = pair(**({"lora_dropout": 0.5} if case == "dropout" else {}))
    x, seen = torch.randn(2, 3, 13, 11), []
    monkeypatch.setattr(ComposedLoRA, "_pays", lambda self, x, rank: True)
    forward = Conv2d.forward
    monkeypatch.setattr(Conv2d, "forward", lambda self, x: seen.append(self) or forward(self, x))
    if case == "hook":
        for module in ours.modules():
            if hasattr(module, "lora_A"):
                module.lora_A["default"].register_forward_hook(lambda m, a, out: out)
    if case == "half":
        for module in ours.modules():
            if hasattr(module, "lora_A"):
                module.base_layer.to(torch.bfloat16)
        ours.base_model.model.last.to(torch.bfloat16)
        x = x.to(torch.bfloat16)
    ours.train()(x)
    assert len(seen) == 3
    if case == "dropout":
        ours.eval()(x)
        assert len(seen) == 3, "without dropout it is one convolution again"


def test_the_cheaper_form_is_chosen():
    def layer(channels, rank):
        spec = AdapterSpec(r=rank, target_modules=("0",))
        return add_adapter(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False)), spec, 0
        ).base_model.model[0]

    # For 32 images, one convolution is cheaper with 64 channels of 32 × 32 at rank 128, but not with 512 of 4 × 4.
    assert layer(64, 128)._pays(torch.empty(32, 64, 32, 32, device="meta"), 128)
    assert not layer(512, 128)._pays(torch.empty(32, 512, 4, 4, device="meta"), 128)
    assert not layer(256, 16)._pays(torch.empty(32, 256, 8, 8, device="meta"), 16)
