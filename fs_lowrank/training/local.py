"""Local training of one client: the phases of the method, one after another."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..data.examples import IGNORED_LABEL
from ..errors import UserError
from ..methods import Phase
from ..models.kinds import is_encoder_decoder, unwrapped
from ..models.machine import input_device, wait
from ..models.names import tags
from ..models.shortcuts.frozen import FrozenPrefix
from ..models.shortcuts.reads import OnlyRead
from ..seeds import derive
from ..settings import Settings
from ..settings.sections import Dataloader
from .optimizer import make_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LocalResult:
    """The result of local training.

    Attributes:
        loss: the mean loss of a batch.
        steps: the number of batches. samples: the number of samples processed.
    """

    loss: float
    steps: int
    samples: int


def batch_indices(examples: Any, loads: Dataloader, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """One epoch of index batches. A client with fewer samples than a batch always gives one short batch."""
    size = len(examples)
    order = generator.permutation(size) if loads.shuffle else np.arange(size)
    if loads.batch_tokens:
        yield from np.split(order, _ends(examples.lengths[order], loads.batch_tokens))
        return
    for start in range(0, size, loads.batch_size):
        batch = order[start : start + loads.batch_size]
        if not (loads.drop_last and start > 0 and len(batch) < loads.batch_size):
            yield batch


def _ends(lengths: np.ndarray, limit: int) -> list[int]:
    """Ends of batches of consecutive samples but the last, each of ``limit`` padded tokens at most, or one sample."""
    ends, start, longest = [], 0, 0
    for i, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if i > start and (i + 1 - start) * longest > limit:
            ends.append(i)
            start, longest = i, length
    return ends


def batches_of(phase: Phase, examples: Any, config: Settings, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Index batches of a phase: its ``steps`` epochs, or ``steps`` optimizer steps over repeated epochs."""
    steps = config.train.local_update_steps if phase.steps is None else phase.steps
    in_epochs = config.train.batch_or_epoch == "epoch"
    epochs = range(steps) if in_epochs else itertools.count()
    batches = itertools.chain.from_iterable(batch_indices(examples, config.dataloader, generator) for _ in epochs)
    return itertools.islice(batches, None if in_epochs else steps * config.grad.grad_accum_count)


def _epoch(size: int, loads: Dataloader) -> tuple[int, int]:
    """The numbers of batches, and of samples in them, in an epoch of a client with ``size`` samples."""
    full, remainder = divmod(size, loads.batch_size)
    remainder = 0 if loads.drop_last and full else remainder
    return full + bool(remainder), full * loads.batch_size + remainder


def steps_taken(size: int, phases: Sequence[Phase], config: Settings) -> int:
    """The number of optimizer steps that ``train_client`` takes with a client with ``size`` samples.

    With epochs, only for batches of ``dataloader.batch_size``.
    """
    steps = [config.train.local_update_steps if p.steps is None else p.steps for p in phases]
    if config.train.batch_or_epoch == "batch":
        return sum(steps)
    batches, _ = _epoch(size, config.dataloader)
    # Gradients are accumulated from one epoch into the next; the last step may have fewer batches.
    return sum(-(-epochs * batches // config.grad.grad_accum_count) for epochs in steps)


def samples_trained(size: int, phases: Sequence[Phase], config: Settings) -> int | None:
    """The number of samples, with repetitions, that ``train_client`` trains a client with ``size`` samples on.

    The last batch of an epoch is smaller than the others, and so is every batch of a client with less than a batch.
    None if the number depends on the order that is drawn: steps of ``dataloader.batch_tokens``.
    """
    steps = [config.train.local_update_steps if p.steps is None else p.steps for p in phases]
    loads, in_epochs = config.dataloader, config.train.batch_or_epoch == "epoch"
    if loads.batch_tokens and not in_epochs:
        return None
    batches, samples = _epoch(size, loads)
    if in_epochs:
        return (size if loads.batch_tokens else samples) * sum(steps)
    passes = (divmod(number * config.grad.grad_accum_count, batches) for number in steps)
    return sum(epochs * samples + extra * loads.batch_size for epochs, extra in passes)


def passes_of(config: Settings, sizes: np.ndarray, length: float) -> np.ndarray:
    """How often clients with so many samples, of a mean ``length`` in tokens, go through them in a round."""
    train, loads = config.train, config.dataloader
    batch = loads.batch_tokens / length if loads.batch_tokens else loads.batch_size
    steps, samples = float(train.local_update_steps), batch * config.grad.grad_accum_count
    return np.full(len(sizes), steps) if train.batch_or_epoch == "epoch" else steps * samples / sizes


def per_token(labels: torch.Tensor) -> bool:
    """Whether labels are of tokens, ``(batch, length)``.

    Other labels are classes or numbers, or sets of classes: floating-point zeros and ones, ``(batch, classes)``.
    """
    return labels.ndim == 2 and not labels.is_floating_point()


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """``batch`` on ``device``, but for the labels of tokens, so that no GPU is waited for to find tokens with one."""
    on_host = {"labels"} if per_token(batch["labels"]) else set()
    return {k: v if k in on_host else v.to(device, non_blocking=True) for k, v in batch.items()}


#: norms that may have running statistics, also where they have no weights
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def set_trainable(model: nn.Module, wanted: Sequence[str]) -> list[nn.Parameter]:
    """Freeze all parameters except those with one of the tags ``wanted``, which are returned.

    A norm that is frozen uses its running statistics and does not update them.
    """
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(tags(name) & set(wanted)))
    for name, module in model.named_modules():
        if isinstance(module, _NORMS):
            module.train(model.training and bool(tags(f"{name}.running_mean") & set(wanted)))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextlib.contextmanager
def _same_counts(model: nn.Module) -> Iterator[None]:
    """A context after which the norms' counts of batches are as before.

    The counts are not sent, and one with ``momentum=None`` averages over them: no client may start from another's.
    """
    counts = {b: b.clone() for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    try:
        yield
    finally:
        for count, before in counts.items():
            count.copy_(before)


def label_logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a batch that have a label, and the labels: of samples, or of a causal LM's positions.

    The head of a causal LM is wide, so it is applied only to these positions.
    """
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    if not per_token(batch["labels"]):
        return model(**inputs).logits, batch["labels"]
    if is_encoder_decoder(model):
        return _decoded(model, inputs, batch["labels"])
    following = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL).flatten()
    rows = (following != IGNORED_LABEL).nonzero().squeeze(1)
    labels, rows = (t.to(batch["input_ids"].device, non_blocking=True) for t in (following[rows], rows))
    head: nn.Module = cast("PreTrainedModel", model).get_output_embeddings()
    length = batch["input_ids"].shape[1]  # virtual tokens may stand before the text

    def labelled(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        if args[0].ndim != 3:
            raise UserError(
                f"model.type: the head of {type(unwrapped(model)).__name__} reads {args[0].ndim} axes, expected 3: "
                "texts, tokens, width; take a model that predicts one token after each"
            )
        return (args[0][:, -length:].flatten(0, 1).index_select(0, rows.to(args[0].device)),)

    hook = head.register_forward_pre_hook(labelled)
    try:
        return model(**inputs, use_cache=False).logits, labels  # keys and values serve only to generate text
    finally:
        hook.remove()


def _decoded(
    model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of an encoder-decoder model for the tokens that have a label, and the labels."""
    rows = (labels.flatten() != IGNORED_LABEL).nonzero().squeeze(1)
    labels, rows = (t.to(inputs["input_ids"].device, non_blocking=True) for t in (labels, rows))
    shifted = cast("PreTrainedModel", model).prepare_decoder_input_ids_from_labels(labels=labels)
    logits = model(**inputs, decoder_input_ids=shifted, use_cache=False).logits
    return logits.flatten(0, 1).index_select(0, rows.to(logits.device)), labels.flatten()[rows]


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each label: squared error of numbers, cross-entropy of classes, its mean over a set of classes."""
    if not labels.is_floating_point():
        return nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    if labels.ndim == 1:
        return (logits.float().squeeze(-1) - labels) ** 2
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(-1)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of the model on a batch."""
    if batch["labels"].is_floating_point():
        return losses_of(*label_logits(model, batch)).mean()
    if batch["labels"].ndim == 1:
        return model(**batch).loss
    if getattr(model.config, "output_router_logits", False):  # a mixture of experts adds its own loss
        return model(**{**batch, "labels": batch["labels"].to(batch["input_ids"].device)}).loss
    logits, labels = label_logits(model, batch)
    return nn.functional.cross_entropy(logits.float(), labels)


@contextlib.contextmanager
def shortcuts(
    prefix: FrozenPrefix | None,
    reads: OnlyRead | None,
    rows: Sequence[tuple[str, Any, np.ndarray]],
    batch: dict[str, Tensor],
    device: torch.device,
) -> Iterator[None]:
    """A context for one forward pass of a batch without cached states and positions that are not read.

    Args:
        rows: the owners of the samples of the batch, as for ``FrozenPrefix.states_of``. device: of the model's inputs.
    """
    with contextlib.ExitStack() as stack:
        if prefix is not None:
            stack.enter_context(prefix.states_of(rows, device))
        if reads is not None:
            stack.enter_context(reads.reading(batch, device))
        yield


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
    reads: OnlyRead | None = None,
) -> LocalResult:
    """Train ``model`` in place on one client's examples, and wait until its device has done so.

    Frozen parameters have no gradient and are not in the optimizer, so weight decay and momentum do not change them.
    Each phase has a new optimizer, so its state is not used for the parameters of another phase.

    Args:
        examples: the client's data: ``len``, ``batch(indices, augment) -> dict of tensors`` with ``labels``.
        phases: tags of the tensors that train, and for how long.
        config: ``train``, ``dataloader`` and ``grad`` of the run's configuration.
        lr: learning rate of this round. seed: for the order of the data, dropout, and augmentation of images.
        owner: key of the examples in the cache ``prefix``.
        prefix: cache of the hidden states below the first trainable layer (``models.shortcuts.frozen``).
        reads: computes the last layer for the positions that are read only (``models.shortcuts.reads``).
    """
    device = input_device(model)
    order, augment = np.random.default_rng(seed), np.random.default_rng(derive(seed, "augment"))
    torch.manual_seed(derive(seed, "dropout"))
    model.train()
    if prefix is not None:
        prefix.eval_below()
    settings = config.train.optimizer
    total, steps, samples = torch.zeros((), device=device), 0, 0
    with _same_counts(model):
        for phase in phases:
            parameters = set_trainable(model, phase.train)
            optimizer = make_optimizer(parameters, settings.type, lr, settings.extra)
            resting = resting_by_step(phase, model.named_parameters())
            batches_per_step, pending, before = config.grad.grad_accum_count, 0, steps
            for indices in batches_of(phase, examples, config, order):
                batch = examples.batch(indices, augment)
                with shortcuts(prefix, reads, [(owner, examples, indices)], batch, device):
                    loss = loss_of(model, to_device(batch, device))
                    total += loss.detach()
                    if phase.penalty is not None:
                        loss = loss + phase.penalty(model)
                    # Within the context, as it may compute layers again.
                    (loss / batches_per_step if batches_per_step > 1 else loss).backward()
                pending, steps, samples = pending + 1, steps + 1, samples + len(indices)
                if pending == batches_per_step:
                    _step(optimizer, parameters, next(resting), config)
                    pending = 0
            if pending:
                _step(optimizer, parameters, next(resting), config)
            if phase.ended is not None:
                with torch.no_grad():
                    phase.ended(model, (steps - before) / batches_per_step, lr)
    model.zero_grad()
    wait(device)
    return LocalResult(float(mean_of(total, torch.full_like(total, max(steps, 1)))), steps, samples)


def mean_of(total: Tensor, steps: Tensor) -> Tensor:
    """``total / steps`` in float64, where both are on one device.

    A GPU multiplies with the reciprocal of a divisor that is a number, or on the CPU, and rounds otherwise.
    """
    return total.double() / steps.double()


def resting_by_step(phase: Phase, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[list[nn.Parameter]]:
    """For one step after the other, the parameters whose turn it is not: without a gradient, they do not change."""
    plan = [(parameter, tags(name).intersection(phase.turns)) for name, parameter in named]
    return itertools.cycle([[p for p, turns in plan if turns and turn not in turns] for turn in phase.turns or ("",)])


def _step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], resting: list[nn.Parameter], config: Settings
) -> None:
    for parameter in resting:
        parameter.grad = None
    if config.grad.grad_clip > 0:
        torch.nn.utils.clip_grad_norm_(parameters, config.grad.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
