"""The federated methods, one file each, and the registry that finds them."""

from .base import Averaging, Gathering, Method, State
from .catalogue import create_method, get_method_class, list_methods, requirements, revisions
from .corrected import DriftCorrection
from .registry import register_method
from .robust import RobustMean
from .terms import (
    TRAIN,
    Client,
    Phase,
    RefusedUpdate,
    Requires,
    Setting,
    Tensors,
    Update,
    Workbench,
    put_beside,
    refuse_negative,
)
from .wrapper import Wrapper

__all__ = [
    "TRAIN",
    "Averaging",
    "Client",
    "DriftCorrection",
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
    "put_beside",
    "refuse_negative",
    "register_method",
    "requirements",
    "revisions",
]
