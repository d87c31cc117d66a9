"""The memory, disk and time of a run before it starts, by arithmetic and a probed step (``run --dry-run``).

The base is computed from the model's configuration, without its weights. If there is room for it, data and model are
loaded, and a client takes a step with the largest batch that there can be; the rest is arithmetic.
"""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from .algebra import nbytes
from .config import Config
from .engines.pool import processes_of
from .methods import Phase
from .models.build import build_skeleton
from .models.machine import device_of, wait
from .models.quantised import beside, to_quantise
from .rounds.checks import SPLITS
from .rounds.task import Task
from .rounds.trainer import Trainer
from .rounds.workspace import Workspace
from .runs.folder import outdir_of
from .runs.summary import human_bytes
from .seeds import derive
from .settings import Settings
from .training import steps_taken, train_client
from .training.evaluate import batch_scores
from .training.local import set_trainable
from .training.optimizer import make_optimizer
from .training.schedule import evaluation_due

#: steps of a client's round that are timed, at most
_MAX_STEPS = 10
#: rounds whose steps are counted, at most: what a method trains may alternate
_MAX_ROUNDS = 10


@dataclass(frozen=True)
class Need:
    """One need of a run: its ``label``, its bytes, ``where`` (device, memory, disk), and the ``basis`` of the size."""

    label: str
    size: float
    where: str
    basis: str


@dataclass
class Estimate:
    """The memory, disk and time of a run.

    Attributes:
        needs: of memory and disk. room: the free bytes by resource (device, memory, disk).
        seconds: of the run; None if no step was probed. scoring: the seconds of scoring a split once, by split.
        steps: of all clients in all rounds; None if they are not known. cohort: how many clients train at once.
        advice: keys to change where something does not fit.
    """

    needs: list[Need]
    room: dict[str, float]
    seconds: float | None = None
    scoring: dict[str, float] = field(default_factory=dict)
    steps: float | None = None
    cohort: int = 1
    advice: list[str] = field(default_factory=list)

    def total(self, where: str) -> float:
        return sum(need.size for need in self.needs if need.where == where)

    @property
    def lacking(self) -> list[str]:
        """The resources that have less room than the run needs."""
        return [where for where, free in self.room.items() if self.total(where) > free]

    def lines(self) -> list[Sequence[str]]:
        """The table, with the totals and the free bytes."""
        rows: list[Sequence[str]] = [("what", "where", "MB", "how it is known")]
        for where, free in self.room.items():
            needs = [need for need in self.needs if need.where == where and need.size]
            rows += [(need.label, where, f"{need.size / 1e6:.3f}", need.basis) for need in needs]
            rows += [("in all", where, f"{self.total(where) / 1e6:.3f}", f"free: {human_bytes(free)}"), ()]
        return rows


def estimate(config: Config) -> Estimate:
    """The estimate for ``config`` on this machine.

    Raises:
        UserError: as when the run starts.
    """
    device, skeleton = device_of(config), build_skeleton(config)
    usage = Estimate([], _room(config, device))
    resource = "device" if device.type == "cuda" else "memory"
    processes = processes_of(config)
    copies = fullest(processes, range(torch.cuda.device_count())) if device.type == "cuda" else processes
    base = _base(skeleton, config)
    # On the CPU, processes map the weights of a checkpoint, which are then in memory once. Elsewhere the run's own
    # process, which trains only where it is the only one, has a model beside theirs.
    mapped = resource == "memory" and not config.quantised and config.dtype == "float32"
    models = 1 if mapped else copies + (processes > 1)
    basis = "arithmetic, from the model's configuration" + f", {models} times" * (models > 1)
    usage.needs.append(Need("base", base * models, resource, basis))
    if base <= usage.room[resource] or config.model.device_map:
        try:
            _probe(config, usage, resource, copies)
        except torch.OutOfMemoryError:
            usage.needs.append(Need("activations", usage.room[resource], resource, "a step took more than is free"))
    usage.advice = _advice(config, usage, resource)
    return usage


def fullest(processes: int, gpus: Sequence[int]) -> int:
    """How many of ``processes`` share the GPU that has most of them, when they take ``gpus`` in turn."""
    return max(Counter(gpus[rank % len(gpus)] for rank in range(processes)).values())


def _room(config: Config, device: torch.device) -> dict[str, float]:
    """The free bytes by resource."""
    room: dict[str, float] = {"memory": float(psutil.virtual_memory().available)}
    if device.type == "cuda":
        gc.collect()  # of an earlier probe: a model and the hooks on it refer to each other
        torch.cuda.empty_cache()
        gpus = range(torch.cuda.device_count()) if config.model.device_map else [device]
        room = {"device": float(sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)), **room}
    folder = outdir_of(config).absolute()
    while not folder.exists():
        folder = folder.parent
    return {**room, "disk": float(shutil.disk_usage(folder).free)}


def _base(skeleton: nn.Module, config: Config) -> float:
    """Bytes of the weights as they are loaded."""
    quantised = to_quantise(skeleton, config) if config.quantised else set()
    itemsize, total = getattr(torch, config.dtype).itemsize, 0.0
    for name, parameter in skeleton.named_parameters():
        path, _, part = name.rpartition(".")
        if path not in quantised or part != "weight":
            total += parameter.numel() * itemsize
        elif config.quantised == "int8":
            total += parameter.numel() + 4 * parameter.shape[0]
        else:  # a scale for 64 numbers, of four bytes, or of one and a share of another
            total += parameter.numel() * (0.5 + (0.0159 if config.lowrank.double_quant else 0.0625))
    return total


def _probe(config: Config, usage: Estimate, resource: str, copies: int) -> None:
    """Load data and model, take a step, and add the needs that these show."""
    workspace = Workspace(config)
    method, model = workspace.method, workspace.model
    sizes = np.array([len(examples) for examples in workspace.data.clients[:1000]])
    widest = max(config.variants(), key=lambda settings: settings.dataloader.batch_size)
    examples = largest_batch(workspace.data.train, widest)
    cohort = usage.cohort = Trainer(workspace).cohort
    phases = _phases(workspace, 1)
    with peak_activations(workspace) as activations:
        _train(workspace, examples, widest, phases)
    trained = [set_trainable(model, phase.train) for phase in phases]
    numbers = max(sum(p.numel() for p in parameters) for parameters in trained)
    state = max(_optimizer_state(parameters, config) for parameters in trained)
    needs = usage.needs
    needs[0] = Need("base", needs[0].size, resource, needs[0].basis + ", loaded")
    needs.append(Need("adapters and gradients", copies * cohort * 8 * numbers, resource, "arithmetic"))
    needs.append(Need("optimizer", copies * cohort * state, resource, f"a step of {config.train.optimizer.type}"))
    basis = f"a step of {len(examples)} samples of up to {int(examples.lengths.max())} tokens"
    if cohort > 1:
        basis += f", for {cohort} clients at once"
    needs.append(Need("activations", copies * cohort * activations[0], resource, basis))
    if workspace.prefix is not None:
        on_disk = config.train.cache_frozen_dir and config.train.cache_frozen_shared
        where = "disk" if on_disk else "memory"
        needs.append(Need("states of frozen layers", workspace.prefix.planned, where, "arithmetic, if all are stored"))
        if not on_disk:
            limit = min(workspace.prefix.planned, config.train.cache_frozen_shared)
            needs.append(Need("states for other runs", limit, "disk", "the same, up to train.cache_frozen_shared"))
    shared, task = (
        nbytes(method.view(workspace.initial_state)),
        (method, 1, 1, workspace.initial_state, config, workspace.schedule),
    )
    exchanges = method.exchanges(workspace.initial_state, 1)
    uplink = max(nbytes(Task(*task, exchange=exchange).expected) for exchange in exchanges)
    needs.append(Need("updates of a round", config.sampled_per_round * uplink, "memory", "arithmetic"))
    personal = len(workspace.clients) * nbytes(workspace.personal.untrained)
    needs.append(Need("clients' own tensors", personal, "memory", "arithmetic"))
    if config.lowrank.checkpoint_freq:
        checkpoint = shared + personal + nbytes(workspace.changed_base())
        count = config.lowrank.keep_checkpoints + 1
        needs.append(Need("checkpoints", count * checkpoint, "disk", f"arithmetic, {count} while one is written"))
    _add_time(usage, workspace, sizes)


def largest_batch(examples: Any, config: Settings) -> Any:
    """The longest of ``examples``, as many as a batch has: no client's batch is larger."""
    loader, lengths = config.dataloader, np.sort(examples.lengths)[::-1]
    count = loader.batch_size
    if loader.batch_tokens:
        count = max(1, loader.batch_tokens // int(lengths[0]))
    return examples.select(np.argsort(-examples.lengths, kind="stable")[: min(count, len(examples))])


def _phases(workspace: Workspace, steps: float) -> list[Phase]:
    """The phases of client 1 in all rounds, one for each set of tensors: ``steps`` in all, in proportion to theirs, but
    each has one at least.
    """
    rounds, default = workspace.config.federate.total_round_num, workspace.config.of_client(1).train.local_update_steps
    phases = [phase for t in range(1, rounds + 1) for phase in workspace.method.phases(t, 1)]
    lengths: Counter[tuple[str, ...]] = Counter()
    for phase in phases:
        lengths[phase.train] += default if phase.steps is None else phase.steps
    share, distinct = steps / lengths.total(), {phase.train: phase for phase in phases}
    return [replace(phase, steps=max(1, round(share * lengths[train]))) for train, phase in distinct.items()]


def _train(workspace: Workspace, examples: Any, config: Settings, phases: Sequence[Phase], **options: Any) -> None:
    """A training in ``phases`` of so many batches that begins, and leaves the model, as client 1 begins."""
    in_batches = replace(config.train, batch_or_epoch="batch")
    config = replace(config, train=in_batches, grad=replace(config.grad, grad_accum_count=1))
    workspace.load_client(workspace.initial_state, 1)
    options |= {"lr": config.train.optimizer.lr, "seed": derive(config.seed, "probe"), "reads": workspace.reads}
    train_client(workspace.model, examples, phases, config, **options)
    workspace.load_client(workspace.initial_state, 1)


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Measures the seconds of the block, including the time that ``device`` still computes after it."""
    wait(device)
    readings, started = [0.0], time.perf_counter()
    yield readings
    wait(device)
    readings[0] = time.perf_counter() - started


@contextmanager
def peak_activations(workspace: Workspace) -> Iterator[list[float]]:
    """Measures the most bytes held for a backward pass within the block; weights do not count."""
    readings = [0.0]
    if workspace.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(workspace.device)
        baseline = torch.cuda.memory_allocated(workspace.device)
        yield readings
        readings[0] = float(torch.cuda.max_memory_allocated(workspace.device) - baseline)
        return
    weights = {t.untyped_storage().data_ptr() for t in [*workspace.model.parameters(), *workspace.model.buffers()]}
    weights |= {t.untyped_storage().data_ptr() for t in beside(workspace.model).values()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> tuple[Tensor, dict[int, int]]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            readings[0] = max(readings[0], float(sum(saved.values())))
        return tensor, saved

    def unpack(packed: tuple[Tensor, dict[int, int]]) -> Tensor:
        saved.clear()  # the backward pass has begun, and the next forward pass saves its own
        return packed[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield readings


def _optimizer_state(parameters: list[nn.Parameter], config: Config) -> float:
    """Bytes of the client's optimizer state for ``parameters``."""
    copies = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
    for parameter in copies:
        parameter.grad = torch.ones_like(parameter)
    settings = config.train.optimizer
    optimizer = make_optimizer(copies, settings.type, settings.lr, settings.extra)
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return float(sum(t.nbytes for t in tensors))


def _work(workspace: Workspace, sizes: np.ndarray) -> tuple[float, float]:
    """The steps and the batches of a client in a round: means over clients of ``sizes``, each by its own settings."""
    config, taken, batch = workspace.config, [], 0
    if config.dataloader.batch_tokens:
        batch = max(1, int(config.dataloader.batch_tokens / float(workspace.data.train.lengths.mean())))
    for client, size in enumerate(sizes.tolist(), start=1):
        settings = config.of_client(client)
        if batch:
            settings = replace(settings, dataloader=replace(settings.dataloader, batch_size=batch))
        single = replace(settings, grad=replace(settings.grad, grad_accum_count=1))
        each = 1 if settings.train.batch_or_epoch == "epoch" else settings.grad.grad_accum_count
        for t in range(1, min(config.federate.total_round_num, _MAX_ROUNDS) + 1):
            phases = workspace.method.phases(t, client)
            taken.append((steps_taken(size, phases, settings), each * steps_taken(size, phases, single)))
    steps, batches = np.mean(taken, axis=0).tolist()
    return steps, batches


def _add_time(usage: Estimate, workspace: Workspace, sizes: np.ndarray) -> None:
    """Add the steps of the run, and its seconds with its evaluations, divided among its processes; clients train one by
    one, each batch as long as one of the client of median size. Computing the states of frozen layers once is left out.
    """
    config, processes = workspace.config, processes_of(workspace.config)
    rounds = range(1, config.federate.total_round_num + 1)
    steps, batches = _work(workspace, sizes)
    trainings = len(rounds) * config.sampled_per_round
    usage.steps = steps * trainings
    size = config.eval_batch_size
    for split, name in SPLITS.items():
        if (examples := getattr(workspace.data, name)) is not None:
            sample = examples.select(np.arange(min(size, len(examples))))
            probed: dict[str, Any] = {"owner": f"{split} probed", "prefix": workspace.prefix, "reads": workspace.reads}
            # Of a test set that the run does not use, as a suite adds it.
            if workspace.prefix and workspace.prefix.budget.get(split, True):
                workspace.prefix.add(probed["owner"], sample)
            batch_scores(workspace.model, sample, size, **probed)  # the first pass fills caches, the model's too
            with _timed(workspace.device) as seconds:
                batch_scores(workspace.model, sample, size, **probed)
            usage.scoring[split] = seconds[0] * math.ceil(len(examples) / size)
    client = int(np.argsort(sizes)[len(sizes) // 2]) + 1
    probe: dict[str, Any] = {"owner": f"client {client}", "prefix": workspace.prefix}
    examples, settings = workspace.data.clients[client - 1], config.of_client(client)
    _train(workspace, examples, settings, _phases(workspace, 1), **probe)  # fills the caches of the later ones, too
    phases = _phases(workspace, min(_MAX_STEPS, batches))
    with _timed(workspace.device) as seconds:
        _train(workspace, examples, settings, phases, **probe)
    training = batches * trainings * seconds[0] / sum(phase.steps or 0 for phase in phases)
    evaluations = sum(evaluation_due(config, t) for t in rounds)
    usage.seconds = (training + evaluations * sum(usage.scoring[split] for split in workspace.held_out())) / processes


def _advice(config: Config, usage: Estimate, resource: str) -> list[str]:
    """Keys to change: of each resource with too little room, for its largest need."""
    batch, tokens = max(1, config.dataloader.batch_size // 2), config.dataloader.batch_tokens // 2
    halved = f"dataloader.batch_tokens {tokens}" if tokens else f"dataloader.batch_size {batch}"
    smaller_batch = f"{halved} grad.grad_accum_count {2 * config.grad.grad_accum_count}"
    for_base = ["lowrank.dtype nf4, or bfloat16", "model.device_map auto: more GPUs, or memory and disk"]
    for_step = ["train.checkpointing True", smaller_batch, "a smaller llm.tok_len", "train.cohort off"]
    if config.is_vision:
        for_base, for_step = ["a smaller lowrank.width"], [smaller_batch]
    by_label = {"base": for_base, **dict.fromkeys(("activations", "adapters and gradients", "optimizer"), for_step)}
    default = ["train.cache_frozen_dir FOLDER on a disk, or a smaller train.cache_frozen_bytes"]
    for_disk = ["lowrank.keep_checkpoints 1, or train.cache_frozen_shared 0; or another outdir"]
    advice: list[str] = []
    for where in usage.lacking:
        largest = max((n for n in usage.needs if n.where == where), key=lambda n: n.size).label
        advice += for_disk if where == "disk" else by_label.get(largest, default)
        if where == resource and config.federate.process_num != 1:
            advice.append("federate.process_num 1: every process has a model of its own")
    return list(dict.fromkeys(advice))
