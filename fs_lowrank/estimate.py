"""What a run will take, before it starts: memory, disk and time, by arithmetic and a probed step (``run --dry-run``).

The base is computed from the model's configuration, without its weights. If there is room for it, data and model are
loaded, and a client takes a step with the largest batch that there can be; the rest is arithmetic.
"""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from .algebra import nbytes
from .config import Config
from .engines.pool import processes_of
from .methods import State
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
from .training import train_client
from .training.evaluate import batch_scores
from .training.local import set_trainable
from .training.optimizer import make_optimizer
from .training.schedule import evaluation_due

#: of a client's round so many steps are timed at most
_MOST_STEPS = 10


@dataclass(frozen=True)
class Need:
    """What one thing takes: ``what`` it is, its bytes, ``where`` (device, memory, disk), and how that is known."""

    what: str
    size: float
    where: str
    how: str


@dataclass
class Estimate:
    """What a run takes.

    Attributes:
        needs: of memory and disk. room: by place, the bytes that are free.
        seconds: of the run; None if no step was probed. scoring: by split, the seconds of scoring it once.
        steps: of all clients in all rounds; None if they are not known. together: how many clients train at once.
        advice: keys to change where something does not fit.
    """

    needs: list[Need]
    room: dict[str, float]
    seconds: float | None = None
    scoring: dict[str, float] = field(default_factory=dict)
    steps: float | None = None
    together: int = 1
    advice: list[str] = field(default_factory=list)

    def total(self, where: str) -> float:
        return sum(need.size for need in self.needs if need.where == where)

    @property
    def lacking(self) -> list[str]:
        """The places that have less room than the run needs."""
        return [where for where, free in self.room.items() if self.total(where) > free]

    def lines(self) -> list[Sequence[str]]:
        """The table, with the totals and what is free."""
        rows: list[Sequence[str]] = [("what", "where", "size", "how it is known")]
        for where, free in self.room.items():
            rows += [(n.what, where, human_bytes(n.size), n.how) for n in self.needs if n.where == where and n.size]
            rows += [("in all", where, human_bytes(self.total(where)), f"free: {human_bytes(free)}"), ()]
        return rows


def estimate(config: Config) -> Estimate:
    """What ``config`` takes on this machine.

    Raises:
        UserError: as when the run starts.
    """
    device, skeleton = device_of(config), build_skeleton(config)
    found = Estimate([], _room(config, device))
    on = "device" if device.type == "cuda" else "memory"
    processes = processes_of(config)
    copies = fullest(processes, range(torch.cuda.device_count())) if device.type == "cuda" else processes
    base = _base(skeleton, config)
    # On the CPU, processes map the weights of a checkpoint, which are then in memory once. Elsewhere the run's own
    # process, which trains only where it is the only one, has a model beside theirs.
    mapped = on == "memory" and not config.quantised and config.dtype == "float32"
    models = 1 if mapped else copies + (processes > 1)
    how = "arithmetic, from the model's configuration" + f", {models} times" * (models > 1)
    found.needs.append(Need("base", base * models, on, how))
    if base <= found.room[on] or config.model.device_map:
        try:
            _probed(config, found, on, copies)
        except torch.OutOfMemoryError:
            found.needs.append(Need("activations", found.room[on], on, "a step took more than is free"))
    found.advice = _advice(config, found, on)
    return found


def fullest(processes: int, gpus: Sequence[int]) -> int:
    """How many of ``processes`` share the GPU that has most of them, when they take ``gpus`` in turn."""
    return max(Counter(gpus[rank % len(gpus)] for rank in range(processes)).values())


def _room(config: Config, device: torch.device) -> dict[str, float]:
    """By place, how many bytes are free."""
    room: dict[str, float] = {"memory": float(psutil.virtual_memory().available)}
    if device.type == "cuda":
        gc.collect()  # what an earlier probe has left: a model and the hooks on it refer to each other
        torch.cuda.empty_cache()
        places = range(torch.cuda.device_count()) if config.model.device_map else [device]
        room = {"device": float(sum(torch.cuda.mem_get_info(place)[0] for place in places)), **room}
    folder = outdir_of(config).absolute()
    while not folder.exists():
        folder = folder.parent
    return {**room, "disk": float(shutil.disk_usage(folder).free)}


def _base(skeleton: nn.Module, config: Config) -> float:
    """Bytes of the weights as they are loaded."""
    chosen = to_quantise(skeleton, config) if config.quantised else set()
    plain, total = getattr(torch, config.dtype).itemsize, 0.0
    for name, parameter in skeleton.named_parameters():
        path, _, part = name.rpartition(".")
        if path not in chosen or part != "weight":
            total += parameter.numel() * plain
        elif config.quantised == "int8":
            total += parameter.numel() + 4 * parameter.shape[0]
        else:  # a scale for 64 numbers, of four bytes, or of one and a share of another
            total += parameter.numel() * (0.5 + (0.0159 if config.lowrank.double_quant else 0.0625))
    return total


def _probed(config: Config, found: Estimate, on: str, copies: int) -> None:
    """Load data and model, take a step, and add what that shows."""
    workspace = Workspace(config)
    method, model = workspace.method, workspace.model
    sizes = np.array([len(examples) for examples in workspace.data.clients[:1000]])
    widest = max(config.variants(), key=lambda own: own.dataloader.batch_size)
    examples = largest_batch(workspace.data.train, widest)
    together = found.together = Trainer(workspace).cohort
    kept = step(workspace, examples)
    trained = set_trainable(model, method.phases(1, 1)[0].train)
    numbers = sum(p.numel() for p in trained)
    state = _optimizer_state(trained, config)
    needs = found.needs
    needs[0] = Need("base", needs[0].size, on, needs[0].how + ", loaded")
    needs.append(Need("adapters and gradients", copies * together * 8 * numbers, on, "arithmetic"))
    needs.append(Need("optimizer", copies * together * state, on, f"a step of {config.train.optimizer.type}"))
    how = f"a step of {len(examples)} samples of up to {int(examples.lengths.max())} tokens"
    if together > 1:
        how += f", for {together} clients at once"
    needs.append(Need("activations", copies * together * kept, on, how))
    if workspace.prefix is not None:
        where = "disk" if config.train.cache_frozen_dir else "memory"
        needs.append(Need("states of frozen layers", workspace.prefix.planned, where, "arithmetic, if all are stored"))
        if not config.train.cache_frozen_dir:
            most = min(workspace.prefix.planned, config.train.cache_frozen_shared)
            needs.append(Need("states for other runs", most, "disk", "the same, up to train.cache_frozen_shared"))
    shared, first = (
        nbytes(method.view(workspace.initial_state)),
        (method, 1, 1, workspace.initial_state, config, workspace.schedule),
    )
    exchanges = method.exchanges(workspace.initial_state, 1)
    sent = max(nbytes(Task(*first, exchange=exchange).expected) for exchange in exchanges)
    needs.append(Need("updates of a round", config.sampled_per_round * sent, "memory", "arithmetic"))
    personal = len(workspace.clients) * nbytes(workspace.personal.untrained)
    needs.append(Need("clients' own tensors", personal, "memory", "arithmetic"))
    if config.lowrank.checkpoint_freq:
        one = shared + personal + nbytes(workspace.changed_base())
        often = config.lowrank.keep_checkpoints + 1
        needs.append(Need("checkpoints", often * one, "disk", f"arithmetic, {often} while one is written"))
    _add_time(found, workspace, sizes)


def largest_batch(examples: Any, config: Settings) -> Any:
    """The longest of ``examples``, as many as a batch has: no client's batch is larger."""
    loads, lengths = config.dataloader, np.sort(examples.lengths)[::-1]
    count = loads.batch_size
    if loads.batch_tokens:
        count = max(1, loads.batch_tokens // int(lengths[0]))
    return examples.select(np.argsort(-examples.lengths, kind="stable")[: min(count, len(examples))])


def step(workspace: Workspace, examples: Any) -> float:
    """Bytes that a training step keeps for its backward pass."""
    return _noted(workspace, lambda: kept_for_backward(workspace), examples)


def _noted(
    workspace: Workspace,
    within: Callable[[], AbstractContextManager[list[float]]],
    examples: Any,
    steps: int = 1,
    **how: Any,
) -> float:
    """What ``within`` notes of a training of so many steps, which begins and ends with the model as client 1 begins."""
    keys = {"train.batch_or_epoch": "batch", "grad.grad_accum_count": 1, "train.local_update_steps": steps}
    phases = [replace(phase, steps=None) for phase in workspace.method.phases(1, 1)[:1]]
    before: State = {n: t.clone() if isinstance(t, Tensor) else t for n, t in workspace.initial_state.items()}
    workspace.load_client(before, 1)
    options: dict[str, Any] = {
        "lr": workspace.config.train.optimizer.lr,
        "seed": derive(workspace.config.seed, "probe"),
        **how,
    }
    with within() as found:
        train_client(
            workspace.model, examples, phases, workspace.config.replace(keys), reads=workspace.reads, **options
        )
    workspace.load_client(before, 1)
    return found[0]


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Notes the seconds of the block, with those that ``device`` still computes after it."""
    wait(device)
    found, started = [0.0], time.perf_counter()
    yield found
    wait(device)
    found[0] = time.perf_counter() - started


@contextmanager
def kept_for_backward(workspace: Workspace) -> Iterator[list[float]]:
    """Notes how many bytes are kept at most for a backward pass within the block; weights do not count."""
    found = [0.0]
    if workspace.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(workspace.device)
        held = torch.cuda.memory_allocated(workspace.device)
        yield found
        found[0] = float(torch.cuda.max_memory_allocated(workspace.device) - held)
        return
    weights = {t.untyped_storage().data_ptr() for t in [*workspace.model.parameters(), *workspace.model.buffers()]}
    weights |= {t.untyped_storage().data_ptr() for t in beside(workspace.model).values()}
    now: dict[int, int] = {}

    def pack(tensor: Tensor) -> tuple[Tensor, dict[int, int]]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            now[storage.data_ptr()] = storage.nbytes()
            found[0] = max(found[0], float(sum(now.values())))
        return tensor, now

    def unpack(packed: tuple[Tensor, dict[int, int]]) -> Tensor:
        now.clear()  # the backward pass has begun, and the next forward pass keeps its own
        return packed[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield found


def _optimizer_state(parameters: list[nn.Parameter], config: Config) -> float:
    """Bytes that the client's optimizer keeps beside ``parameters``."""
    copied = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
    for parameter in copied:
        parameter.grad = torch.ones_like(parameter)
    kind = config.train.optimizer
    optimizer = make_optimizer(copied, kind.type, kind.lr, kind.extra)
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return float(sum(t.nbytes for t in held))


def _add_time(found: Estimate, workspace: Workspace, sizes: np.ndarray) -> None:
    """Steps of the whole run, and its seconds with its evaluations, divided among its processes; clients one by one, by
    a round of the one of median size. What is computed once of frozen layers is left out.
    """
    config, train, loads = workspace.config, workspace.config.train, workspace.config.dataloader
    processes = processes_of(config)
    batch = loads.batch_size
    if loads.batch_tokens:
        batch = max(1, int(loads.batch_tokens / float(workspace.data.train.lengths.mean())))
    each = float(np.ceil(sizes / batch).mean()) if train.batch_or_epoch == "epoch" else config.grad.grad_accum_count
    rounds = range(1, config.federate.total_round_num + 1)
    phases = [phase for t in rounds for phase in workspace.method.phases(t, 1)]
    steps = sum(train.local_update_steps if phase.steps is None else phase.steps for phase in phases)
    found.steps = float(each * steps * config.sampled_per_round)
    size = config.eval_batch_size
    for split, name in SPLITS.items():
        if (examples := getattr(workspace.data, name)) is not None:
            few = examples.select(np.arange(min(size, len(examples))))
            with _timed(workspace.device) as seconds:
                batch_scores(workspace.model, few, size, owner=f"{split} probed", reads=workspace.reads)
            found.scoring[split] = seconds[0] * math.ceil(len(examples) / size)
    client, timed = int(np.argsort(sizes)[len(sizes) // 2]), partial(_timed, workspace.device)
    probe: dict[str, Any] = {
        "examples": workspace.data.clients[client],
        "owner": f"client {client + 1}",
        "prefix": workspace.prefix,
    }
    _noted(workspace, timed, **probe)  # the first also prepares what later ones find
    a_round = max(1, min(_MOST_STEPS, round(each * steps / len(rounds))))
    training = found.steps * _noted(workspace, timed, steps=a_round, **probe) / a_round
    often = sum(evaluation_due(config, t) for t in rounds)
    found.seconds = (training + often * sum(found.scoring[split] for split in workspace.held_out())) / processes


def _advice(config: Config, found: Estimate, on: str) -> list[str]:
    """Keys to change, for what is largest where there is too little room."""
    halved = f"dataloader.batch_size {max(1, config.dataloader.batch_size // 2)}"
    if config.dataloader.batch_tokens:
        halved = f"dataloader.batch_tokens {config.dataloader.batch_tokens // 2}"
    smaller_batch = f"{halved} grad.grad_accum_count {2 * config.grad.grad_accum_count}"
    of_base = ["lowrank.dtype nf4, or bfloat16", "model.device_map auto: more GPUs, or memory and disk"]
    of_step = ["train.checkpointing True", smaller_batch, "a smaller llm.tok_len", "train.cohort off"]
    if config.is_vision:
        of_base, of_step = ["a smaller lowrank.width"], [smaller_batch]
    said = {"base": of_base, **dict.fromkeys(("activations", "adapters and gradients", "optimizer"), of_step)}
    others = ["train.cache_frozen_dir FOLDER on a disk, or a smaller train.cache_frozen_bytes"]
    on_disk = ["lowrank.keep_checkpoints 1, or train.cache_frozen_shared 0; or another outdir"]
    advice: list[str] = []
    for where in found.lacking:
        largest = max((n for n in found.needs if n.where == where), key=lambda n: n.size).what
        advice += on_disk if where == "disk" else said.get(largest, others)
        if where == on and config.federate.process_num != 1:
            advice.append("federate.process_num 1: every process has a model of its own")
    return list(dict.fromkeys(advice))
