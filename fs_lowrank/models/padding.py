"""A classifier's result for a text does not depend on the other texts of its batch, which is padded to the longest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import say_once
from ..seeds import drawing
from .machine import input_device, rounding
from .shortcuts.trials import differing


def position_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """The tables of learned or sinusoidal positions."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and (name.endswith(".wpe") or "position" in name.rpartition(".")[2])
    ]


def settle_padding(model: nn.Module, pad: int, longest: int | str = "auto") -> None:
    """Let the classifier ``model`` give for each text of a batch the result that it gives for the text alone.

    A decoder reads the class at the last token that is not the padding token of its configuration, so that names
    ``pad`` from here on, also where it is saved. A model that looks at padding all the same computes the texts of a
    batch by length: XLNet reads the last position, FNet mixes all of them, ConvBERT and MobileBERT look at neighbours,
    and LongRoPE scales the positions of all texts of a batch by the longest.

    Args:
        pad: the token that batches are padded with. longest: text in tokens (``llm.tok_len``).
    """
    config: Any = getattr(model, "config", None)
    # RoBERTa and others count positions from the padding token of their configuration, and read no class by it.
    if config is not None and not any(table.padding_idx is not None for table in position_embeddings(model)):
        config.pad_token_id = config.get_text_config().pad_token_id = pad
    scaled = _scaled_beyond(config, longest)
    if scaled or padding_matters(model, pad, lambda ids, mask: model(input_ids=ids, attention_mask=mask).logits):
        _compute_by_length(model, beyond=scaled)
        say_once(
            f"{type(model).__name__} gives a text another score where it is padded, so the texts of a batch are "
            "computed by length, which takes longer"
        )


def _scaled_beyond(config: Any, longest: int | str) -> int:
    """The length beyond which a text scales the positions of its batch otherwise; 0 if texts do not reach it."""
    rope: Any = getattr(config and config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return 0
    length = int(rope["original_max_position_embeddings"])
    return 0 if isinstance(longest, int) and longest <= length else length


@torch.no_grad()
def padding_matters(model: nn.Module, pad: int, score: Callable[[Tensor, Tensor], Tensor], left: bool = False) -> bool:
    """Whether a short text has another score beside a longer one; False if ``score`` refuses these two.

    Args:
        score: logits, one row for each text, from ``input_ids`` and ``attention_mask``. left: where padding is.
    """
    end = getattr(getattr(model, "config", None), "eos_token_id", None)
    ends = [end] if isinstance(end, int) else list(end or ())[:1]  # BART reads the class where the text ends
    tokens = [token for token in range(12) if token not in (pad, *ends)]
    short, long = tokens[:3] + ends, tokens[:9] + ends
    padding = len(long) - len(short)
    batch = [[pad] * padding + short if left else short + [pad] * padding, long]
    mask = [[0] * padding + [1] * len(short) if left else [1] * len(short) + [0] * padding, [1] * len(long)]
    device = input_device(model)
    try:
        with drawing(0):
            alone = score(
                torch.tensor([short], device=device), torch.ones(1, len(short), dtype=torch.long, device=device)
            )
            scores = score(torch.tensor(batch, device=device), torch.tensor(mask, device=device))
    except Exception:  # a model of a program's, or one for more than a text, may raise any
        return False
    return bool(differing("logits", alone[0].float(), scores[0].float(), rounding(model)))


def _part(value: Any, rows: Tensor, padding: int) -> Any:
    """The ``rows`` of an input without the positions that pad them on the right."""
    if not isinstance(value, Tensor):
        return value
    return value[rows, : value.shape[1] - padding] if value.ndim > 1 else value[rows]


def _compute_by_length(model: nn.Module, beyond: int = 0) -> None:
    """Let ``model`` compute the samples of each length of a batch without padding, if one is longer than ``beyond``."""
    cls = type(model)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, attention_mask: Tensor | None = None, labels: Tensor | None = None, **inputs: Any):
        from transformers.modeling_outputs import SequenceClassifierOutput

        arguments = {**inputs, "attention_mask": attention_mask, "labels": labels}
        if attention_mask is None or attention_mask.shape[1] <= beyond or attention_mask.all():
            return cls.forward(self, **arguments)
        lengths, logits, loss = attention_mask.sum(1), None, None
        for length in lengths.unique():
            rows, padding = (lengths == length).nonzero().squeeze(1), attention_mask.shape[1] - int(length)
            parts = {n: _part(v, rows, 0 if n == "labels" else padding) for n, v in arguments.items()}
            output = cls.forward(self, **parts)
            if logits is None:
                logits = output.logits.new_zeros(len(lengths), *output.logits.shape[1:])
            logits = logits.index_copy(0, rows.to(logits.device), output.logits)
            if output.loss is not None:
                share = output.loss * len(rows) / len(lengths)
                loss = share if loss is None else loss + share
        return SequenceClassifierOutput(loss=loss, logits=logits)

    # Its class and not its forward, so that copies of the module have it, too.
    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    vars(model)["by_length"] = True
