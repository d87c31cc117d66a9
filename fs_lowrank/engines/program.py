"""Objects that exist in the process of a program alone, where other processes of its run would not find them."""

from __future__ import annotations

from ..config import Config
from ..data import PARTITIONERS
from ..errors import UserError
from ..methods import get_method_class
from ..models.given import SUFFIX, is_given


def check_others(config: Config, remedy: str = "set federate.process_num 1") -> None:
    """Check that processes which do not run the program have all that ``config`` names.

    Args:
        remedy: how the run can do without them.
    Raises:
        UserError: the model is a module that the program gave, or the running script or notebook registers the method
            or the splitter itself.
    """
    if is_given(config):
        raise UserError(
            f"model = {config.model.type.removesuffix(SUFFIX)}: other processes cannot have a module that transformers "
            f"cannot load from a folder; {remedy}"
        )
    named = {
        "federate.method": (config.federate.method, get_method_class(config.federate.method)),
        "data.splitter": (config.data.splitter, PARTITIONERS.get(config.data.splitter)),
    }
    for key, (name, registered) in named.items():
        if getattr(registered, "__module__", "") == "__main__":
            package = ", or put it in a package with the entry point fs_lowrank.methods" * (key == "federate.method")
            raise UserError(
                f"{key} = {name}: other processes do not have what the running script or notebook registers; "
                f"{remedy}{package}"
            )
