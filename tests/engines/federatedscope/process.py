"""One process of a distributed run; ``job`` and ``answers`` come from the test.

``job`` is (settings, overrides, sabotage). The keys of sabotage:

- ``dies_in``, ``silent_in``: the round in whose training the process exits, or sleeps for ever
- ``dies_after``: the round after which the server exits; ``sleeps``: seconds that the server sleeps after each round
- ``until``: (a round, a client): the server ends the run after the first round from that one on with that client
- ``waits_for``: after round 1 the server creates the file ``here`` in this folder, and waits for one called ``go``
- ``late``: seconds before the process starts to run
- ``other_start``: the adapter is drawn from another seed; ``revision``: of every method in this process
- ``dies_at``: (a method as ``module.Class.method`` below fs_lowrank, n): the process exits at its n-th call
- ``fails_at``: in the same form; the n-th call raises an error
- ``says``: the text of the error with which the client's training fails in round 2; ``raw``: it is sent as it is
- ``informs``: what the client answers when it is asked for information on joining
- ``harms``: the client sends client 1, with each share, a ``stopped`` and the share once more
- ``counts_in``: the file into which a client writes the bytes of tensors that it has received
- ``reports``: what the client says of its evaluation, by the names of metrics, in place of what it has measured
- ``naps``: (a round, seconds): the client sleeps so long in the training of that round
- ``announces``: the port that the client names to the server, which is not the one on which it listens; or a name of
  this host, by which it names the server's own address
- ``waits_in``: a folder, where a file of this process has its longest wait in seconds: as ``client`` from a message of
  its own to the server's next one, as ``server`` from asking a client until the server has its answer or gives it up
- ``dies_evaluating``: the client exits when it is asked to evaluate; ``resume``: the run is resumed
"""

import importlib
import itertools
import json
import os
import time
import traceback
from pathlib import Path

import torch

torch.set_num_threads(1)
settings, overrides, sabotage = job  # noqa: F821


def measure_waits(folder: Path) -> None:
    from fs_lowrank.engines.federatedscope.comm import Comm
    from fs_lowrank.engines.federatedscope.distributed_client import DistributedClient
    from fs_lowrank.engines.federatedscope.distributed_server import DistributedServer

    since, longest = {}, {}
    deliver, next_message = Comm.deliver, DistributedClient._next_message
    dispatch, give_up = DistributedServer.dispatch, DistributedServer._give_up_on_the_lost

    def ended(role, what):
        waited = time.monotonic() - since.pop(what)
        if waited > longest.get(role, -1.0):
            longest[role] = waited
            (folder / f"{os.getpid()}.json").write_text(json.dumps(longest))

    def delivers(comm, receiver, message, *args, **kwargs):
        if not comm.serves and receiver == 0 and message.msg_type != "alive":
            since.setdefault("answer", time.monotonic())
        return deliver(comm, receiver, message, *args, **kwargs)

    def hears(client):
        message = next_message(client)
        if message is not None and "answer" in since:
            ended("client", "answer")
        return message

    def dispatches(server, order, message):
        since[order.client] = time.monotonic()
        return dispatch(server, order, message)

    def gives_up(server):
        give_up(server)
        answered = server.msg_buffer["eval"].get(server.state - 1, {}).keys()
        awaited = server.waiting() | (server.asked_to_evaluate - answered if server.evaluating else set())
        for client in since.keys() - awaited:
            ended("server", client)

    Comm.deliver, DistributedClient._next_message = delivers, hears
    DistributedServer.dispatch, DistributedServer._give_up_on_the_lost = dispatches, gives_up


try:
    import fs_lowrank

    def on_client(round, client, of):
        if round == sabotage.get("dies_in"):
            os._exit(9)
        if round == sabotage.get("silent_in"):
            time.sleep(1000)
        if round == 2 and "says" in sabotage:
            raise RuntimeError(sabotage["says"])
        napping, seconds = sabotage.get("naps", (0, 0))
        if round == napping:
            time.sleep(seconds)

    def on_round(record):
        if record["round"] == sabotage.get("dies_after"):
            os._exit(9)
        time.sleep(sabotage.get("sleeps", 0))
        if "waits_for" in sabotage and record["round"] == 1:
            folder = Path(sabotage["waits_for"])
            (folder / "here").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)
        first, client = sabotage.get("until", (0, 0))
        return first and record["round"] >= first and client in record["clients"]

    if sabotage.get("other_start"):
        import fs_lowrank.models.adapters as adapters

        adapters.derive = lambda seed, *purpose: 12345
    if "revision" in sabotage:
        fs_lowrank.Method.revision_of = classmethod(lambda cls, params: sabotage["revision"])
    if sabotage.get("dies_evaluating"):
        from fs_lowrank.engines.federatedscope.client import LowRankClient

        LowRankClient.callback_funcs_for_evaluate = lambda *_: os._exit(9)
    if "reports" in sabotage:
        from fs_lowrank.engines.federatedscope.comm import Comm

        send = Comm.send

        def reports(self, message):
            if message.msg_type == "metrics":
                message.content = {**message.content, **sabotage["reports"]}
            return send(self, message)

        Comm.send = reports

    def end_at(what):
        place, call = sabotage[what]
        module, cls, name = place.rsplit(".", 2)
        owner = getattr(importlib.import_module(f"fs_lowrank.{module}"), cls)
        whole, calls = getattr(owner, name), itertools.count(1)

        def ends(*args, **kwargs):
            if next(calls) != call:
                return whole(*args, **kwargs)
            if what == "dies_at":
                os._exit(9)
            raise RuntimeError("sabotage")

        setattr(owner, name, ends)

    for what in {"dies_at", "fails_at"} & sabotage.keys():
        end_at(what)
    if sabotage.get("raw"):
        from fs_lowrank.engines.federatedscope import wire

        wire.encodable = lambda text: text
    if "informs" in sabotage:
        from fs_lowrank.engines.federatedscope import wire
        from fs_lowrank.engines.federatedscope.client import LowRankClient

        LowRankClient.callback_funcs_for_join_in_info = lambda self, message: wire.send(
            self, "join_in_info", [0], sabotage["informs"]
        )
    if "harms" in sabotage:
        from fs_lowrank.engines.federatedscope import wire
        from fs_lowrank.engines.federatedscope.client import LowRankClient

        deliver = LowRankClient._deliver

        def harms(self, receiver, message, size=0):
            deliver(self, receiver, message, size)
            if message.msg_type == "ss_model_para" and receiver == 1:
                wire.send(self, "stopped", [1], "go home")
                deliver(self, receiver, message, size)

        LowRankClient._deliver = harms
    if "waits_in" in sabotage:
        measure_waits(Path(sabotage["waits_in"]))
    if "announces" in sabotage:
        from fs_lowrank.engines.federatedscope.client import LowRankClient

        ask_to_join, named = LowRankClient._ask_to_join, {"port": sabotage["announces"]}
        if isinstance(sabotage["announces"], str):
            named = {"host": sabotage["announces"], "port": overrides["distribute.server_port"]}

        def asks(client):
            client.local_address = {**client.local_address, **named}
            ask_to_join(client)

        LowRankClient._ask_to_join = asks
    if "counts_in" in sabotage:
        from fs_lowrank.engines.federatedscope import messages

        received, read = [], messages.read

        def counted(*args):
            message = read(*args)
            if message.msg_type in ("model_para", "evaluate"):
                received.append(message.content.opened().nbytes)
            with open(sabotage["counts_in"], "w") as file:
                file.write(str(sum(received)))
            return message

        messages.read = counted
    time.sleep(sabotage.get("late", 0))
    result = fs_lowrank.run(
        fs_lowrank.load_config(settings, overrides),
        "federatedscope",
        resume=sabotage.get("resume", False),
        on_round=on_round,
        on_client=on_client,
    )
    answers.put(("ok", result.history, {n: p.detach().numpy() for n, p in result.model.named_parameters()}))  # noqa: F821
except Exception as error:
    traceback.print_exc()
    answers.put((type(error).__name__, str(error), {}))  # noqa: F821
    raise SystemExit(1 if isinstance(error, fs_lowrank.errors.RunFailed) else 2) from error  # as our command does
