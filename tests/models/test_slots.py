"""Modules that compute slot by slot, against each client's own module."""

import copy

import pytest
import torch
from torch import nn

from fs_lowrank.models.shortcuts.slots import Rows, Slots, _products
from fs_lowrank.models.shortcuts.trials import Unfit

CPU = torch.device("cpu")


class Net(nn.Module):
    """Frozen, a layer norm and a head, whose tensors differ between clients."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x):
        return self.classifier(self.norm(torch.tanh(self.inner(x))))


@pytest.fixture
def clients():
    torch.manual_seed(0)
    base = Net().double()
    nets = [copy.deepcopy(base) for _ in range(3)]
    for net in nets:
        for name, parameter in net.named_parameters():
            if "inner" not in name:
                nn.init.normal_(parameter)
    return nets


def held(net):
    return {n: p.detach().clone() for n, p in net.named_parameters() if "inner" not in n}


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 4, 2), (3, 0, 2), (0, 2, 0), (0, 2, 2)])
@pytest.mark.parametrize("sides", [(), (4,), (4, 2)])
def test_each_row_has_its_clients_tensors(clients, counts, sides):
    model = copy.deepcopy(clients[0])
    slots = Slots(model, [held(net) for net in clients], [{}] * 3, {"head"})
    slots.trainable({"head"})
    x = torch.randn(sum(counts), *sides, 5, dtype=torch.float64)
    with slots.installed(), slots.rows(counts):
        found = model(x)
    parts = zip(clients, x.split(counts), strict=True)
    torch.testing.assert_close(found, torch.cat([net(part) for net, part in parts if len(part)]))
    found.square().sum().backward()
    for i, (net, part) in enumerate(zip(clients, x.split(counts))):
        net(part).square().sum().backward()
        for name, stacked in slots.stacked.items():
            wanted = net.get_parameter(name).grad if "classifier" in name else None
            if wanted is None:
                assert stacked.grad is None
            else:
                torch.testing.assert_close(stacked.grad[i], wanted)
    torch.testing.assert_close(model(x), clients[0](x)), "outside it is the model's own"


def test_tensors_that_are_equal_stay_in_the_model(clients):
    same = [held(clients[0]) for _ in range(3)]
    assert Slots(clients[0], same, [{}] * 3, ()).stacked == {}
    assert sorted(Slots(clients[0], same, [{}] * 3, {"head"}).stacked) == ["classifier.bias", "classifier.weight"]


def test_slots_are_filled_up_where_products_are_batched():
    """What a GPU computes for unequal numbers of rows."""
    torch.manual_seed(0)
    weight, bias = torch.randn(3, 4, 5), torch.randn(3, 4)
    rows, x = Rows((1, 4, 2), CPU), torch.randn(7, 2, 5)
    at, places = rows.filled
    assert at.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 5, 5], "each with its own"
    torch.testing.assert_close(_products(x[at], weight, bias)[places], rows.linear(x, weight, bias))
    torch.testing.assert_close(_products(x[at], weight, None)[places], rows.linear(x, weight, None))


def test_an_input_without_the_batchs_rows(clients):
    slots = Slots(clients[0], [held(net) for net in clients], [{}] * 3, {"head"})
    with slots.installed(), slots.rows((1, 1, 1)), pytest.raises(Unfit, match="norm is computed for 2 rows of a"):
        clients[0](torch.randn(2, 5, dtype=torch.float64))


def test_other_modules_have_no_slots():
    net = nn.Sequential(nn.Conv1d(2, 2, 1))
    with pytest.raises(Unfit, match="0.weight is a tensor of Conv1d"):
        Slots(net, [{"0.weight": torch.randn(2, 2, 1)} for _ in range(2)], [{}] * 2, ())
