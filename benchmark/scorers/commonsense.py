"""The commonsense tasks in the instruction format of LLM-Adapters, which RoLoRA's Tables 3 and 12 use.

Hu et al., "LLM-Adapters: An Adapter Family for Parameter-Efficient Fine-Tuning of LLMs", EMNLP 2023.

Files: ``commonsense/<task>/train.json`` and ``test.json``, lists of ``{instruction, input, output, answer}``. An
instruction contains the question, the options and the format of the answer, which ``split_row`` parses.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fs_lowrank.errors import UserError
from fs_lowrank.jobs.files import read_json, write_text

_CHOOSE = "Please choose the correct answer to the question: "


@dataclass(frozen=True)
class Form:
    """The format of a task's instruction: the text before the question, the word before the number of each option, and
    the text before the first option, between options, and before the line with the format of the answer."""

    start: str
    word: str = "Answer"
    first: str = "\n\n"
    between: str = " "
    last: str = "\n\n"

    def pattern(self, options: int) -> re.Pattern[str]:
        """The instruction of a question with so many options; its groups are the question and the options.

        A number that the question itself has is not taken for that of an option, since the first group is the longest.
        """
        marks = (f"{self.between if n else self.first}{self.word}{n + 1}: " for n in range(options))
        parts = self.start, *marks, f"{self.last}Answer format: "
        return re.compile("(.*)".join(map(re.escape, parts)) + ".*", re.DOTALL)


#: the eight tasks by the name of their folder
FORMS = {
    "ARC-Challenge": Form(_CHOOSE),
    "ARC-Easy": Form(_CHOOSE),
    "boolq": Form("Please answer the following question with true or false, question: ", word=""),
    "hellaswag": Form("Please choose the correct ending to complete the given sentence: ", "Ending"),
    "openbookqa": Form(_CHOOSE),
    "piqa": Form("Please choose the correct solution to the question: ", "Solution", between="\n\n"),
    "social_i_qa": Form(_CHOOSE),
    "winogrande": Form(
        "Please choose the correct answer to fill in the blank to complete the given sentence: ", "Option", last=" "
    ),
}
HOW_TO_GET = (
    "these files are LLM-Adapters' dataset/<task>/{train,test}.json; "
    "put them below the data root as commonsense/<task>/"
)


@dataclass(frozen=True)
class Question:
    """A row: the question, its options (none for BoolQ), and the index of the right option; for BoolQ, 1 for true."""

    question: str
    options: tuple[str, ...]
    right: int


def split_row(task: str, row: dict) -> Question:
    """Parse ``row``, of which nothing is lost.

    Raises:
        ValueError: the row does not have the format of its task, or its answer is none of the options.
    """
    form, instruction, answer = FORMS[task], row["instruction"], row["answer"]
    # Some ARC rows have five options, or three, and an answer format of four.
    number = next((n for n in range(9, 0, -1) if form.word and f"{form.word}{n}: " in instruction), 0)
    match = form.pattern(number).fullmatch(instruction)
    if match is None:
        raise ValueError(f"not an instruction of {task} with {number} options: {instruction[:200]!r}")
    answers = [f"{form.word.lower()}{n + 1}" for n in range(number)] if form.word else ["false", "true"]
    if answer not in answers:
        raise ValueError(f"answer {answer!r} is none of the options of {instruction[:200]!r}")
    return Question(match[1], match.groups()[1:], answers.index(answer))


def path(root: Path, task: str, split: str) -> Path:
    return root / "commonsense" / task / f"{split}.json"


def read(root: Path, task: str, split: str) -> list[dict]:
    """Read the rows of a file.

    Raises:
        UserError: no such file, or one that is not a list of instructions.
    """
    file = path(root, task, split)
    if not file.is_file():
        raise UserError(f"{task}: there is no {file}; {HOW_TO_GET}")
    rows: list[dict] = read_json(file, list, remedy=HOW_TO_GET)
    wanted = {"instruction", "input", "output", "answer"}
    if not rows:
        raise UserError(f"{file} has no rows; {HOW_TO_GET}")
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not wanted <= row.keys() or not all(isinstance(row[k], str) for k in wanted):
            raise UserError(f"{file}: row {i} should have the texts {', '.join(sorted(wanted))}, got {str(row)[:200]}")
    return rows


def questions(root: Path, task: str, split: str) -> list[Question]:
    """Read and parse the rows of a file.

    Raises:
        UserError: as for ``read``; or a row without the format of its task (the message names file and row).
    """
    result = []
    for i, row in enumerate(read(root, task, split)):
        try:
            result.append(split_row(task, row))
        except ValueError as error:
            raise UserError(f"{path(root, task, split)}: row {i}: {error}") from error
    return result


def training_file(
    data_root: Path | str, out: Path | str, per_task: int | None, seed: int, tasks: Sequence[str] = ()
) -> dict[str, int]:
    """Write the training rows of ``tasks`` (default: all) to one JSONL file, for ``data.type``.

    Tasks are in alphabetical order, each with a sample of ``per_task`` rows in the order of its file. The field
    ``category`` is the task. The sample of one task does not depend on the other tasks.

    Returns:
        number of rows by task.
    Raises:
        UserError: a task has no train.json.
    """
    root, out = Path(data_root), Path(out)
    counts, lines = {}, []
    for task in sorted(tasks or FORMS):
        rows = read(root, task, "train")
        indices: Sequence[int] = range(len(rows))
        if per_task is not None and per_task < len(rows):
            indices = sorted(random.Random(f"{seed}:{task}").sample(indices, per_task))
        for i in indices:
            row = {key: rows[i][key] for key in ("instruction", "input", "output")}
            lines.append(json.dumps({**row, "category": task}, ensure_ascii=False))
        counts[task] = len(indices)
    write_text(out, "\n".join(lines) + "\n")
    return counts
