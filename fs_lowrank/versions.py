"""The version of the package and the schema of the files that it writes.

The files that carry ``"schema"`` are ``summary.json``, ``environment.json``, ``data.json`` and each checkpoint's
``meta.json`` of a run, the entries of ``comparison.json``, and the results of ``benchmark`` and ``hpo``. The schema of
``rounds.jsonl`` is that of the ``environment.json`` beside it. A file without the key was written by version 0.1.0, and
is read as schema 1. Schema 2 has the clients' rows beside ``data.json`` (``runs.split``), and the positions of
clients' copies among the tensors of a checkpoint (``rounds.ledger``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import DamagedFile, UserError

#: setup.py reads it from this line, without importing the package
__version__ = "0.2.0"

#: Raised by one when a reader of the previous version would misread a file, not when a field is added.
SCHEMA = 2


class NewerSchema(UserError):
    """A file was written by a version of fs-lowrank that is newer than this one."""


def check_schema(content: Mapping[str, Any], path: str | Path) -> None:
    """Check that this version can read a file.

    Args:
        content: of the file, as plain data.
        path: of the file, for the message.
    Raises:
        NewerSchema: a newer version wrote it.
        DamagedFile: its schema is not a whole number above 0.
    """
    schema = content.get("schema", 1)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise DamagedFile(f"{path}: schema = {schema!r}: expected a whole number above 0; the file is damaged")
    if schema > SCHEMA:
        raise NewerSchema(
            f"{path}: schema {schema}: a newer version of fs-lowrank wrote this file, and this one, {__version__}, "
            f"reads schema {SCHEMA} and below; update fs-lowrank, or use the version that wrote it"
        )
