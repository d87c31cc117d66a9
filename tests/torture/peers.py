"""Hostile messages: during a distributed run on the framework's engine, one client is hostile, and strangers join in.

The hostile client has joined like the others, so the server reads what it sends; nothing that it sends is an update
that can be used. Others send with the real tokens of the two healthy clients, to these and to the server, what the
protocol refuses or has no effect. The run of the healthy clients must end as it does with a hostile client that only
says that it cannot train.

A message counts when it was sent, whatever the answer. How far it got is in ``seen``.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import multiprocessing
import os
import queue
import random
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from . import forged
from .bench import Bench, Outcome, by_command_line
from .child import Ended, die_with_parent, difference, fork, unsound
from .forged import HEALTHY, HOSTILE, Scene
from .tiny import settings

SHARD = 5
#: messages of a run, and rounds
MESSAGES, ROUNDS = 360, 12
#: seconds in which a process must have answered a message
ANSWER = 30.0
#: seconds after which the hostile client joins again, if it has not been asked for anything
SILENCE = 3.0
_METHOD, _TOKEN = "/gRPCComServeFunc/sendMessage", "fs-lowrank-token"
#: a run without any attack, which ``inputs`` uses
QUIET = "no attack"
#: keys of the runs, and whether one client is hostile; with secret sharing all would fail with it
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "the server evaluates": ({}, True),
    "the clients evaluate": ({"federate.make_global_eval": False}, True),
    "secret sharing": ({"federate.use_ss": True}, False),
    QUIET: ({"lowrank.timeout": 20.0}, False),
}


def usable() -> str:
    """Why this kind cannot run here; empty if it can."""
    root = os.environ.get("FEDERATEDSCOPE_ROOT")
    if not root or not (Path(root) / "federatedscope").is_dir():
        return "FEDERATEDSCOPE_ROOT is not set to a checkout of the framework"
    missing = [name for name in ("grpc", "pydantic", "pympler") if not importlib.util.find_spec(name)]
    return f"{missing[0]} is not installed" if missing else ""


# -- the hostile side, in a process of its own -------------------------------------------------------------


def _raw(draw: random.Random) -> bytes:
    """Bytes that are not a message."""
    return draw.choice(
        [
            b"",
            draw.randbytes(draw.choice((1, 100, 10_000))),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(50),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(100),
            b"\x80\x04\x95.",
        ]
    )


class Listener:
    """Takes every message that is sent to ``port``, and gives it back as type, state and content.

    Args:
        token: as a client of ours does, it takes only messages that carry it; empty: all.
    """

    def __init__(self, port: int, token: str = ""):
        import grpc
        from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol

        self.heard: queue.SimpleQueue[tuple[str, int, str]] = queue.SimpleQueue()

        def take(request: Any, context: Any) -> Any:
            if token and (_TOKEN, token) not in context.invocation_metadata():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "this process does not know the sender's token")
            told = [request.msg[name].single_msg for name in ("msg_type", "state", "content")]
            self.heard.put((told[0].str_value, told[1].int_value, told[2].str_value))
            return protocol.MessageResponse(msg="ACK")

        handler = grpc.unary_unary_rpc_method_handler(
            take, protocol.MessageRequest.FromString, protocol.MessageResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler("gRPCComServeFunc", {"sendMessage": handler})
        self._server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((handlers,))
        if not self._server.add_insecure_port(f"127.0.0.1:{port}"):
            raise RuntimeError(f"port {port} is in use")
        self._server.start()

    def next(self, seconds: float) -> tuple[str, int, str] | None:
        """The next message within so many seconds, but for questions whether this process is alive."""
        with contextlib.suppress(queue.Empty):
            while (told := self.heard.get(timeout=seconds))[0] == "alive":
                pass
            return told
        return None


class Attack:
    """The hostile client, if ``request`` is what it joins with, and the strangers.

    Attributes:
        sent: of every message, what it was, and how far it got.
        wrong: what a process did that none may do.
    """

    def __init__(self, outdir: Path, ports: dict[int, int], request: dict[str, Any], seed: int | None, variant: str):
        keys, member = VARIANTS[variant]
        self.outdir, self.ports, self.seed = outdir, ports, seed
        self.evaluates = "federate.make_global_eval" in keys
        self.draw = random.Random(seed)
        self.scene = Scene(request, ports, {})
        self.member = Listener(request["address"]["port"], request["token"]) if member else None
        self.sent: list[tuple[str, str]] = []
        self.wrong = ""
        self._open: list[socket.socket] = []
        self._channels: dict[int, Any] = {}
        self._heard = 0.0

    def run(self, is_over: Callable[[], bool]) -> None:
        """Take part, and send until everything is sent or the run has ended."""
        while not self._listens(self.ports[0]):
            if is_over():
                return
            time.sleep(0.05)
        if self.member:
            self.scene.tokens[HOSTILE] = self.scene.request["token"]
            self._join()
            while not is_over() and self.member.next(0.2) is None:
                pass
        orders = ROUNDS * (2 if self.evaluates else 1)
        share = MESSAGES // (1 + orders) + 1
        self._burst(share)
        while not is_over():
            if self.member:
                self._answer(self.member.next(0.2), share)
            elif len(self.sent) < MESSAGES:
                self._burst(10)
                time.sleep(0.02)
            else:
                time.sleep(0.1)

    def _answer(self, told: tuple[str, int, str] | None, share: int) -> None:
        """Messages while the server waits for this client, an answer that is of no use, and more messages."""
        kind, state, content = told or ("", 0, "")
        if told:
            self._heard = time.monotonic()
        elif time.monotonic() > self._heard + SILENCE:
            self._join()  # what it has sent may have cost it its place
        if kind not in ("model_para", "evaluate"):
            return
        from fs_lowrank.rounds.parcel import Parcel

        parcel = Parcel.of(base64.b64decode(content))
        self.scene.state, self.scene.purpose = state, "evaluate" if kind == "evaluate" else parcel.facts["purpose"]
        if parcel.tensors:
            self.scene.tensors = {n: ("F32", list(t.shape)) for n, t in parcel.tensors.items()}
        self._burst(share // 2)
        if kind == "evaluate":
            self._plain("metrics", HOSTILE, state, "none")
        elif self.scene.purpose == "train":
            facts = {"round": parcel.facts["round"], "error": "it cannot", "lost": False}
            self._plain("model_para", HOSTILE, state, {"facts": facts, "tensors": {}})
        self._burst(share - share // 2)

    def _join(self) -> None:
        self._heard = time.monotonic()
        self._plain("join_in", HOSTILE, 0, self.scene.request)

    def _burst(self, number: int) -> None:
        """Send so many messages, some at the same time."""
        if self.seed is None:
            return
        with contextlib.suppress(OSError, ValueError):
            members = json.loads((self.outdir / "clients.json").read_text())
            self.scene.joined = {m["number"] for m in members} >= set(HEALTHY)
        of_port = {f"token_{self.ports[number_of]}": number_of for number_of in HEALTHY}
        for folder, _, files in os.walk(self.outdir.parent):  # checkpoints disappear meanwhile, which rglob reports
            for name in of_port.keys() & set(files):
                self.scene.tokens[of_port[name]] = (Path(folder) / name).read_text()
        drawn: list[forged.Forged | tuple[int, bytes]] = [
            (self.draw.choice([*self.ports.values()]), _raw(self.draw))
            if self.draw.random() < 0.1
            else forged.forge(self.scene, self.draw)
            for _ in range(min(number, MESSAGES - len(self.sent)))
        ]
        with ThreadPoolExecutor(4) as pool:
            self.sent += filter(None, pool.map(self._send, drawn))

    def _send(self, each: forged.Forged | tuple[int, bytes]) -> tuple[str, str] | None:
        if isinstance(each, forged.Forged):
            answer = self._call(each.to, each.content, each.token)
            if answer is None:
                return None
            answers = {"INVALID_ARGUMENT": "no message", "UNAUTHENTICATED": "without a known token"}
            far = forged.depth(each, self.scene) if answer == "OK" else answers.get(answer, "turned away")
            return f"to {each.to}: {each.what}", far
        with contextlib.suppress(OSError):
            peer = socket.create_connection(("127.0.0.1", each[0]), timeout=2.0)
            self._open.append(peer)  # until the end
            peer.sendall(each[1])
            return f"{len(each[1])} raw bytes", "raw bytes"
        return None

    def _call(self, to: int, content: bytes, token: str) -> str | None:
        """The status that a process answers with; None if nobody listens."""
        import grpc

        if to not in self._channels:
            options = (("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1))
            self._channels[to] = grpc.insecure_channel(f"127.0.0.1:{self.ports[to]}", options=options)
        call = self._channels[to].unary_unary(_METHOD, lambda b: b, lambda b: b)
        try:
            call(content, timeout=ANSWER, metadata=((_TOKEN, token),))
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.wrong = self.wrong or f"process {to} did not answer a message within {ANSWER:.0f} s"
            theirs = code is not grpc.StatusCode.UNAVAILABLE or "too many messages" in str(error.details())
            return code.name if theirs else None
        return "OK"

    def _plain(self, kind: str, sender: int, state: int, content: Any) -> None:
        """A message of the protocol to the server, that does not count; sent again while the server is busy."""
        tree = {"msg_type": kind, "sender": sender, "receiver": [0], "state": state, "timestamp": 0.0}
        sent = forged.encoded({**tree, "content": content}, forged.how_encoded(kind))
        until = time.monotonic() + ANSWER
        while self._call(0, sent, self.scene.tokens.get(HOSTILE, "")) == "UNAVAILABLE" and time.monotonic() < until:
            time.sleep(0.05)

    @staticmethod
    def _listens(port: int) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return True
        return False


# -- the run -----------------------------------------------------------------------------------------------


class Beside:
    """A function in a forked process, which neither waits for this one nor shares its threads."""

    def __init__(self, work: Callable[[], Any]):
        context = multiprocessing.get_context("fork")
        self._reader, writer = context.Pipe(duplex=False)

        def report() -> None:
            die_with_parent()
            writer.send(work())

        self.process = context.Process(target=report)
        self.process.start()
        writer.close()

    def result(self) -> Any:
        """What the function returned; an error if its process died."""
        try:
            return self._reader.recv()
        except EOFError:
            raise RuntimeError("a process of the case itself died; its error is above") from None
        finally:
            self.process.join()

    def has_ended(self) -> bool:
        """Whether ``result`` is there at once."""
        return self._reader.poll()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for each in sockets:
        each.close()
    return ports


def worker(
    bench: Bench, outdir: Path, variant: str, number: int, ports: dict[int, int], forks: bool, resume: bool = False
) -> Ended:
    """Run the server, or the client of this number, to its end."""
    keys, has_member = VARIANTS[variant]
    common = {
        "federate.method": "rolora",
        "federate.client_num": 3 if has_member else 2,
        "federate.total_round_num": ROUNDS,
        "federate.mode": "distributed",
        "distribute.use": True,
        "distribute.server_host": "127.0.0.1",
        "distribute.client_host": "127.0.0.1",
        "distribute.server_port": ports[0],
        "lowrank.timeout": 50.0,
        "train.local_update_steps": 5,
        **keys,
    }
    own: dict[str, Any] = {"distribute.role": "client", "distribute.data_idx": number}
    own |= {"distribute.client_port": ports.get(number, 0)}
    own = own if number else {"distribute.role": "server"}
    file = outdir.with_name(f"worker{number}.yaml")
    place = outdir if number == 0 else outdir.with_name(f"client{number}")
    file.write_text(yaml.safe_dump(settings(bench.inputs, place, **common, **own)))
    argv, out = ["run", "--engine", "federatedscope", "--cfg", str(file)], outdir.with_name(f"worker{number}.out")
    argv += ["--resume"] if resume else []
    if not forks:
        return bench.command(argv, out)

    def work() -> int:
        from fs_lowrank import cli

        return cli.main(argv)

    return fork(work, out)


def _request(bench: Bench, outdir: Path, variant: str) -> dict[str, Any]:
    """What a client joins with, the third if there is one: a real one asks a process that listens, and is killed."""
    server, client = free_ports(2)
    number = HOSTILE if VARIANTS[variant][1] else HEALTHY[0]
    joining = Beside(partial(worker, bench, outdir, variant, number, {0: server, number: client}, True))

    def listen() -> str:
        listener = Listener(server)
        told = listener.next(60.0)
        return told[2] if told else ""

    asked = Beside(listen)
    try:
        return json.loads(asked.result())
    finally:
        joining.kill()


def _distributed(
    bench: Bench, outdir: Path, variant: str, request: dict[str, Any], seed: int | None, forks: bool = True
) -> tuple[dict[str, Ended], list[tuple[str, str]], str]:
    """A run, attacked if there is a seed: how the processes ended, what was sent, and what was wrong."""
    names = {0: "server", 1: "client 1", 2: "client 2"}
    *own, last = free_ports(len(names) + 1)
    ports = dict(zip(names, own))
    request = {**request, "address": {"host": "127.0.0.1", "port": last}, "token": f"{last:032x}"}
    workers = {n: Beside(partial(worker, bench, outdir, variant, n, ports, forks)) for n in names}
    over = multiprocessing.get_context("fork").Event()

    def attack() -> tuple[list[tuple[str, str]], str]:
        one = Attack(outdir, ports, request, seed, variant)
        one.run(over.is_set)
        return one.sent, one.wrong

    attacker = Beside(attack)
    ended = {}
    for number, name in names.items():
        ended[name] = workers[number].result()
        over.set()
    sent, wrong = attacker.result()
    return ended, sent, wrong


def figures(outdir: Path) -> list[list[Any]]:
    """Of every round, what the healthy clients did in it."""
    records = [json.loads(line) for line in (outdir / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [r.get("client_scores", {}) for r in records]
    return [
        [r["round"], r["clients"], r["loss"], *(of.get(str(client)) for client in HEALTHY)]
        for r, of in zip(records, scores)
    ]


def reference(bench: Bench, variant: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a run without an attack, and what its third client joins with."""
    import fs_lowrank.engines.federatedscope.run  # noqa: F401, warm, before anything is forked

    folder = bench.folder / "references" / "peers" / variant.replace(" ", "_")
    if not (folder / "request.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        request = _request(bench, folder / "run", variant)
        ended, _, wrong = _distributed(bench, folder / "run", variant, request, None)
        wrong = wrong or next((e.fault or e.err for e in ended.values() if e.code), "")
        if wrong:
            raise RuntimeError(f"the distributed run fails by itself: {wrong}")
        (folder / "request.json").write_text(json.dumps(request))
    return folder / "run", json.loads((folder / "request.json").read_text())


def case(seed: int, bench: Bench) -> list[Outcome]:
    forged.check_types()
    variants = [name for name in VARIANTS if name != QUIET]
    variant = variants[seed % len(variants)]
    wanted, request = reference(bench, variant)
    with bench.place() as outdir:
        ended, sent, wrong = _distributed(bench, outdir, variant, request, seed, not by_command_line(seed))
        what = f"{len(sent)} messages; {variant}"
        for name, each in ended.items():
            if each.fault or each.code:
                wrong = wrong or f"{name}: {each.fault or each.err}"
        if not wrong:
            try:
                unlike = unsound(outdir) or difference(outdir / "adapter", wanted / "adapter")
                pairs = zip(figures(outdir), figures(wanted), strict=True)
                unlike = unlike or next((f"{mine}, expected {theirs}" for mine, theirs in pairs if mine != theirs), "")
            except (OSError, ValueError) as error:
                unlike = f"{type(error).__name__}: {error}"
            wrong = f"another result without an error: {unlike}" if unlike else ""
        if wrong:
            return [Outcome("failed", what, wrong, "")]
        return [Outcome("same", f"{variant}: {told}", "", far) for told, far in sent]
