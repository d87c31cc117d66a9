"""One process of a distributed run; ``job`` and ``answers`` come from the test.

``job`` is (settings, overrides, sabotage). The keys of sabotage:

- ``silent_in``: the round in whose training the process sleeps for ever
- ``dies_after``: the round after which the server exits; ``sleeps``: seconds that the server sleeps after each round
- ``until``: (a round, a client): the server ends the run after the first round from that one on with that client
- ``waits_for``: after round 1 the server creates the file ``here`` in this folder, and waits for one called ``go``
- ``late``: seconds before the process starts to run
- ``other_start``: the adapter is drawn from another seed; ``revision``: of every method in this process
- ``dies_at``: (a method as ``module.Class.method`` below fs_lowrank, n): the process exits at its n-th call
- ``says``: the text of the error with which the client's training fails in round 2
- ``counts_in``: the file into which a client writes the bytes of tensors that it has received
- ``waits_in``: a folder, where a file of this process has its longest wait in seconds: as ``client`` from a message of
  its own to the server's next one, as ``server`` from asking a client until the server has its answer or gives it up
- ``resume``: the run is resumed
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
    from fs_lowrank.engines.federatedscope.distributed import Clients, RemoteClient

    longest, exchange, answer = {}, Clients.exchange, RemoteClient._answer

    def note(role, began):
        waited = time.monotonic() - began
        if waited > longest.get(role, -1.0):
            longest[role] = waited
            (folder / f"{os.getpid()}.json").write_text(json.dumps(longest))

    def exchanges(server, orders):
        began = time.monotonic()
        for pair in exchange(server, orders):
            note("server", began)
            yield pair

    def answers(client, order, asked):
        if sent:
            note("client", sent.pop())
        answer(client, order, asked)
        sent.append(time.monotonic())

    sent = []
    Clients.exchange, RemoteClient._answer = exchanges, answers


try:
    import fs_lowrank

    def on_client(round, client, of):
        if round == sabotage.get("silent_in"):
            time.sleep(1000)

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
    if "says" in sabotage:
        from fs_lowrank.rounds.trainer import Trainer

        fit = Trainer.fit

        def says(self, task, *given):
            if task.round == 2:
                raise RuntimeError(sabotage["says"])
            return fit(self, task, *given)

        Trainer.fit = says
    if "dies_at" in sabotage:
        place, call = sabotage["dies_at"]
        module, cls, name = place.rsplit(".", 2)
        owner = getattr(importlib.import_module(f"fs_lowrank.{module}"), cls)
        whole, calls = getattr(owner, name), itertools.count(1)

        def ends(*args, **kwargs):
            return os._exit(9) if next(calls) == call else whole(*args, **kwargs)

        setattr(owner, name, ends)

    if "waits_in" in sabotage:
        measure_waits(Path(sabotage["waits_in"]))
    if "counts_in" in sabotage:
        from fs_lowrank.engines.federatedscope.distributed import RemoteClient

        received, answer_to = [], RemoteClient._answer

        def counted(self, order, asked):
            received.append(order.nbytes)
            Path(sabotage["counts_in"]).write_text(str(sum(received)))
            answer_to(self, order, asked)

        RemoteClient._answer = counted
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
