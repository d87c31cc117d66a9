"""What the framework's samplers have to know of the clients, checked before anything runs.

All but ``uniform`` draw by how fast a client is, which the framework has from ``federate.resource_info_file``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ...errors import UserError, nearest

_SAMPLERS = ("uniform", "group", "responsiveness")


def check_resources(cfg: Any) -> None:
    """Check ``federate.sampler`` of the framework's configuration, and what it needs.

    Raises:
        UserError: there is no such sampler, or this process has not got what it needs; or the file would run code.
    """
    sampler, file = cfg.federate.sampler, cfg.federate.resource_info_file
    if sampler not in _SAMPLERS:
        raise UserError(
            f"federate.sampler = {sampler!r}: expected one of {', '.join(_SAMPLERS)}{nearest(sampler, _SAMPLERS)}"
        )
    if sampler != "uniform" and cfg.federate.mode == "distributed":
        raise UserError(
            f"federate.sampler = {sampler!r} draws by how fast the clients are, in mode standalone; use the sampler "
            "uniform"
        )
    if file and Path(file).is_file():  # the framework unpickles it, whether it is used or not
        try:
            with open(file, "rb") as opened:
                _Plain(opened).load()
        except Exception as error:  # what is no pickle makes it raise errors of many classes
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise UserError(f"federate.resource_info_file = {file!r} cannot be read ({reason})") from None
    elif file or sampler != "uniform" or "client_resource" in cfg.federate.join_in_info:
        raise UserError(
            f"federate.resource_info_file = {file!r}: there is no such file, and federate.sampler = {sampler!r} or "
            "federate.join_in_info asks how fast the clients are; name a pickled table {number: {'computation': "
            "milliseconds a sample, 'communication': kbit/s}}"
        )


class _Plain(pickle.Unpickler):
    """Reads plain values alone: nothing that a file names is imported, so nothing of it runs."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and what it names would run")
