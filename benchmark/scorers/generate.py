"""The papers' commonsense score: generate an answer to the instruction and parse it.

As in LLM-Adapters' evaluation, which RoLoRA's Tables 3 and 12 use: a sample counts if the first of the task's answer
words in the reply is the right one (``true``, ``solution2``, ``answer3``, ``ending1``, ``option2``); a reply without
one is wrong, and is also counted as unparsed. A score can be below chance, and is not comparable with lm-eval's.

Differs from the authors' script in the prompt, which here is the one that training used (the tokenizer's chat template,
or Alpaca's text without the blanks that the script indents it by), and in the decoding, which is greedy unless
``num_beams: 4`` asks for theirs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fs_lowrank.data.examples import IGNORED_LABEL
from fs_lowrank.data.tokenize import tokenize_instructions
from fs_lowrank.errors import UserError
from fs_lowrank.models.kinds import is_encoder_decoder, unwrapped
from fs_lowrank.settings import Key, Origin, check_value
from fs_lowrank.training.generate import continue_prompts

from ..intervals import right_rows
from . import commonsense
from .share import majority, share

#: lm-eval's names of the same tasks
ALIASES = {"arc_easy": "ARC-Easy", "arc_challenge": "ARC-Challenge", "social_iqa": "social_i_qa"}


@dataclass(frozen=True)
class Options:
    """``limit``: number of samples, the first of each task; none for all. ``template``: of the
    prompt; ``auto`` is the tokenizer's chat template, or Alpaca's form where it has none."""

    tasks: list[str] = field(metadata={"filled": True})
    limit: int | None = field(default=None, metadata={"min": 2})
    batch_size: int = field(default=16, metadata={"min": 1})
    max_new_tokens: int = field(default=32, metadata={"min": 1})
    num_beams: int = field(default=1, metadata={"min": 1})
    template: str = field(default="auto", metadata={"choices": ("auto", "chat", "alpaca")})


def check(options: Options, root: Path) -> None:
    """Raises:
    UserError: an unknown task, or files that are missing or damaged.
    """
    for task in options.tasks:
        commonsense.read(root, _folder(task), "test")


def score(model, tokenizer, options: Options, root: Path) -> dict[str, dict]:
    """Task → ``acc``, ``unparsed`` (fraction of replies without an answer), their standard errors, ``n``; ``majority``,
    the accuracy of always giving the most frequent right answer; ``acc_right``, which samples were right.

    ``version`` identifies the rules above; ``decoding`` and ``template`` describe the settings.
    """
    result, paired = {}, is_encoder_decoder(unwrapped(model))
    usual = "instruction" if paired else "chat" if getattr(tokenizer, "chat_template", None) else "alpaca"
    for task in options.tasks:
        rows = commonsense.read(root, _folder(task), "test")[: options.limit]
        replies = continue_prompts(
            model,
            tokenizer,
            prompts(rows, tokenizer, options.template, paired),
            batch_size=options.batch_size,
            max_new_tokens=options.max_new_tokens,
            num_beams=options.num_beams,
        )
        answers = [parse(_folder(task), reply) for reply in replies]
        hits = [answer == row["answer"] for answer, row in zip(answers, rows)]
        result[task] = {
            **share(hits, "acc"),
            "acc_right": right_rows(f"first {len(hits)}", hits),
            **share([answer is None for answer in answers], "unparsed"),
            "majority": majority([row["answer"] for row in rows]),
            "n": len(rows),
            "version": "first answer word, 1",
            "decoding": f"{'greedy' if options.num_beams == 1 else f'{options.num_beams} beams'}, at most "
            f"{options.max_new_tokens} new tokens, batches of {options.batch_size} padded on the left",
            "template": usual if options.template == "auto" else options.template,
            "data": f"commonsense/{_folder(task)}/test.json",
        }
    return result


def parse(task: str, reply: str) -> str | None:
    """The first answer word of ``task`` in ``reply``; None if there is none."""
    word = commonsense.FORMS[task].word.lower()
    pattern = {"": "true|false", "answer": "answer[1-5]", "ending": "ending[1-4]"}.get(word, f"{word}[12]")
    match = re.search(pattern, reply)
    return match and match[0]


def prompts(rows: list[dict], tokenizer, template: str = "auto", paired: bool = False) -> list[list[int]]:
    """Token ids of the prompt of each row, as in training.

    Args:
        paired: for an encoder-decoder model, whose prompt is a text of its own with an end.
    Raises:
        UserError: a prompt is longer than the tokenizer's limit.
    """
    frame = pd.DataFrame(rows, columns=["instruction", "input", "output"])
    examples, mask = tokenize_instructions(frame, tokenizer, 1 << 20, template, paired=paired)
    if cut := examples.truncated if paired else int((~mask).sum()):
        raise UserError(
            f"{cut} of {len(rows)} prompts are longer than the model's limit of {tokenizer.model_max_length} tokens"
        )
    # The prompt is the part without loss, or a text of its own.
    return [
        ids.tolist() if paired else ids[labels == IGNORED_LABEL].tolist()
        for ids, labels in zip(examples.columns["input_ids"], examples.columns["labels"])
    ]


def _folder(task: str) -> str:
    name = check_value("evaluation.tasks", task, Key(str, {"choices": (*commonsense.FORMS, *ALIASES)}), Origin())
    return ALIASES.get(name, name)
