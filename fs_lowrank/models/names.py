"""Tags of tensors, derived from their names. Methods use tags to say what is trained and what is sent:

========== ==============================================================================
``lora_A``   the down-projection of the shared adapter, ``(r, d_in)``, random at start
``lora_B``   the up-projection of the shared adapter, ``(d_out, r)``, zero at start
``adapter``  any tensor of the shared adapter (also LoHa's, IA3's, virtual tokens and others)
``personal`` any tensor of the adapter ``personal``; likewise for any adapter other than PEFT's ``default``
``head``     the classifier: a module at the top of the model whose name is in ``HEAD_MODULES`` or ``HEAD_PARTS`` or
             ends as in ``PEFT_HEADS`` (DistilBERT's ``pre_classifier``), or one that is trained beside an adapter
             (``kinds.heads_by_place``, the user's ``modules_to_save``); a module of such a name inside the base model
             is ``base``. A head of another name without an adapter is known to ``is_head`` only
``rest``     any tensor of ``base`` without an adapter; trained only in a model from scratch
``nested``   a pair nested in the shared one (``models.nested``)
``factor``   a thin factor in place of a full weight (``models.factorised``)
``x``        a name ``x:…`` is not a tensor of the model but an additional one that a method stores or sends, or has put
             beside the model (``methods.put_beside``), as a buffer whose name has ``|`` for every dot
``base``     everything else: the original weights of the model, and the running statistics of its norms
========== ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from ..errors import UserError

#: names of heads; such a module is a head only at the top of the model, not inside the base
HEAD_MODULES = ("classifier", "score", "fc")
#: names, at the top of the model, of parts of a head that only classifiers of transformers have
HEAD_PARTS = ("classification_head", "logits_proj", "sequence_summary")
#: endings of the names of heads: PEFT trains and saves modules with such names, anywhere in the model
PEFT_HEADS = ("classifier", "score")
#: prefix of the wrapped model in PEFT's model
_PEFT_PREFIX = "base_model.model."
#: parts of the names of adapters' tensors, by which they are known
_ADAPTER_PARTS = """
    lora_A lora_B hada_w1_a hada_w1_b hada_w2_a hada_w2_b hada_t1 hada_t2 lokr_w1 lokr_w1_a lokr_w1_b lokr_w2
    lokr_w2_a lokr_w2_b lokr_t2 lora_magnitude_vector vera_lambda_b vera_lambda_d oft_R ia3_l prompt_encoder
""".split()
#: all tags but the prefixes of names with a colon, and the names of adapters other than PEFT's ``default``
TAGS = frozenset({"adapter", "personal", "head", "rest", "nested", "factor", "base", *_ADAPTER_PARTS})
#: ends of the names of a norm's running statistics
_STATISTICS = (".running_mean", ".running_var")
#: tensors of adapters that are initialised to zero, so that the adapter has no effect
_ZERO_AT_START = frozenset({"lora_B", "hada_w2_b", "lokr_w1", "lokr_w1_a"})


def zero_at_start(name: str) -> bool:
    """Whether the adapter tensor ``name`` is initialised to zero; other tensors are random."""
    return bool(tags(name) & _ZERO_AT_START)


@lru_cache(maxsize=1 << 16)
def tags(name: str) -> frozenset[str]:
    """The tags of tensor ``name``, a name of ``model.named_parameters()``."""
    if ":" in name:
        return frozenset({name.split(":", 1)[0]})
    parts = name.split(".")
    if "nested" in parts:
        return frozenset({"nested"})
    if parts[-1].startswith("factor_"):
        return frozenset({"factor"})
    for part in _ADAPTER_PARTS:
        if part in parts:
            adapter = (parts[parts.index(part) + 1 :] or ["default"])[0]  # PEFT saves names without the adapter's
            return frozenset({"adapter", part} if adapter == "default" else {adapter})
    if "original_module" in parts:
        return frozenset()  # PEFT's untouched copy of a head: never trained, never sent
    path = name.removeprefix(_PEFT_PREFIX).split(".")
    if "modules_to_save" in path:
        # With virtual tokens, PEFT's model holds the base without a wrapper of its own.
        module = path[path[0] == "base_model" : path.index("modules_to_save")]
        # Inside the base it is a head only if the user named it; PEFT chooses by the end of the name.
        is_head = len(module) == 1 or not module[-1].endswith(PEFT_HEADS)
    else:
        is_head = path[0] in (*HEAD_MODULES, *HEAD_PARTS) or path[0].endswith(PEFT_HEADS)
    if is_head:
        return frozenset({"head"})
    return frozenset({"base"} if parts[-2:] == ["base_layer", "weight"] else {"base", "rest"})


def refuse_reserved(model: nn.Module, label: str) -> None:
    """Refuse a model without an adapter that has a parameter with the name of a tensor that methods add.

    Raises:
        UserError: it would count as one of them, and never be trained or sent.
    """
    for name, _ in model.named_parameters():
        reserved = {*_ADAPTER_PARTS, "original_module", "modules_to_save"} & {*name.split(".")}
        if reserved or tags(name) - {"base", "rest", "head"}:
            raise UserError(
                f"{label}: its parameter {name!r} has a name that methods and PEFT use for what they add, so it "
                "would count as added; give the module or the parameter another name"
            )


def is_head(name: str, heads: Iterable[str] = ()) -> bool:
    """Whether tensor ``name`` is of a head, by its tags or because it lies in one of the modules ``heads``.

    Args:
        heads: ``kinds.heads_by_place`` of a model without an adapter.
    """
    return "head" in tags(name) or name.startswith(tuple(f"{module}." for module in heads))


def select(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The sorted names that have one of the tags ``wanted``."""
    wanted = frozenset(wanted)
    return sorted(n for n in names if tags(n) & wanted)


def pairs(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The names ``(B, A)`` of every LoRA pair of the shared adapter in ``tensors``, sorted by layer."""
    downs = select(tensors, {"lora_A"})
    return [(a.replace(".lora_A.", ".lora_B."), a) for a in downs]


def entries(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` under the names ``KIND:name``, which are not names of tensors of the model."""
    return {f"{kind}:{n}": t for n, t in tensors.items()}


def entries_of(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of ``entries``: the tensors with names ``KIND:name``, by ``name``."""
    return {n.removeprefix(f"{kind}:"): t for n, t in tensors.items() if n.startswith(f"{kind}:")}


def is_statistic(name: str) -> bool:
    """Whether ``name`` is a running statistic of a batch norm: sent and averaged, but not trained by gradients."""
    return name.endswith(_STATISTICS)


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the model, the running statistics of its norms, and the tensors beside it; not copied."""
    buffers = {n.replace("|", "."): b for n, b in model.named_buffers() if ":" in n or n.endswith(_STATISTICS)}
    return {**dict(model.named_parameters()), **buffers}


def with_owners(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[nn.Module, Tensor]]:
    """The module that has each of the tensors ``names``, and the tensor.

    Raises:
        KeyError: the model has no such tensor.
    """
    owned = {}
    for name in names:
        path, _, last = ("", "", name.replace(".", "|")) if ":" in name else name.rpartition(".")
        try:
            owner = model.get_submodule(path)
            owned[name] = owner, getattr(owner, last)
        except AttributeError:
            raise KeyError(name) from None
    return owned


def named_tensors(model: nn.Module, wanted: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of the model, not copied, that have one of the tags ``wanted``, sorted by name."""
    tensors = all_tensors(model)
    return {n: tensors[n] for n in select(tensors, wanted)}


def sharing(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """The ``layers`` whose weight another module has, too (a tied head and the embedding), and that module."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for last, child in module.named_children():
            for parameter in child.parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(f"{name}.{last}".lstrip(".").removesuffix(".base_layer"))
    shared = {}
    for name in layers:
        layer: Any = model.get_submodule(name)
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        weight = getattr(base, "weight", None)
        if twins := [other for other in holders.get(id(weight), ()) if other != name]:
            shared[name] = twins[0]
    return shared
