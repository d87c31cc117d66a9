"""A prompt template of the user's: a text with columns in braces, such as ``Question: {question} Answer: {output}``.

The text before the answer's field is the prompt; the model learns the answer and the text after it.
``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fs_lowrank.data.files import as_texts, require_columns
from fs_lowrank.errors import nearest
from fs_lowrank.settings import Origin

#: forms that have a name
TEMPLATES = ("auto", "chat", "alpaca")
#: role -> the columns that it may be in where ``data.args`` does not name one
SYNONYMS = {
    "instruction": ("instruction", "prompt", "query", "question"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
}


def is_custom(template: str) -> bool:
    """Whether ``template`` is a text with fields, and not the name of a form."""
    return template not in TEMPLATES


def check_template(args: Mapping[str, Any], origin: Origin) -> None:
    """Refuse a template without fields or without the answer, as far as the template alone shows it.

    Raises:
        UserError: the message names the mistake.
    """
    template = args.get("template", "auto")
    if not is_custom(template):
        return
    key = "data.args.0.template"
    if "{" not in template:
        expected = f"{', '.join(TEMPLATES)}, or a text with columns in braces, such as '{{question}}\\n{{output}}'"
        origin.wrong(key, template, expected + nearest(template, TEMPLATES))
    try:
        fields = [name for _, name in _parsed(template)[0] if name is not None]
    except ValueError as error:
        origin.fail(key, f"= {template!r}: {error}")
    answers = [args["output"]] if args.get("output") else list(SYNONYMS["output"])
    if not fields or fields[-1] not in (*answers, "output") or fields[-1] in fields[:-1]:
        present = {*answers, "output"} & set(fields)
        problem = "must have the answer once, and as its last field" if present else "has no field of the answer"
        origin.fail(key, f"= {template!r} {problem}: {' or '.join(f'{{{name}}}' for name in answers)}")


def ends(template: str) -> bool:
    """Whether a template of the user's has text after the answer."""
    return bool(_parsed(template)[1].strip())


def prompted(template: str) -> bool:
    """Whether a template of the user's has a text or a field before the answer; else the whole text is learned."""
    parts, _ = _parsed(template)
    return bool(parts[0][0]) or len(parts) > 1


def _parsed(template: str) -> tuple[list[tuple[str, str | None]], str]:
    """Texts with the column after each, up to the answer's, which is the last column; and the text after the answer.

    The column is None after an escaped brace. Without any column, the first are empty.

    Raises:
        ValueError: braces that do not match, or hold more than a name.
    """
    parts: list[tuple[str, str | None]] = []
    answer = 0
    for text, name, spec, conversion in string.Formatter().parse(template):
        if name == "" or spec or conversion:
            raise ValueError("expected the name of a column between braces; {{ and }} are braces themselves")
        parts.append((text, name))
        answer = answer if name is None else len(parts)
    return parts[:answer], "".join(text for text, _ in parts[answer:])


def prompts(
    table: pd.DataFrame, where: str | Path, args: Mapping[str, Any], answered: bool = True
) -> tuple[pd.DataFrame, set[str]]:
    """The rows of ``table`` by the template in ``args``, and the columns that the template uses.

    Args:
        answered: the table has the answers; without them ``output`` is a stand-in.
    Returns:
        The columns ``instruction`` (the whole prompt), ``input`` (empty) and ``output`` (the answer and the text
        after it), empty where the answer is empty.
    Raises:
        UserError: a field that is no column; the message names the nearest.
    """
    texts: list[str | pd.Series] = []
    used = set()
    parts, ending = _parsed(args["template"])
    for index, (text, name) in enumerate(parts, start=1):
        texts.append(text)
        if name is None or index == len(parts) and not answered:  # the text ends with a brace, or before the answer
            continue
        candidates = [args[name]] if name in SYNONYMS and args.get(name) else [name, *SYNONYMS.get(name, ())]
        column = next((c for c in candidates if c in table), candidates[0])
        require_columns(f"{where}: data.args: template", table, [column])
        used.add(column)
        texts.append(as_texts(where, column, table[column]))
    answer = texts.pop() if answered else "x"
    prompt = pd.Series("", index=table.index, dtype=object)
    for piece in texts:
        prompt = prompt + piece
    output = answer.where(answer.str.strip() == "", answer + ending) if isinstance(answer, pd.Series) else answer
    return pd.DataFrame({"instruction": prompt, "input": "", "output": output}, index=table.index), used
