"""Modules that a program gives, without a name or folder: they are held while a run goes on.

``model.type: NAME@object`` is the module that is held. It takes ``input_ids`` and ``attention_mask`` (or fewer) and
gives logits, or something with ``logits``. Its head is the module with a head's name (``names.tags``), else the
linear module at its top whose output the logits are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import UserError, say_once, user_errors
from ..settings import Settings
from .names import refuse_reserved, tags

SUFFIX = "@object"
#: modules that PEFT adds, or a model of it has
_OF_PEFT = """
    base_model.model base_layer default lora_dropout lora_A lora_B lora_embedding_A lora_embedding_B
    lora_magnitude_vector
""".split()
_held: list[tuple[nn.Module, Any]] = []


def is_given(config: Settings) -> bool:
    """Whether the model of ``config`` is a module that is held."""
    return config.model.type.endswith(SUFFIX)


@contextmanager
def holding(module: nn.Module, tokenizer: Any) -> Iterator[None]:
    """In the block, ``model.type: NAME@object`` is ``module``, of which runs take copies."""
    _held.append((module, tokenizer))
    try:
        yield
    finally:
        _held.pop()


def held(config: Settings) -> tuple[nn.Module, Any]:
    """The module and its tokenizer.

    Raises:
        UserError: none is held.
    """
    if not _held:
        raise UserError(
            f"model.type = {config.model.type}: a module that a program gave; give it again, with run(config, model=…, "
            "tokenizer=…)"
        )
    return _held[-1]


def copy_of_held(config: Settings, num_labels: int | None = None) -> nn.Module:
    """A copy of the module that is held, whose output has ``loss`` and ``logits``, in the run's dtype.

    Args:
        num_labels: of the data, which the last dimension of the logits has to be; None: not known.
    Raises:
        UserError: it has other outputs.
    """
    from transformers import PreTrainedConfig

    module = copy.deepcopy(held(config)[0]).to(getattr(torch, config.dtype))
    refuse_reserved(module, f"model.type = {config.model.type}")
    cls = type(module)
    parameters = inspect.signature(cls.forward).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def forward(self: nn.Module, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        arguments = inputs if everything else {name: value for name, value in inputs.items() if name in parameters}
        output = cls.forward(self, **arguments)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        plain = labels is not None and labels.ndim == 1 and not labels.is_floating_point()
        loss = nn.functional.cross_entropy(logits.float(), labels) if plain and labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits)

    # Its class and not its forward, so that PEFT's copies of the module have it, too; the tensors keep their names.
    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    if not hasattr(module, "config"):
        vars(module)["config"] = PreTrainedConfig()
    vars(module)["own_heads"] = []
    if num_labels is not None:
        candidates = _check(module, num_labels)
        vars(module)["own_heads"] = heads = [name for name in candidates if _can_be_head(module, name, config)]
        for head in heads if config.llm.adapter.use else ():
            say_once(f"model.type = {config.model.type}: its head is {head}, whose output the logits are")
    vars(module)["new_weights"] = []
    return module.eval()


def _can_be_head(module: nn.Module, name: str, config: Settings) -> bool:
    """Whether PEFT can train the module ``name`` at the top as a head, and nothing says that it is none."""
    base = getattr(module, "base_model_prefix", "")
    has_head = (
        base and hasattr(module, str(base)) or any("head" in tags(f"{n}.weight") for n, _ in module.named_children())
    )
    adapted = config.llm.adapter.use and name in (config.adapter.target_modules or ())
    frozen = not any(p.requires_grad for p in module.get_submodule(name).parameters())
    # PEFT takes all modules whose names end like a head's for heads, its own among them.
    names = [*(n for n, _ in module.named_modules() if n != name), *_OF_PEFT]
    return not (has_head or adapted or frozen or any(n.endswith(name) for n in names))


@torch.no_grad()
def _check(module: nn.Module, num_labels: int) -> list[str]:
    """Refuse other outputs; returns the names of the linear modules at the top whose output the logits are."""
    outputs: dict[str, Any] = {}
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device)
    called = f"model: {type(module).__name__}, called with input_ids and attention_mask of one text,"
    with ExitStack() as stack, user_errors(called, "expected logits, or something with logits"):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                hook = child.register_forward_hook(lambda *call, name=name: outputs.update({name: call[-1]}))
                stack.enter_context(hook)
        logits = module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        shape = tuple(logits.shape)
    if shape != (1, num_labels):
        raise UserError(
            f"model: {type(module).__name__} gives logits of the shape {shape} for one text, and the data has "
            f"{num_labels} labels; expected {(1, num_labels)}"
        )
    return [name for name, out in outputs.items() if out.data_ptr() == logits.data_ptr() and out.shape == logits.shape]
