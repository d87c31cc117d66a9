"""The tokens that end an answer: training ends one as the tokenizer does, a base as its generation config says."""

from __future__ import annotations

from typing import Any

from ..errors import say_once


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """The tokens at which ``model`` stops to generate: those of its generation config, and the tokenizer's."""
    own, end = model.generation_config.eos_token_id, tokenizer.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or ())
    return ends if end is None or end in ends else [*ends, end]


def settle_ends(model: Any, tokenizer: Any, place: str) -> None:
    """Write ``ends_of`` into the generation config of ``model``, with which it is saved, and say what differed."""
    own = getattr(model, "generation_config", None)
    if own is None:
        return
    before, ends = own.eos_token_id, ends_of(model, tokenizer)
    if not ends or ends in (before, [before]):
        return
    own.eos_token_id = ends
    if before is not None:
        say_once(
            f"model.type: {place!r}: an answer ends with {tokenizer.convert_ids_to_tokens(before)} by its "
            f"generation_config.json and with {tokenizer.eos_token!r} by its tokenizer; generated text ends at either"
        )
