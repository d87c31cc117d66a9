"""What the framework's samplers have to know of the clients, checked before anything runs.

All but ``uniform`` draw by how fast a client is. The framework has that from ``federate.resource_info_file``; between
processes each client has the file, and tells the server when it joins (``federate.join_in_info``).
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
_TABLE = "{number: {'computation': milliseconds a sample, 'communication': kbit/s}}"


def check_resources(cfg: Any) -> None:
    """Check ``federate.sampler`` of the framework's configuration, and what it needs.

    Raises:
        UserError: there is no such sampler, or this process has not got what it needs; the framework would fail on both
            with a traceback, between processes only when all clients have joined.
    """
    federate, role = cfg.federate, cfg.distribute.role
    sampler, asked, file = federate.sampler, list(federate.join_in_info), federate.resource_info_file
    if sampler not in _SAMPLERS:
        raise UserError(
            f"federate.sampler = {sampler!r}: expected one of {', '.join(_SAMPLERS)}{nearest(sampler, _SAMPLERS)}"
        )
    for name in asked:
        if name not in _INFORMATION:
            raise UserError(
                f"federate.join_in_info = {asked}: a client can be asked for {' and '.join(_INFORMATION)} when it "
                f"joins, not for {name!r}; remove that"
            )
    draws, tells = sampler != "uniform", "client_resource" in asked
    if file and Path(file).is_file():
        _check_table(file)  # the framework unpickles it, whether it is used or not
    between = federate.mode == "distributed"
    if between and draws and not tells:
        raise UserError(
            f"federate.sampler = {sampler!r} draws by how fast the clients are, which in mode distributed each of them "
            "tells when it joins; set federate.join_in_info to ['client_resource'] and, for the clients, "
            "federate.resource_info_file, or use the sampler uniform"
        )
    if not (tells and role == "client" if between else tells or draws):
        return
    what, instead = "federate.join_in_info = ['client_resource']", "leave that out"
    if draws:
        what, instead = f"federate.sampler = {sampler!r}", "use the sampler uniform"
    if not file:
        raise UserError(
            f"{what} needs to know how fast the clients are; set federate.resource_info_file to a pickled table "
            f"{_TABLE}, or {instead}"
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
    if not isinstance(table, Mapping) or not table:
        raise UserError(
            f"federate.resource_info_file = {file!r} holds {type(table).__name__} of {_length(table)}; expected a "
            f"pickled table {_TABLE}, which is not empty"
        )
    for number, row in table.items():
        if not isinstance(row, Mapping) or not all(_positive(row.get(n)) for n in ("computation", "communication")):
            raise UserError(
                f"federate.resource_info_file = {file!r}: the row {number!r} is {str(row):.200}; expected positive "
                f"numbers, as in {_TABLE}"
            )


def _positive(value: Any) -> bool:
    try:
        return 0 < float(value) < math.inf
    except (TypeError, ValueError):
        return False


def _length(table: Any) -> str:
    return f"length {len(table)}" if hasattr(table, "__len__") else "no length"
