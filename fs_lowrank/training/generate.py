"""Greedy, beam or sampled generation for batches of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby

import torch

from ..data.tokenize import pad_id
from ..jobs.progress import steps
from ..models.ends import ends_of
from ..models.kinds import is_encoder_decoder, unwrapped
from ..models.machine import input_device
from ..models.padding import padding_matters
from ..models.prompts import generating, is_prompted
from ..seeds import drawing


@torch.no_grad()
def continue_prompts(
    model,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    num_beams: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    on_cut: Callable[[int], object] = lambda count: None,
) -> list[str]:
    """The continuation of each prompt, without the prompt and without special tokens.

    Greedy decoding, beam search if ``num_beams`` is above 1, or sampling from the full distribution if ``temperature``
    is above 0, which does not change torch's generator. Of the generation settings of the model only the
    end-of-text tokens and a decoder's first token are used. Samples are sorted by length and padded on the left, those
    of an encoder on the right.

    Args:
        prompts: token ids of each prompt.
        seed: of the samples.
        on_cut: told how many continuations were cut at ``max_new_tokens``, if any were.
    """
    from transformers import GenerationConfig

    inner = unwrapped(model)
    prompted, paired = is_prompted(model), is_encoder_decoder(inner)
    device = input_device(model)
    original = inner.generation_config
    pad = pad_id(tokenizer)
    plain = GenerationConfig(
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}),
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        bos_token_id=original.bos_token_id,
        eos_token_id=ends_of(inner, tokenizer) or None,
        decoder_start_token_id=original.decoder_start_token_id,
    )

    def first(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The logits of the first token that follows."""
        config = GenerationConfig(max_new_tokens=1, pad_token_id=pad, return_dict_in_generate=True, output_logits=True)
        return inner.generate(input_ids=ids, attention_mask=mask, generation_config=config).logits[0]

    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    texts = [""] * len(prompts)
    ends, cut = torch.tensor(sorted(ends_of(inner, tokenizer)), dtype=torch.long), 0
    inner.generation_config = plain  # generate() fills what a config leaves open from the model's own
    try:
        with generating(), drawing(seed) if temperature else nullcontext():
            same_length = prompted or batch_size > 1 and not paired and padding_matters(inner, pad, first, left=True)
            batches = [*_batches(order, batch_size, [len(p) for p in prompts] if same_length else None)]
            for rows in steps(batches, "writing answers"):
                width = len(prompts[rows[0]])
                start = 0 if paired else width  # a decoder beside an encoder does not repeat the prompt
                padding = [width - len(prompts[i]) for i in rows]
                ids = torch.tensor([_padded(prompts[i], [pad] * n, paired) for n, i in zip(padding, rows)])
                mask = torch.tensor([_padded([1] * (width - n), [0] * n, paired) for n in padding])
                outputs = (model if prompted else inner).generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=plain,
                )
                for i, tokens in zip(rows, outputs[:, start:].cpu()):
                    texts[i] = tokenizer.decode(tokens, skip_special_tokens=True)
                    # The first token of a decoder beside an encoder may be the one that ends a text.
                    cut += not torch.isin(tokens[paired:], ends).any()
    finally:
        inner.generation_config = original
    if cut:
        on_cut(int(cut))
    return texts


def _batches(order: Sequence[int], size: int, lengths: Sequence[int] | None) -> Iterator[Sequence[int]]:
    """``order`` in batches; with ``lengths``, each of one length: padding would move a text from virtual tokens, and
    RWKV reads padding.
    """
    groups = groupby(order, key=lambda i: lengths[i] if lengths else 0)
    for group in (list(rows) for _, rows in groups):
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _padded(row: Sequence[int], padding: list[int], right: bool) -> list[int]:
    return [*row, *padding] if right else [*padding, *row]
