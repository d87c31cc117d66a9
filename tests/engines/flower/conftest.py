"""A federation without Ray: Flower's own grid and state, and a thread that lets nodes answer."""

import secrets
import threading
from uuid import uuid4

import pytest


@pytest.fixture
def quick(few):
    """``quick(name, keys)``: a configuration under an outdir of its own: three clients, two rounds of two steps."""
    three = {"federate.client_num": 3, "train.cache_frozen": "off"}
    return lambda name, keys=None, of=None: few(name, {**three, **(keys or {})}, of)


class Federation:
    """Nodes of Flower in this process. ``behave(node_number, message, answer)`` may replace what a node does.

    Attributes:
        grid: for ``Nodes``.
        own: by number of the node, from 0, its ``--node-config``.
        sent: the number and the type of every message that a node was given.
    """

    def __init__(self, count, folder, behave=None, own=None):
        from flwr.app import Context, RecordDict
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.task_pb2 import Task
        from flwr.server.superlink.linkstate import LinkStateFactory
        from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
        from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supercore.run import Run
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.federation import NoOpFederationManager
        from flwr.superlink.grid import InMemoryGrid

        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self.state, self.behave, self.folder = factory.state(), behave, folder
        run = Run.create_empty(run_id=7)
        run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, SUPERLINK_NODE_ID
        self.state.run_ids[7] = RunRecord(run=run)
        self.state.task_store[1] = Task(task_id=1, run_id=7)
        self.grid = InMemoryGrid(factory)
        self.grid.set_run(run)
        self.sent, self.nodes, self.contexts = [], [], {}
        for number in range(count):
            node, config = self._join(), {"partition-id": number, **((own or {}).get(number, {}))}
            self.contexts[node] = Context(7, node, config, RecordDict(), {})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _join(self):
        from flwr.common.constant import HEARTBEAT_INTERVAL_INF, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

        node = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, secrets.token_bytes(32), HEARTBEAT_INTERVAL_INF)
        self.state.acknowledge_node_heartbeat(node, HEARTBEAT_INTERVAL_INF)
        self.nodes.append(node)
        return node

    def leave(self, number):
        """The node is gone for good."""
        from flwr.common.constant import NOOP_FLWR_AID

        self.state.delete_node(NOOP_FLWR_AID, self.nodes[number])

    def replace(self, number):
        """Another node stands for the client of one that has left."""
        context = self.contexts.pop(self.nodes[number])
        context.node_id = self._join()
        self.contexts[context.node_id] = context
        self.nodes[number] = self.nodes.pop()

    def _work(self):
        from fs_lowrank.engines.flower.client import client_app

        app = client_app(self.folder)
        while not self._over.wait(0.005):
            for number, node in enumerate(list(self.nodes)):
                for message in self.state.get_message_ins(node, limit=1):
                    self.sent.append((number, message.metadata.message_type))

                    def answer(message=message, context=self.contexts[node]):
                        return app(message=message, context=context)

                    reply = self.behave(number, message, answer) if self.behave else answer()
                    if reply is not None:
                        reply.metadata.__dict__["_message_id"] = str(uuid4())
                        self.state.store_message_res(reply)

    def end(self):
        self._over.set()
        self._thread.join(30)


@pytest.fixture
def federation(tmp_path):
    """``federation(count, behave, own)``: makes a ``Federation``, whose nodes remember in a folder of the test."""
    made = []

    def make(count=3, behave=None, own=None, folder=None):
        made.append(Federation(count, folder or tmp_path / "nodes", behave, own))
        return made[-1]

    yield make
    for one in made:
        one.end()
