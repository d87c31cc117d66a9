"""Small nets and their data; ``one_round`` plays clients and server without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fs_lowrank.methods import Client, Update, Workbench, create_method
from fs_lowrank.rounds.admission import check_update


class Small(nn.Module):
    """6-12-9-4, no biases: small enough for brute force."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.one, self.two = nn.Linear(6, 12, bias=bias), nn.Linear(12, 9, bias=bias)
        self.classifier = nn.Linear(9, 4, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None):
        logits = self.classifier(self.features(pixel_values))
        return SimpleNamespace(
            logits=logits, loss=None if labels is None else nn.functional.cross_entropy(logits, labels)
        )


class Pictures(Small):
    """Convolutions 3 and 5, then 20-7-4, on 1 × 10 × 10."""

    def __init__(self, bias: bool = False, norm: bool = False):
        nn.Module.__init__(self)
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3, bias=bias), nn.Conv2d(3, 5, 2, bias=bias)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.fc1 = nn.Linear(20, 7, bias=bias)
        self.classifier = nn.Linear(7, 4, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 1, stride=2)
        return torch.relu(self.fc1(x.flatten(1)))


class Bench:
    small, pictures = Small, Pictures

    @staticmethod
    def net(kind: type = Small, seed: int = 0, scale: float = 1.0, **options) -> nn.Module:
        torch.manual_seed(seed)
        model = kind(**options)
        for parameter in model.parameters():
            parameter.data *= scale
        return model.eval()

    @staticmethod
    def data(count: int = 24, seed: int = 0, kind: type = Small, classes: int = 4) -> list[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        shape = (6,) if kind is Small else (1, 10, 10)
        x = torch.randn(count, *shape, generator=draw)
        y = torch.randint(0, classes, (count,), generator=draw)
        return [{"pixel_values": x[i : i + 7], "labels": y[i : i + 7]} for i in range(0, count, 7)]

    @classmethod
    def one_round(
        cls,
        name: str,
        models: list[nn.Module],
        sizes=None,
        kind: type = Small,
        data=None,
        round: int = 1,
        validation=None,
        options=None,
        net=None,
        **params,
    ):
        """The message and other results of a round in which local training ended at ``models``.

        Args:
            options: of ``create_method``. net: of the net ``kind``.
        """
        sizes = sizes or [20 + 3 * k for k in range(len(models))]
        data = data or [cls.data(n, seed=k, kind=kind) for k, n in enumerate(sizes)]
        method = create_method(name, seed=5, **(options or {}), **params)
        model = method.adapt(cls.net(kind, **(net or {})))
        state = method.initial_state(model)
        validation = validation or cls.data(30, seed=99, kind=kind)
        method.workbench = Workbench(model, lambda: iter(validation), 7)
        updates = []
        for k, trained in enumerate(models, start=1):
            trained = method.adapt(trained)
            client = Client(k, sizes[k - 1], batches=lambda k=k: iter(data[k - 1]))
            sent = {n: t.detach() for n, t in method.upload(trained, round, client).items()}
            updates.append(check_update(Update(k, sizes[k - 1], sent), method.expected(state, round, k)))
        with torch.no_grad():
            new, message = method.aggregate(updates, state, round)
        return SimpleNamespace(
            method=method,
            message=message,
            updates=updates,
            state=new,
            model=model,
            data=data,
            weights=method.weights(updates),
        )

    @staticmethod
    def tensors(model: nn.Module) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    @staticmethod
    def permuted(model: nn.Module, seed: int = 3) -> nn.Module:
        """A copy with the hidden neurons in another order, which computes the same function."""
        import copy

        other, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        layers = [m for m in other.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        for layer, after in zip(layers, layers[1:]):
            order = torch.randperm(len(layer.weight), generator=draw)
            layer.weight.data = layer.weight.data[order]
            grouped = after.weight.data.reshape(len(after.weight), len(order), -1)
            after.weight.data = grouped[:, order].reshape(after.weight.shape)
        return other


@pytest.fixture
def bench():
    return Bench
