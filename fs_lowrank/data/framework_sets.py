"""The instruction data that FederatedScope knows by name (``NAME@llm``), from the files that it downloads.

Nothing is downloaded here: the files are expected below ``data.root``, where FederatedScope puts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fs_lowrank.data.files import read_table
from fs_lowrank.data.tables import require_columns
from fs_lowrank.errors import UserError, say_once

#: name -> its file
FILES = {
    "alpaca": "alpaca_data.json",
    "alpaca_cleaned": "alpaca_data_cleaned.json",
    "dolly-15k": "databricks-dolly-15k.jsonl",
    "gsm8k": "gsm8k_train.jsonl",
    "rosetta_alpaca": "rosetta_alpaca.json",
}
#: name -> the columns of its roles, where they are not called as the roles; keys of ``data.args``
COLUMNS = {
    "gsm8k": {"instruction": "question", "output": "answer"},
    "rosetta_alpaca": {"category": "input"},
    "code_search_net": {"instruction": "docstring", "input": "language", "output": "code", "category": "language"},
}
NAMES = (*FILES, "code_search_net")
#: CodeSearchNet's languages, in the order in which FederatedScope reads them
_LANGUAGES = ("python", "javascript", "java", "ruby", "php", "go")

#: RosettaAlpaca's smallest language
_LEFT_OUT = "X86-64 Assembly"


def read_set(name: str, splitter: str, path: Path, quoting: bool | None = None, *named_by: str) -> pd.DataFrame:
    """The table of the set called ``name``, changed as FederatedScope changes it.

    Args:
        splitter: ``data.splitter``; with ``meta`` the smallest language of RosettaAlpaca is left out.
        path, quoting, named_by: as for ``read_table``; of CodeSearchNet, any path in the folder of the languages.
    """
    if name == "code_search_net":
        return _code_search_net(path.parent)
    table = read_table(path, quoting, *named_by)
    if name == "gsm8k":
        require_columns(path, table, ["answer"])
        table["answer"] = [str(answer).replace("####", "The answer is") for answer in table["answer"]]
    if name == "rosetta_alpaca" and splitter == "meta" and "input" in table:
        kept = table["input"] != _LEFT_OUT
        say_once(
            f"data.splitter = meta: {int((~kept).sum())} rows of {_LEFT_OUT} in {path.name} are left out, as in "
            "FederatedScope"
        )
        table = table[kept].reset_index(drop=True)
    return table


def _code_search_net(root: Path) -> pd.DataFrame:
    """The training rows of all languages; an instruction is the language and the docstring."""
    folders = {name: root / name / "final" / "jsonl" / "train" for name in _LANGUAGES}
    # By number, as FederatedScope reads them: python_train_10 comes after python_train_9.
    parts = [
        path
        for name, folder in folders.items()
        for path in sorted(folder.glob(f"{name}_train_*.jsonl.gz"), key=lambda path: (len(path.name), path.name))
    ]
    if missing := [name for name, folder in folders.items() if not any(folder in part.parents for part in parts)]:
        raise UserError(
            f"no file {folders[missing[0]] / missing[0]}_train_0.jsonl.gz; code_search_net@llm needs CodeSearchNet's "
            f"languages ({', '.join(_LANGUAGES)}) below data.root, as FederatedScope's "
            "llm/dataset/code_search_net.py leaves them"
        )
    columns = list(COLUMNS["code_search_net"].values())[:3]
    tables = []
    for path in parts:
        table = read_table(path)
        require_columns(path, table, columns)
        tables.append(table[columns])
    whole = pd.concat(tables, ignore_index=True)
    whole["docstring"] = [f"{lang} {said}" for lang, said in zip(whole["language"], whole["docstring"])]
    return whole


def with_columns(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """``data.args`` with the columns of the set called ``name``, unless they are given."""
    return {**COLUMNS.get(name, {}), **args}
