"""PEFT's names for the kinds of adapters, its arguments for them, and the arguments that have no effect."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import say_once
from ..seeds import derive
from ..settings import AdapterSpec, show
from ..settings.adapter import FORMER, OF_PEFT, PROMPTS
from .names import HEAD_MODULES, PEFT_HEADS

if TYPE_CHECKING:
    import peft

#: by ``adapter_method`` of ``llm.adapter.args``
CLASSES = {
    "lora": "LoraConfig",
    "loha": "LoHaConfig",
    "lokr": "LoKrConfig",
    "vera": "VeraConfig",
    "oft": "OFTConfig",
    "ia3": "IA3Config",
    "prefix": "PrefixTuningConfig",
    "prompt": "PromptTuningConfig",
    "p-tuning": "PromptEncoderConfig",
}


def unwrapped(model: nn.Module) -> Any:
    """The model of transformers, or of a program's, without PEFT's wrapper; the adapter's layers stay in it."""
    return getattr(model, "get_base_model", lambda: model)()


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether ``model`` reads a text with one stack of layers and writes another with a second, as T5 does."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def text_part(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the part of ``model`` that a text goes through; the name is empty where that is all of it.

    Models for images or sound and text have several towers, and a text reaches one of them.
    """
    inner = unwrapped(model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(inner, "get_decoder") or is_encoder_decoder(inner) or config.get_text_config() is config:
        return "", model
    part = inner.get_decoder()
    return next((name, module) for name, module in model.named_modules() if module is part or module is inner is part)


def computes_by_length(model: nn.Module) -> bool:
    """Whether ``model`` computes the texts of a batch by length, as it would look at padding (``models.padding``)."""
    return bool(vars(unwrapped(model)).get("by_length"))


def vision_targets(model: nn.Module) -> list[str] | None:
    """The layers for adapters of one of our networks (``models.vision``); None for other models."""
    return getattr(model, "adapter_targets", None)


def task_type(model: nn.Module, spec: AdapterSpec) -> dict[str, str]:
    """PEFT's name of the model's task, by which it chooses its wrapper of the model."""
    by_place = not vars(model).get("own_heads") and heads_by_place(model)  # PEFT's own class would ask for its config
    if (any(hasattr(model, head) for head in HEAD_MODULES) or by_place) and not vision_targets(model):
        return {"task_type": "SEQ_CLS"}
    if is_encoder_decoder(model):
        return {"task_type": "SEQ_2_SEQ_LM"} if spec.method in PROMPTS else {}
    return {"task_type": "CAUSAL_LM"} if hasattr(model, "lm_head") else {}


def heads_by_place(model: nn.Module) -> list[str]:
    """The names of a classifier's modules that are a head by where they are, and that PEFT does not know by name.

    They are those beside the base model (XLNet's ``sequence_summary`` and ``logits_proj``, BART's
    ``classification_head``, DeBERTa's ``pooler``), and the base's ``pooler`` if the checkpoint had none; in a module of
    a program's, see ``models.given``.
    """
    net: Any = model
    if heads := vars(net).get("own_heads"):
        return list(heads)
    base = getattr(net, "base_model_prefix", "")
    if not base or not hasattr(net, base) or getattr(net, "get_output_embeddings", lambda: None)() is not None:
        return []
    beside = [
        name
        for name, module in net.named_children()
        if name != base and next(module.parameters(), None) is not None and not name.endswith(PEFT_HEADS)
    ]
    new = any(name.startswith(f"{base}.pooler.") for name in vars(net).get("new_weights", ()))
    return [*beside, f"{base}.pooler"] if new else beside


def sizes(model: nn.Module, spec: AdapterSpec, seed: int) -> dict[str, Any]:
    """Rank, strength and dropout in the words of PEFT's class. Dropout of LoHa and LoKr is on rows of the update."""
    dropout = spec.lora_dropout
    match spec.method:
        case "lora":
            strength = {"lora_alpha": spec.lora_alpha, "lora_dropout": dropout, "use_rslora": spec.use_rslora}
            return {"r": spec.r, **strength}
        case "vera":  # the two frozen matrices that all layers share follow from a seed of their own
            prng = {} if "projection_prng_key" in spec.extra else {"projection_prng_key": derive(seed, "vera") % 2**31}
            return {"r": spec.r, "vera_dropout": dropout, **prng}
        case "oft":
            blocks = spec.extra.get("oft_block_size")
            return {
                "r": 0 if blocks else spec.r,
                "module_dropout": dropout,
                **({} if blocks else {"oft_block_size": 0}),
            }
        case "prefix":
            return _widths(model, spec)
        case "prompt" | "p-tuning":  # PEFT would make as many tokens for the decoder, which it does not use
            alone = {"num_transformer_submodules": 1} if is_encoder_decoder(model) else {}
            return {**_widths(model, spec), **alone}
        case "ia3":
            return {}
    return {"r": spec.r, "alpha": spec.lora_alpha, "rank_dropout": dropout}


def _widths(model: Any, spec: AdapterSpec) -> dict[str, int]:
    """The sizes that PEFT looks up under names that some models lack: DistilBERT has ``dim``, for example."""
    names = {
        "token_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
    }
    config: Any = getattr(getattr(model, "config", None), "get_text_config", dict)()
    values = {name: getattr(config, attribute, None) for name, attribute in names.items() if name not in spec.extra}
    return {name: value for name, value in values.items() if value is not None}


def further(spec: AdapterSpec) -> dict[str, Any]:
    """Copies of the further arguments for PEFT's config, which changes lists, without those of a saved adapter."""
    idle = {*OF_PEFT, *(name for name, default in FORMER.items() if spec.extra.get(name) == default)}
    return {name: copy.deepcopy(value) for name, value in spec.extra.items() if name not in idle}


def say_idle(wrapped: peft.PeftModel, options: Mapping[str, Any]) -> None:
    """Say once which ``options`` arguments have no effect with this model."""
    used, modules = wrapped.peft_config["default"], list(wrapped.modules())
    single = {name: value for name, value in options.items() if not isinstance(value, (list, tuple, set, dict))}
    idle = {name: f"PEFT takes {show(getattr(used, name))}" for name in single if getattr(used, name) != options[name]}
    if options.get("bias", "none") != "none":  # ``add_adapter`` refuses one that trains
        idle["bias"] = "the modules with an adapter have none"
    if options.get("use_qalora") and not any(type(module).__name__.startswith("GPTQ") for module in modules):
        idle["use_qalora"] = "it is for weights quantised by GPTQ"
    if options.get("use_effective_conv2d") and not any(isinstance(module, nn.Conv2d) for module in modules):
        idle["use_effective_conv2d"] = "the model has no convolutions"
    for name, reason in idle.items():
        say_once(f"llm.adapter.args.0.{name} = {show(options[name])} has no effect: {reason}")
