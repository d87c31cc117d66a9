"""A cache of the hidden states below the first trainable layer, so that frozen layers are not computed twice.

Below the first layer with a trainable parameter, no gradient flows. Without dropout in these layers, the hidden states
of a sample are the same in every epoch and round. They are computed once per sample and cached. For a batch, the frozen
layers return their input, and the first layer above them receives the cached states.

This is exact if the blocks are in one ``ModuleList``, pass only hidden states to the next block, and the states do not
depend on the padding of the batch. That holds for BERT, DeBERTa, GPT-2, Llama and most models, but not for XLM, XLNet,
FNet or ConvBERT. Before training, a few samples are run with and without the cache; if they differ, it is not used.

In the first layer above, keys and values come from the cached states by frozen matrices and the adapters. Outputs of
frozen matrices are cached beside the states, if there is room for those of all samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...algebra import digest
from ...jobs.memo import memoized
from ...jobs.progress import steps
from ...seeds import drawing
from ..adapters import layer_stack
from ..kinds import unwrapped
from ..machine import input_device, machine, rounding
from ..names import tags
from ..quantised import beside, direct_tensors
from .reads import Attending, Enough, giving, instead, outermost
from .states import SharedStates
from .trials import Unfit, differing, failure, preserving_modes, rows_to_try, with_gradients

logger = logging.getLogger("fs_lowrank")

#: number of samples whose states are computed in one batch
COMPUTED_TOGETHER = 32
#: passes over an owner's samples in a run from which on its states are cached. Filling the cache takes one: a run that
#: is never repeated loses half a pass at most, and a run that finds the states of another gains. It does not depend on
#: whether states are stored for others, so that results do not
PASSES = 0.5
#: part of the names of entries for other runs; higher whenever something else is stored, or in another form
_FORMAT = 2


@dataclass(frozen=True)
class Owners:
    """Owners of samples, of whom there may be very many.

    Attributes:
        names, tokens, passes: of each, its name, its number of tokens and of passes over them in the run.
    """

    names: Sequence[str]
    tokens: np.ndarray
    passes: np.ndarray

    @classmethod
    def from_examples(cls, owners: Mapping[str, tuple[Any, float]]) -> Owners:
        """From (examples, number of passes) by name."""
        tokens = np.array([samples.lengths.sum() for samples, _ in owners.values()], np.int64)
        return cls(list(owners), tokens, np.array([passes for _, passes in owners.values()]))


class FrozenPrefix:
    """The cache of the hidden states that enter the first trainable block.

    Args:
        model: the adapted model.
        trainable: tags of all parameters that are trained in any phase.
        limit: maximum size of the cache in bytes; other states are computed each time.
        shared: where states are stored for other runs and processes, if its limit is not 0; None: in memory.
        changing: names of the base weights that the method changes; None: only states are cached, no keys and values.
        fewest: passes over an owner's samples from which on its states are cached.
        decides: all that decides whether a trial succeeds, as for ``memoized``; None: unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: set[str],
        limit: float,
        shared: SharedStates | None = None,
        changing: Collection[str] | None = None,
        fewest: float = PASSES,
        decides: Mapping[str, Any] | None = None,
    ):
        self.model, self.changing, self.fewest, self.decides = model, changing, fewest, decides
        self.shared = shared if shared is not None and shared.limit > 0 else None
        stack = layer_stack(model)
        self.layers = list(stack[1]) if stack else []
        name = stack[0] + "." if stack else ""
        trained = [n for n, _ in model.named_parameters() if tags(n) & trainable]
        in_stack = [int(n.removeprefix(name).split(".")[0]) for n in trained if stack and n.startswith(name)]
        # A trainable tensor outside the blocks is a head above them, or an embedding below, which excludes a cache.
        below = [n for n in trained if not n.startswith(name) and "head" not in tags(n)]
        self.depth = min(in_stack, default=len(self.layers) - 1) if self.layers and not below else 0
        self.trained = frozenset(trained)
        #: the first trainable block's modules whose outputs are cached beside its input -> their widths
        self.parts: dict[str, int] = {}
        self.first = Attending(self.layers[self.depth]) if self.depth else None
        self.path = f"{name}{self.depth}."
        self.limit = limit
        self.below: list[nn.Module] = []
        #: number of outputs of each block that has run; 0 for a bare tensor
        self.outputs: dict[nn.Module, int] = {}
        self._below: dict[str, Any] | None = None
        #: owner -> states of all its samples, and the first row of each sample
        self.cached: dict[str, tuple[Tensor, np.ndarray]] = {}
        #: owner -> whether its states are cached; a client that is not in it has none
        self.budget: dict[str, bool] = {}
        self.planned = 0.0  # bytes of all that is cached

    def __bool__(self) -> bool:
        return self.depth > 0

    def eval_below(self) -> None:
        """Turn off dropout in all modules before the first trainable block; call after ``model.train()``."""
        for module in self.below:
            module.training = False

    def plan(self, owners: Mapping[str, tuple[Any, float]], trial: Any, clients: Owners | None = None) -> None:
        """Decide once whose states are cached: of each owner in the given order, and of those with less than a pass
        last, if they fit into the remaining limit.

        The decision depends on the configuration and the data alone, not on the order of training or on the entries of
        other runs, because a resumed run and the same run in a search have to make the same one. If the results of the
        model differ with cached states, a warning gives the reason and the cache is not used.

        Args:
            owners: name -> (examples, number of passes over them in the run). Examples with fewer than ``fewest``
                are not cached.
            trial: samples of lengths from the shortest to the longest of all owners.
            clients: further owners, who come after ``owners``.
        """
        groups = [Owners.from_examples(owners), *([] if clients is None else [clients])]
        if self:
            self._probe(trial)
        if not self:
            return
        self.parts = self._find_parts(trial)
        used = [np.flatnonzero((group.passes >= self.fewest) & (group.passes > 0)) for group in groups]
        tokens = sum(int(group.tokens[chosen].sum()) for group, chosen in zip(groups, used))
        if tokens * self.columns * self.dtype.itemsize > self.limit:
            self.parts = {}
        self.budget, self.planned = dict.fromkeys(owners, False), 0.0
        for group, chosen in zip(groups, used):
            for i in chosen[np.argsort(group.passes[chosen] < 1, kind="stable")].tolist():
                self._take(group.names[i], int(group.tokens[i]))
        wrong = self._tried(trial) if self.planned else ""
        if wrong and self.parts:
            self.parts = {}
            wrong = self._tried(trial)
        if wrong:
            logger.warning(
                "train.cache_frozen: the cache cannot be used with %s (%s); the frozen layers are computed each time",
                type(unwrapped(self.model)).__name__,
                wrong,
            )
            self.budget, self.planned = dict.fromkeys(owners, False), 0.0

    def add(self, owner: str, examples: Any) -> None:
        """Cache the states of a further owner, too, if the cache is used and they fit into the remaining limit."""
        if self.planned:
            self._take(owner, int(examples.lengths.sum()))

    def _take(self, owner: str, tokens: int) -> None:
        size = tokens * self.columns * self.dtype.itemsize
        if size <= self.limit - self.planned:
            self.budget[owner] = True
            self.planned += size

    @contextlib.contextmanager
    def states_of(self, batch: Sequence[tuple[str, Any, np.ndarray]], device: torch.device) -> Iterator[None]:
        """A context in which the forward pass of a batch uses cached states.

        If only some of its samples have cached states, those of the others are computed first.

        Args:
            batch: owners, their examples, and the indices of the samples.
            device: of the model's inputs.
        """
        if not self or not any(self.budget.get(owner) for owner, _, _ in batch):
            yield
            return
        rows: list[Tensor] = []
        for owner, examples, indices in batch:
            if not self.budget.get(owner):
                states = self._hidden(examples, indices).to(device, non_blocking=True)
                rows += [row[: examples.lengths[i]] for row, i in zip(states, indices)]
                continue
            rows += [self._row(owner, examples, i) for i in indices]
        if len({row.device for row in rows}) > 1:
            rows = [row.to(device, non_blocking=True) for row in rows]
        with self._bypass([part.to(device, non_blocking=True) for part in self._padded(rows)]):
            yield

    def _row(self, owner: str, examples, index: int) -> Tensor:
        """The cached states of one sample; those of all samples of the owner are computed the first time."""
        if owner not in self.cached:
            self.cached[owner] = self._compute(owner, examples)
        states, starts = self.cached[owner]
        return states[starts[index] : starts[index + 1]]

    @property
    def columns(self) -> int:
        """Numbers that are cached for a token."""
        return self.width + sum(self.parts.values())

    def _padded(self, rows: list[Tensor]) -> list[Tensor]:
        """The states of a batch, and the outputs of ``parts``: each ``(samples, longest, width)``."""
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return [piece.contiguous() for piece in padded.split([self.width, *self.parts.values()], -1)]

    @contextlib.contextmanager
    def _bypass(self, pieces: list[Tensor]) -> Iterator[None]:
        """A context in which the blocks below return their input, and the first trainable block receives ``pieces``:
        its input, and what its modules ``parts`` return.

        ``forward`` is replaced on the instance, because no hook of torch can skip the computation of a module.
        ``_differs`` checks on samples that the model gives the same results.
        """

        states, *outputs = pieces

        def give(module, args, kwargs):
            if args:
                return (states, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": states}

        first = self.layers[self.depth]
        with contextlib.ExitStack() as stack:
            stack.enter_context(first.register_forward_pre_hook(give, with_kwargs=True))
            for layer in self.layers[: self.depth]:
                stack.enter_context(instead(layer, _passing(self.outputs.get(layer, 0))))
            for name, output in zip(self.parts, outputs, strict=True):
                stack.enter_context(instead(first.get_submodule(name), giving(output)))
            yield

    def _find_parts(self, examples) -> dict[str, int]:
        """The modules of the first trainable block, and their widths, whose outputs never change: matrices of the base
        that keys and values depend on, whose input is not trained. Queries are cheap where only few are read.

        None on a GPU, which computes them faster than it receives them.
        """
        device = input_device(self.model)
        changing, first = self.changing, self.first
        if changing is None or first is None or device.type != "cpu":
            return {}
        widths: dict[str, int] = {}

        def base(name: str) -> bool:
            module = first.layer.get_submodule(name)
            weights = {f"{self.path}{name}.{n}": p for n, p in module.named_parameters()}
            frozen = all("base" in tags(n) and n not in changing for n in weights)
            return frozen and any(p.ndim > 1 for p in weights.values())

        def probe(states: Tensor, arguments: Mapping[str, Any]) -> None:
            needed, _ = first.needed(states, arguments)
            with torch.enable_grad():
                outputs, _ = first.modules_on_the_way(states.detach(), arguments)
            frozen = outermost(
                name
                for name, t in outputs.items()
                if not t.requires_grad and t.ndim == 3 and t.dtype == self.dtype and base(name)
            )
            within = [n for n in frozen if any(f"{n}.".startswith(f"{other}.") for other in needed)]
            widths.update({n: outputs[n].shape[-1] for n in within})

        try:
            with with_gradients(self.model, self.trained):
                self._hidden(examples, np.arange(1), probe)
        except Exception as error:  # a model's code may raise any error for inputs that it does not expect
            logger.debug("no keys and values are cached: %s", error)
        return widths

    @torch.no_grad()
    def _probe(self, examples) -> None:
        """Run one sample up to the first trainable block, to find the modules below it and its inputs."""
        modules: dict[nn.Module, None] = {}

        def note(module, args, output):
            modules[module] = None
            if module in self.layers:
                self.outputs[module] = len(output) if isinstance(output, tuple) else 0

        with contextlib.ExitStack() as stack:
            for module in self.model.modules():
                stack.enter_context(module.register_forward_hook(note))
            try:
                states = self._hidden(examples, np.arange(1))
            except Unfit:
                self.depth = 0
                return
        self.width, self.dtype = states.shape[-1], states.dtype
        # All submodules, also those that run only in training.
        self.below = list({part: None for module in modules for part in module.modules()})
        frozen = {id(p) for module in self.below for p in module.parameters()}
        if any(id(p) in frozen for n, p in self.model.named_parameters() if n in self.trained):
            self.depth = 0  # a trained module of modules_to_save, such as an embedding, runs below the blocks

    def _tried(self, examples) -> str:
        """``_differs``, or what it said of an equal model."""
        inputs = self.decides and {**self.decides, "cached": [self.depth, self.parts]}
        return memoized(lambda: inputs, lambda: self._differs(examples), len)

    @torch.no_grad()
    def _differs(self, examples) -> str:
        """Compare results with and without cached states on a few samples; returns the difference, or ``""``.

        States are computed for each sample alone and then used in a padded batch. Both evaluation mode and training
        mode are tested, with the same dropout; random state and mode of the model are restored.
        """
        lengths, device, eps = examples.lengths, input_device(self.model), rounding(self.model)
        chosen = rows_to_try(lengths)
        batch = {k: v.to(device) for k, v in examples.batch(chosen).items() if k != "labels"}
        with preserving_modes(self.model):
            try:
                rows = [self._hidden(examples, np.array([i]))[0] for i in chosen]
                for row, i in zip(rows, chosen):
                    if row.shape != (lengths[i], self.columns):
                        return f"the states of {lengths[i]} tokens have shape {tuple(row.shape)}"
                pieces = self._padded(rows)
                for training in (False, True):
                    self.model.train(training)
                    self.eval_below()
                    plain = self._ends(batch)
                    with self._bypass(pieces):
                        ends = self._ends(batch)
                    for label, a, b in zip(("logits", "states"), plain, ends):
                        if wrong := differing(label, a, b, eps):
                            return wrong
            except Exception as error:
                return failure(error)
        return ""

    def _ends(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Logits and outputs of the last block, without padding positions; dropout is the same each time."""
        last_states: list[Tensor] = []
        hook = self.layers[-1].register_forward_hook(
            lambda module, args, output: last_states.append(output[0] if isinstance(output, tuple) else output)
        )
        with hook, drawing(0):
            logits = self.model(**batch).logits
        real = batch["attention_mask"].bool()
        return [t[real].float() if t.ndim == 3 else t.float() for t in (logits, last_states[0])]

    @torch.no_grad()
    def _hidden(self, examples, indices: np.ndarray, use: Callable | None = None) -> Tensor:
        """The input of the first trainable block for a batch and the outputs of ``parts``, without dropout:
        ``(len(indices), longest, columns)``.

        Args:
            use: called with the block's input and its other arguments.

        Raises:
            Unfit: that block does not run, or receives no ``hidden_states``.
        """
        inputs: list[Tensor | None] = []

        def catch(module, args, kwargs):
            states = args[0] if args else kwargs.get("hidden_states")
            inputs.append(states)
            if self.first is not None and (self.parts or use):
                states, arguments = self.first.arguments(args, kwargs)
                if use:
                    use(states, arguments)
                outputs = self.first.modules_on_the_way(states, arguments)[0]
                inputs[0] = torch.cat([states, *(outputs[name].detach() for name in self.parts)], -1)
            raise Enough

        device = input_device(self.model)
        batch = {k: v.to(device, non_blocking=True) for k, v in examples.batch(indices).items() if k != "labels"}
        hook = self.layers[self.depth].register_forward_pre_hook(catch, with_kwargs=True)
        with hook, preserving_modes(self.model), contextlib.suppress(Enough):
            self.model.eval()(**batch)
        if not inputs or inputs[0] is None:
            raise Unfit("its first trained layer does not run")
        return inputs[0]

    def _compute(self, owner: str, examples) -> tuple[Tensor, np.ndarray]:
        """Hidden states of all samples, computed in fixed batches, so that they do not depend on earlier calls."""
        starts = np.concatenate([[0], np.cumsum(examples.lengths)])
        if self.shared is None:
            return self._filled(owner, examples, starts), starts
        return self.shared.get(self._key(examples), lambda: self._filled(owner, examples, starts)), starts

    def _filled(self, owner: str, examples, starts: np.ndarray) -> Tensor:
        lengths, buffer = examples.lengths, torch.empty((int(starts[-1]), self.columns), dtype=self.dtype)
        order = np.argsort(-lengths, kind="stable")
        for first in steps(range(0, len(order), COMPUTED_TOGETHER), "computing frozen layers"):
            indices = order[first : first + COMPUTED_TOGETHER]
            for row, i in zip(self._hidden(examples, indices).cpu(), indices):
                buffer[starts[i] : starts[i + 1]] = row[: lengths[i]]
        return buffer

    def _key(self, examples) -> str:
        """A hash of all that decides the values of the states of ``examples``."""
        if self._below is None:
            tensors = {
                f"{i} {name}": tensor
                for i, module in enumerate(self.below)
                for name, tensor in direct_tensors(module).items()
            }
            if self.parts:
                tensors |= {
                    name: tensor
                    for name, tensor in self.model.named_parameters()
                    if name.startswith(self.path) and "base" in tags(name) and name not in (self.changing or ())
                }
                tensors |= {n: t for n, t in beside(self.model).items() if n.startswith(self.path)}
            config = {k: v for k, v in unwrapped(self.model).config.to_dict().items() if k != "_name_or_path"}
            self._below = {
                "weights": digest(tensors),
                "model": [type(unwrapped(self.model)).__name__, self.depth, config],
                "modules": [type(module).__name__ for module in self.below] + list(self.parts),
                **machine(self.model),
                "together": COMPUTED_TOGETHER,
                "format": _FORMAT,
                "versions": [version(package) for package in ("torch", "transformers", "peft")],
            }
        decided = {**self._below, "dtype": str(self.dtype), "examples": examples.fingerprint()}
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _passing(outputs: int) -> Callable:
    """A ``forward`` that returns its input as the first of ``outputs`` outputs; 0: as a bare tensor."""

    def forward(hidden_states, *args, **kwargs):
        return (hidden_states, *[None] * (outputs - 1)) if outputs else hidden_states

    return forward
