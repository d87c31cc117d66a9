"""The instruction data that FederatedScope knows by name (``NAME@llm``), from the files that it downloads.

Nothing is downloaded here: the files are expected below ``data.root``, where FederatedScope puts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fs_lowrank.data.files import natural, read_table
from fs_lowrank.errors import UserError, say_once
from fs_lowrank.settings.reading import read_packaged

#: name -> its file, and the columns of its roles
SETS: dict[str, dict[str, Any]] = read_packaged(__package__, "framework_sets.yaml")
#: CodeSearchNet's languages, in the order in which FederatedScope reads them
_LANGUAGES = ("python", "javascript", "java", "ruby", "php", "go")

#: RosettaAlpaca's smallest language
_LEFT_OUT = "X86-64 Assembly"


def read_set(name: str, splitter: str, path: Path, quoting: bool | None = None) -> dict[str, pd.DataFrame]:
    """The table of the set called ``name``, changed as FederatedScope changes it.

    Args:
        splitter: ``data.splitter``; with ``meta`` the smallest language of RosettaAlpaca is left out.
        path, quoting: as for ``read_table``; for CodeSearchNet, any path in the folder of the languages.
    """
    if name == "code_search_net":
        return {"train": _code_search_net(path.parent)}
    table = worded(name, read_table(path, quoting))
    if name == "rosetta_alpaca" and splitter == "meta" and "input" in table:
        retained = table["input"] != _LEFT_OUT
        say_once(
            f"data.splitter = meta: {int((~retained).sum())} rows of {_LEFT_OUT} in {path.name} are left out, as in "
            "FederatedScope"
        )
        table = table[retained].reset_index(drop=True)
    return {"train": table}


def worded(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """``table`` of the set called ``name`` with the words that FederatedScope changes."""
    if name == "gsm8k" and "answer" in table:
        return table.assign(answer=[str(answer).replace("####", "The answer is") for answer in table["answer"]])
    if name == "code_search_net" and {"language", "docstring"} <= {*table}:
        pairs = zip(table["language"], table["docstring"])
        return table.assign(docstring=[f"{language} {docstring}" for language, docstring in pairs])
    return table


def _code_search_net(root: Path) -> pd.DataFrame:
    """The training rows of all languages; an instruction is the language and the docstring."""
    tables = []
    for name in _LANGUAGES:
        folder = root / name / "final" / "jsonl" / "train"
        # By number, as FederatedScope reads them: python_train_10 comes after python_train_9.
        paths = sorted(folder.glob(f"{name}_train_*.jsonl.gz"), key=lambda path: natural(path.name))
        if not paths:
            raise UserError(
                f"no file {folder / name}_train_0.jsonl.gz; code_search_net@llm needs CodeSearchNet's languages "
                f"({', '.join(_LANGUAGES)}) below data.root, as FederatedScope leaves them"
            )
        tables += [read_table(path)[["docstring", "language", "code"]] for path in paths]
    return worded("code_search_net", pd.concat(tables, ignore_index=True))
