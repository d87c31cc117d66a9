"""Which workers run a method: ours for our methods."""

from __future__ import annotations

from .config import our_method


def choose(method: str):
    """Server and client classes for ``federate.method``; None leaves it to the framework."""
    if our_method(method) is None:
        return None
    from .client import LowRankClient
    from .server import LowRankServer

    return {"client": LowRankClient, "server": LowRankServer}


def stock(cfg):
    """The configuration as the framework's own workers are made with: without what ours do in their place.

    With the method's name it would warn that it has no such aggregator; with the rest it would prepare its own.
    """
    plain = cfg.clone()
    plain.defrost()
    plain.federate.method, plain.federate.restore_from = "fedavg", ""
    plain.federate.online_aggr = plain.federate.use_ss = False
    plain.train.is_enable_half = False  # it would turn the adapters too into 16 bits
    plain.fedopt.use = False
    plain.quantization.method = "none"
    plain._immutable(True)
    return plain
