"""Local copies of the data sets behind lm-eval's tasks, with the fields that its task definitions ask for.

Below the data root: ``commonsense/<task>/{train,test}.json`` (see ``commonsense``),
``mmlu/{dev,test}/<subject>_*.csv`` and ``humaneval/HumanEval.jsonl.gz``.

The instruction format omits some fields. It has no passages for BoolQ, so lm-eval's prompt begins with the question.
The context and question of Social IQa, and the two parts of a HellaSwag context, are one text in it; they are split
before the last sentence, and lm-eval's prompt joins them again (in HellaSwag it also capitalises the second part).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from fs_lowrank.data.files import read_table
from fs_lowrank.errors import UserError

from . import commonsense
from .commonsense import Question


def _boolq(q: Question) -> dict:
    return {"passage": "", "question": q.question.removesuffix("?"), "label": q.right}


def _piqa(q: Question) -> dict:
    return {"goal": q.question, "sol1": q.options[0], "sol2": q.options[1], "label": q.right}


def _social_i_qa(q: Question) -> dict:
    context, question = _last_sentence(q.question)
    return {
        "context": context,
        "question": question,
        "label": str(q.right + 1),
        **{f"answer{letter}": option for letter, option in zip("ABC", q.options)},
    }


def _hellaswag(q: Question) -> dict:
    label, _, context = q.question.partition(": ")
    first, second = (context, "") if re.search(r"[.!?\])\"']$", context) else _last_sentence(context)
    return {"activity_label": label, "ctx_a": first, "ctx_b": second, "endings": list(q.options), "label": str(q.right)}


def _winogrande(q: Question) -> dict:
    return {"sentence": q.question, "option1": q.options[0], "option2": q.options[1], "answer": str(q.right + 1)}


def _arc(q: Question) -> dict:
    labels = [chr(ord("A") + i) for i in range(len(q.options))]
    return {"question": q.question, "choices": {"text": list(q.options), "label": labels}, "answerKey": labels[q.right]}


def _openbookqa(q: Question) -> dict:
    fields = _arc(q)
    return {"question_stem": fields.pop("question"), **fields}


def _last_sentence(text: str) -> tuple[str, str]:
    """Split ``text`` at the blank before its last sentence (else at its first blank), without the blank."""
    cuts = [m.end() for m in re.finditer(r"[.!?][\"')]* (?=\S)", text)] or [text.find(" ") + 1]
    return text[: max(cuts[-1] - 1, 0)], text[cuts[-1] :]


#: (lm-eval's dataset_path, dataset_name) -> folder below ``commonsense``, split that lm-eval scores, conversion
_COMMONSENSE: dict[tuple[str, str | None], tuple[str, str, Callable[[Question], dict]]] = {
    ("aps/super_glue", "boolq"): ("boolq", "validation", _boolq),
    ("baber/piqa", None): ("piqa", "validation", _piqa),
    ("lighteval/siqa", None): ("social_i_qa", "validation", _social_i_qa),
    ("Rowan/hellaswag", None): ("hellaswag", "validation", _hellaswag),
    ("allenai/winogrande", "winogrande_xl"): ("winogrande", "validation", _winogrande),
    ("allenai/ai2_arc", "ARC-Easy"): ("ARC-Easy", "test", _arc),
    ("allenai/ai2_arc", "ARC-Challenge"): ("ARC-Challenge", "test", _arc),
    ("allenai/openbookqa", "main"): ("openbookqa", "test", _openbookqa),
}
MMLU = ("cais/mmlu", "hails/mmlu_no_train")
HUMANEVAL = "openai/openai_humaneval"


def find(root: Path, dataset_path: str, dataset_name: str | None) -> tuple[dict, str] | None:
    """The local copy of an lm-eval data set as ``{split: datasets.Dataset}`` and its description, or None.

    A missing split for examples in the prompt is empty.

    Raises:
        UserError: a file is damaged.
    """
    file = expected(root, dataset_path, dataset_name)
    if file is None or not file.is_file():
        return None
    if (dataset_path, dataset_name) in _COMMONSENSE:
        return _commonsense(root, *_COMMONSENSE[dataset_path, dataset_name])
    return _humaneval(file) if dataset_path == HUMANEVAL else _mmlu(root, file, str(dataset_name))


def expected(root: Path, dataset_path: str, dataset_name: str | None) -> Path | None:
    """The file that ``find`` needs; None for an unknown data set."""
    if (dataset_path, dataset_name) in _COMMONSENSE:
        return commonsense.path(root, _COMMONSENSE[dataset_path, dataset_name][0], "test")
    if dataset_path == HUMANEVAL:
        return root / "humaneval" / "HumanEval.jsonl.gz"
    return root / "mmlu" / "test" / f"{dataset_name}_test.csv" if dataset_path in MMLU and dataset_name else None


def _commonsense(root, task, scored, convert):
    rows = {scored: [convert(q) for q in commonsense.questions(root, task, "test")], "train": []}
    if commonsense.path(root, task, "train").is_file():
        rows["train"] = [convert(q) for q in commonsense.questions(root, task, "train")]
    return _datasets(rows, scored), f"commonsense/{task}, instruction form"


def _mmlu(root: Path, test: Path, subject: str):
    dev = root / "mmlu" / "dev" / f"{subject}_dev.csv"
    rows = {"test": _mmlu_rows(test, subject), "dev": _mmlu_rows(dev, subject) if dev.is_file() else []}
    return _datasets(rows, "test"), f"mmlu/test/{test.name}"


def _mmlu_rows(path: Path, subject: str) -> list[dict]:
    """Six columns: question, four choices, and the answer as a letter or a number from 0; a header is optional."""
    try:
        frame = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    rows = frame.iloc[1:] if frame[0][0] == "question" else frame
    wrong = rows if rows.shape[1] != 6 else rows[~rows[5].str.strip().isin([*"ABCD", *"0123"])]
    if len(wrong) or not len(rows):
        raise UserError(
            f"{path}: row {wrong.index[0] + 1 if len(wrong) else 0} should be a question, four choices and A-D or 0-3"
        )
    return [
        {"question": row[0], "subject": subject, "choices": row[1:5], "answer": "0123ABCD".index(row[5].strip()) % 4}
        for row in rows.values.tolist()
    ]


def _humaneval(path: Path):
    rows, fields = read_table(path), ["task_id", "prompt", "test", "entry_point"]
    if rows.reindex(columns=fields).isna().any(axis=None):
        raise UserError(f"{path}: expected problems with {', '.join(fields)}")
    return _datasets({"test": rows[fields].to_dict("records")}, "test"), f"humaneval/{path.name}"


def _datasets(rows: dict[str, list[dict]], full: str) -> dict:
    from datasets import Dataset

    built = {split: Dataset.from_list(part) for split, part in rows.items() if part}
    return {split: built[split] if part else built[full].select([]) for split, part in rows.items()}
