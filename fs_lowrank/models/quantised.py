"""Bases whose matrices are quantised to 8 or 4 bits by bitsandbytes (``lowrank.dtype`` ``int8`` and ``nf4``).

transformers quantises the matrices of linear layers while it loads them. Modules that train or are new for the task and
weights that are shared with the embeddings, stay as they are: heads, the output layer of a language model, an encoder's
pooler.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, say_once
from ..settings import Settings
from .kinds import heads_by_place, unwrapped
from .names import tags
from .placing import offloaded


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed."""
    return find_spec("bitsandbytes") is not None


def require_bitsandbytes(key: str) -> None:
    """Raise ``UserError`` if bitsandbytes, which the configuration's ``key`` needs, is not installed."""
    if not has_bitsandbytes():
        raise UserError(f"{key} needs bitsandbytes, which is not installed: pip install 'fs-lowrank[quant]'")


def loading(config: Settings, skeleton: Any) -> dict[str, Any]:
    """Arguments of transformers' ``from_pretrained`` that quantise the base; none if it is not to be quantised.

    A checkpoint that is quantised already is loaded as it is.

    Args:
        skeleton: the model without weights.
    """
    kind = config.quantised
    if not kind:
        return {}
    require_bitsandbytes(f"lowrank.dtype = {kind}")
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = {"load_in_8bit": True}
    if kind == "nf4":
        options = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": getattr(torch, config.dtype),
            "bnb_4bit_use_double_quant": config.lowrank.double_quant,
        }
    device = "cuda:0" if config.torch_device == "cuda" else config.torch_device
    placement = {} if config.model.device_map else {"device_map": {"": device}}
    if getattr(skeleton.config, "quantization_config", None):
        return placement
    return {
        **placement,
        "quantization_config": BitsAndBytesConfig(**options, llm_int8_skip_modules=_skipped(skeleton, config)),
    }


def _skipped(skeleton: Any, config: Settings) -> list[str]:
    """The names of the modules that are not quantised."""
    out, embeddings = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    tied = {id(p) for p in embeddings.parameters()}
    skipped = [
        name
        for name, module in skeleton.named_modules()
        if module is out or module is not skeleton and any(id(p) in tied for p in module.parameters(recurse=False))
    ]
    skipped += [name for name, _ in skeleton.named_children() if "head" in tags(f"{name}.weight")]
    skipped += heads_by_place(skeleton)
    skipped += config.adapter.extra.get("modules_to_save") or []
    return [*skipped, f"{skeleton.base_model_prefix}.pooler"]


def to_quantise(skeleton: nn.Module, config: Settings) -> set[str]:
    """The names of the layers of ``skeleton`` that transformers will quantise."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = _skipped(skeleton, config)
    named = ((name, m) for name, m in skeleton.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D))
    return {name for name, _ in named if should_convert_module(name, skipped)}


def settle(model: Any, config: Settings, source: str) -> None:
    """Check the model that was loaded from ``source``, and say once which matrices are quantised.

    Raises:
        UserError: the checkpoint is quantised otherwise than the configuration says, or nothing could be quantised.
    """
    kind, dtype = _kind(model), config.quantised
    if kind != dtype:
        advice = f"set lowrank.dtype {kind}" if kind in ("int8", "nf4") else "take a checkpoint that is not quantised"
        raise UserError(
            f"model.type: the checkpoint at {source!r} is quantised already ({kind}), and lowrank.dtype is "
            f"{config.lowrank.dtype}; {advice}"
        )
    if not dtype:
        return
    quantised = layers(model)
    for module in quantised.values() if dtype == "nf4" else ():
        module.compute_dtype, module.compute_type_is_set = getattr(torch, config.dtype), True
        # For inference on some processors, it would change the weights for good and fetch code from a hub.
        module.support_avx512bf16_for_cpu = False
    inside = set(quantised)
    skipped = {
        n.rpartition(".")[0] for n, p in model.named_parameters() if p.ndim > 1 and n.rpartition(".")[0] not in inside
    }
    if not inside:
        raise UserError(
            f"lowrank.dtype = {dtype}: {type(model).__name__} has no matrix that bitsandbytes quantises (its matrices: "
            f"{', '.join(sorted(skipped)[:3])}, …); take lowrank.dtype bfloat16"
        )
    size = sum(t.nbytes for t in [*model.parameters(), *beside(model).values()])
    say_once(
        f"lowrank.dtype = {dtype}: {len(inside)} matrices are quantised, and the base takes {size / 1e6:,.0f} MB; in "
        f"{config.dtype} stay: {', '.join(sorted(skipped))}, and vectors",
        logging.INFO,
    )


def _kind(model: Any) -> str:
    """How a loaded model is quantised: ``int8``, ``nf4``, another kind in words; empty if it is not."""
    config: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if config is None:
        return ""
    if getattr(config, "load_in_8bit", False):
        return "int8"
    if getattr(config, "load_in_4bit", False):
        return str(config.bnb_4bit_quant_type)
    return str(config.quant_method)


def layers(model: nn.Module) -> dict[str, Any]:
    """The quantised layers of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if is_quantised(module)}


def is_quantised(module: nn.Module) -> bool:
    """Whether bitsandbytes has quantised the weight of a layer."""
    weight = dict(module.named_parameters(recurse=False)).get(
        "weight"
    )  # PEFT's layers show the weight of the layer inside them as theirs
    return type(weight).__name__ in ("Params4bit", "Int8Params")


def beside(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights that are not among its parameters, by name: the scales of quantised layers, which bitsandbytes
    stores beside them, and the values of offloaded weights (``model.device_map``).
    """
    return {f"{path}.{name}": tensor for path, module in model.named_modules() for name, tensor in _beside(module)}


def _beside(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from _scales(module)
    yield from offloaded(module)


def direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of ``module`` alone, not of the modules in it: parameters, buffers, and ``beside``."""
    tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    return tensors | dict(_beside(module))


def _scales(module: Any) -> Iterator[tuple[str, Tensor]]:
    if not is_quantised(module):
        return
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        yield "weight.SCB", _row_scales(module)
        return
    yield "weight.absmax", state.absmax
    if state.nested:
        yield "weight.offset", state.offset
        yield "weight.nested_absmax", state.state2.absmax


def _row_scales(layer: Any) -> Tensor:
    """Of a layer of 8 bits, whose first pass moves them from the weight to the layer."""
    scales: Tensor = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    return scales


def count(model: nn.Module) -> int:
    """The number of parameters, quantised ones too, of which two or more may share a number in memory."""
    packed = {id(layer.weight): layer.in_features * layer.out_features for layer in layers(model).values()}
    return sum(packed.get(id(p), p.numel()) for p in model.parameters())


def version_of(model: nn.Module) -> str:
    """The version of bitsandbytes if ``model`` is quantised, else empty."""
    return version("bitsandbytes") if any(map(is_quantised, model.modules())) else ""


def dequantised(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in the dtype of its computation, with plain layers in place of quantised ones.

    Adapters on quantised layers are merged into them: a pair with its bias, and with DoRA's lengths of the rows of the
    sum. Others are left.

    Raises:
        UserError: an adapter's pair has a bias, and its layer has none.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = copy.deepcopy(model)
    inner = unwrapped(model)
    for name, layer in list(model.named_modules()):
        adapted = isinstance(layer, BaseTunerLayer)
        base: Any = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
        if not is_quantised(base) or name.endswith(".base_layer"):
            continue
        weight = _dequantised(base).to(inner.config.dtype)
        for adapter in layer.active_adapters if adapted else ():
            if adapter in getattr(layer, layer.adapter_layer_names[0]):
                weight += layer.get_delta_weight(adapter).to(weight)
                if adapter in layer.lora_magnitude_vector:
                    norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
                    weight = (weight * (layer.lora_magnitude_vector[adapter].weight / norms)[:, None]).to(weight)
                if (bias := layer.lora_B[adapter].bias) is not None:
                    if base.bias is None:
                        raise UserError(f"lora_bias: {name} has no bias to add to; save the adapter alone")
                    base.bias.data += bias.data * layer.scaling[adapter]
        model.set_submodule(name, _plain(base, weight))
    inner.hf_quantizer.remove_quantization_config(inner)
    return model


def _dequantised(layer: Any) -> Tensor:
    """The weight of a quantised layer, ``(d_out, d_in)``."""
    import bitsandbytes

    if hasattr(layer.weight, "quant_state"):
        return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, _row_scales(layer))


def _plain(layer: Any, weight: Tensor) -> nn.Module:
    """A layer of the kind that ``layer`` was before it was quantised."""
    plain: Any
    with torch.device("meta"):
        if layer.source_cls is nn.Linear:
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        else:  # transformers' Conv1D, whose weight is the other way round
            plain, weight = layer.source_cls(layer.out_features, layer.in_features), weight.T.contiguous()
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        plain.bias = layer.bias
    return plain
