"""A network of layers that are not square, one of them a convolution, and clients that follow it by messages alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fs_lowrank.methods import Client, Method, RefusedUpdate, Update, create_method, get_method_class
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.rounds.copies import load_told
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import Round
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training.local import set_trainable
from tests.servers import ledger_of

LAYERS = ("up", "conv", "down")
ALPHA = 6


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=tolerance)


def best(matrix, rank):
    """Its best approximation of this rank."""
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def equal(a, b):
    """Named tensors are equal to the bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Net(nn.Module):
    """12 × 7, then a convolution of 5 × (3·1·2), then 6 × 15, then a classifier: nothing is square."""

    def __init__(self):
        super().__init__()
        self.up, self.conv, self.down = nn.Linear(7, 12), nn.Conv2d(3, 5, (1, 2)), nn.Linear(15, 6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        x = torch.tanh(self.up(x)).view(-1, 3, 1, 4)
        x = torch.tanh(self.conv(x)).flatten(1)
        logits = self.classifier(torch.tanh(self.down(x)))
        return logits if labels is None else SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


class Toy:
    """Helpers of the tests, written without the functions that the methods use."""

    layers = LAYERS
    alpha = ALPHA

    @staticmethod
    def net() -> Net:
        torch.manual_seed(11)
        return Net()

    @staticmethod
    def inputs() -> Tensor:
        return torch.randn(16, 7, generator=torch.Generator().manual_seed(5))

    @staticmethod
    def method(name: str, r: int = 2, *, rsLoRA: bool = False, **options) -> Method:
        adapter = AdapterSpec(r=r, lora_alpha=ALPHA, target_modules=LAYERS, use_rslora=rsLoRA)
        fields = get_method_class(name).Params.__dataclass_fields__
        few = {key: value for key, value in (("server_steps", 20), ("heads", 2)) if key in fields}
        return create_method(name, **{"adapter": adapter, "rounds": 8, "seed": 4, **few, **options})

    @classmethod
    def outputs(cls, model: nn.Module) -> Tensor:
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        with torch.no_grad():
            return plain(cls.inputs()).double()

    @classmethod
    def dense_outputs(cls, changes: Mapping[str, np.ndarray], head: Mapping[str, np.ndarray] | None = None) -> Tensor:
        """Outputs in float64 of the plain net with ``W + changes[layer]``, and another head if one is given."""
        net = cls.net().double()
        with torch.no_grad():
            for layer, change in changes.items():
                weight = getattr(net, layer).weight
                weight += torch.from_numpy(change).reshape(weight.shape)
            for name, value in (head or {}).items():
                getattr(net.classifier, name).copy_(torch.from_numpy(value))
            return net(cls.inputs().double())

    @staticmethod
    def pair(tensors: Mapping[str, Tensor], layer: str) -> tuple[np.ndarray, np.ndarray]:
        """``(B, A)`` of a layer as float64 matrices, found by its name."""

        def half(kind):
            (name,) = (n for n in tensors if f".{layer}.lora_{kind}." in n)
            return tensors[name].detach().double().numpy().reshape(tensors[name].shape[0], -1)

        return half("B"), half("A")

    @classmethod
    def change(cls, tensors: Mapping[str, Tensor], layer: str, *, rsLoRA: bool = False) -> np.ndarray:
        """``s · B · A`` of a layer in float64, with ``s`` by the rank the pair has."""
        up, down = cls.pair(tensors, layer)
        return ALPHA / (down.shape[0] ** 0.5 if rsLoRA else down.shape[0]) * up @ down

    @classmethod
    def mean_product(cls, updates: Iterable[Update], layer: str, *, rsLoRA: bool = False) -> np.ndarray:
        """``Σ p_k s_k B_k A_k`` of a layer."""
        p = cls.weights(u.num_samples for u in updates)
        return sum(w * cls.change(u.tensors, layer, rsLoRA=rsLoRA) for w, u in zip(p, updates))

    @classmethod
    def mean_pair(cls, updates: Iterable[Update], layer: str) -> tuple[np.ndarray, np.ndarray]:
        """``Σ p_k B_k`` and ``Σ p_k A_k`` of a layer."""
        p, halves = cls.weights(u.num_samples for u in updates), [cls.pair(u.tensors, layer) for u in updates]
        up, down = (sum(w * half[i] for w, half in zip(p, halves)) for i in (0, 1))
        return up, down

    @staticmethod
    def head(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """``weight`` and ``bias`` of the classifier that trains."""
        return {
            n.rsplit(".", 1)[1]: t.detach().double().numpy()
            for n, t in tensors.items()
            if "classifier" in n and "original_module" not in n
        }

    @staticmethod
    def weights(sizes: Iterable[int]) -> np.ndarray:
        """``p_k``."""
        sizes = np.array(list(sizes), dtype=np.float64)
        return sizes / sizes.sum()


class Federation:
    """Clients with a model each, who learn about the others only through messages.

    Local training is replaced by a random change (``jump``) that is drawn from client and round. A client that missed
    rounds can therefore be compared with one that did not, and no two clients agree by chance.
    """

    def __init__(self, method: Method, sizes: tuple[int, ...], min_clients: int = 1, net=Toy.net, batches=None):
        self.method, self.sizes = method, sizes
        self.copies = {k: method.adapt(net()) for k in range(1, len(sizes) + 1)}
        self.model = method.adapt(net())
        self.batches = batches or self.batches
        self.ledger = ledger_of(method, method.initial_state(self.model), len(sizes), min_clients=min_clients)
        for client, copy in self.copies.items():
            load_tensors(copy, method.view(self.ledger.state, client))
        self.received: list[Update] = []
        self.current: Round | None = None

    def at(self, round: int) -> Round:
        """The ``Round`` of all clients with this number; it begins when this is first called."""
        if self.current is None or self.current.number != round:
            self.current = Round(round, self.ledger)
        return self.current

    def downlink(self, client: int, round: int) -> Mapping[str, Tensor]:
        """Send ``client`` what it lacks at the start of ``round``; returns the tensors."""
        order = self.at(round).ask(client)
        self.at(round).delivered(order)
        return order.parcel.tensors

    def catch_up(self, client: int, round: int) -> Mapping[str, Tensor]:
        message = self.downlink(client, round)
        if message:
            self.method.apply(self.copies[client], message, round - 1)
        return message

    def receive(self, update: Update, round: int) -> None:
        """Hand in an update, and ask the client for it first if necessary; raises if it is refused."""
        one, client = self.at(round), update.client
        if client in one.waiting:
            one.ask(client)
        if not one.take(client, Parcel(update.tensors, round=round, samples=update.num_samples, loss=0.0)):
            raise RefusedUpdate(next((f["reason"] for f in one.failed if f["client"] == client), "nobody waits for it"))

    def finish(self, round: int) -> dict[str, Tensor]:
        """End the round with the updates handed in so far; returns the message."""
        one, self.current = self.at(round), None
        for client in one.waiting:
            one.fail(client, "absent", "it did not take part")
        return one.finish().message

    def jump(self, client: int, round: int, size: float = 0.3) -> None:
        """In place of local training: changes every tensor that trains, and nothing else."""
        generator = torch.Generator().manual_seed(1000 * client + round)
        for phase in self.method.phases(round, client):
            for parameter in set_trainable(self.copies[client], phase.train):
                with torch.no_grad():
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    def update(
        self, client: int, round: int, exchange: str = "train", told: Mapping[str, Tensor] | None = None
    ) -> Update:
        size = self.sizes[client - 1]
        own = Client(client, size, lambda: self.batches(client), exchange, told or {})
        sent = self.method.upload(self.copies[client], round, own)
        return Update(client, size, {n: t.detach().clone() for n, t in sent.items()})

    def play(self, round: int, clients: Iterable[int] | None = None) -> list[dict[int, Update]]:
        """A round up to the server's step; the updates of each exchange by client."""
        exchanges, sent = self.at(round).exchanges, list[dict[int, Update]]()
        for exchange in exchanges:
            sent.append({})
            for client in clients or self.copies:
                told = self.catch_up(client, round) if exchange == exchanges[0] else self.downlink(client, round)
                if exchange != exchanges[0]:
                    load_told(self.copies[client], told)
                if exchange == "train":
                    self.jump(client, round)
                sent[-1][client] = self.update(client, round, exchange, told)
            for update in sent[-1].values():
                self.receive(update, round)
            if exchange != exchanges[-1]:
                for client in self.at(round).waiting:
                    self.at(round).fail(client, "absent", "it did not take part")
                self.at(round).go_on()
        return sent

    def round(self, round: int, clients: Iterable[int] | None = None) -> dict[str, Tensor]:
        """One round; ``received`` holds the updates of its last exchange afterwards."""
        self.received = list(self.play(round, clients)[-1].values())
        message = self.finish(round)
        self.method.apply(self.model, message, round)
        return message

    def batches(self, client: int) -> Iterator[dict[str, Tensor]]:
        """The client's data, in batches of two."""
        draw = torch.Generator().manual_seed(client)
        for first in range(0, self.sizes[client - 1], 2):
            size = min(2, self.sizes[client - 1] - first)
            yield {"x": torch.randn(size, 7, generator=draw), "labels": torch.randint(3, (size,), generator=draw)}

    def everything(self, client: int | None = None) -> dict[str, Tensor]:
        """All parameters of a client's copy, or of the global model."""
        model = self.model if client is None else self.copies[client]
        return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.fixture
def toy():
    return Toy


@pytest.fixture
def federation():
    return Federation
