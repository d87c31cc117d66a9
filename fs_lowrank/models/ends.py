"""The tokens that end an answer: training ends one as the tokenizer does, a base as its generation config says."""

from __future__ import annotations

from typing import Any


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """The tokens at which ``model`` stops to generate: those of its generation config, and the tokenizer's."""
    configured, end = model.generation_config.eos_token_id, tokenizer.eos_token_id
    ends = [configured] if isinstance(configured, int) else list(configured or ())
    return ends if end is None or end in ends else [*ends, end]


def settle_ends(model: Any, tokenizer: Any) -> None:
    """Write ``ends_of`` into the generation config of ``model``, with which it is saved."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    ends = ends_of(model, tokenizer)
    if ends and ends not in (config.eos_token_id, [config.eos_token_id]):
        config.eos_token_id = ends
