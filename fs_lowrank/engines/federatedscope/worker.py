"""Chooses the worker classes of a method."""

from __future__ import annotations

from .config import our_method
from .session import is_distributed


def choose(method: str):
    """Server and client classes for ``federate.method``; None leaves the method to the framework."""
    if our_method(method) is None:
        return None
    if is_distributed():
        from .distributed import DistributedClient, DistributedServer

        return {"client": DistributedClient, "server": DistributedServer}
    from .client import LowRankClient
    from .server import LowRankServer

    return {"client": LowRankClient, "server": LowRankServer}
