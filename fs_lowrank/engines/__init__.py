"""What runs a method: the embedded engine, the plug-in for FederatedScope, and what other packages add."""

from .catalogue import added_engines, get_engine, list_engines

__all__ = ["added_engines", "get_engine", "list_engines"]
