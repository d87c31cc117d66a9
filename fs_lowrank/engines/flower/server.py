"""The server's side: a transport over Flower's grid, with a message of its own to every node.

A node introduces itself once: its client, the facts that the server compares, and the round of its copy of the model.
Every later reply has the round of its copy again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from ...config import Config
from ...errors import RunFailed
from ...rounds.codec import codec_of
from ...rounds.copies import personal_in
from ...rounds.ledger import Ledger
from ...rounds.parcel import Parcel
from ...rounds.round import Order
from ...rounds.transport import Lost
from ...rounds.workspace import Workspace
from ...runs.folder import outdir_of
from ..members import Members, memory_of
from ..waiting import Silent, replies
from .messages import packed, unpacked

logger = logging.getLogger("fs_lowrank")

#: this engine's folder in that of a run: the run's token and, in a simulation, the clients' copies
FOLDER = "flower"
#: nodes that are called together: Flower's simulation looks through all messages for each node
AT_A_TIME = 64
#: the type of a Flower message, by what the client is asked for
KINDS: dict[str, str] = {"call": "query", "train": "train", "follow": "train", "evaluate": "evaluate"}


class Nodes(Members):
    """The clients of a run are nodes of Flower.

    Args:
        config: the run's configuration.
        grid: Flower's; set before the run begins.
        stopped: whether the run is to stop; asked while the server waits.
        pause: seconds between two looks for replies.
        simulated: the nodes are on this machine, and so are their copies, so that the clients' personal parts are saved
            with the result.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid | None = None,
        stopped: Callable[[], bool] = lambda: False,
        pause: float = 0.5,
        simulated: bool = False,
    ):
        super().__init__(config, outdir_of(config) / FOLDER, elsewhere="own-data=true")
        self.codec, self.timeout = codec_of(config), config.lowrank.timeout
        self.grid, self.stopped, self.pause, self.simulated = grid, stopped, pause, simulated
        #: node -> why it does not take part; ``Silent`` if it did not even answer
        self.refused: dict[int, Lost] = {}

    # -- who is there ------------------------------------------------------------------------------

    def begin(self, workspace: Workspace, ledger: Ledger, resumed: bool) -> None:
        """Wait until every client has a node, but no longer than ``lowrank.timeout``.

        A node that is refused may be mended and started anew meanwhile, but not in a simulation.
        """
        super().begin(workspace, ledger, resumed)
        clients = range(1, self.config.federate.client_num + 1)

        def joined() -> Iterable[tuple[int, None]]:
            present = self._present()
            absent = [client for client in clients if client not in present]
            refused = absent[: self.simulated * len(self.refused)]
            if len(refused) < len(absent):
                self._wait()
            return [(client, None) for client in (*present, *refused)]

        list(replies(clients, joined, self.timeout, "client", work=False))  # waits

    def missing(self, clients: Collection[int]) -> Mapping[int, str]:
        if self.refused and not self.members:
            reasons = sorted({re.sub(r"^client \d+: ", "", lost.reason) for lost in self.refused.values()})
            raise RunFailed(f"no node can take part; refused were {len(self.refused)}: {'; '.join(reasons[:3])}")
        # What was wrong may be mended by now; a node that does not answer would cost every round the time to wait.
        self.refused = {node: lost for node, lost in self.refused.items() if isinstance(lost, Silent)}
        present = self._present()
        return {client: self._why_absent(client) for client in clients if client not in present}

    def _why_absent(self, client: int) -> str:
        reasons = [lost.reason for lost in self.refused.values()]
        for reason in reasons:
            if reason.startswith(f"client {client}: "):
                return f"its node was refused: {reason.partition(': ')[2]}"
        if client in self.members:
            return "its node is not connected"
        strangers = [reason for reason in reasons if not reason.startswith("client ")]
        return "; ".join(["no node has joined for it", *(f"one was refused: {reason}" for reason in strangers[:1])])

    def _present(self) -> set[int]:
        """The clients whose nodes are connected, after nodes that are new have been called."""
        assert self.grid is not None
        connected = set(self.grid.get_node_ids())
        # A node that was not connected meanwhile is called again, with or without another number.
        self.refused = {node: lost for node, lost in self.refused.items() if node in connected}
        called = {member.process for member in self.members.values()} | self.refused.keys()
        new = sorted(connected - called)
        for first in range(0, len(new), AT_A_TIME):
            calls = {node: Parcel({}, kind="call") for node in new[first : first + AT_A_TIME]}
            for node, reply in self._carried(calls, work=False):
                if lost := self._joined(node, reply, connected):
                    logger.warning("refused node %d: %s", node, lost.reason)
                    self.refused[node] = lost
        return {client for client, member in self.members.items() if member.process in connected}

    def _joined(self, node: int, reply: Parcel | Lost, connected: set[int]) -> Lost | None:
        """Let a node that has introduced itself take part; the reason if it cannot."""
        if isinstance(reply, Lost):
            return reply
        if "error" in reply.facts:
            return Lost("refused", str(reply.facts["error"])[:1000])
        if reason := self.refusal(reply.facts):
            return Lost("refused", reason)
        client = reply.facts["client"]
        before = self.members.get(client)
        if before and before.process in connected:
            reason = f"client {client} has joined already, as node {before.process}; choose another partition-id"
            return Lost("refused", reason)
        self.welcome(reply.facts, node)
        return None

    # -- messages ----------------------------------------------------------------------------------

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel | Lost]]:
        by_node = {self.members[order.client].process: order for order in orders}
        for node, answer in self._carried({node: order.parcel for node, order in by_node.items()}, work=True):
            yield by_node[node], answer if isinstance(answer, Lost) else self.checked(by_node[node], answer)

    def _carried(self, parcels: Mapping[int, Parcel], work: bool) -> Iterator[tuple[int, Parcel | Lost]]:
        """Send nodes their parcels, calls or ``work``; the replies, as they come, and at last who has not replied.

        The wait ends ``lowrank.timeout`` after the last reply, since nodes of a simulation take turns; meanwhile the
        log names the nodes for which the server waits.
        """
        assert self.grid is not None
        common = {"run": self.token, "config": self.config.to_dict()}
        grid, sent = self.grid, dict[str, int]()  # the node of each message
        for node, parcel in parcels.items():
            content = packed(Parcel(parcel.tensors, **parcel.facts, **common))
            # A node that comes back later than the server waits is not to work on it any more.
            ttl = self.timeout * (len(parcels) + 2) + 600.0
            kind, group = KINDS[parcel.facts.get("purpose", "call")], str(parcel.facts.get("round", 0))
            message = Message(content, dst_node_id=node, message_type=kind, ttl=ttl, group_id=group)
            if identities := [identity for identity in grid.push_messages([message]) if identity]:
                sent[identities[0]] = node
            else:
                yield node, Lost("absent", "Flower's SuperLink did not take the message for its node")

        def arrivals() -> Iterator[tuple[int, Parcel | Lost]]:
            pulled = list(grid.pull_messages(list(sent)))
            for reply in pulled:
                if node := sent.pop(reply.metadata.reply_to_message_id, 0):
                    yield node, _answer(reply, self.simulated)
            if not pulled:
                self._wait()

        yield from replies(list(sent.values()), arrivals, self.timeout, "node", work)

    def _wait(self) -> None:
        if self.stopped():
            raise RunFailed("the run was stopped; continue it with resume=True")
        time.sleep(self.pause)

    # -- the end -----------------------------------------------------------------------------------

    def personal(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The clients' own tensors in their copies on this machine."""
        identity, by_client = f"{self.config.fingerprint()}:{self.token}", {}
        for client in self.members if self.simulated and self.workspace.personal.untrained else ():
            memory = memory_of(client_folder(self.config), identity, client)
            if tensors := personal_in(memory, client, identity, self.ledger.undone.get(client)):
                by_client[client] = tensors
        return by_client


def client_folder(config: Config) -> Path:
    """The folder of the states of a simulation's clients."""
    return (outdir_of(config) / FOLDER / "clients").absolute()


#: Flower's codes for a message or a reply that did not arrive, and for a node that is not connected
_ABSENT = (3, 4, 5)


def _answer(reply: Message, simulated: bool) -> Parcel | Lost:
    """The parcel of a reply, or why it has none.

    Args:
        simulated: the reason of an error is Flower's own; in a federation, a node can write any.
    Raises:
        RunFailed: a process of the simulation died, in whose place Flower starts no other.
    """
    if reply.has_error():
        reason = " ".join((reply.error.reason or "no reason given").split())[:500]
        if simulated and "ray.exceptions" in reason and "Actor" in reason:
            raise RunFailed(f"a process of Flower's simulation died ({reason:.200}); run again with resume=True")
        return Lost("absent" if reply.error.code in _ABSENT else "failed", f"Flower: {reason}")
    try:
        return unpacked(reply.content)
    except ValueError as error:
        return Lost("failed", str(error))
