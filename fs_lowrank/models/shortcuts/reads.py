"""The last layer computed for the positions that the loss reads.

A classifier reads one position of the last layer's output, and an answer's loss the positions of the answer. For these
the last layer needs the keys and values of all positions, but queries, output projection and feed-forward only of the
positions that are read.

The layer's own code runs twice. The first pass has all positions and ends where attention hands its keys and values to
the cache that transformers' layers take for generating text. The second has the positions that are read, gets these
keys and values from the cache, and takes over the outputs of the first pass. Its output is put back into its positions,
and the others are zeros, which nobody reads. So no code here is for one family of models; the layers of BERT, RoBERTa,
Llama, Qwen2, GPT-2 and others take such a cache. Queries are not computed in the first pass, except where they come
from the same matrix as keys and values (GPT-2). Before use, results and gradients are compared on a few samples, in
evaluation and with dropout.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import say_once
from ..adapters import layer_stack
from ..kinds import unwrapped
from ..machine import input_device, rounding
from .masks import Masks, comparable, draw, draws
from .trials import Unfit, differing, failure, preserving_modes, rows_to_try

#: the largest share of a batch's positions that may be read; with more, two passes save nothing
_MAX_SHARE = 0.75
#: names of the norm that follows the layers in transformers' models
_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
#: names of the layers' argument for the cache
_CACHES = ("past_key_values", "layer_past")
#: the label of a token without loss
_IGNORED = -100


@dataclass(frozen=True)
class Positions:
    """The positions of a batch of ``(samples, length)`` that are read.

    Attributes:
        index: for each sample the positions to compute, ``(samples, count)``; ``count`` is the largest number of a
            sample, so that samples with fewer have some that are not read.
        rows: the read ones in the flattened batch. filled: the same in the flattened ``index``.
    """

    length: int
    index: Tensor
    rows: Tensor
    filled: Tensor

    @classmethod
    def from_mask(cls, read: Tensor, device: torch.device) -> Positions:
        """From a mask, bool ``(samples, length)``."""
        counts = read.sum(1, keepdim=True)
        count = int(counts.max())
        index = torch.argsort((~read).byte(), dim=1, stable=True)[:, :count]
        filled = torch.arange(count, device=read.device) < counts
        flat = (mask.flatten().nonzero().squeeze(1) for mask in (read, filled))
        index, rows, filled = (t.to(device, non_blocking=True) for t in (index, *flat))
        return cls(read.shape[1], index, rows, filled)

    def take(self, values: Tensor, axis: int = 1) -> Tensor:
        """``values``, ``(samples or 1, …)``, at these positions; ``axis``: the axis of the positions."""
        if values.shape[axis] == 1 and self.length > 1:
            return values  # the same for all positions
        index = self.index.to(values.device, non_blocking=True)
        index = index.view(len(self.index), *[1] * (axis - 1), -1, *[1] * (values.ndim - axis - 1))
        shape = (len(self.index), *values.shape[1:axis], index.shape[axis], *values.shape[axis + 1 :])
        return values.expand(len(self.index), *values.shape[1:]).gather(axis, index.expand(shape))

    def put_back(self, values: Tensor) -> Tensor:
        """``values`` at these positions of ``(samples, length, width)``, and zeros elsewhere."""
        samples, _, width = values.shape
        flat = values.new_zeros(samples * self.length, width)
        rows, filled = (t.to(values.device, non_blocking=True) for t in (self.rows, self.filled))
        return flat.index_copy(0, rows, values.flatten(0, 1)[filled]).view(samples, self.length, width)

    def masks(self) -> Masks:
        """Dropout with the masks of all positions."""
        samples, count = self.index.shape

        def mask(values: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
            axis = len(shape) // 2
            if len(shape) not in (3, 4) or (shape[0], shape[axis]) != (samples, count):
                return draw(values, p, shape)
            return self.take(draw(values, p, (*shape[:axis], self.length, *shape[axis + 1 :])), axis)

        return Masks(mask, count)


class Attending:
    """A layer that can be run until attention hands its keys and values to the cache that it is given."""

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.signature = inspect.signature(layer.forward)
        #: the layer's argument for the cache; in some models it is among those that are passed on
        self.cache = next((name for name in _CACHES if name in self.signature.parameters), _CACHES[0])

    def arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The layer's input, and its other arguments by name."""
        arguments = dict(self.signature.bind(*args, **kwargs).arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        return arguments.pop("hidden_states"), arguments

    def run(self, states: Tensor, arguments: Mapping[str, Any]) -> Cache:
        """The cache with keys and values of all positions.

        Raises:
            Unfit: the layer runs to its end without handing them out.
        """
        cache = Cache()
        with contextlib.suppress(Enough):
            self.layer.forward(states, **{**arguments, self.cache: cache})
        if cache.stored is None:
            raise Unfit("its layers hand keys and values to no cache")
        return cache

    def modules_on_the_way(self, states: Tensor, arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor], Cache]:
        """By name the outputs, ``(samples, length, …)``, of all modules that ran, and the cache."""
        outputs: dict[str, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for name, module in self.layer.named_modules():
                if name:
                    stack.enter_context(module.register_forward_hook(noting(outputs, name)))
            cache = self.run(states, arguments)
        return {name: t for name, t in outputs.items() if t.shape[:2] == states.shape[:2]}, cache

    def needed(self, states: Tensor, arguments: Mapping[str, Any]) -> tuple[list[str], dict[str, torch.Size]]:
        """The outermost modules on the way that keys and values depend on, and the shapes of the others' outputs."""
        with torch.enable_grad():
            outputs, cache = self.modules_on_the_way(states.detach().requires_grad_(), arguments)
            together = torch.stack([t.sum() for t in cache.stored or ()]).sum()
        outputs = {name: t for name, t in outputs.items() if t.requires_grad}
        outer = outermost(outputs)
        gradients = torch.autograd.grad(together, [outputs[n] for n in outer], allow_unused=True)
        needed = [n for n, g in zip(outer, gradients) if g is not None]
        return needed, {n: outputs[n].shape[2:] for n in outer if n not in needed}


@dataclass(frozen=True)
class Checked:
    """What ``OnlyRead.check`` found out about a model. It holds for copies of the model, too.

    Attributes:
        shared: modules of the last layer that the first pass computes, by name. unneeded: those it need not -> their
            output's shape after the first two axes.
        usable: whether results are exact in evaluation. usable_in_training: also with dropout.
    """

    shared: tuple[str, ...] = ()
    unneeded: Mapping[str, torch.Size] = field(default_factory=dict)
    usable: bool = False
    usable_in_training: bool = False


class OnlyRead:
    """Computes the last layer of ``model`` for the positions that are read, if it was ``checked`` to be exact."""

    def __init__(self, model: nn.Module, checked: Checked | None = None):
        self.model, self.checked = model, checked or Checked()
        stack = layer_stack(model)
        self.layer = stack[1][-1] if stack else nn.Identity()
        above = model.get_submodule(stack[0].rpartition(".")[0]) if stack else None
        norms = [norm for name in _NORMS if isinstance(norm := getattr(above, name, None), nn.Module)]
        #: the module after which the positions are put back
        self.end = norms[0] if norms else self.layer
        self.attending = Attending(self.layer)
        self.causal = any(getattr(module, "is_causal", False) is True for module in self.layer.modules())

    def __bool__(self) -> bool:
        return self.checked.usable

    def positions(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Which positions of a batch are read, bool ``(samples, length)``.

        An encoder's classifier reads the first, a causal one the last that is not the padding token, by the rule of
        transformers' models; for token labels, those before a token with a label.
        """
        ids, labels = batch["input_ids"], batch.get("labels")
        read = torch.zeros_like(ids, dtype=torch.bool)
        if labels is not None and labels.ndim == 2 and not labels.is_floating_point():
            read[:, :-1] = labels[:, 1:] != _IGNORED
            return read
        last = torch.zeros_like(ids[:, 0])
        if self.causal:
            config: Any = self.model.config
            pad = config.get_text_config().pad_token_id
            count = torch.arange(ids.shape[1], device=ids.device)
            last = last - 1 if pad is None else (count * (ids != pad)).argmax(1)
        read[torch.arange(len(ids), device=ids.device), last] = True
        return read

    @contextlib.contextmanager
    def reading(self, batch: Mapping[str, Tensor], device: torch.device | None = None) -> Iterator[None]:
        """A context for one forward pass of ``batch``, with its labels; other positions of the output are zeros.

        Args:
            device: of the model's inputs, if the caller knows it.
        """
        read = self.positions(batch) if (self.checked.usable_in_training if self.layer.training else self) else None
        if read is None or not 0 < int(read.sum(1).max()) <= _MAX_SHARE * read.shape[1]:
            yield
            return
        with self._narrowed(Positions.from_mask(read, device or input_device(self.model))):
            yield

    @contextlib.contextmanager
    def _narrowed(self, positions: Positions) -> Iterator[None]:
        with contextlib.ExitStack() as stack:

            def narrow(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
                states, arguments = self.attending.arguments(args, kwargs)
                if states.shape[:2] != (len(positions.index), positions.length):
                    raise Unfit(f"its layers have {states.shape[1]} positions for {positions.length} tokens")
                drops = draws(layer)
                cache, outputs = self._first_pass(states, arguments, drops)
                for name, output in outputs.items():
                    stack.enter_context(instead(layer.get_submodule(name), giving(positions.take(output))))
                if drops:
                    stack.enter_context(positions.masks())
                second = {name: _selected(value, positions) for name, value in arguments.items()}
                if self.causal and second.get("attention_mask") is None:
                    second["attention_mask"] = _causal_mask(positions, states)
                return (positions.take(states),), {**second, self.attending.cache: cache}

            with (
                self.layer.register_forward_pre_hook(narrow, with_kwargs=True),
                self.layer.register_forward_hook(lambda *_: stack.close(), always_call=True),
                self.end.register_forward_hook(lambda module, args, output: _put_back(output, positions)),
            ):
                yield

    def _first_pass(self, states: Tensor, arguments: Mapping[str, Any], drops: bool) -> tuple[Cache, dict[str, Tensor]]:
        """Keys and values of all positions, and the outputs of the modules that were computed on the way to them.

        Args:
            drops: the layer applies dropout. Then modules that apply it are not left out, since they draw.
        """
        outputs: dict[str, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for name in self.checked.shared:
                stack.enter_context(self.layer.get_submodule(name).register_forward_hook(noting(outputs, name)))
            for name, shape in self.checked.unneeded.items():
                module = self.layer.get_submodule(name)
                if drops and draws(module):
                    stack.enter_context(module.register_forward_hook(noting(outputs, name)))
                else:
                    blank = states.new_zeros(()).expand(*states.shape[:2], *shape)
                    stack.enter_context(instead(module, giving(blank)))
            return self.attending.run(states, arguments), outputs

    # -- before it is trusted --------------------------------------------------------------------------

    def check(self, examples: Any) -> Checked:
        """Compare results and gradients of a few of ``examples`` with the plain forward; use it if they are equal.

        If not, a warning says so once. A padded batch is compared, and a sample alone, for which models make no mask.
        This is done without dropout and then with it; if only the second differs, it is used in evaluation only. Modes
        of the model are restored, and no random numbers are used.
        """
        chosen, device = rows_to_try(examples.lengths), input_device(self.model)
        batches = [examples.batch(rows) for rows in (chosen, chosen[-1:])]
        with preserving_modes(self.model):
            wrong = self._trial(batches, device, training=False)
            usable = not wrong
            wrong = wrong or self._trial(batches, device, training=True)
        self.checked = replace(self.checked, usable=usable, usable_in_training=not wrong)
        if wrong:
            mode = " in training" if usable else ""
            name = type(unwrapped(self.model)).__name__
            say_once(
                f"train.only_read: the last layer of {name} cannot be computed for some positions only{mode} "
                f"({wrong}); it is computed for all"
            )
        return self.checked

    def _trial(self, batches: list[dict[str, Tensor]], device: torch.device, training: bool) -> str:
        """What differs, or fails, in one of the modes; ``""`` if nothing does."""
        self.model.train(training)
        try:
            return self._differs(batches, device)
        except Exception as error:
            return failure(error)

    def _differs(self, batches: list[dict[str, Tensor]], device: torch.device) -> str:
        config: Any = self.model.config
        if getattr(config, "output_router_logits", False):
            return "its loss reads the routers' outputs of all positions"
        for batch in batches:
            inputs = {k: v.to(device) for k, v in batch.items() if k != "labels"}
            if not self.checked.shared:
                self._probe(inputs)
            read = self.positions(batch)
            plain = self._results(inputs, read)
            with self._narrowed(Positions.from_mask(read, device or input_device(self.model))):
                ours = self._results(inputs, read)
            # Gradients are compared all together, because some of them are zero but for rounding.
            for label, a, b in zip(("outputs", "gradients of the input", "gradients", "random numbers"), plain, ours):
                if wrong := differing(label, a, b, rounding(self.model)):
                    return wrong
        return ""

    def _results(self, inputs: dict[str, Tensor], read: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the read positions, gradients of a fixed sum of them (of the layer's input, and parameters), and
        the next random number.
        """
        entered: list[Tensor] = []

        def enter(layer, args, kwargs):
            states, arguments = self.attending.arguments(args, kwargs)
            entered.append(states.detach().requires_grad_())
            return (entered[0],), arguments

        hook = self.layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        device = input_device(self.model)
        with hook, torch.enable_grad(), comparable():
            logits = self.model(**inputs).logits
            number = torch.rand((), device=device)
        logits = (logits[read.to(logits.device)] if logits.ndim == 3 else logits).float()
        weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
        trained = [p for p in self.layer.parameters() if p.requires_grad]
        grad_in, *gradients = torch.autograd.grad((logits * weights).sum(), [entered[0], *trained], allow_unused=True)
        flat = [g.flatten().float() for g in gradients if g is not None]
        return logits.detach(), grad_in.float(), torch.cat(flat) if flat else logits.new_zeros(1), number

    def _probe(self, inputs: dict[str, Tensor]) -> None:
        """Find the modules that the first pass runs, and which of them keys and values do not depend on."""
        results: list[tuple[list[str], dict[str, torch.Size]]] = []

        def probe(layer, args, kwargs):
            results.append(self.attending.needed(*self.attending.arguments(args, kwargs)))
            raise Enough

        with self.layer.register_forward_pre_hook(probe, with_kwargs=True), contextlib.suppress(Enough):
            self.model(**inputs)
        if not results:
            raise Unfit("its last layer does not run")
        needed, unneeded = results[0]
        self.checked = Checked(tuple(needed), unneeded)


def outermost(names: Iterable[str]) -> list[str]:
    """The ``names`` that are not inside another."""
    names = list(names)
    return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]


@contextlib.contextmanager
def instead(module: nn.Module, forward: Callable) -> Iterator[None]:
    """A context in which ``module`` runs ``forward``, replaced on the instance: no hook of torch can skip a module."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            vars(module).pop("forward", None)
        else:
            module.forward = before


class Cache:
    """The ``past_key_values`` of a layer of transformers: ends the first pass, and gives its keys afterwards."""

    def __init__(self) -> None:
        self.stored: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.stored is None:
            self.stored = keys, values
            raise Enough
        return self.stored


def noting(outputs: dict[str, Tensor], name: str) -> Callable:
    def note(module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[name] = output

    return note


def giving(output: Tensor) -> Callable:
    return lambda *args, **kwargs: output


def _selected(value: Any, positions: Positions) -> Any:
    """An argument of the layer for the positions: masks ``(samples, heads, queries, keys)``, other tensors with an
    axis for positions, and pairs of them (cosine and sine)."""
    if isinstance(value, tuple):
        return tuple(_selected(v, positions) for v in value)
    return positions.take(value, value.ndim // 2) if isinstance(value, Tensor) and value.ndim in (2, 3, 4) else value


def _causal_mask(positions: Positions, states: Tensor) -> Tensor:
    """Added to scores: nothing for earlier positions and its own, the smallest number for later ones."""
    index = positions.index.to(states.device, non_blocking=True)
    later = torch.arange(positions.length, device=states.device) > index[:, None, :, None]
    return states.new_zeros(later.shape).masked_fill(later, torch.finfo(states.dtype).min)


def _put_back(output: Any, positions: Positions) -> Any:
    return (positions.put_back(output[0]), *output[1:]) if isinstance(output, tuple) else positions.put_back(output)


class Enough(Exception):
    """Ends a forward pass when keys and values are there."""
