"""A test engine whose clients are processes that read an order from a file, write their answer to another, and exit.

``OUTDIR/mail/000002/order_3`` is what the server tells client 3 in round 2, and ``answer_3`` beside it is its answer.
What a client must remember is in ``mail/clients``.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from fs_lowrank.config import Config, check_local, load_config
from fs_lowrank.engines.transport import Lost, Transport, run_over
from fs_lowrank.jobs.files import replacing
from fs_lowrank.rounds.codec import codec_of
from fs_lowrank.rounds.copies import personal_in, standing_in
from fs_lowrank.rounds.ledger import Ledger
from fs_lowrank.rounds.node import Node
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import Order
from fs_lowrank.rounds.workspace import Workspace
from fs_lowrank.runs.folder import outdir_of
from fs_lowrank.runs.result import RunResult

#: limit in seconds for the processing of a message; number of client processes at a time
LIMIT, CORES = 600.0, os.cpu_count() or 1


def check(config: Config) -> None:
    """Raise ``UserError`` for keys that only the framework honours; its ``quantization`` is honoured here, too."""
    others = config.framework
    if config.get("quantization.method") == "uniform" and config.get("quantization.nbits") in (8, 16):
        others = {name: value for name, value in others.items() if not name.startswith("quantization.")}
    check_local(dataclasses.replace(config, framework=others))


class Files(Transport):
    """Carries orders and answers in files, each to a process of its own."""

    def __init__(self, config: Config):
        self.config, self.codec, self.mail = config, codec_of(config), outdir_of(config) / "mail"

    def begin(self, workspace: Workspace, ledger: Ledger, resumed: bool) -> None:
        self.ledger, self.identity = ledger, self.config.fingerprint()
        if not resumed:
            shutil.rmtree(self.mail, ignore_errors=True)
        self.mail.mkdir(exist_ok=True)
        self.config.dump(self.mail / "config.yaml")

    def standing(self, client: int):
        return standing_in(memory(self.mail, client), client, self.identity)

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel | Lost]]:
        orders = list(orders)
        folder = self.mail / f"{max(order.round for order in orders):06}"
        folder.mkdir(exist_ok=True)
        for first in range(0, len(orders), CORES):
            group = orders[first : first + CORES]
            started = [(order, start(str(folder / f"order_{order.client}"), order)) for order in group]
            for order, process in started:
                process.join(LIMIT)
                process.kill()  # has no effect on a process that has ended
                process.join()
                if process.exitcode:
                    yield order, Lost("failed", f"its process ended with exit code {process.exitcode}")
                else:
                    yield order, Parcel.of((folder / f"answer_{order.client}").read_bytes())
        shutil.rmtree(folder)

    def personal(self):
        clients, undone = range(1, self.config.federate.client_num + 1), self.ledger.undone
        own = {c: personal_in(memory(self.mail, c), c, self.identity, undone.get(c)) for c in clients}
        return {client: tensors for client, tensors in own.items() if tensors}


def memory(mail: Path, client: int) -> Path:
    """The disk of a client."""
    return mail / "clients" / str(client)


def start(path: str, order: Order) -> BaseProcess:
    """Start a client's process, forked from a single-threaded process that has only imported modules."""
    with replacing(Path(path), durable=False) as aside:
        aside.write_bytes(order.parcel.to_bytes())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([m for m in sys.modules if m.startswith(("fs_lowrank.r", "transformers.models."))])
    process = context.Process(target=client_process, args=(path, torch.get_num_threads()))
    process.start()
    return process


def client_process(path: str, threads: int) -> None:
    """Carry out the order in the file ``path``."""
    torch.set_num_threads(threads)
    order, mail = Path(path), Path(path).parents[1]
    config, client = load_config(mail / "config.yaml"), int(order.name.partition("_")[2])
    node = Node(Workspace(config, serves=False), codec_of(config))
    answer = node.obey(Parcel.of(order.read_bytes()), client, memory(mail, client), config.fingerprint())
    with replacing(order.with_name(f"answer_{client}"), durable=False) as aside:
        aside.write_bytes(answer.to_bytes())


def run(config: Config, resume: bool = False, on_round=None, on_client=None, callbacks=()) -> RunResult:
    """See ``fs_lowrank.run``."""
    check(config)
    return run_over(Files(config), config, resume, on_round, on_client, callbacks)
