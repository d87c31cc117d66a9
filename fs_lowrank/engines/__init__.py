"""The engines: the embedded one, the plug-in for FederatedScope, and those of other packages."""

from .catalogue import added_engines, get_engine, list_engines

__all__ = ["added_engines", "get_engine", "list_engines"]
