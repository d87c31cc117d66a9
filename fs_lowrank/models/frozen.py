"""Nothing frozen is computed twice.

Below the first layer with a trainable parameter no gradient flows, and with dropout off there the hidden
states of a sample are the same in every epoch and round. They are computed once a sample and kept; while a
batch runs, the layers below pass their input through and the first layer above is given the kept states.

That is exact where the blocks stand in one ``ModuleList``, hand on nothing but hidden states, and these do not
depend on how far a batch is padded: in BERT, DeBERTa, GPT-2, Llama and most others, but not in XLM, XLNet, FNet
or ConvBERT. A few samples are run both ways before anything trains; where the outcomes differ, nothing is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError
from .adapters import layer_stack
from .names import tags

logger = logging.getLogger("fs_lowrank")

_BATCH = 32
#: samples that are run with kept states and without, before anything is kept
_TRIED = 4


class FrozenPrefix:
    """The blocks below the first trainable one, and the hidden states that leave them.

    Args:
        model: the adapted model.
        trainable: tags of all parameters that any phase trains.
        limit: bytes of hidden states to keep, at most; the rest is computed anew each time.
        folder: keep the states in memory-mapped files there instead of in memory.
    """

    def __init__(self, model: nn.Module, trainable: set[str], limit: float, folder: str | Path | None = None):
        self.model = model
        stack = layer_stack(model)
        self.layers = list(stack[1]) if stack else []
        name = stack[0] + "." if stack else ""
        learns = [n for n, _ in model.named_parameters() if tags(n) & trainable]
        in_stack = [int(n.removeprefix(name).split(".")[0]) for n in learns if stack and n.startswith(name)]
        # A trainable tensor outside the blocks is a head above them, or an embedding below, which forbids it.
        below = [n for n in learns if not n.startswith(name) and "head" not in tags(n)]
        self.depth = min(in_stack, default=len(self.layers)) if not below else 0
        if self.depth >= len(self.layers):
            self.depth = 0 if not self.layers else min(self.depth, len(self.layers) - 1)
        self.learns = frozenset(learns)
        self.limit, self.folder = limit, Path(folder) if folder else None
        self.below: list[nn.Module] = []
        #: of each block that has run: how many outputs it gives, 0 for a bare tensor
        self.outputs: dict[nn.Module, int] = {}
        self.kept: dict[str, tuple[Tensor, np.ndarray]] = {}
        self.budget: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return self.depth > 0

    def eval_below(self) -> None:
        """Dropout off in everything that runs before the first trainable block; call after ``model.train()``."""
        for module in self.below:
            module.training = False

    def plan(self, owners: dict[str, tuple[object, float]]) -> None:
        """Decide once, by use and size and in the order given, whose states are kept.

        The decision must not depend on who trained first: a run that resumes has to make the same one.
        Where the model does not give the same with kept states, a warning says why and nothing is kept.

        Args:
            owners: name -> (examples, how often the run will go through them). Keeping costs one pass, so
                what is seen less than twice is not kept.
        Raises:
            UserError: states are to be kept in a folder that cannot be made or written to.
        """
        if self:
            self._probe(next(iter(owners.values()))[0])
        if not self:
            return
        left = self.limit
        for owner, (examples, passes) in owners.items():
            size = int(examples.lengths.sum()) * self.width * self.dtype.itemsize
            self.budget[owner] = passes >= 2 and size <= left
            left -= size if self.budget[owner] else 0
        kept = [examples for owner, (examples, _) in owners.items() if self.budget[owner] and len(examples)]
        wrong = self._differs(kept) if kept else ""
        if wrong:
            inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            logger.warning(
                "train.cache_frozen: %s's layers cannot be left out (%s); the frozen layers are computed each time",
                type(inner).__name__,
                wrong,
            )
            self.budget = dict.fromkeys(owners, False)
        elif kept and self.folder:
            _make(self.folder)

    @contextlib.contextmanager
    def states(self, owner: str, examples, indices: np.ndarray) -> Iterator[None]:
        """While open, a forward pass of the batch ``indices`` starts from the kept states of ``owner``."""
        if not self or not self.budget.get(owner):
            yield
            return
        if owner not in self.kept:
            self.kept[owner] = self._compute(owner, examples)
        buffer, starts = self.kept[owner]
        device = next(self.model.parameters()).device
        rows = [buffer[starts[i] : starts[i + 1]] for i in indices]
        states = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        with self._bypass(states):
            yield

    @contextlib.contextmanager
    def _bypass(self, states: Tensor) -> Iterator[None]:
        """While open, the blocks below pass on what they are given, and the first trainable one gets ``states``.

        ``forward`` is replaced on the instance, since no hook of torch's can leave a module's own computation out.
        That a model bears it is tried on samples first (``_differs``).
        """

        def give(module, args, kwargs):
            if args:
                return (states, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": states}

        below = self.layers[: self.depth]
        handle = self.layers[self.depth].register_forward_pre_hook(give, with_kwargs=True)
        try:
            for layer in below:
                layer.forward = _passing(self.outputs.get(layer, 0))
            yield
        finally:
            handle.remove()
            for layer in below:
                layer.__dict__.pop("forward", None)

    @torch.no_grad()
    def _probe(self, examples) -> None:
        """Run one sample up to the first trainable block, to see what runs below it and what enters it."""
        seen: dict[nn.Module, None] = {}

        def note(module, args, output):
            seen[module] = None
            if module in self.layers:
                self.outputs[module] = len(output) if isinstance(output, tuple) else 0

        hooks = [m.register_forward_hook(note) for m in self.model.modules()]
        try:
            states = self._hidden(examples, np.arange(1))
        finally:
            for hook in hooks:
                hook.remove()
        if states is None:  # the blocks are not what runs on this data
            self.depth = 0
            return
        self.width, self.dtype = states.shape[-1], states.dtype
        # With their parts, also those that run in training only.
        self.below = list({part: None for module in seen for part in module.modules()})
        frozen = {id(p) for module in self.below for p in module.parameters()}
        if any(id(p) in frozen for n, p in self.model.named_parameters() if n in self.learns):
            self.depth = 0  # something of modules_to_save that trains, such as an embedding, runs below the blocks

    @torch.no_grad()
    def _differs(self, owners: list) -> str:
        """What is wrong with kept states in this model, by a few short samples run both ways; empty if nothing is.

        The states are those of each sample alone, the batch is padded: a batch holds samples of one owner, so
        where none has samples of two lengths, padding need not be tried. Done as in evaluation and as in training,
        with the same dropout; random numbers and the model's mode are afterwards as before.
        """
        examples = max(owners, key=lambda e: min(len(np.unique(e.lengths)), _TRIED))
        lengths = examples.lengths
        _, first = np.unique(lengths, return_index=True)
        chosen = np.concatenate([first, np.setdiff1d(np.arange(len(lengths)), first)])[:_TRIED]
        device = next(self.model.parameters()).device
        batch = {k: v.to(device) for k, v in examples.batch(chosen).items() if k != "labels"}
        modes = {m: m.training for m in self.model.modules()}
        # The error of a rounding grows from layer to layer.
        allowed = max(1e-4, 8 * torch.finfo(self.dtype).eps)
        try:
            rows = [self._hidden(examples, np.array([i]))[0] for i in chosen]
            for row, i in zip(rows, chosen):
                if row.shape != (lengths[i], self.width):
                    return f"the states of {lengths[i]} tokens come as {tuple(row.shape)}"
            states = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            for training in (False, True):
                self.model.train(training)
                self.eval_below()
                plain = self._ends(batch)
                with self._bypass(states):
                    ends = self._ends(batch)
                for what, a, b in zip(("logits", "states"), plain, ends):
                    apart, scale = float((a - b).abs().max()), float(a.abs().max())
                    if not apart <= allowed * scale:  # NaN too
                        return f"{what} up to {scale:.2g} differ by {apart:.2g}"
        except Exception as error:  # whatever a model's code may say to inputs it does not expect
            return f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            for module, was in modes.items():
                module.training = was
        return ""

    def _ends(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Logits, and what leaves the last block, where there is no padding; dropout draws the same each time."""
        left: list[Tensor] = []
        hook = self.layers[-1].register_forward_hook(
            lambda module, args, output: left.append(output[0] if isinstance(output, tuple) else output)
        )
        device = batch["input_ids"].device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(0)
                logits = self.model(**batch).logits
        finally:
            hook.remove()
        real = batch["attention_mask"].bool()
        return [t[real].float() if t.ndim == 3 else t.float() for t in (logits, left[0])]

    @torch.no_grad()
    def _hidden(self, examples, indices: np.ndarray) -> Tensor | None:
        """What enters the first trainable block for a batch, ``(len(indices), longest, width)``; dropout off.

        None where that block does not run, or is given no ``hidden_states``.
        """
        seen: list[Tensor | None] = []

        def catch(module, args, kwargs):
            seen.append(args[0] if args else kwargs.get("hidden_states"))
            raise _Enough

        device = next(self.model.parameters()).device
        batch = {k: v.to(device) for k, v in examples.batch(indices).items() if k != "labels"}
        training = {m: m.training for m in self.model.modules()}
        self.model.eval()
        hook = self.layers[self.depth].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with contextlib.suppress(_Enough):
                self.model(**batch)
        finally:
            hook.remove()
            for module, was in training.items():
                module.training = was
        return seen[0] if seen else None

    def _compute(self, owner: str, examples) -> tuple[Tensor, np.ndarray]:
        """Hidden states of every sample, in fixed batches, so that they never depend on what ran before."""
        lengths = examples.lengths
        starts = np.concatenate([[0], np.cumsum(lengths)])
        shape, dtype = (int(starts[-1]), self.width), self.dtype
        if self.folder is None:
            buffer = torch.empty(shape, dtype=dtype)
        else:
            path = self.folder / f"{owner}-{os.getpid()}.states"
            _reserve(path, shape[0] * shape[1] * dtype.itemsize)
            buffer = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)
            path.unlink()  # the mapping lives on, and nothing is left behind however the process ends
        order = np.argsort(-lengths, kind="stable")
        for first in range(0, len(order), _BATCH):
            indices = order[first : first + _BATCH]
            for row, i in zip(self._hidden(examples, indices).cpu(), indices):
                buffer[starts[i] : starts[i + 1]] = row[: lengths[i]]
        return buffer, starts


def _passing(outputs: int) -> Callable:
    """A ``forward`` that gives its input back, as the first of so many ``outputs``; 0: as the tensor itself."""

    def forward(hidden_states, *args, **kwargs):
        return (hidden_states, *[None] * (outputs - 1)) if outputs else hidden_states

    return forward


def _make(folder: Path) -> None:
    """Make the folder, and see that a file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"train.cache_frozen_dir: {folder} cannot be used as a folder for the frozen layers' states "
            f"({error.strerror}); name another, or leave the key out to keep them in memory"
        ) from None


def _reserve(path: Path, size: int) -> None:
    """Make the file, with its room on the disk: a mapping that finds the disk full later ends the process."""
    try:
        with open(path, "wb") as file:
            if size and hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(
            f"train.cache_frozen_dir: {path.parent} does not take the {size / 1e6:.3g} MB of the frozen "
            f"layers' states ({error.strerror}); name a folder with room, or say train.cache_frozen: off"
        ) from None


class _Enough(Exception):
    """Ends a forward pass once the states are there."""
