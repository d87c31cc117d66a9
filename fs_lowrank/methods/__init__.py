"""The federated methods, one file each, and the registry that finds them."""

from .base import Client, Method, Phase, RefusedUpdate, Setting, State, Tensors, Update, Workbench
from .catalogue import create_method, get_method_class, list_methods, revisions
from .registry import register_method

__all__ = [
    "Client",
    "Method",
    "Phase",
    "RefusedUpdate",
    "Setting",
    "State",
    "Tensors",
    "Update",
    "Workbench",
    "create_method",
    "get_method_class",
    "list_methods",
    "register_method",
    "revisions",
]
