"""One client's local training: the method's phases, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..methods import Phase
from ..models.frozen import FrozenPrefix
from ..models.names import tags
from ..seeds import derive
from ..settings import Settings
from .optimizer import make_optimizer


@dataclass(frozen=True)
class LocalResult:
    """What came of a client's training: mean loss a step, optimizer steps, samples processed."""

    loss: float
    steps: int
    samples: int


def batch_indices(
    size: int, batch_size: int, generator: np.random.Generator, shuffle: bool = True, drop_last: bool = False
) -> Iterator[np.ndarray]:
    """One epoch of index batches; a client smaller than a batch always gives its one short batch."""
    order = generator.permutation(size) if shuffle else np.arange(size)
    for start in range(0, size, batch_size):
        batch = order[start : start + batch_size]
        if not (drop_last and start > 0 and len(batch) < batch_size):
            yield batch


def _batches(size: int, config: Settings, steps: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Index batches of a phase: ``steps`` epochs, or ``steps`` optimizer steps, going round the data."""
    limit = None if config.train.batch_or_epoch == "epoch" else steps * config.grad.grad_accum_count
    epoch, given = 0, 0
    while (epoch < steps) if limit is None else (given < limit):
        for batch in batch_indices(
            size, config.dataloader.batch_size, generator, config.dataloader.shuffle, config.dataloader.drop_last
        ):
            yield batch
            given += 1
            if given == limit:
                return
        epoch += 1


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def set_trainable(model: nn.Module, wanted: Sequence[str]) -> list[nn.Parameter]:
    """Freeze everything but the parameters with one of the tags ``wanted``; return those.

    A batch-norm that is frozen uses its running statistics and leaves them as they are.
    """
    chosen = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(tags(name) & set(wanted)))
        parameter.grad = None
        if parameter.requires_grad:
            chosen.append(parameter)
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS) and module.weight is not None:
            module.train(model.training and module.weight.requires_grad)
    return chosen


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's mean loss on a batch.

    A causal LM's head is wide, and its logits are wanted only where a loss is taken, so it is given only
    those positions; the loss is the same.
    """
    if batch["labels"].ndim == 1 or getattr(model.config, "output_router_logits", False):
        return model(**batch).loss  # a mixture of experts adds a loss of its own
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    following = batch["labels"][:, 1:]
    taken = following != -100
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0][:, :-1][taken],))
    try:
        logits = model(**inputs).logits
    finally:
        hook.remove()
    return nn.functional.cross_entropy(logits.float(), following[taken])


def train_client(
    model: nn.Module,
    examples,
    phases: Sequence[Phase],
    config: Settings,
    *,
    lr: float,
    seed: int,
    owner: str = "",
    prefix: FrozenPrefix | None = None,
) -> LocalResult:
    """Train ``model`` in place on one client's examples.

    A frozen parameter has no gradient and is in no optimizer, so weight decay and momentum cannot move it;
    each phase starts with a new optimizer, so nothing it remembers survives a switch of halves.

    Args:
        examples: the client's data: ``len``, ``batch(indices, augment) -> dict of tensors`` with ``labels``.
        phases: what trains, and how long.
        config: ``train``, ``dataloader`` and ``grad`` of the run's configuration.
        lr: this round's learning rate. seed: decides the order of the data, dropout, and how images are varied.
        owner: whose data it is, for ``prefix``'s kept states.
        prefix: the part below the first trainable layer, to be computed once (``models.frozen``).
    """
    device = next(model.parameters()).device
    order, augment = np.random.default_rng(seed), np.random.default_rng(derive(seed, "augment"))
    torch.manual_seed(derive(seed, "dropout"))
    model.train()
    if prefix is not None:
        prefix.eval_below()
    wanted = config.train.optimizer
    total, steps, samples = torch.zeros((), device=device), 0, 0
    for phase in phases:
        parameters = set_trainable(model, phase.train)
        optimizer = make_optimizer(parameters, wanted.type, lr, wanted.extra)
        accumulate, waiting = config.grad.grad_accum_count, 0
        duration = config.train.local_update_steps if phase.steps is None else phase.steps
        for indices in _batches(len(examples), config, duration, order):
            batch = to_device(examples.batch(indices, augment), device)
            if prefix is None:
                loss = loss_of(model, batch)
            else:
                with prefix.states(owner, examples, indices):
                    loss = loss_of(model, batch)
            total += loss.detach()
            if phase.penalty is not None:
                loss = loss + phase.penalty(model)
            (loss / accumulate if accumulate > 1 else loss).backward()
            waiting, steps, samples = waiting + 1, steps + 1, samples + len(indices)
            if waiting == accumulate:
                _step(optimizer, parameters, config)
                waiting = 0
        if waiting:
            _step(optimizer, parameters, config)
    for parameter in model.parameters():
        parameter.grad = None
    return LocalResult(loss=float(total) / max(steps, 1), steps=steps, samples=samples)


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], config: Settings) -> None:
    if config.grad.grad_clip > 0:
        torch.nn.utils.clip_grad_norm_(parameters, config.grad.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
