"""The federated methods, one file each, and the registry that finds them."""

from .base import (
    Averaging,
    Client,
    Gathering,
    Method,
    Phase,
    RefusedUpdate,
    Requires,
    Setting,
    State,
    Tensors,
    Update,
    Workbench,
    refuse_negative,
)
from .catalogue import create_method, get_method_class, list_methods, requirements, revisions
from .registry import register_method
from .robust import RobustMean
from .wrapper import Wrapper

__all__ = [
    "Averaging",
    "Client",
    "Gathering",
    "Method",
    "Phase",
    "RefusedUpdate",
    "Requires",
    "RobustMean",
    "Setting",
    "State",
    "Tensors",
    "Update",
    "Workbench",
    "Wrapper",
    "create_method",
    "get_method_class",
    "list_methods",
    "refuse_negative",
    "register_method",
    "requirements",
    "revisions",
]
