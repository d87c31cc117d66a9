"""Convolutions with adapters: a step of ResNet-18 relative to the full-rank step and to that of PEFT, and many clients.

The memory of the clients is measured on Fashion-MNIST, resized to 3 × 32 × 32: fs-lowrank fetch fashion_mnist
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
from torch import nn

from fs_lowrank.models import adapters, convolution
from fs_lowrank.models.vision import VisionOptions, build_vision
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training.local import set_trainable
from fs_lowrank.training.optimizer import make_optimizer

from . import memory_row, race, row, threads
from .clients import in_fresh_process

#: adapters to measure: kind and rank; the ranks of LoRA are the paper's
KINDS = (("lora", 128), ("lora", 64), ("lora", 16), ("loha", 32), ("lokr", 32))
SLOWEST = 0.6
SETTINGS = {
    "federate": {"method": "fedlora", "client_num": 100, "total_round_num": 1},
    "data": {
        "type": "fashion_mnist",
        "splitter": "iid",
        "splits": [1.0, 0.0, 0.0],
        "subsample": 0.01,
        "transform": [
            ["Pad", {"padding": 2}],
            ["Grayscale", {"num_output_channels": 3}],
            ["ToTensor"],
            ["Normalize", {"mean": [0.286], "std": [0.353]}],
        ],
    },
    "model": {"type": "resnet18"},
    "llm": {"adapter": {"args": [{"r": 128, "alpha": 128}]}},
    "dataloader": {"batch_size": 2},
    "train": {"local_update_steps": 1, "optimizer": {"type": "SGD", "lr": 0.05}},
    "eval": {"split": [], "freq": 0},
}
#: bytes that a run may use in addition to the base model and the clients' adapters
ALLOWED = 2e9


def stepper(
    options: VisionOptions, spec: AdapterSpec | None, composed: bool, batch: dict[str, torch.Tensor]
) -> Callable[[], float]:
    """A function that takes one training step and returns its loss.

    Args:
        spec: the adapter; None trains all weights. composed: one convolution per layer, or PEFT's form.
    """
    torch.manual_seed(0)
    model: nn.Module = build_vision(options)
    with ExitStack() as stack:
        if not composed:
            stack.enter_context(patch.object(convolution, "compose", lambda model: None))
        model = model if spec is None else adapters.add_adapter(model, spec, seed=0)
    model.train()
    trained = set_trainable(model, ("base", "head") if spec is None else ("adapter", "rest", "head"))
    optimizer = make_optimizer(trained, "SGD", 0.01, {"momentum": 0.9})

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def steps(options: VisionOptions, kinds=KINDS, size: int = 32, repeats: int = 5) -> dict:
    """Seconds per step of each form, and the difference between their losses."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        "pixel_values": torch.randn(size, *options.image_shape, generator=generator),
        "labels": torch.randint(options.num_classes, (size,), generator=generator),
    }
    forms = {"full": stepper(options, None, True, batch)}
    for kind, rank in kinds:
        spec = AdapterSpec(method=kind, r=rank, lora_alpha=rank)
        for name, composed in (("ours", True), ("peft", False)):
            forms[f"{kind} {rank} {name}"] = stepper(options, spec, composed, batch)
    losses: dict[str, list[float]] = {name: [take()] for name, take in forms.items()}  # the first step warms up

    def step(name: str) -> None:
        losses[name].append(forms[name]())

    seconds = race({name: partial(step, name) for name in forms}, repeats)
    apart = {
        f"{k} {r}": max(abs(a - b) / abs(b) for a, b in zip(losses[f"{k} {r} ours"], losses[f"{k} {r} peft"]))
        for k, r in kinds
    }
    return {"seconds": seconds, "apart": apart, "batch_size": size}


def run() -> dict:
    """The steps on one thread, and 100 clients of rank 128 in a process of their own."""
    with threads(1):
        found = steps(VisionOptions("resnet18", 10, (3, 32, 32)))
    seconds, rows = found["seconds"], []
    for kind, rank in KINDS:
        ours, peft = seconds[f"{kind} {rank} ours"], seconds[f"{kind} {rank} peft"]
        rows.append(
            row(
                f"ResNet-18, {kind}, rank {rank}, batch {found['batch_size']}",
                "speed of a step ÷ the full-rank step's",
                seconds["full"] / ours,
                f"{ours:.2f} s, full rank {seconds['full']:.2f} s, plain PEFT {peft:.2f} s "
                f"({seconds['full'] / peft:.2f})",
                found["apart"][f"{kind} {rank}"],
                least=SLOWEST,
            )
        )
    memory = in_fresh_process(SETTINGS, True)
    rows.append(memory_row(f"{memory['clients']} clients, ResNet-18, rank 128, a round of all", memory, ALLOWED))
    return {"threads": 1, "rows": rows, "results": {"steps": found, "memory": memory}}
