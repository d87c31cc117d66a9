"""Products that a method keeps beside the base instead of merging them: an adapter that grows from round to round."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..algebra import low_rank_sum_svd
from .adapters import ACCUMULATED, add_beside, load_tensors
from .names import tags

if TYPE_CHECKING:
    import peft


def add_accumulated(model: peft.PeftModel, seed: int) -> peft.PeftModel:
    """Add the adapter ``ACCUMULATED``, still without a product; its scale is 1 and its input has no dropout."""
    return add_beside(model, ACCUMULATED, seed, r=1, lora_alpha=1, lora_dropout=0.0, init_lora_weights=True)


def accumulate_pair(model: nn.Module, down_name: str, up: Tensor, down: Tensor, max_rank: int | None = None) -> bool:
    """Append a pair to the adapter ``ACCUMULATED`` of the layer with ``lora_A`` ``down_name``; the base is unchanged.

    Args:
        up: as for ``merge_pair``.
        down: as for ``merge_pair``.
        max_rank: the largest rank of the adapter, which is replaced by its best approximation of that rank if it is
            exceeded; None: any rank.
    Returns:
        whether an approximation was stored: the pairs have a larger rank together.
    """
    down_all = down_name.replace(".default.", f".{ACCUMULATED}.")
    up_all = down_all.replace(".lora_A.", ".lora_B.")
    parameters = dict(model.named_parameters())
    old_up, old_down = parameters[up_all], parameters[down_all]
    with torch.no_grad():
        ups, downs = up.to(old_up.device).flatten(1), down.to(old_up.device).flatten(1)
        if old_up.any():  # its initial pair has B = 0 and is replaced
            ups, downs = torch.cat([old_up.flatten(1), ups], 1), torch.cat([old_down.flatten(1), downs])
        widest = min(ups.shape[0], downs.shape[1])  # no product has a larger rank
        limit = ups.shape[1] if max_rank is None else min(max_rank, widest)
        cut = ups.shape[1] > limit
        if cut:
            u, s, vh = low_rank_sum_svd([ups], [downs], [1.0], limit)
            ups, downs = u * s, vh
    # The pair of a convolution has the axes of a kernel as well.
    ups = ups.reshape(*ups.shape, *old_up.shape[2:])
    load_tensors(model, {up_all: ups, down_all: downs.reshape(len(downs), *old_down.shape[1:])})
    return cut and limit < widest


def one_adapter(model: peft.PeftModel) -> tuple[peft.LoraConfig, dict[str, Tensor]]:
    """The adapter ``ACCUMULATED`` and the shared one as a single LoRA adapter, with PEFT's names.

    Returns:
        Its config, with the sum of both ranks of each layer and scale 1, and its tensors with those of the head.
    """
    from peft import get_peft_model_state_dict

    saved = get_peft_model_state_dict(model, adapter_name="default")
    tensors = {n: t for n, t in saved.items() if ".lora_" not in n and "nested" not in tags(n)}
    ranks: dict[str, int] = {}
    for name, layer in model.named_modules():
        if ACCUMULATED not in getattr(layer, "lora_A", {}):
            continue
        parts = [a for a in (ACCUMULATED, "default") if bool(layer.lora_B[a].weight.any())] or ["default"]
        tensors[f"{name}.lora_A.weight"] = torch.cat([layer.lora_A[a].weight for a in parts]).detach()
        tensors[f"{name}.lora_B.weight"] = torch.cat(
            [layer.lora_B[a].weight * layer.scaling[a] for a in parts], 1
        ).detach()
        ranks[name.removeprefix("base_model.model.")] = tensors[f"{name}.lora_A.weight"].shape[0]
    config = copy.deepcopy(model.peft_config["default"])
    rank = max(ranks.values())
    config.r, config.lora_alpha, config.use_rslora = rank, rank, False
    config.rank_pattern = {name: r for name, r in ranks.items() if r != rank}
    config.alpha_pattern = dict(config.rank_pattern)
    config.init_lora_weights = True  # some others would ask for ranks of their kind when the adapter is loaded
    return config, tensors
