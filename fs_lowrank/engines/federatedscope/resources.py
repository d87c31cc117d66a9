"""What the framework's samplers have to know of the clients, checked before anything runs.

All but ``uniform`` draw by how fast a client is, which the framework has from ``federate.resource_info_file``.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UserError, nearest

_SAMPLERS = ("uniform", "group", "responsiveness")
#: what ``federate.join_in_info`` may ask for
_INFORMATION = ("num_sample", "client_resource")
_COLUMNS = ("computation", "communication")
_TABLE = "{number: {'computation': milliseconds a sample, 'communication': kbit/s}}"


def check_resources(cfg: Any) -> None:
    """Check ``federate.sampler`` of the framework's configuration, and what it needs.

    Raises:
        UserError: there is no such sampler, or this process has not got what it needs; the framework would fail on both
            with a traceback, between processes only when all clients have joined.
    """
    federate = cfg.federate
    sampler, asked, file = federate.sampler, list(federate.join_in_info), federate.resource_info_file
    if sampler not in _SAMPLERS:
        raise UserError(
            f"federate.sampler = {sampler!r}: expected one of {', '.join(_SAMPLERS)}{nearest(sampler, _SAMPLERS)}"
        )
    if unknown := sorted(set(asked) - set(_INFORMATION)):
        raise UserError(
            f"federate.join_in_info = {asked}: a client can be asked for {' and '.join(_INFORMATION)} when it joins, "
            f"not for {unknown[0]!r}; remove that"
        )
    if file and Path(file).is_file():
        _check_table(file)  # the framework unpickles it, whether it is used or not
    if federate.mode == "distributed":
        if sampler != "uniform":
            raise UserError(
                f"federate.sampler = {sampler!r} draws by how fast the clients are, in mode standalone; use the "
                "sampler uniform"
            )
    elif sampler != "uniform" or "client_resource" in asked:
        what = f"federate.sampler = {sampler!r}" if sampler != "uniform" else f"federate.join_in_info = {asked}"
        if not file:
            raise UserError(
                f"{what} needs to know how fast the clients are; set federate.resource_info_file to a pickled table "
                f"{_TABLE}, or leave it out"
            )
        if not Path(file).is_file():
            raise UserError(f"federate.resource_info_file = {file!r}: there is no such file; correct the path")


class _Plain(pickle.Unpickler):
    """Reads plain values alone: nothing that a file names is imported, so nothing of it runs."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and what it names would run")


def _check_table(file: str) -> None:
    try:
        with open(file, "rb") as opened:
            table = _Plain(opened).load()
    except Exception as error:  # what is no pickle makes it raise errors of many classes
        raise UserError(
            f"federate.resource_info_file = {file!r} cannot be read ({type(error).__name__}: {str(error)[:200]}); "
            f"expected a pickled table {_TABLE} of plain numbers"
        ) from None
    rows = table.values() if isinstance(table, Mapping) else ()
    right = [isinstance(row, Mapping) and all(_positive(row.get(n)) for n in _COLUMNS) for row in rows]
    if not right or not all(right):
        raise UserError(
            f"federate.resource_info_file = {file!r} holds {str(table):.200}; expected a pickled table {_TABLE} of "
            "positive numbers, which is not empty"
        )


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf
