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
from fs_lowrank.data.examples import IGNORED_LABEL, Examples
from fs_lowrank.data.ragged import Ragged
from fs_lowrank.data.template import ends, is_own, prompted
from fs_lowrank.errors import UserError, say_once, users_own
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
#: what is not used takes half of the time; a warning of long texts is for models without truncation
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
        raise UserError(f"llm.tok_len {max_len} leaves no room for text beside {special} special tokens")
    columns: dict[str, list[Ragged]] = {}
    truncated = 0
    for start in steps(range(0, len(frame), BATCH), f"tokenising {len(frame):,} rows"):
        part = frame.iloc[start : start + BATCH]
        texts = [part["text"].tolist()]
        if pair:
            texts.append(part["text_pair"].tolist())
        encoded = tokenizer(*texts, truncation=True, max_length=max_len, padding=False, return_attention_mask=False)
        for name in ("input_ids", "token_type_ids"):
            if name in encoded:
                columns.setdefault(name, []).append(Ragged.of(encoded[name]).narrowed())
        full = [i for i, row in enumerate(encoded["input_ids"]) if len(row) == max_len]
        if full:
            complete = tokenizer(*([each[i] for i in full] for each in texts), **_IDS_ALONE)
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
            other, ``instruction`` is the prompt as it stands (``data.template``).
        loss_on: ``answer`` (and its end-of-sequence token) or ``all`` tokens.
        paired: for an encoder-decoder model: prompt and answer are two texts, each of which is cut and ends with the
            end-of-sequence token; ``auto`` is the instruction, and its input on a line of its own.

    Returns:
        the examples, and a bool array over the rows of ``frame``: False for rows left out because the prompt alone
        fills ``max_len``.

    Raises:
        UserError: a chat template that is missing or refuses a row, nothing that ends an answer, or no row left; of
            ``paired``, a chat, a loss on ``all``, or nothing before the answer.
    """
    max_len, own = _limit(tokenizer, max_len), is_own(template)
    talks = "messages" in frame or "before" in frame and not own
    if paired:
        _check_pairs(frame, template, loss_on)
    elif talks and template == "alpaca":
        raise UserError("data.args: template = alpaca has no place for conversations, nor for system and history")
    chats = template == "chat" or template == "auto" and bool(getattr(tokenizer, "chat_template", None))
    chat = not paired and (talks or chats)
    start = [] if chat or paired else _start(tokenizer)  # a chat template contains the first token
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    usual = _plain if paired and template == "auto" else _alpaca
    form: Form = _filled_in if own else partial(_chats, tokenizer) if chat else usual
    if not end and len(frame):
        first = frame.iloc[:BATCH]
        contents = [turns[-1]["content"].rstrip() for turns in _turns(first)] if chat else []
        answers = (answer.rstrip() for _, answer in form(first))
        _check_end(template, any(not answer.endswith(content) for content, answer in zip(contents, answers)))

    def in_one(prompt: list[int], answer: list[int]) -> Encoded | None:
        prompt, answer = start + prompt, answer if answer[-1:] == end else answer + end
        ids = (prompt + answer)[:max_len]
        if len(ids) <= len(prompt):
            return None
        labels = [IGNORED_LABEL] * len(prompt) + ids[len(prompt) :] if loss_on == "answer" else ids
        return ids, labels, len(prompt) + len(answer) > max_len

    def as_pair(prompt: list[int], answer: list[int]) -> Encoded:
        sides = [ids[:-1] if end and ids[-1:] == end else ids for ids in (prompt, answer)]
        read, written = (ids[: max_len - len(end)] + end for ids in sides)
        return read, written, any(len(ids) + len(end) > max_len for ids in sides)

    examples, kept = _encoded(frame, tokenizer, form, as_pair if paired else in_one, paired)
    if len(frame) and not kept.any():
        raise UserError(f"all {len(frame)} prompts fill llm.tok_len {max_len} without an answer token; raise it")
    return examples, kept


def _check_pairs(frame: pd.DataFrame, template: str, loss_on: str) -> None:
    """Refuse what an encoder-decoder model cannot read or learn."""
    if "messages" in frame or "before" in frame or template == "chat":
        raise UserError(
            "conversations, the columns system and history, and chat templates are for decoders; an encoder-decoder "
            "model has data.args: template"
        )
    if loss_on != "answer":
        raise UserError(
            f"data.args: loss_on = {loss_on}: an encoder-decoder model writes the answer alone; leave it out"
        )
    if is_own(template) and not prompted(template):
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
    """The examples, and which of the rows of ``frame`` are in them.

    Args:
        encode: gives the example of the tokens of a prompt and of its answer; None: there is none.
    """
    columns: dict[str, list[Ragged]] = {"input_ids": [], "labels": []}
    kept, truncated = np.zeros(len(frame), dtype=bool), 0
    for start in steps(range(0, len(frame), BATCH), f"tokenising {len(frame):,} rows"):
        rows = slice(start, start + BATCH)
        prompts, answers = zip(*form(frame.iloc[rows]))
        made = [encode(*ids) for ids in zip(_ids(tokenizer, prompts), _ids(tokenizer, answers), strict=True)]
        kept[rows] = [one is not None for one in made]
        there = [one for one in made if one is not None]
        columns["input_ids"].append(Ragged.of([ids for ids, _, _ in there]).narrowed())
        columns["labels"].append(Ragged.of([labels for _, labels, _ in there]).narrowed())
        truncated += sum(cut for _, _, cut in there)
    return Examples(_joined(columns), None, pad_id(tokenizer), truncated=truncated, paired=paired), kept


def _check_end(template: str, closed: bool = False) -> None:
    """Refuse a tokenizer without an end-of-sequence token, unless the template writes something after the answer.

    Args:
        closed: the tokenizer's chat template does.
    """
    if not closed and not (is_own(template) and ends(template)):
        raise UserError(
            "data.args: template: nothing ends an answer, so a model would not learn to stop. Give the tokenizer an "
            "end-of-sequence token (eos_token), or write a text after the answer, as in '{instruction} {output} END'. "
            "An encoder writes no answers: name another model"
        )


def _filled_in(frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """By a template of the user's (``data.template``)."""
    return zip(frame["instruction"], frame["output"], strict=True)


def _plain(frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    for instruction, given, output in zip(frame["instruction"], frame["input"], frame["output"], strict=True):
        yield (f"{instruction}\n{given}" if given.strip() else instruction), output


def _joined(columns: dict[str, list[Ragged]]) -> dict[str, Ragged]:
    return {name: Ragged.join(parts) for name, parts in columns.items()}


def _limit(tokenizer: Any, max_len: int) -> int:
    limit = getattr(tokenizer, "model_max_length", max_len) or max_len
    if limit < max_len:
        say_once(f"llm.tok_len = {max_len} is lowered to {limit}, the longest text that the tokenizer is made for")
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
    for instruction, given, output in zip(frame["instruction"], frame["input"], frame["output"], strict=True):
        prompt = ALPACA if given.strip() else ALPACA_NO_INPUT
        yield prompt.format(instruction=instruction, input=given), output


def _turns(frame: pd.DataFrame) -> Iterator[list[dict[str, str]]]:
    if "messages" in frame:
        yield from frame["messages"]
        return
    before = frame["before"] if "before" in frame else [[]] * len(frame)
    for more, instruction, given, output in zip(before, frame["instruction"], frame["input"], frame["output"]):
        question = f"{instruction}\n\n{given}" if given.strip() else instruction
        yield [*more, {"role": "user", "content": question}, {"role": "assistant", "content": output}]


def _chats(tokenizer: Any, frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Prompt and answer of each row by the tokenizer's chat template, which may refuse a row.

    Raises:
        UserError: it raises an error, or renders earlier turns otherwise where an answer follows.
    """
    for row, turns in zip(frame.index, _turns(frame), strict=True):
        where = f"row {row + 1}: the model's chat template"
        with users_own(where, _OTHER_TEMPLATE):
            prompt = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(turns, tokenize=False)
        if whole.startswith(prompt):
            # The answer includes the end-of-turn token that follows it in the template, but not a final newline.
            yield prompt, whole[len(prompt) :].rstrip()
            continue
        with users_own(where, _OTHER_TEMPLATE):
            earlier = tokenizer.apply_chat_template(turns[:-1], tokenize=False).rstrip()
            any_answer = [*turns[:-1], {**turns[-1], "content": _ANY}]
            whole = tokenizer.apply_chat_template(any_answer, tokenize=False)
        yield _before_prefill(where, prompt, whole, earlier, turns[-1]["content"])


def _before_prefill(where: str, prompt: str, whole: str, earlier: str, answer: str) -> tuple[str, str]:
    """Prompt and answer where a template opens answers with a text that their turns do not have, such as ``<think>``.

    The prompt ends before that text, so that it is the same for answers that repeat it and those that do without it.

    Args:
        prompt: as the template gives it. whole: the same turns, answered by ``_ANY``. earlier: without a prompt.
    """
    common = os.path.commonprefix([prompt, whole])
    if len(common) < len(earlier) or _ANY not in whole[len(common) :]:
        raise UserError(
            f"{where} gives {prompt!r} as the prompt and {whole!r} with an answer, which does not begin with the "
            f"prompt; {_OTHER_TEMPLATE}"
        )
    if opened := prompt[len(common) :].strip():
        say_once(f"the model's chat template opens answers with {opened!r}; prompts end before it here")
    return common, whole[len(common) :].rstrip().replace(_ANY, answer.strip())


def tokenizer_fingerprint(tokenizer: Any, saved: bool = False) -> str:
    """A hash over all that decides the tokens of a text, 12 digits.

    Args:
        tokenizer: one of transformers.
        saved: also over settings that are only saved with it, without the place that it was read from.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        uncut(tokenizer)
        rules = backend.to_str()
    about = [type(tokenizer).__name__, tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)]
    own = {k: v for k, v in tokenizer.init_kwargs.items() if k not in _PLACE and not k.endswith("_file")}
    known = [rules, *about, tokenizer.model_max_length, own if saved else {}]
    return digest({}, json.dumps(known, sort_keys=True, default=str))[:12]


def uncut(tokenizer: Any) -> None:
    """Take from ``tokenizer`` how it was last told to cut and to pad, which is said at each call, and saved with it."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()
        backend.no_padding()
