"""A prompt template of the user's: a text with columns in braces, such as ``Question: {question} Answer: {output}``.

The text before the answer's field is the prompt; the answer, and the text after it, is what the model learns to say.
``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fs_lowrank.data.files import as_texts
from fs_lowrank.errors import UserError, nearest
from fs_lowrank.settings import Origin

#: forms that have a name
TEMPLATES = ("auto", "chat", "alpaca")
#: role -> the columns that it may be in where ``data.args`` does not name one
SYNONYMS = {
    "instruction": ("instruction", "prompt", "query", "question"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
}


def is_own(template: str) -> bool:
    """Whether it is a text with fields, and not the name of a form."""
    return template not in TEMPLATES


def check_template(args: Mapping[str, Any], origin: Origin) -> None:
    """Refuse a template without fields or without the answer, as far as that is known without the data.

    Raises:
        UserError: the message says what is wrong with it.
    """
    template = args.get("template", "auto")
    if not is_own(template):
        return
    at = "data.args.0.template"
    if "{" not in template:
        expected = f"{', '.join(TEMPLATES)}, or a text with columns in braces, such as '{{question}}\\n{{output}}'"
        origin.wrong(at, template, expected + nearest(template, TEMPLATES))
    try:
        fields = [name for _, name in _parts(template) if name is not None]
    except ValueError as error:
        origin.fail(at, f"= {template!r}: {error}")
    answers = [args["output"]] if args.get("output") else list(SYNONYMS["output"])
    if fields[-1] not in (*answers, "output") or fields[-1] in fields[:-1]:
        known = {*answers, "output"} & set(fields)
        what = "must have the answer once, and as its last field" if known else "has no field of the answer"
        origin.fail(at, f"= {template!r} {what}: {' or '.join(f'{{{name}}}' for name in answers)}")


def ends(template: str) -> bool:
    """Whether a template of the user's has text after the answer."""
    parts = _parts(template)
    last = max(i for i, (_, name) in enumerate(parts) if name is not None)
    return any(text.strip() for text, _ in parts[last + 1 :])


def prompted(template: str) -> bool:
    """Whether anything stands before the answer in a template of the user's; else the whole text is learned."""
    (text, name), *more = _parts(template)
    return bool(text) or any(name is not None for _, name in more)


def _parts(template: str) -> list[tuple[str, str | None]]:
    """Texts, and the column after each; none after a brace that is one, nor where the template ends with text.

    Raises:
        ValueError: braces that do not match, or more than a name in them.
    """
    parts = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        if name == "" or spec or conversion:
            raise ValueError("expected the name of a column between braces; {{ and }} are braces themselves")
        parts.append((text, name))
    return parts


def prompts(
    table: pd.DataFrame, where: str | Path, args: Mapping[str, Any], answered: bool = True
) -> tuple[pd.DataFrame, set[str]]:
    """The rows of ``table`` by the template in ``args``, and the columns that are in it.

    Args:
        answered: the table has the answers; without them ``output`` is a stand-in.
    Returns:
        The columns ``instruction`` (the whole prompt), ``input`` (empty) and ``output`` (the answer and what follows),
        empty where the answer is.
    Raises:
        UserError: a field that is no column; the message names the nearest.
    """
    there = [str(column) for column in table]
    before: list[str | pd.Series] = []
    used = set()
    parts = _parts(args["template"])
    last = max(i for i, (_, name) in enumerate(parts) if name is not None)
    for index, (text, name) in enumerate(parts[: last + 1]):
        before.append(text)
        if name is None:  # the text ends with a brace
            continue
        if index == last and not answered:
            break
        named = [args[name]] if name in SYNONYMS and args.get(name) else [name, *SYNONYMS.get(name, ())]
        column = next((c for c in named if c in table), None)
        if column is None:
            listed = ", ".join(there)
            raise UserError(
                f"{where}: data.args: template: no column {name!r}{nearest(name, there)}; there are: {listed}"
            )
        used.add(column)
        before.append(as_texts(where, column, table[column]))
    answer = before.pop() if answered else "x"
    prompt = pd.Series("", index=table.index, dtype=object)
    for piece in before:
        prompt = prompt + piece
    after = "".join(text for text, _ in parts[last + 1 :])
    output = answer.where(answer.str.strip() == "", answer + after) if isinstance(answer, pd.Series) else answer
    return pd.DataFrame({"instruction": prompt, "input": "", "output": output}, index=table.index), used
