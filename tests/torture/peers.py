"""Hostile messages: during a distributed run on the framework's engine, random bytes and messages with wrong fields
are sent to the server and to both clients. The run must end as it does without them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from .bench import Bench, Outcome
from .child import Ended, difference
from .tiny import settings

SHARD = 2
#: messages of a run
MESSAGES = 250
ROUNDS = 12
_METHOD = "/gRPCComServeFunc/sendMessage"


def usable() -> str:
    """Why this kind cannot run here; empty if it can."""
    root = os.environ.get("FEDERATEDSCOPE_ROOT")
    if not root or not (Path(root) / "federatedscope").is_dir():
        return "FEDERATEDSCOPE_ROOT is not set to a checkout of the framework"
    return "" if importlib.util.find_spec("grpc") else "grpcio is not installed"


# -- what is sent ------------------------------------------------------------------------------------------


@cache
def _proto() -> SimpleNamespace:
    """The protobuf classes of the framework's messages, from its generated file, without importing the framework."""
    from google.protobuf import descriptor_pool, message_factory

    path = Path(os.environ["FEDERATEDSCOPE_ROOT"]) / "federatedscope/core/proto/gRPC_comm_manager_pb2.py"
    keywords = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.keyword)]
    described = next(ast.literal_eval(k.value) for k in keywords if k.arg == "serialized_pb")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(described)
    names = ("MessageRequest", "MsgValue")
    found = {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(n)) for n in names}
    return SimpleNamespace(**found)


_TYPES = "join_in join_in_info address model_para update metrics evaluate finish stopped refused ss_model_para".split()
_TYPES += "assign_client_id ask_for_join_in_info model_para_for_eval converged unknown __init__ \x00".split()
_TEXTS = ["", "{}", "[]", "null", "NaN", "\x00", "é" * 1000, "a" * 100_000, "AAAA", "1e400", "../../x", "[" * 100_000]


def _value(proto: Any, draw: random.Random, depth: int = 0) -> Any:
    """A random value for a field, of any type."""
    value = proto.MsgValue()
    kind = draw.choice(
        "int text float list map numbers deep nothing".split() if depth < 3 else ["int", "text", "float"]
    )
    if kind == "int":
        value.single_msg.int_value = draw.choice([0, 1, 2, 3, -1, 99, 2**31 - 1, -(2**31)])
    elif kind == "float":
        value.single_msg.float_value = draw.choice([0.0, 1.5, -1.0, 3e38, float("nan"), float("inf")])
    elif kind == "text":
        value.single_msg.str_value = draw.choice([*_TEXTS, *_TYPES, "abc", "1", _parcel(draw), _request(draw)])
    elif kind == "list":
        value.list_msg.list_value.extend(_value(proto, draw, depth + 1) for _ in range(draw.randrange(4)))
    elif kind == "map":
        for name in draw.sample(["a", "round", "samples", "loss", "", "error"], draw.randrange(1, 4)):
            value.dict_msg_stringkey.dict_value[name].CopyFrom(_value(proto, draw, depth + 1))
    elif kind == "numbers":
        for name in draw.sample([0, 1, 2, -1, 7], draw.randrange(1, 3)):
            value.dict_msg_intkey.dict_value[name].CopyFrom(_value(proto, draw, depth + 1))
    elif kind == "deep":
        value.single_msg.int_value = 1
        for _ in range(draw.choice((5, 15, 30))):
            outer = proto.MsgValue()
            outer.list_msg.list_value.append(value)
            value = outer
    return value


def _request(draw: random.Random) -> str:
    told: dict[str, Any] = {
        "samples": draw.choice([1, 14, 10**9, -1, True, "x", None, 1e300]),
        "address": {"host": "127.0.0.1", "port": draw.choice([1, 9, 70000, "a", -1])},
        "proof": draw.choice([{}, {"a": "b"}, [], None, {"a": 3}]),
        "config": draw.choice([{}, {"federate": 3}, [], None, {"seed": 10**400}]),
    }
    if draw.random() < 0.3:
        told.pop(draw.choice(sorted(told)))
    return json.dumps(told)


def _parcel(draw: random.Random) -> str:
    """A parcel of tensors as text, valid or almost valid."""
    import base64
    import struct

    facts = draw.choice(['{"round": 1, "samples": 14, "loss": 0.5}', '{"round": 1, "error": "x"}', "[]", "3", "{"])
    head = json.dumps({"__metadata__": {"facts": facts}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    content = struct.pack("<Q", len(head) + draw.choice((0, 0, 1, 2**40))) + head.encode() + b"\0\0\x80\x7f"
    return base64.b64encode(content[: draw.choice((len(content), len(content), 20))]).decode()


def _message(proto: Any, draw: random.Random) -> bytes:
    """A serialised message: well formed, with wrong or missing fields, or with some bytes changed."""
    request = proto.MessageRequest()
    request.msg["sender"].single_msg.int_value = draw.choice([0, 1, 2, 3, -1])
    request.msg["receiver"].single_msg.int_value = draw.choice([0, 1, 2])
    request.msg["state"].single_msg.int_value = draw.choice([0, 1, 2, 5, ROUNDS, 10**9])
    request.msg["timestamp"].single_msg.float_value = 0.0
    request.msg["strategy"].single_msg.str_value = "None"
    request.msg["msg_type"].single_msg.str_value = draw.choice(_TYPES)
    request.msg["content"].single_msg.str_value = draw.choice([_parcel(draw), _request(draw), *_TEXTS])
    for _ in range(draw.randrange(3)):
        field = draw.choice(["sender", "receiver", "state", "timestamp", "strategy", "msg_type", "content", "more"])
        if draw.random() < 0.2:
            request.msg.pop(field, None) if hasattr(request.msg, "pop") else None
        else:
            request.msg[field].CopyFrom(_value(proto, draw))
    content = request.SerializeToString()
    if draw.random() < 0.2:
        changed = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        content = bytes(changed)
    return content


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


def _attack(ports: list[int], draw: random.Random, over: Callable[[], bool], sent: list[int]) -> None:
    """Send until everything is sent or the run has ended; connections with raw bytes remain open."""
    import grpc

    proto, open_ = _proto(), []
    channels = {}
    while sum(sent) < MESSAGES and not over():
        port = draw.choice(ports)
        with contextlib.suppress(OSError, grpc.RpcError):
            if draw.random() < 0.1:
                peer = socket.create_connection(("127.0.0.1", port), timeout=2.0)
                peer.sendall(_raw(draw))
                open_.append(peer)
            else:
                if port not in channels:
                    options = (("grpc.enable_http_proxy", 0),)
                    channels[port] = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
                call = channels[port].unary_unary(_METHOD, lambda b: b, lambda b: b)
                call(_message(proto, draw), timeout=2.0)
            sent.append(1)
    for each in (*open_, *channels.values()):
        each.close()


# -- the run -----------------------------------------------------------------------------------------------


def _distributed(bench: Bench, outdir: Path, draw: random.Random | None) -> tuple[list[Ended], int]:
    """Run a server and two clients from the command line, and attack them if ``draw`` is given."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [s.getsockname()[1] for s in sockets]
    for each in sockets:
        each.close()
    common = {
        "federate.method": "rolora",
        "federate.client_num": 2,
        "federate.total_round_num": ROUNDS,
        "federate.mode": "distributed",
        "distribute.use": True,
        "distribute.server_host": "127.0.0.1",
        "distribute.client_host": "127.0.0.1",
        "distribute.server_port": ports[0],
        "lowrank.timeout": 50.0,
        "train.local_update_steps": 5,
    }
    own: list[dict[str, Any]] = [{"distribute.role": "server"}]
    own += [{"distribute.role": "client", "distribute.data_idx": k, "distribute.client_port": ports[k]} for k in (1, 2)]
    ended: list[Ended | None] = [None] * 3

    def start(worker: int) -> None:
        file = outdir.with_name(f"worker{worker}.yaml")
        place = outdir if worker == 0 else outdir.with_name(f"client{worker}")
        file.write_text(yaml.safe_dump(settings(bench.inputs, place, **common, **own[worker])))
        argv = ["run", "--engine", "federatedscope", "--cfg", str(file)]
        ended[worker] = bench.command(argv, outdir.with_name(f"worker{worker}.out"))

    threads = [threading.Thread(target=start, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    sent: list[int] = []
    if draw is not None:
        _wait_for(ports[0], threads[0])
        _attack(ports, draw, lambda: not threads[0].is_alive(), sent)
    for thread in threads:
        thread.join()
    return [e for e in ended if e is not None], len(sent)


def _wait_for(port: int, server: threading.Thread) -> None:
    while server.is_alive():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        time.sleep(0.05)


def case(seed: int, bench: Bench) -> list[Outcome]:
    reference = bench.folder / "references" / "peers" / "run"
    if not reference.parent.exists():
        reference.parent.mkdir(parents=True)
        ended, _ = _distributed(bench, reference, None)
        wrong = [e.fault or e.err for e in ended if e.code]
        if wrong:
            raise RuntimeError(f"the distributed run fails by itself: {wrong[0]}")
    with bench.place() as outdir:
        ended, sent = _distributed(bench, outdir, random.Random(seed))
        what = f"{sent} messages to a server and two clients"
        for name, each in zip(("server", "client 1", "client 2"), ended):
            if each.fault or each.code:
                return [Outcome("failed", what, f"{name}: {each.fault or each.err}")]
        unlike = difference(outdir / "adapter", reference / "adapter")
        if unlike:
            return [Outcome("failed", what, f"another result without an error: {unlike}")]
        return [Outcome("same", what)] * sent
