"""The table of how fast clients are, by which the framework's samplers other than ``uniform`` draw."""

from __future__ import annotations

import pickle
from typing import Any

from ...errors import UserError


def check_resources(cfg: Any) -> None:
    """Check that the file ``federate.resource_info_file`` can be read, and runs no code.

    The framework unpickles the file, whether it is used or not.

    Raises:
        UserError: it cannot be read, is no such table, or would run code.
    """
    sampler, file = cfg.federate.sampler, cfg.federate.resource_info_file
    if sampler == "uniform" and not file:
        return
    try:
        with open(file, "rb") as opened:
            if not [entry["computation"] + entry["communication"] for entry in _Plain(opened).load().values()]:
                raise ValueError("it has no client")
    except Exception as error:  # of many classes, if it is no pickle
        raise UserError(
            f"federate.resource_info_file = {file!r} cannot be read ({type(error).__name__}: {str(error)[:200]}); for "
            f"federate.sampler = {sampler!r}, name a pickled table {{number: {{'computation': milliseconds a sample, "
            "'communication': kbit/s}}"
        ) from None


class _Plain(pickle.Unpickler):
    """Reads plain values alone: it imports no names of a file, so no code of it runs."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and what it names would run")
