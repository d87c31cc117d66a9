"""Tokenization for classification and for causal language models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.algebra import digest
from fs_lowrank.data.examples import IGNORED_LABEL, TOKENS, Examples
from fs_lowrank.data.ragged import Ragged
from fs_lowrank.data.template import ends, is_custom, prompted
from fs_lowrank.errors import UserError, say_once, user_errors
from fs_lowrank.jobs.progress import steps

BATCH = 1000

#: fractions of unknown tokens: above the first a run is refused, above the second there is a warning
UNKNOWN_REFUSED, UNKNOWN_SAID = 0.5, 0.05

# Taori et al., 2023: Stanford Alpaca
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_NO_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
#: gives the prompt and the answer of each row
Form = Callable[[pd.DataFrame], Iterable[tuple[str, str]]]
#: token ids and labels of an example, and whether it was cut
Encoded = tuple[list[int], list[int], bool]
#: an answer that no text is likely to contain
_ANY = "\N{REPLACEMENT CHARACTER}answer\N{REPLACEMENT CHARACTER}"
_OTHER_TEMPLATE = (
    "if it refuses system turns, put their text into the user's first turn; else take a tokenizer with another "
    "template, or name one with template in data.args"
)
#: settings of a tokenizer that say where it was read from; others end in ``_file``
_PLACE = ("name_or_path", "is_local", "local_files_only")
#: outputs that are not used take half of the time; a warning of long texts is for models without truncation
_IDS_ALONE = {"padding": False, "return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


def check_vocabulary(frame: pd.DataFrame, tokenizer: Any) -> None:
    """Check that the tokenizer knows the text of ``frame``, on up to 1,000 evenly spaced rows, without the template.

    For a folder without tokenizer files, transformers makes an empty vocabulary, for which every word is unknown or
    gives no token. A text without tokens counts as one unknown token.

    Raises:
        UserError: more than half of the tokens are unknown; above 5 % there is a warning.
    """
    rows = frame.iloc[np.unique(np.linspace(0, len(frame) - 1, BATCH).astype(int))]
    texts = [text for text in _texts(rows) if text.strip()]
    ids = _ids(tokenizer, texts) if texts else []
    unknown = sum(row.count(tokenizer.unk_token_id) if row else 1 for row in ids)
    share = unknown / max(sum(len(row) or 1 for row in ids), 1)
    if share <= UNKNOWN_SAID:
        return
    problem = (
        f"the tokenizer at {tokenizer.name_or_path!r} does not know {share:.0%} of the tokens of the training text; "
        f"its vocabulary has {len(tokenizer)}"
    )
    if share > UNKNOWN_REFUSED:
        raise UserError(
            f"model.type: {problem}; are its files (tokenizer.json, vocab.txt, …) there, and is it for text of "
            "this kind?"
        )
    say_once(problem)


def _texts(frame: pd.DataFrame) -> Iterator[str]:
    if "messages" in frame:
        for turns in frame["messages"]:
            yield from (turn["content"] for turn in turns if isinstance(turn["content"], str))
    for column in ("text", "text_pair", "instruction", "input", "output"):
        if column in frame:
            yield from frame[column]


def tokenize_classification(frame: pd.DataFrame, tokenizer: Any, max_len: int) -> Examples:
    """Tokenize one or two sentences per row, truncated to ``max_len`` tokens; of a pair, the longer one first.

    Args:
        frame: columns ``text``, perhaps ``text_pair``, and ``label``.
        max_len: in tokens, including special tokens; at most the tokenizer's ``model_max_length``.

    Raises:
        UserError: ``max_len`` leaves no room for text.
    """
    pair = "text_pair" in frame
    max_len = _limit(tokenizer, max_len)
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_len < special + 1 + pair:
        raise UserError(f"tok_len (or max_len) {max_len} leaves no room for text beside {special} special tokens")
    columns: dict[str, list[Ragged]] = {}
    truncated = 0
    for start in steps(range(0, len(frame), BATCH), f"tokenising {len(frame):,} rows"):
        rows = frame.iloc[start : start + BATCH]
        texts = [rows["text"].tolist()]
        if pair:
            texts.append(rows["text_pair"].tolist())
        encoded = tokenizer(*texts, truncation=True, max_length=max_len, padding=False, return_attention_mask=False)
        for name in ("input_ids", "token_type_ids"):
            if name in encoded:
                columns.setdefault(name, []).append(Ragged.of(encoded[name], TOKENS))
        full = [i for i, row in enumerate(encoded["input_ids"]) if len(row) == max_len]
        if full:
            complete = tokenizer(*([column[i] for i in full] for column in texts), **_IDS_ALONE)
            truncated += sum(len(row) > max_len for row in complete["input_ids"])
    types, labels = getattr(tokenizer, "pad_token_type_id", 0) or 0, frame["label"].to_numpy()
    return Examples(_joined(columns), labels, pad_id(tokenizer), types, truncated)


def tokenize_instructions(
    frame: pd.DataFrame,
    tokenizer: Any,
    max_len: int,
    template: str = "auto",
    loss_on: str = "answer",
    paired: bool = False,
) -> tuple[Examples, np.ndarray]:
    """Tokenize prompt, answer and end-of-sequence token of each row, truncated on the right to ``max_len`` tokens.

    Prompt and answer are tokenized separately, so that the boundary between them is the same as in generation.

    Args:
        frame: columns ``instruction``, ``input``, ``output`` and perhaps ``before``, turns; or ``messages``, whose last
            turn is the answer.
        template: ``chat`` for the tokenizer's chat template, ``alpaca``, or ``auto``: ``chat`` if it has one. With any
            other, ``instruction`` is the complete prompt (``data.template``).
        loss_on: ``answer`` (and its end-of-sequence token) or ``all`` tokens.
        paired: for an encoder-decoder model: prompt and answer are two texts, each of which is cut and ends with the
            end-of-sequence token; ``auto`` is the instruction, and its input on a line of its own.

    Returns:
        the examples, and a bool array over the rows of ``frame``: False for rows left out because the prompt alone
        fills ``max_len``.

    Raises:
        UserError: a chat template that is missing or refuses a row, no end of an answer, or no row left; with
            ``paired``, a chat, a loss on ``all``, or an empty prompt.
    """
    max_len, custom = _limit(tokenizer, max_len), is_custom(template)
    talks = "messages" in frame or "before" in frame and not custom
    if paired:
        _check_pairs(frame, template, loss_on)
    elif talks and template == "alpaca":
        raise UserError("data.args: template = alpaca has no place for conversations, nor for system and history")
    chats = template == "chat" or template == "auto" and bool(getattr(tokenizer, "chat_template", None))
    chat = not paired and (talks or chats)
    start = [] if chat or paired else _start(tokenizer)  # a chat template contains the first token
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    usual = _joined_input if custom or paired and template == "auto" else _alpaca
    form: Form = partial(_chats, tokenizer) if chat else usual
    if not end and len(frame):
        first = frame.iloc[:BATCH]
        contents = [turns[-1]["content"].rstrip() for turns in _turns(first)] if chat else []
        answers = (answer.rstrip() for _, answer in form(first))
        _check_end(template, any(not answer.endswith(content) for content, answer in zip(contents, answers)))

    def as_one(prompt: list[int], answer: list[int]) -> Encoded | None:
        prompt, answer = start + prompt, answer if answer[-1:] == end else answer + end
        ids = (prompt + answer)[:max_len]
        if len(ids) <= len(prompt):
            return None
        labels = [IGNORED_LABEL] * len(prompt) + ids[len(prompt) :] if loss_on == "answer" else ids
        return ids, labels, len(prompt) + len(answer) > max_len

    def as_pair(prompt: list[int], answer: list[int]) -> Encoded:
        sides = [ids[:-1] if end and ids[-1:] == end else ids for ids in (prompt, answer)]
        source, target = (ids[: max_len - len(end)] + end for ids in sides)
        return source, target, any(len(ids) + len(end) > max_len for ids in sides)

    examples, retained = _encoded(frame, tokenizer, form, as_pair if paired else as_one, paired)
    if len(frame) and not retained.any():
        raise UserError(f"all {len(frame)} prompts fill tok_len (or max_len) {max_len} without an answer; raise it")
    return examples, retained


def _check_pairs(frame: pd.DataFrame, template: str, loss_on: str) -> None:
    """Refuse forms of data that an encoder-decoder model cannot read or learn."""
    if "messages" in frame or "before" in frame or template == "chat":
        raise UserError(
            "conversations, the columns system and history, and chat templates are for decoders; an encoder-decoder "
            "model has data.args: template"
        )
    if loss_on != "answer":
        raise UserError(
            f"data.args: loss_on = {loss_on}: an encoder-decoder model writes the answer alone; leave it out"
        )
    if is_custom(template) and not prompted(template):
        raise UserError(
            f"data.args: template = {template!r}: there is no text before the answer, for an encoder-decoder "
            "model to read; put the column of the prompt there"
        )


def _encoded(
    frame: pd.DataFrame,
    tokenizer: Any,
    form: Form,
    encode: Callable[[list[int], list[int]], Encoded | None],
    paired: bool,
) -> tuple[Examples, np.ndarray]:
    """The examples, and a mask of the rows of ``frame`` that they contain, bool ``(rows,)``.

    Args:
        encode: makes an example from the tokens of a prompt and of its answer; None: the row is left out.
    """
    columns: dict[str, list[Ragged]] = {"input_ids": [], "labels": []}
    retained, truncated = np.zeros(len(frame), dtype=bool), 0
    for start in steps(range(0, len(frame), BATCH), f"tokenising {len(frame):,} rows"):
        rows = slice(start, start + BATCH)
        prompts, answers = zip(*form(frame.iloc[rows]))
        encoded = [encode(*ids) for ids in zip(_ids(tokenizer, prompts), _ids(tokenizer, answers), strict=True)]
        retained[rows] = [example is not None for example in encoded]
        examples = [example for example in encoded if example is not None]
        columns["input_ids"].append(Ragged.of([ids for ids, _, _ in examples], TOKENS))
        columns["labels"].append(Ragged.of([labels for _, labels, _ in examples], TOKENS))
        truncated += sum(cut for _, _, cut in examples)
    return Examples(_joined(columns), None, pad_id(tokenizer), truncated=truncated, paired=paired), retained


def _check_end(template: str, closed: bool = False) -> None:
    """Refuse a tokenizer without an end-of-sequence token, unless the template writes something after the answer.

    Args:
        closed: the tokenizer's chat template writes it.
    """
    if not closed and not (is_custom(template) and ends(template)):
        raise UserError(
            "data.args: template: nothing ends an answer, so a model would not learn to stop. Give the tokenizer an "
            "end-of-sequence token (eos_token), or write a text after the answer, as in '{instruction} {output} END'. "
            "An encoder writes no answers: name another model"
        )


def _joined_input(frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """The instruction and its input, which a template of the user's leaves empty."""
    for instruction, context, output in zip(frame["instruction"], frame["input"], frame["output"], strict=True):
        yield (f"{instruction}\n{context}" if context.strip() else instruction), output


def _joined(columns: dict[str, list[Ragged]]) -> dict[str, Ragged]:
    return {name: Ragged.join(parts) for name, parts in columns.items()}


def _limit(tokenizer: Any, max_len: int) -> int:
    limit = getattr(tokenizer, "model_max_length", max_len) or max_len
    if limit < max_len:
        say_once(f"tok_len (or max_len) = {max_len} is lowered to {limit}, the longest text that the tokenizer takes")
    return int(min(max_len, limit))


def pad_id(tokenizer: Any) -> int:
    """The token that batches are padded with: the padding token, else the one that ends a text, else 0."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0  # padding is masked, so any id works


def _start(tokenizer: Any) -> list[int]:
    """The token that the tokenizer puts at the beginning of a sequence, if any."""
    bos = tokenizer.bos_token_id
    probe = tokenizer("a")["input_ids"]
    return [int(bos)] if bos is not None and probe[:1] == [bos] else []


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False, **_IDS_ALONE)["input_ids"]]


def _alpaca(frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    for instruction, context, output in zip(frame["instruction"], frame["input"], frame["output"], strict=True):
        prompt = ALPACA if context.strip() else ALPACA_NO_INPUT
        yield prompt.format(instruction=instruction, input=context), output


def _turns(frame: pd.DataFrame) -> Iterator[list[dict[str, str]]]:
    if "messages" in frame:
        yield from frame["messages"]
        return
    earlier = frame["before"] if "before" in frame else [[]] * len(frame)
    for history, instruction, context, output in zip(earlier, frame["instruction"], frame["input"], frame["output"]):
        question = f"{instruction}\n\n{context}" if context.strip() else instruction
        yield [*history, {"role": "user", "content": question}, {"role": "assistant", "content": output}]


def _chats(tokenizer: Any, frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Prompt and answer of each row by the tokenizer's chat template, which may refuse a row.

    Raises:
        UserError: it raises an error, or renders earlier turns otherwise where an answer follows.
    """
    for row, turns in zip(frame.index, _turns(frame), strict=True):
        where = f"row {row + 1}: the model's chat template"
        with user_errors(where, _OTHER_TEMPLATE):
            prompt = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
            rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        if rendered.startswith(prompt):
            # The answer includes the end-of-turn token that follows it in the template, but not a final newline.
            yield prompt, rendered[len(prompt) :].rstrip()
            continue
        with user_errors(where, _OTHER_TEMPLATE):
            earlier = tokenizer.apply_chat_template(turns[:-1], tokenize=False).rstrip()
            probe = [*turns[:-1], {**turns[-1], "content": _ANY}]
            rendered = tokenizer.apply_chat_template(probe, tokenize=False)
        yield _before_prefill(where, prompt, rendered, earlier, turns[-1]["content"])


def _before_prefill(where: str, prompt: str, rendered: str, earlier: str, answer: str) -> tuple[str, str]:
    """Prompt and answer where a template opens answers with a text that the turns lack, for example ``<think>``.

    The prompt ends before that text, so that it is the same for answers with the text and without it.

    Args:
        prompt: as the template gives it. rendered: the same turns with the answer ``_ANY``. earlier: without a prompt.
    """
    common = os.path.commonprefix([prompt, rendered])
    if len(common) < len(earlier) or _ANY not in rendered[len(common) :]:
        raise UserError(
            f"{where} gives {prompt!r} as the prompt and {rendered!r} with an answer, which does not begin with the "
            f"prompt; {_OTHER_TEMPLATE}"
        )
    if opened := prompt[len(common) :].strip():
        say_once(f"the model's chat template opens answers with {opened!r}; prompts end before it here")
    return common, rendered[len(common) :].rstrip().replace(_ANY, answer.strip())


def tokenizer_fingerprint(tokenizer: Any, saved: bool = False) -> str:
    """A hash over everything that decides the tokens of a text, 12 digits.

    Args:
        tokenizer: one of transformers.
        saved: also over settings that are only saved with it, without the path that it was read from.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        clear_truncation(tokenizer)
        rules = backend.to_str()
    identity = [type(tokenizer).__name__, tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)]
    settings = {k: v for k, v in tokenizer.init_kwargs.items() if k not in _PLACE and not k.endswith("_file")}
    content = [rules, *identity, tokenizer.model_max_length, settings if saved else {}]
    return digest({}, json.dumps(content, sort_keys=True, default=str))[:12]


def clear_truncation(tokenizer: Any) -> None:
    """Reset truncation and padding of ``tokenizer``: every call sets them, and they would be saved with it."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()
        backend.no_padding()
