"""A test engine whose server and clients exchange files, in processes that handle one message each and exit.

During a round, its messages are in ``OUTDIR/mail``, one ``Parcel`` per file. A round has one exchange for training,
and a second one if clients evaluate models of their own:

    000002/train/call_3      server to client 3: report the state of your copy of the model
    000002/train/hello_3     its reply
    000002/train/order_3     server to client 3: the tensors that it lacks, and what to do
    000002/train/answer_3    its reply

``run`` starts a client process for every message without a reply, and a server process for every reply. What a client
must remember is in ``mail/clients``, and what the server must remember in the checkpoint of the run. Within a round,
each server process builds the same ``Round`` again from the messages in the folder.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors import SafetensorError

from fs_lowrank.config import Config, check_local, load_config
from fs_lowrank.errors import RunFailed, UserError
from fs_lowrank.jobs.files import replacing
from fs_lowrank.jobs.locks import claimed
from fs_lowrank.rounds.codec import Codec, Plain, Uniform
from fs_lowrank.rounds.copies import LostCopy, OwnCopy, answer, apology, standing_in
from fs_lowrank.rounds.ending import end_round
from fs_lowrank.rounds.evaluator import CLIENTS, Evaluator
from fs_lowrank.rounds.keeper import RecordKeeper
from fs_lowrank.rounds.ledger import Ledger, Standing
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import Round
from fs_lowrank.rounds.site import Site
from fs_lowrank.runs.checkpoint import load_checkpoint
from fs_lowrank.runs.folder import check_outdir, outdir_of
from fs_lowrank.runs.records import read_records
from fs_lowrank.runs.result import RunResult

#: kind of a message -> kind of its reply
REPLY = {"call": "hello", "order": "answer"}
#: files beside the messages: the configuration, and the error that ended a server process
CONFIG, FAILURE = "config.yaml", "failure.json"
#: limit in seconds for the processing of a message; number of client processes at a time
LIMIT, CORES = 600.0, os.cpu_count() or 1


def codec_of(config: Config) -> Codec:
    """How messages and updates are encoded; this engine honours the framework's ``quantization``."""
    return Uniform(config.get("quantization.nbits")) if config.get("quantization.method") == "uniform" else Plain()


def check(config: Config) -> None:
    """Raise ``UserError`` for keys that only the framework honours."""
    others = config.framework
    if config.get("quantization.method") == "uniform" and config.get("quantization.nbits") in (8, 16):
        others = {name: value for name, value in others.items() if not name.startswith("quantization.")}
    check_local(dataclasses.replace(config, framework=others))


def unanswered(mail: Path) -> list[Path]:
    """Messages to clients that have no reply yet, sorted by round and client."""
    sent = (path for kind in REPLY for path in mail.glob(f"[0-9]*/*/{kind}_*") if not reply_to(path).exists())
    return sorted(sent, key=address)


def address(message: Path) -> tuple[int, int]:
    """Round and client of a message."""
    return int(message.parent.parent.name), int(message.name.partition("_")[2])


def reply_to(message: Path) -> Path:
    kind, _, client = message.name.partition("_")
    return message.with_name(f"{REPLY[kind]}_{client}")


def write(path: Path, parcel: Parcel) -> None:
    with replacing(path, durable=False) as aside:
        aside.write_bytes(parcel.to_bytes())


def client_process(folder: str, message: str, threads: int) -> None:
    """Handle one message to a client."""
    torch.set_num_threads(threads)
    mail, path = Path(folder), Path(message)
    config, (_, client) = load_config(mail / CONFIG), address(path)
    disk = mail / "clients" / str(client)
    if path.name.startswith("call"):
        reply = Parcel({}, standing=list(standing_in(disk, client, config.fingerprint())))
    else:
        reply = obey(config, client, disk, Parcel.of(path.read_bytes()))
    write(reply_to(path), reply)


def obey(config: Config, client: int, disk: Path, order: Parcel) -> Parcel:
    """Update the copy of ``client`` and carry out ``order``; returns the reply."""
    round, purpose, codec = order.facts["round"], order.facts["purpose"], codec_of(config)
    site = Site(config, serves=False)
    copy = OwnCopy(site.method, site.model, client, site.personal, codec, config.fingerprint())
    copy.restore(disk)
    try:
        copy.catch_up(order)
    except LostCopy as error:
        return apology(round, error)
    reply, own, tests = Parcel({}, round=round), site.data.clients[client - 1], site.data.client_tests[client - 1]
    try:
        if purpose == "train":
            update, result = site.fit(site.clients[client - 1], own, round, site.model, site.prefix)
            reply = answer(round, update, result.loss, codec)
            reply.facts["spent"] = site.take_spent()[client]
            copy.keep_personal(round)
        elif purpose == "evaluate":
            reply.facts["scores"] = Evaluator(site).score(tests, f"client {client} test")
    except Exception as error:  # must not end the round of the others; the server records it
        reply = apology(round, error)
    copy.save(disk)
    return reply


def server_process(folder: str, reply: str, threads: int) -> None:
    """Handle a reply, or the start of a run (``mail`` itself); does nothing while other replies are missing."""
    torch.set_num_threads(threads)
    mail = Path(folder)
    if unanswered(mail) or not Path(reply).exists():
        return
    try:
        Server(load_config(mail / CONFIG)).go_on()
    except (UserError, OSError, SafetensorError) as error:
        (mail / FAILURE).write_text(json.dumps([type(error) is UserError, str(error)]))


class Server:
    """The server in the state of its latest checkpoint."""

    def __init__(self, config: Config):
        self.config, self.mail = config, outdir_of(config) / "mail"
        self.site = site = Site(config)
        self.evaluator = Evaluator(site)
        self.evaluator.check_watched()
        self.ledger = Ledger.of(
            config, site.method, site.initial_state, site.clients, keep_messages=True, heads=site.heads
        )
        self.keeper = RecordKeeper(site, self.evaluator, self.ledger, outdir_of(config))
        checkpoint = self.keeper.start(resume=True)
        self.done = checkpoint.round if checkpoint else 0

    def go_on(self) -> None:
        """Continue the run until replies are missing, or the run has ended."""
        while self.done < self.config.federate.total_round_num and not self.evaluator.stalled(self.keeper.history):
            number = self.done + 1
            try:
                record = self.round(number)
            except RunFailed:
                shutil.rmtree(self.mail / f"{number:06}")  # a resumed run asks all clients again
                raise
            if record is None:
                return
            self.keeper.add(record)
            if not self.keeper.checkpoint_due(number):
                self.keeper.save(number)  # the next server process continues from it
            shutil.rmtree(self.mail / f"{number:06}")
            self.done = number

    def round(self, number: int) -> dict | None:
        """The record of round ``number``; None while replies are missing."""
        site = self.site
        round = Round(number, self.ledger, codec=codec_of(self.config), base=site.changed_base)
        if (answers := self.exchange(round, round.selected, "train")) is None:
            return None
        for client in sorted(round.trains):
            round.take(client, answers[client])
        spent = {c: a.facts["spent"] for c, a in answers.items() if "spent" in a.facts}
        seconds = {"training": sum(s["training"] for s in spent.values() if not s["reused"])}
        started = time.perf_counter()
        end_round(round, self.keeper)
        seconds["aggregation"] = time.perf_counter() - started
        metrics = {}
        if self.evaluator.due(number):
            metrics = self.evaluator.held_out()
            if CLIENTS in self.evaluator.splits():
                sizes = {c.id: len(e) for c, e in zip(site.clients, site.data.client_tests) if e is not None}
                if (answers := self.exchange(round, sizes, "evaluate")) is None:
                    return None
                scores = {c: a.facts["scores"] for c, a in sorted(answers.items()) if "scores" in a.facts}
                if scores:
                    metrics[CLIENTS] = self.evaluator.combined(scores, sizes)
        seconds["evaluation"] = time.perf_counter() - started - seconds["aggregation"]
        return round.record(metrics, seconds, spent)

    def exchange(self, round: Round, clients: Iterable[int], purpose: str) -> dict[int, Parcel] | None:
        """Send ``clients`` the messages that have not been sent yet; their replies, or None while some are missing."""
        folder = self.mail / f"{round.number:06}" / purpose
        calls = {c: folder / f"call_{c}" for c in clients}
        for path in calls.values():
            if not path.exists():
                write(path, Parcel({}, round=round.number))
        if not all(reply_to(path).exists() for path in calls.values()):
            return None
        orders = {}
        for client, path in calls.items():
            hello = Parcel.of(reply_to(path).read_bytes()).facts
            if "error" in hello:
                round.fail(client, "absent", hello["error"])
                continue
            order = round.ask(client, Standing(*hello["standing"]), purpose)
            round.delivered(order)
            orders[client] = folder / f"order_{client}"
            if not orders[client].exists():
                write(orders[client], order.parcel)
        replies = {client: reply_to(path) for client, path in orders.items()}
        if not all(path.exists() for path in replies.values()):
            return None
        return {client: Parcel.of(path.read_bytes()) for client, path in replies.items()}


def start(target: Callable, *args: str) -> BaseProcess:
    """Start a process that runs ``target``, forked from a single-threaded process that has only imported modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([m for m in sys.modules if m.startswith(("fs_lowrank.r", "transformers.models."))])
    process = context.Process(target=target, args=(*args, torch.get_num_threads()))
    process.start()
    return process


def exit_code(process: BaseProcess) -> int | None:
    """Wait for a process, and kill it if it takes longer than ``LIMIT``."""
    process.join(LIMIT)
    process.kill()  # has no effect on a process that has ended
    process.join()
    return process.exitcode


def deliver(mail: Path, messages: list[Path]) -> Iterator[Path]:
    """Let clients handle ``messages``, as many at a time as there are cores; yields each when it has a reply."""
    for first in range(0, len(messages), CORES):
        batch = messages[first : first + CORES]
        for message, process in [(m, start(client_process, str(mail), str(m))) for m in batch]:
            error = UserError(f"its process ended with exit code {exit_code(process)}")
            if not reply_to(message).exists():
                write(reply_to(message), apology(address(message)[0], error))
            yield message


def serve(mail: Path, reply: Path) -> None:
    """Let the server handle ``reply``; raises the error of its process, or ``RunFailed`` if the process died."""
    code = exit_code(start(server_process, str(mail), str(reply)))
    if (mail / FAILURE).exists():
        wrong_use, text = json.loads((mail / FAILURE).read_text())
        raise (UserError if wrong_use else RunFailed)(text)
    if code:
        raise RunFailed(f"the server's process ended with exit code {code}; run again with resume=True")


def run(config: Config, resume: bool = False, on_round=None, on_client=None) -> RunResult:
    """See ``fs_lowrank.run``."""
    check(config)
    check_outdir(config, resume)
    mail = outdir_of(config) / "mail"
    with claimed(mail.with_suffix(".lock")) as mine:
        if not mine:
            raise RunFailed(f"another run is writing into {mail.parent}; wait for it, or choose another outdir")
        if not resume:
            shutil.rmtree(mail, ignore_errors=True)
        mail.mkdir(exist_ok=True)
        (mail / FAILURE).unlink(missing_ok=True)
        config.dump(mail / CONFIG)
        checkpoint = load_checkpoint(mail.with_name("checkpoint")) if resume else None
        work(mail, checkpoint.round if checkpoint else 0, on_round, on_client)
        server = Server(config)
        try:
            return server.keeper.finish()
        finally:
            server.keeper.release()


def work(mail: Path, reported: int, on_round: Callable | None, on_client: Callable | None) -> None:
    """Deliver messages until none is left or ``on_round`` returns True; rounds up to ``reported`` are not reported."""
    serve(mail, mail)
    while True:
        for record in read_records(mail.with_name("rounds.jsonl"), up_to=sys.maxsize)[reported:]:
            reported = record["round"]
            if on_round and on_round(record):
                return
        if not (messages := unanswered(mail)):
            return
        for done, message in enumerate(deliver(mail, messages)):
            if on_client:
                on_client(address(message)[0], done, len(messages))
        for message in messages:
            serve(mail, reply_to(message))
