"""The version of the package, and of the files that it writes: the one place for both.

The files that carry ``"schema"`` are ``summary.json``, ``environment.json``, ``data.json`` and each checkpoint's
``meta.json`` of a run, the entries of ``comparison.json``, the results of ``benchmark`` and what ``hpo`` found.
``rounds.jsonl`` follows the ``environment.json`` beside it. A file without the key is of version 0.1.0, before files
said so, and is read as schema 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import UserError

#: setup.py reads it from this line, without importing anything
__version__ = "0.2.0.dev0"

#: Goes up by one when a reader of the version before would misread a file, not when a field is added.
SCHEMA = 1


class NewerSchema(UserError):
    """A file was written by a version of fs-lowrank that is newer than this one."""


def check_schema(content: Mapping[str, Any], path: str | Path) -> None:
    """Whether this version reads what a file holds.

    Args:
        content: the file's, as plain data. path: the file, for the message.
    Raises:
        NewerSchema: a newer version wrote it.
        UserError: its schema is no whole number above 0.
    """
    schema = content.get("schema", 1)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise UserError(f"{path}: schema = {schema!r}: expected a whole number above 0; the file is damaged")
    if schema > SCHEMA:
        raise NewerSchema(
            f"{path}: schema {schema}: a newer version of fs-lowrank wrote this file, and this one, {__version__}, "
            f"reads schema {SCHEMA} and below; update fs-lowrank, or use the version that wrote it"
        )
