"""Local training of several clients of a round in one forward and backward pass (``train.cohort``).

Each client has its own tensors, order of data, batches, steps, optimizer state, gradient norm and dropout, as alone, so
results are those of ``train_client`` but for rounding. On a GPU dropout draws other masks, equal in distribution.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Examples
from ..methods import Phase
from ..models.adapters import layer_stack, load_tensors, lora_scales
from ..models.checkpointing import recomputes
from ..models.kinds import is_encoder_decoder
from ..models.machine import input_device, rounding, wait
from ..models.names import all_tensors, select, tags, with_owners
from ..models.shortcuts.frozen import FrozenPrefix
from ..models.shortcuts.masks import draws
from ..models.shortcuts.reads import OnlyRead
from ..models.shortcuts.slots import Slots, unslotted
from ..models.shortcuts.trials import TRIED, differing, failure, preserving_modes, rows_to_try, with_gradients
from ..seeds import derive, drawing
from ..settings import Optimizer, Settings
from .blocks import ClientMasks, divide, overhead
from .local import (
    LocalResult,
    batches_of,
    label_logits,
    loss_of,
    losses_of,
    mean_of,
    resting_by_step,
    set_trainable,
    shortcuts,
    to_device,
)
from .optimizer import make_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: ``auto`` on a processor: the largest batch of a client and of a cohort, in multiples of the tokens that a pass
#: costs (``blocks.overhead``), and the largest number of clients. Measured with MiniLM's last two
#: layers, where a pass costs 80 tokens: cohorts of 8 are 1.9, 1.6 and 1.3 times as fast with batches of 80, 160 and 320
#: tokens, and 1.15 times with 500
_BATCH_LIMIT, _COHORT_LIMIT, _MAX_CLIENTS = 4.0, 32.0, 16
#: ``auto`` on a GPU: the part of its memory that may be used, and the tokens of a pass with which it is busy
_GPU_SHARE, _GPU_TOKENS = 0.5, 65536
#: the optimizers of torch that step each number alone; Adafactor does not, nor optimizers of 8 bits, whose numbers
#: share a scale
_ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
Item = TypeVar("Item")
#: a loss, its gradients, None for a tensor that it does not depend on, and the random number that is drawn next
Gradients = tuple[Tensor, Sequence[Tensor | None], Tensor]


@dataclass(frozen=True)
class Member:
    """A client of a cohort; the attributes are arguments of ``train_client``."""

    owner: str
    examples: Any
    phases: Sequence[Phase]
    seed: int
    config: Settings


def train_cohort(
    model: nn.Module,
    members: Sequence[Member],
    load: Callable[[int], object],
    held: Collection[str],
    config: Settings,
    *,
    lr: float,
    prefix: FrozenPrefix | None = None,
    reads: OnlyRead | None = None,
) -> list[tuple[LocalResult, dict[str, Tensor]]]:
    """Train all ``members``; for each the result and its tensors after it, by name. Waits for the device.

    Args:
        members: between which and ``model`` there is no ``obstacle``.
        load: loads the tensors of one member, by its index, into the model. The last member's stay there.
        held: tags of the tensors that may differ between clients.
    Raises:
        Unfit: the clients have to be trained one by one; the message says why.
    """
    phases = members[0].phases
    slots = _slots(model, len(members), load, held, {tag for phase in phases for tag in phase.train})
    torch.manual_seed(derive(members[0].seed, "dropout", *(member.seed for member in members[1:])))
    model.train()
    if prefix is not None:
        prefix.eval_below()
    set_trainable(model, ())
    training = _Training(model, members, slots, config, prefix, reads)
    with slots.installed():
        for phase in phases:
            training.run(phase, lr)
    for phase in phases[-1:]:
        set_trainable(model, phase.train)  # as after the training of one client
    losses = training.mean_losses()
    wait(training.device)
    return [
        (LocalResult(loss, steps, samples), {n: t.clone() for n, t in slots.tensors(i).items()})
        for i, (loss, steps, samples) in enumerate(zip(losses, training.steps, training.samples))
    ]


def _slots(
    model: nn.Module, number: int, load: Callable[[int], object], held: Collection[str], trained: Collection[str]
) -> Slots:
    tensors: list[dict[str, Tensor]] = []
    scales = []
    names = select(all_tensors(model), {*held, *trained})
    for i in range(number):
        load(i)
        tensors.append({n: t.detach().clone() for n, (_, t) in with_owners(model, names).items()})
        scales.append(lora_scales(model))
    return Slots(model, tensors, scales, trained)


class _Training:
    """The steps of a cohort.

    Attributes:
        losses: of each client, the sum over its batches, ``(clients,)``; steps: the number of its batches;
            samples: of its samples, with repetitions.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Sequence[Member],
        slots: Slots,
        config: Settings,
        prefix: FrozenPrefix | None,
        reads: OnlyRead | None,
    ):
        self.model, self.members, self.slots, self.config = model, members, slots, config
        self.prefix, self.reads = prefix, reads
        self.device = input_device(model)
        self.blocks, self.overhead = config.train.blocks, overhead(model)
        #: for dropout, which on a GPU is drawn for all at once
        self.draws: list[torch.Generator] = []
        if draws(model) and self.device.type == "cpu":
            seeds = [derive(member.seed, "dropout") for member in members]
            self.draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.orders = [np.random.default_rng(member.seed) for member in members]
        self.losses = torch.zeros(len(members), device=self.device)
        self.steps, self.samples = [0] * len(members), [0] * len(members)

    def run(self, phase: Phase, lr: float) -> None:
        """One phase of all clients; clients with fewer batches than others stop at their last step."""
        kind, slots = self.config.train.optimizer, self.slots
        parameters = slots.trainable(phase.train)
        optimizer = make_optimizer(parameters, kind.type, lr, kind.extra)
        resting = resting_by_step(phase, slots.stacked.items())
        streams = [batches_of(phase, m.examples, m.config, order) for m, order in zip(self.members, self.orders)]
        upcoming = [next(batches, None) for batches in streams]
        ended: dict[int, dict[str, Tensor]] = {}
        pending = 0
        while current := {i: batch for i, batch in enumerate(upcoming) if batch is not None}:
            # The others' steps would move a client that has ended, too, by momentum and weight decay.
            for i in set(range(len(upcoming))) - current.keys() - ended.keys() if not pending else ():
                ended[i] = {n: t.clone() for n, t in slots.tensors(i).items()}
            self.add_gradients(current)
            upcoming = [None if batch is None else next(batches, None) for batch, batches in zip(upcoming, streams)]
            pending += 1
            if pending == self.config.grad.grad_accum_count or all(batch is None for batch in upcoming):
                for parameter in next(resting):
                    parameter.grad = None
                _clip(parameters, self.config.grad.grad_clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                pending = 0
        for i, tensors in ended.items():
            slots.put(i, tensors)

    def add_gradients(self, batches: Mapping[int, np.ndarray]) -> None:
        """Add the gradients of one batch of each client, whose loss is the mean over the batch."""
        members = [self.members[i] for i in batches]
        indices, sizes = np.concatenate(list(batches.values())), [len(batch) for batch in batches.values()]
        joined = Examples.together(zip((m.examples for m in members), batches.values()))
        slot = np.repeat(list(batches), sizes)
        losses = joined.losses(np.arange(len(joined)))
        shares = 1 / np.maximum(np.bincount(slot, losses, len(self.members)), 1)
        lengths = np.split(joined.lengths, np.cumsum(sizes)[:-1])
        dropout = ClientMasks(lengths, [self.draws[i] for i in batches]) if self.draws else None
        for part in divide(joined.lengths, self.overhead, self.blocks):
            part = np.sort(part)  # by client
            if not losses[part].sum():
                continue
            counts = np.bincount(slot[part], minlength=len(self.members))
            rows = [
                (m.owner, m.examples, indices[part][slot[part] == i]) for i, m in zip(batches, members) if counts[i]
            ]
            batch = joined.batch(part)
            context = shortcuts(self.prefix, self.reads, rows, batch, self.device)
            with context, self.slots.rows(counts.tolist()), dropout.masks(part) if dropout else nullcontext():
                logits, labels = label_logits(self.model, to_device(batch, self.device))
                terms = losses_of(logits, labels)
                terms = terms * self._on_device(np.repeat(shares[slot[part]], losses[part]).astype(np.float32))
                # Within the contexts, as it may compute layers again.
                (terms.sum() / self.config.grad.grad_accum_count).backward()
            by_slot = np.bincount(slot[part], losses[part], len(self.members)).astype(np.int64)
            # A check of the lengths would wait for the GPU.
            self.losses += torch.segment_reduce(terms.detach(), "sum", lengths=self._on_device(by_slot), unsafe=True)
        for i, size in zip(batches, sizes):
            self.steps[i] += 1
            self.samples[i] += size

    def mean_losses(self) -> list[float]:
        """Of each client the mean loss of its batches."""
        return mean_of(self.losses, self._on_device(np.maximum(self.steps, 1))).tolist()

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _clip(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """``clip_grad_norm_`` for each client by the norm of its own gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if max_norm <= 0 or not gradients:
        return
    rows = [g.flatten(1).norm(dim=1).float() for g in gradients]
    norms = torch.stack([norm.to(rows[0].device) for norm in rows]).norm(dim=0)  # a model may be on several devices
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)).to(gradient))


# -- who can train together ----------------------------------------------------------------------------


def obstacle(model: nn.Module, phases: Sequence[Sequence[Phase]]) -> str:
    """Why clients with these ``phases`` cannot train together; empty if they can, as far as phases and model tell."""
    if is_encoder_decoder(model):
        return "an encoder-decoder model has two stacks of layers"
    if any(phase.has_code for client in phases for phase in client):
        return "a penalty is added to a client's loss"
    plans = {tuple((tuple(sorted(phase.train)), phase.turns, phase.steps) for phase in client) for client in phases}
    if len(plans) > 1:
        return "the clients train different tensors, or for different numbers of steps"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return "the routers' loss of a mixture of experts is not a mean over samples"
    parameters = dict(model.named_parameters())
    trained = select(parameters, {tag for phase in phases[0] for tag in phase.train})
    if base := [n for n in trained if "base" in tags(n)]:
        return f"the method trains the base ({base[0]})"
    return unslotted(model, [n for n in trained if parameters[n].numel()])


def cohort_size(model: nn.Module, config: Settings, lengths: np.ndarray, depth: int) -> int:
    """The number of clients that train together as ``train.cohort`` asks for; 1: each alone.

    Args:
        lengths: of the clients' samples, in tokens. depth: the number of layers whose states are kept.
    """
    device = input_device(model)
    if config.train.cohort:
        return config.train.cohort
    loads, stack = config.dataloader, layer_stack(model)
    tokens = loads.batch_tokens or loads.batch_size * float(lengths.mean())
    if stack is None or is_encoder_decoder(model):
        return 1
    if device.type == "cpu":
        cost = overhead(model)
        return max(1, min(_MAX_CLIENTS, int(_COHORT_LIMIT * cost / tokens))) if tokens <= _BATCH_LIMIT * cost else 1
    if device.type != "cuda":
        return 1
    total = torch.cuda.get_device_properties(device).total_memory
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    longest = loads.batch_tokens or loads.batch_size * int(lengths.max())
    room = (_GPU_SHARE * total - size) / bytes_a_token(model, len(stack[1]) - depth, int(lengths.max()))
    return max(1, int(min(room, _GPU_TOKENS) / longest))


def places(model: nn.Module) -> int:
    """How many processes could train at a time on this machine: one for each GPU or core."""
    device = input_device(model)
    return max(1, torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1)


def evenly(size: int, clients: int, places: int) -> int:
    """The size of cohorts of at most ``size`` of ``clients``, such that each of ``places`` has equally many cohorts.

    It is the same with any ``federate.process_num``, on which results must not depend.
    """
    cohorts = math.ceil(clients / (places * size))
    return math.ceil(clients / (places * cohorts))


def parts_of(clients: Sequence[Item], number: int) -> list[Sequence[Item]]:
    """``clients`` in so many groups, in their order, of sizes that differ by one at most."""
    ends = [math.ceil(len(clients) * part / number) for part in range(number + 1)]
    return [clients[first:last] for first, last in zip(ends, ends[1:])]


def bytes_a_token(model: nn.Module, layers: int, longest: int) -> float:
    """Memory of a training pass for each token: activations of ``layers`` layers and the head for the backward pass."""
    sizes: Any = cast("PreTrainedModel", model).config.get_text_config()
    width = sizes.hidden_size
    inner = getattr(sizes, "intermediate_size", None) or 4 * width
    values = layers * (16 * width + 4 * inner + 3 * sizes.num_attention_heads * longest)
    # Logits of a language model, their softmax and its gradient are in float32.
    words = 3 * sizes.vocab_size if cast("PreTrainedModel", model).get_output_embeddings() is not None else 0
    return values * next(model.parameters()).element_size() + 4 * words


def elementwise(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` steps each number alone, so that stacked tensors are stepped as single ones."""
    return optimizer.type.lower() in _ELEMENTWISE


def never_together(model: nn.Module, config: Settings, held: Collection[str], examples: Examples | None) -> str:
    """Why no clients can train together; empty if they can, as far as a trial shows.

    Losses and gradients of one pass are compared with the passes client by client. Three clients are tried, whose
    tensors are the model's with some noise; on a CPU, where each draws its own masks, with dropout. The model's
    tensors, its modes and random numbers are restored.

    Args:
        held: tags of the tensors that may differ between clients. examples: for the trial; None of images.
    """
    if examples is None:
        return "images are not trained together"
    if not elementwise(config.train.optimizer):
        return f"train.optimizer.type = {config.train.optimizer.type} does not step each number by itself"
    candidates = [n for n, p in model.named_parameters() if tags(n) & set(held) and "base" not in tags(n) and p.numel()]
    names = [n for n in candidates if not unslotted(model, [n])]
    net = {n: model.get_parameter(n).detach().clone() for n in names}
    if not names:
        return "no tensor that it trains is that of a linear layer or a layer norm"
    batches = dict(enumerate(np.split(np.resize(rows_to_try(examples.lengths), TRIED), [1, 2])))
    members = [Member("", examples, (), seed, config) for seed in batches]
    draw = torch.Generator().manual_seed(0)
    nets = [{n: net[n] + 0.02 * torch.randn(net[n].shape, generator=draw).to(net[n]) for n in names} for _ in batches]
    try:
        with preserving_modes(model), with_gradients(model, names), torch.enable_grad():
            model.train(input_device(model).type == "cpu")
            if draws(model) and recomputes(model):
                return "train.checkpointing computes layers again, and each client draws its dropout once"
            alone = [_single(model, m, tensors, rows) for m, tensors, rows in zip(members, nets, batches.values())]
            model.requires_grad_(False)
            slots = Slots(model, nets, [lora_scales(model)] * len(nets), held)
            slots.trainable(held)
            training = _Training(model, members, slots, config, None, None)
            training.blocks = 1
            with slots.installed():
                training.add_gradients(batches)
        stacked = [slots.stacked[n].grad for n in names]
        generators = training.draws or [torch.Generator().manual_seed(derive(m.seed, "dropout")) for m in members]
        ours = [[g[i] for g in stacked if g is not None] for i in batches]
        losses, gradients, numbers = zip(*alone)
        # Gradients of all clients are compared together, because gradients of a client's samples may cancel out.
        for label, a, b in (
            ("losses", torch.stack(losses), training.losses),
            ("gradients", _flat(gradients, training.losses), _flat(ours, training.losses)),
            ("random numbers", torch.stack(numbers), torch.stack([torch.rand((), generator=g) for g in generators])),
        ):
            if a.shape != b.shape:
                return f"other tensors have {label}"
            if wrong := differing(label, a, b, rounding(model)):
                return wrong
        return ""
    except Exception as error:
        return failure(error)
    finally:
        load_tensors(model, net)


def _single(model: nn.Module, member: Member, tensors: Mapping[str, Tensor], rows: np.ndarray) -> Gradients:
    """The loss of a batch of a client with these ``tensors``, their gradients, and the next random number."""
    load_tensors(model, tensors)
    with drawing(derive(member.seed, "dropout")):
        loss = loss_of(model, to_device(member.examples.batch(rows), input_device(model)))
        step = loss / member.config.grad.grad_accum_count
        gradients = torch.autograd.grad(step, [model.get_parameter(n) for n in tensors], allow_unused=True)
        return loss.detach().float(), gradients, torch.rand(())


def _flat(gradients: Iterable[Iterable[Tensor | None]], template: Tensor) -> Tensor:
    vectors = [g.flatten().to(template) for group in gradients for g in group if g is not None]
    return torch.cat([template.new_zeros(1), *vectors])
