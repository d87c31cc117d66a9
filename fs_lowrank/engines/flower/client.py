"""The client's side: a Flower ``ClientApp`` that answers one message at a time, in a process that may end after each.

The client's state is in a folder of its own disk (``rounds.node``). A process that lives on reuses data and model,
whichever client it answers for next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...config import Config, load_config
from ...errors import UserError
from ...fetch import home
from ...rounds.codec import codec_of
from ...rounds.copies import apology, standing_in
from ...rounds.node import Node
from ...rounds.parcel import Parcel
from ...rounds.workspace import Workspace
from ..members import memory_of
from .messages import packed, unpacked


def client_app(folder: Path | None = None, threads: int = 0) -> ClientApp:
    """The app that every node runs.

    Args:
        folder: for the clients' states; None: the folder of the node's configuration.
        threads: of torch; 0: as many as it takes.
    """
    app = ClientApp()
    for kind in (app.query, app.train, app.evaluate):
        kind()(partial(respond, folder=folder, threads=threads))
    return app


def respond(message: Message, context: Context, folder: Path | None, threads: int) -> Message:
    """The reply to ``message``; an error is one, too."""
    if threads:
        torch.set_num_threads(threads)
    round = 0
    try:
        order = unpacked(message.content)
        round = order.facts.get("round", 0)
        reply = carry_out(order, context.node_config, folder)
    except Exception as error:  # must not end the round of the others; the server records it
        reply = apology(round, error)
    return Message(packed(reply), reply_to=message)


def carry_out(order: Parcel, options: Mapping[str, Any], folder: Path | None) -> Parcel:
    """The reply to ``order``, which may be a call: the client introduces itself.

    Args:
        order: with the facts ``run``, the run's token, and ``config``, the server's configuration.
        options: the node's configuration: ``partition-id``, the client's number less one; ``cfg``, a configuration of
            its own; ``own-data``, whether all data that it names are this client's; ``folder``, for its state.
        folder: in place of the node's own, in a simulation.
    """
    if "partition-id" not in options:
        raise UserError(
            "the node's configuration does not say which client it is; start flower-supernode with "
            "--node-config 'partition-id=0' for client 1, 1 for client 2 and so on"
        )
    client, config = int(options["partition-id"]) + 1, config_of(order, options, folder)
    identity = f"{config.fingerprint()}:{order.facts['run']}"
    memory = memory_of(folder or Path(str(options.get("folder") or home() / "flower")).expanduser(), identity, client)
    node = _node(json.dumps(config.to_dict()), bool(options.get("own-data", False)))
    if order.facts.get("kind") == "call":
        reply = node.introduction(client)
        reply.facts["standing"] = list(standing_in(memory, client, identity))
    else:
        reply = node.obey(order, client, memory, identity)
    reply.facts["agreed"] = f"client {client}, {node.agreed}"  # a node that is restarted may name another client
    return reply


def config_of(order: Parcel, options: Mapping[str, Any], folder: Path | None) -> Config:
    """The configuration of a node, its own or the server's.

    In a simulation Ray shows each process GPUs of its own only, so that the server's ``device`` is not theirs.
    """
    config = load_config(str(options["cfg"]) if options.get("cfg") else order.facts["config"])
    return config.replace(device=-1) if folder and config.torch_device != "cpu" else config


@lru_cache(1)
def _node(config: str, own_data: bool) -> Node:
    loaded = load_config(json.loads(config))
    return Node(Workspace(loaded, serves=False, undivided=own_data), codec_of(loaded))
