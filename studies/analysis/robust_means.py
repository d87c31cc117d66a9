"""Robust means against malicious clients: a table of test accuracies by rule and attack.

Of 10 clients, 2 are malicious. All train a network of two hidden layers on a mixture of Gaussians (10 classes in 20
dimensions, split by a Dirichlet distribution), with LoRA pairs on the hidden layers. The malicious clients send
something else than the result of their training:

- ``label flip``: they train on wrong labels (9 − y);
- ``scaled``: 50 times the change of a client with wrong labels, to replace the model;
- ``sign flip``: minus 3 times the change after honest training;
- ``opposite mean``: minus the mean change of all honest clients, which they know;
- ``a little``: the mean of the honest clients minus 1.5 standard deviations, value by value (Baruch et al., "A Little
  Is Enough", NeurIPS 2019);
- ``noise``: normal noise of standard deviation 1; ``zeros``: only zeros; ``huge``: only values of 10³⁰.

A rule survives an attack if its accuracy is at most 5 points below that of the weighted mean without an attack. The
rules are given the number of malicious clients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.script import script
from fs_lowrank.methods import Client, RobustMean, Update, create_method
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.kinds import unwrapped
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training.local import set_trainable

CLIENTS, MALICIOUS, CLASSES, WIDTH = 10, 2, 10, 20
RULES = ("none", "median", "trimmed_mean", "norm_bound", "krum", "multi_krum")
#: learning rate of the clients
LR = 0.3
#: points of accuracy that a rule may lose
MARGIN = 0.05

Tensors = Mapping[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.classifier = nn.Linear(WIDTH, 32), nn.Linear(32, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.two(torch.relu(self.one(x)))))


def _from(start: Tensors, change: Tensors, factor: float) -> dict[str, Tensor]:
    return {n: start[n] + factor * (t - start[n]) for n, t in change.items()}


def _little(own: Tensors, start: Tensors, honest: Sequence[Tensors], draw: torch.Generator) -> dict[str, Tensor]:
    stacks = {n: torch.stack([h[n] for h in honest]) for n in own}
    return {n: t.mean(0) - 1.5 * t.std(0) for n, t in stacks.items()}


def _opposite(own: Tensors, start: Tensors, honest: Sequence[Tensors], draw: torch.Generator) -> dict[str, Tensor]:
    return _from(start, {n: torch.stack([h[n] for h in honest]).mean(0) for n in own}, -1.0)


#: what a malicious client sends, from the result of its training, its start, and what the honest clients send
ATTACKS: dict[str, Callable[[Tensors, Tensors, Sequence[Tensors], torch.Generator], Tensors]] = {
    "no attack": lambda own, start, honest, draw: own,
    "label flip": lambda own, start, honest, draw: own,
    "scaled": lambda own, start, honest, draw: _from(start, own, 50.0),
    "sign flip": lambda own, start, honest, draw: _from(start, own, -3.0),
    "opposite mean": _opposite,
    "a little": _little,
    "noise": lambda own, start, honest, draw: {n: t + torch.randn(t.shape, generator=draw) for n, t in own.items()},
    "zeros": lambda own, start, honest, draw: {n: torch.zeros_like(t) for n, t in own.items()},
    "huge": lambda own, start, honest, draw: {n: torch.full_like(t, 1e30) for n, t in own.items()},
}
#: attacks whose clients train on wrong labels
FLIPPED = ("label flip", "scaled")


def data(seed: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """The training data of each client, ``(samples, 20)`` with labels, and the test data."""
    draw = torch.Generator().manual_seed(seed)
    centres = 1.1 * torch.randn(CLASSES, WIDTH, generator=draw)

    def sample(labels: Tensor) -> tuple[Tensor, Tensor]:
        return centres[labels] + torch.randn(len(labels), WIDTH, generator=draw), labels

    torch.manual_seed(seed)
    shares = torch.distributions.Dirichlet(torch.ones(CLASSES)).sample((CLIENTS,))
    parts = [sample(torch.multinomial(share, 60 + 10 * k, True, generator=draw)) for k, share in enumerate(shares)]
    return parts, sample(torch.randint(0, CLASSES, (1000,), generator=draw))


def run(method_name: str, rule: str, attack: str, seed: int, rounds: int, steps: int) -> tuple[float, float]:
    """The test accuracy after the last round, and the mean number of malicious clients that a round left out."""
    robust = None if rule == "none" else RobustMean(rule, MALICIOUS if rule != "norm_bound" else 1)
    adapter = AdapterSpec(r=4, lora_alpha=8, target_modules=("one", "two"))
    method = create_method(
        method_name, adapter=adapter, rounds=rounds, seed=seed, from_scratch=True, uniform=True, robust=robust
    )
    parts, (test_x, test_y) = data(seed)
    torch.manual_seed(seed)
    model = method.adapt(Net())
    net = unwrapped(model)
    state, draw, left_out = method.initial_state(model), torch.Generator().manual_seed(seed), 0
    bad = range(1, CLIENTS + 1, CLIENTS // MALICIOUS)
    for round in range(1, rounds + 1):
        start = method.view(state)
        sent: dict[int, Tensors] = {}
        for client, (x, y) in enumerate(parts, start=1):
            load_tensors(model, start)
            labels = CLASSES - 1 - y if client in bad and attack in FLIPPED else y
            for phase in method.phases(round, client):
                optimizer = torch.optim.SGD(set_trainable(model, phase.train), lr=LR)
                for _ in range(steps):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(x), labels).backward()
                    optimizer.step()
            own = method.upload(model, round, Client(client, len(y)))
            sent[client] = {n: t.detach().clone() for n, t in own.items()}
        honest = [t for client, t in sent.items() if client not in bad]
        sent |= {client: ATTACKS[attack](sent[client], start, honest, draw) for client in bad}
        updates = [Update(client, len(parts[client - 1][1]), sent[client]) for client in sorted(sent)]
        with torch.no_grad():
            state, message = method.aggregate(updates, state, round)
            if not all(bool(torch.isfinite(t).all()) for t in message.values()):
                return 0.0, 0.0  # the engine would stop here
            load_tensors(model, start)
            method.apply(model, message, round)
        left_out += sum(client in bad for client in method.notes)
    with torch.no_grad():
        logits = net(test_x)
    right = (logits.argmax(1) == test_y) & torch.isfinite(logits).all(1)
    return float(right.float().mean()), left_out / rounds


def study(methods: list[str], seeds: int, rounds: int, steps: int) -> dict:
    """The result of the command, as plain data: by method, rule and attack."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _study(methods, seeds, rounds, steps)
    finally:
        torch.set_num_threads(threads)


def _study(methods: list[str], seeds: int, rounds: int, steps: int) -> dict:
    table: dict[str, dict[str, dict[str, dict]]] = {}
    for method in methods:
        for rule in RULES:
            for attack in ATTACKS:
                runs = [run(method, rule, attack, seed, rounds, steps) for seed in range(seeds)]
                accuracies = [accuracy for accuracy, _ in runs]
                cell = {
                    "test_acc": statistics.fmean(accuracies),
                    "by_seed": accuracies,
                    "malicious_noted": statistics.fmean(noted for _, noted in runs),
                }
                table.setdefault(method, {}).setdefault(rule, {})[attack] = cell
        base = table[method]["none"]["no attack"]["test_acc"]
        for rule in RULES:
            for cell in table[method][rule].values():
                cell["survives"] = cell["test_acc"] >= base - MARGIN
    return {
        "clients": CLIENTS,
        "malicious": MALICIOUS,
        "rounds": rounds,
        "steps": steps,
        "seeds": seeds,
        "table": table,
    }


def readme(result: dict) -> str:
    """The tables as Markdown."""
    lines = [
        "# Robust means against malicious clients",
        "",
        f"Made by `{result['command']}` ({result['seconds']:.0f} s). {result['malicious']} of {result['clients']} "
        f"clients are malicious; test accuracy in per cent after {result['rounds']} rounds, mean of {result['seeds']} "
        f"seeds. Bold: within {100 * MARGIN:g} points of the weighted mean without an attack. The docstring of "
        "`studies/analysis/robust_means.py` says what each kind of malicious client sends.",
    ]
    for method, rules in result["table"].items():
        lines += [
            "",
            f"## `{method}`",
            "",
            f"| `lowrank.robust` | {' | '.join(ATTACKS)} |",
            "| --- " * (len(ATTACKS) + 1) + "|",
        ]
        for rule, cells in rules.items():
            shown = [f"{100 * c['test_acc']:.1f}" for c in cells.values()]
            bold = [f"**{text}**" if c["survives"] else text for text, c in zip(shown, cells.values())]
            lines.append(f"| `{rule}` | {' | '.join(bold)} |")
    return "\n".join(lines) + "\n"


OPTIONS: dict[str, dict[str, Any]] = {
    "--methods": dict(nargs="+", default=["fedlora", "rolora"], help="averaging methods"),
    "--seeds": dict(type=int, default=2, help="number of seeds, 0 to seeds - 1"),
    "--rounds": dict(type=int, default=15),
    "--steps": dict(type=int, default=5, help="local steps of gradient descent on all data of a client"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, readme=readme, out="results/robust_means")


if __name__ == "__main__":
    raise SystemExit(main())
