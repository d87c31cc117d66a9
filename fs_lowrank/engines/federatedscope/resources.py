"""The table of how fast clients are, by which the framework's samplers other than ``uniform`` draw."""

from __future__ import annotations

import pickle
from typing import Any

from ...errors import UserError


def check_resources(cfg: Any) -> None:
    """Check that the file ``federate.resource_info_file`` can be read, and that nothing in it runs.

    The framework unpickles the file, whether it is used or not.

    Raises:
        UserError: it cannot be read, or would run code; or this run draws without the framework's samplers.
    """
    sampler, file = cfg.federate.sampler, cfg.federate.resource_info_file
    if sampler == "uniform" and not file:
        return
    if sampler != "uniform" and cfg.federate.mode == "distributed":
        raise UserError(
            f"federate.sampler = {sampler!r} draws by how fast the clients are, in mode standalone; use the sampler "
            "uniform"
        )
    try:
        with open(file, "rb") as opened:
            _Plain(opened).load()
    except Exception as error:  # what is no pickle makes it raise errors of many classes
        raise UserError(
            f"federate.resource_info_file = {file!r} cannot be read ({type(error).__name__}: {str(error)[:200]}); for "
            f"federate.sampler = {sampler!r}, name a pickled table {{number: {{'computation': milliseconds a sample, "
            "'communication': kbit/s}}"
        ) from None


class _Plain(pickle.Unpickler):
    """Reads plain values alone: nothing that a file names is imported, so nothing of it runs."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and what it names would run")
