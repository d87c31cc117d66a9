"""What a tensor is, read off its name.

A tag is a word that a method uses to say what trains and what is sent:

========== ==============================================================================
``lora_A``   the down-projection of the shared adapter, ``(r, d_in)``, random at start
``lora_B``   the up-projection of the shared adapter, ``(d_out, r)``, zero at start
``adapter``  any tensor of the shared adapter (also LoHa's and LoKr's)
``personal`` any tensor of an adapter called ``personal``; so for any adapter that is not PEFT's ``default``
``head``     the classifier: a module of that name at the top of the model, or what PEFT keeps in ``modules_to_save``;
             a module of the same name inside the base is base
``rest``     any tensor of ``base`` that carries no adapter; it trains only in a model from scratch
``nested``   a pair nested in the shared one (``models.nested``)
``factor``   a thin factor in the place of a full weight (``models.factorised``)
``x``        a name ``x:…`` is no tensor of the model but what a method keeps or sends beside them
``base``     everything else: the weights the model came with, and the running statistics of its norms
========== ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from torch import Tensor, nn

#: what a head is called; it is one only at the top of the model, beside the base and not inside it
HEAD_MODULES = ("classifier", "score", "fc")
#: what PEFT takes for the head of a classifier, by the end of the name and wherever it stands
PEFT_HEADS = ("classifier", "score")
#: under what PEFT's model holds the model that it wraps
_PEFT_PREFIX = "base_model.model."
_ADAPTER_PARTS = (
    "lora_A",
    "lora_B",
    "hada_w1_a",
    "hada_w1_b",
    "hada_w2_a",
    "hada_w2_b",
    "hada_t1",
    "hada_t2",
    "lokr_w1",
    "lokr_w1_a",
    "lokr_w1_b",
    "lokr_w2",
    "lokr_w2_a",
    "lokr_w2_b",
    "lokr_t2",
)


#: the adapter's tensors that are zero at the start, so that it changes nothing
_ZERO_AT_START = frozenset({"lora_B", "hada_w2_b", "lokr_w1", "lokr_w1_a"})


def zero_at_start(name: str) -> bool:
    """Whether the adapter's tensor called ``name`` starts at zero; the others are drawn."""
    return bool(tags(name) & _ZERO_AT_START)


@lru_cache(maxsize=1 << 16)
def tags(name: str) -> frozenset[str]:
    """The tags of the tensor called ``name`` in ``model.named_parameters()``."""
    if ":" in name:
        return frozenset({name.split(":", 1)[0]})
    parts = name.split(".")
    if "nested" in parts:
        return frozenset({"nested"})
    if parts[-1].startswith("factor_"):
        return frozenset({"factor"})
    for part in _ADAPTER_PARTS:
        if part in parts:
            adapter = parts[parts.index(part) + 1]
            return frozenset({"adapter", part} if adapter == "default" else {adapter})
    if "original_module" in parts:
        return frozenset()  # PEFT's untouched copy of a head: never trained, never sent
    path = name.removeprefix(_PEFT_PREFIX).split(".")
    if "modules_to_save" in path:
        module = path[: path.index("modules_to_save")]
        # Inside the base it is a head only if the user named it; PEFT's own choice is by the end of the name.
        is_head = len(module) == 1 or not module[-1].endswith(PEFT_HEADS)
    else:
        is_head = path[0] in HEAD_MODULES
    if is_head:
        return frozenset({"head"})
    return frozenset({"base"} if parts[-2:] == ["base_layer", "weight"] else {"base", "rest"})


def select(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The names that carry one of the ``wanted`` tags, sorted."""
    wanted = frozenset(wanted)
    return sorted(n for n in names if tags(n) & wanted)


def pairs(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The names ``(B, A)`` of every LoRA pair of the shared adapter in ``tensors``, sorted by layer."""
    downs = select(tensors, {"lora_A"})
    return [(a.replace(".lora_A.", ".lora_B."), a) for a in downs]


def entries(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` under names ``KIND:name``, which are no tensors of the model."""
    return {f"{kind}:{n}": t for n, t in tensors.items()}


def entries_of(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of ``entries``: those of ``tensors`` that are called ``KIND:name``, by ``name``."""
    return {n.removeprefix(f"{kind}:"): t for n, t in tensors.items() if n.startswith(f"{kind}:")}


def is_statistic(name: str) -> bool:
    """Whether ``name`` is a running statistic of a batch-norm: shared and averaged, but no gradient trains it."""
    return name.endswith((".running_mean", ".running_var"))


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own parameters, and the running statistics of its norms (not copies)."""
    return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if is_statistic(n)}}


def named_tensors(model: nn.Module, wanted: Iterable[str]) -> dict[str, Tensor]:
    """The model's own tensors (not copies) that carry one of the ``wanted`` tags, sorted by name."""
    tensors = all_tensors(model)
    return {n: tensors[n] for n in select(tensors, wanted)}
