"""What a hostile process sends: messages of every type by the schema of the engine, valid or with mutated fields.

A message is drawn as nested data, mutated there, and then encoded as the engine encodes it: tensors and facts as a
parcel in base64, a request to join as JSON, the rest as values of the protocol. Mutations of the encoding change the
text or the bytes that come out.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

#: the clients that are left alone to train, and the number of the hostile one
HEALTHY, HOSTILE = (1, 2), 3
#: a round of the framework that no run reaches
FAR = 10**6
#: stands for text nested 100,000 deep
_DEEP = "@nested deep@"
#: stands for a number of 5,000 digits
_DIGITS = "@digits@"
#: stands for a lone surrogate, which no valid protobuf text has; three bytes as well
_LONE = "\ue000"
_TYPES_OF_OTHERS = ["unknown", "__init__", "\x00", "", "alive", "model_diff", "a" * 10_000, "JOIN_IN"]


@dataclass
class Scene:
    """What the sender knows while it draws.

    Attributes:
        request: a request to join that a server accepts, the sender's own.
        ports: by number, where each process listens; 0 is the server.
        tokens: by number, the real token of a client.
        state, purpose: of the last order that the hostile client was sent. tensors: by name, dtype and shape of them.
        joined: whether the healthy clients have joined.
    """

    request: dict[str, Any]
    ports: dict[int, int]
    tokens: dict[int, str]
    state: int = 0
    purpose: str = "train"
    tensors: dict[str, tuple[str, list[int]]] = field(default_factory=lambda: {"a.lora_A.weight": ("F32", [1])})
    joined: bool = False


@dataclass(frozen=True)
class Forged:
    """A message as it is sent.

    Attributes:
        to: number of the receiver. token: in its metadata.
        what: its type and what was changed.
    """

    content: bytes
    to: int
    token: str
    what: str


# -- contents that fit the schema --------------------------------------------------------------------------


def _round(scene: Scene, draw: random.Random) -> int:
    """A round of our methods, which count from 1: mostly the current one."""
    now = scene.state + 1
    return draw.choice([now, now, now, now - 1, now + 1, 0, FAR])


def _parcel(scene: Scene, draw: random.Random, facts: dict[str, Any]) -> dict[str, Any]:
    """A parcel whose tensors no round takes: one of them has another name."""
    chosen = dict(list(scene.tensors.items())[: draw.choice((1, 4, 1000))])
    if chosen and draw.random() < 0.9:
        name = draw.choice(sorted(chosen))
        chosen[f"{name}.x"] = chosen.pop(name)
    else:
        chosen = {}
    return {"facts": facts, "tensors": {n: {"dtype": d, "shape": list(s)} for n, (d, s) in chosen.items()}}


def _request(scene: Scene, draw: random.Random) -> dict[str, Any]:
    """A request to join: of the hostile client, or of one with a new token that claims a place and an address."""
    told = copy.deepcopy(scene.request)
    if draw.random() < 0.5:
        told["process"] = f"{draw.getrandbits(128):032x}"
    if draw.random() < 0.6:
        told["token"] = f"{draw.getrandbits(128):032x}"
        told["address"]["port"] = draw.choice([*scene.ports.values(), scene.request["address"]["port"], 1])
    return told


def _update(scene: Scene, draw: random.Random) -> dict[str, Any]:
    facts: dict[str, Any] = {"round": _round(scene, draw), "samples": 14, "loss": 0.5}
    if draw.random() < 0.3:
        facts = {"round": facts["round"], "error": "no", "lost": draw.random() < 0.5}
    return _parcel(scene, draw, facts)


def _order(scene: Scene, draw: random.Random) -> dict[str, Any]:
    now = _round(scene, draw)
    facts = {"round": now, "purpose": draw.choice(["train", "follow", "evaluate"]), "since": now - 1, "stands": now - 1}
    facts |= {"whole": True} if draw.random() < 0.3 else {}
    return _parcel(scene, draw, facts)


def _metrics(scene: Scene, draw: random.Random) -> Any:
    whole = {"test_acc": 0.5, "test_avg_loss": 0.7, "test_total": 4.0, "test_loss": 2.8, "test_correct": 2.0}
    some = dict(draw.sample(sorted(whole.items()), draw.randrange(1, len(whole))))
    return draw.choice(["none", whole, whole, some, {"a": 1.0}, {n: 3e38 for n in whole}, {n: 0.0 for n in whole}])


def _address(scene: Scene, draw: random.Random) -> dict[int, Any]:
    neighbour = {"address": f"127.0.0.1:{draw.choice([*scene.ports.values()])}", "token": "ab" * 16}
    return {draw.choice([0, 1, 2, 3, 9]): dict(neighbour)}


def _word(scene: Scene, draw: random.Random) -> str:
    return draw.choice(["", "the run is over", "é" * 100, "\n\n", "[bold]"])


Contents = Callable[[Scene, random.Random], Any]
#: by who reads: a content that fits the schema, by type of message
TO_SERVER: dict[str, Contents] = {
    "join_in": _request,
    "join_in_info": lambda scene, draw: {"num_sample": 14.0, "client_resource": 1.0},
    "model_para": _update,
    "metrics": _metrics,
}
TO_CLIENT: dict[str, Contents] = {
    "model_para": _order,
    "evaluate": _order,
    "ss_model_para": lambda scene, draw: _parcel(scene, draw, {}),
    "assign_client_id": lambda scene, draw: str(draw.choice([1, 2, 3])),
    "ask_for_join_in_info": lambda scene, draw: ["num_sample"],
    "address": _address,
    **dict.fromkeys(("finish", "converged", "refused", "stopped", "join_again"), _word),
}


def check_types() -> None:
    """Every type of message that the engine's schema has is drawn.

    Raises:
        RuntimeError: one is not.
    """
    from fs_lowrank.engines.federatedscope import messages

    known = {
        kind
        for model in vars(messages).values()
        if isinstance(model, type) and "msg_type" in getattr(model, "model_fields", {})
        for kind in get_args(model.model_fields["msg_type"].annotation)
    }
    drawn = TO_SERVER.keys() | TO_CLIENT.keys()
    if known != drawn:
        raise RuntimeError(f"the schema of messages and those drawn here differ in {sorted(known ^ drawn)}")


# -- mutations ---------------------------------------------------------------------------------------------

_OTHERS: list[Any] = ["", "abc", "1", "\x00", 0, 1, -1, 3, 1.5, True, None, [], {}, [1], {"a": 1}, {"a": {"b": []}}]
_RANGE: list[Any] = [0, -1, -2, 7, 99, 2**16, 2**31 - 1, -(2**31), 2**31, 3e38, -3e38, 1e-45, -0.0]
_HUGE: list[Any] = [2**63, 10**18, 10**400, -(10**400), _DIGITS, 1e308, -1e308, "9" * 5000, "a" * 100_000]
_NAN = [float("nan"), float("inf"), -float("inf")]
_NAMES: list[Any] = ["more", "", "strategy", "__class__", "content", "\x00", "a" * 600, "é", 0, 99]


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in nested data."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _mutate(tree: dict[str, Any], draw: random.Random) -> str:
    """Change one value of a message; returns what was changed."""
    paths = [*_places(tree)]
    inside = [p for p in paths if p[0] == "content"]
    near = [p for p in inside if len(p) <= 3]  # not in the many keys of a configuration
    path = draw.choice(draw.choice([paths, inside, near, near]) or paths)
    node = tree
    for key in path[:-1]:
        node = node[key]
    at, old = path[-1], node[path[-1]]
    how = draw.choice("type type range range missing extra extra nesting surrogate huge huge nan".split())
    if how == "type":
        node[at] = copy.deepcopy(draw.choice([v for v in _OTHERS if type(v) is not type(old)]))
    elif how == "range":
        beside = [old + 1, old - 1, -old] if isinstance(old, (int, float)) and not isinstance(old, bool) else []
        texts = ["", "x", "a" * 5000, f"{old}x", str(old)[:-1]]
        node[at] = draw.choice(texts if isinstance(old, str) else [*_RANGE, *beside])
    elif how == "missing":
        del node[at]
    elif how == "extra":
        target = old if isinstance(old, (dict, list)) else node
        if isinstance(target, dict):
            target[draw.choice(_NAMES)] = copy.deepcopy(draw.choice(_OTHERS))
        else:
            target.extend([copy.deepcopy(draw.choice(_OTHERS))] * draw.choice((1, 3, 300)))
    elif how == "nesting":
        node[at] = draw.choice([[old], {"a": old}, [[old]], _DEEP, [old, old], {at: old}])
    elif how == "surrogate":
        node[at] = draw.choice(["\ud800", "a\udfff", "\ud83d" * 50])
    else:
        node[at] = draw.choice(_HUGE if how == "huge" else _NAN)
    return f"{how} of {'.'.join(str(p)[:30] for p in path)}"


def _garble(text: str, draw: random.Random) -> str:
    """Encoded content with some characters changed, cut or added."""
    at = draw.randrange(len(text)) if text else 0
    return draw.choice(
        [
            text[:at],
            text + text,
            text[:at] + draw.choice("{}[]=\x00é\"'-_ ") + text[at + 1 :],
            text[:at] + "AAAA" + text[at:],
            "\ufeff" + text,
            " " + text + "\n",
            "",
            text[::-1],
            "=" * 50,
            base64.b64encode(struct.pack("<Q", draw.choice((0, 1, 2**26, 2**40, 2**64 - 1))) + b"{}").decode(),
            base64.b64encode(b"\x80\x04\x95" + text.encode("utf-8", "replace")).decode(),
        ]
    )


# -- encoding ----------------------------------------------------------------------------------------------


def _json(tree: Any) -> str:
    """Nested data as JSON; what cannot be a key is made text."""
    text = json.dumps(tree, skipkeys=True)
    return text.replace(json.dumps(_DEEP), "[" * 100_000 + "]" * 100_000).replace(json.dumps(_DIGITS), "9" * 5000)


def _sealed(content: Any) -> Any:
    """A parcel in base64, with as many bytes as its first tensors need; other content as it is."""
    if not isinstance(content, dict) or not {"facts", "tensors"} & content.keys():
        return content
    head: dict[str, Any] = {"__metadata__": {"facts": _json(content.get("facts"))}}
    head |= {k: v for k, v in content.items() if k not in ("facts", "tensors")}
    size, tensors = 0, content.get("tensors")
    for name, each in tensors.items() if isinstance(tensors, dict) else ():
        if not isinstance(each, dict):
            head[str(name)] = each
            continue
        shape = each.get("shape")
        count = 1
        for n in shape if isinstance(shape, list) else ():
            count = count * n if isinstance(n, int) and 0 <= n < 10**4 else 0
        bytes_ = min(4 * count, 10**6)
        head[str(name)] = {**each, "data_offsets": each.get("data_offsets", [size, size + bytes_])}
        size += bytes_
    text = _json(head).encode("utf-8", "surrogatepass")
    return base64.b64encode(struct.pack("<Q", len(text)) + text + bytes(size)).decode("ascii")


def _value(value: Any, depth: int = 0) -> Any:
    """A value of the protocol; what it has no type for becomes the nearest."""
    from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol

    made = protocol.MsgValue()
    if value == _DEEP:
        made.single_msg.int_value = 1
        for _ in range(25):
            outer = protocol.MsgValue()
            outer.list_msg.list_value.append(made)
            made = outer
    elif isinstance(value, int) and -(2**31) <= value < 2**31:
        made.single_msg.int_value = int(value)
    elif isinstance(value, (int, float)):
        made.single_msg.float_value = float(value) if abs(value) < 1e300 else float("inf")
    elif isinstance(value, str):
        made.single_msg.str_value = "".join(_LONE if "\ud800" <= c <= "\udfff" else c for c in value)
    elif isinstance(value, list):
        made.list_msg.SetInParent()
        made.list_msg.list_value.extend(_value(v, depth + 1) for v in value)
    elif isinstance(value, dict) and value and all(type(k) is int for k in value):
        for key, v in value.items():
            made.dict_msg_intkey.dict_value[key].CopyFrom(_value(v, depth + 1))
    elif isinstance(value, dict):
        made.dict_msg_stringkey.SetInParent()
        for key, v in value.items():
            made.dict_msg_stringkey.dict_value[str(key)].CopyFrom(_value(v, depth + 1))
    return made


def encoded(tree: dict[str, Any], how: Callable[[Any], Any], garble: Callable[[str], str] | None = None) -> bytes:
    """A message as bytes. ``how`` encodes the content; ``garble`` changes the text that comes out."""
    from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol

    request = protocol.MessageRequest()
    for name, value in tree.items():
        if name == "content":
            value = how(value)
            value = garble(value) if garble and isinstance(value, str) else value
        request.msg[str(name)].CopyFrom(_value(value))
    return request.SerializeToString().replace(_LONE.encode(), b"\xed\xa0\x80")


def how_encoded(kind: str) -> Callable[[Any], Any]:
    if kind == "join_in":
        return _json
    return _sealed if kind in ("model_para", "evaluate", "ss_model_para") else lambda content: content


# -- a message ---------------------------------------------------------------------------------------------


def depth(forged: Forged, scene: Scene) -> str:
    """How far a message gets whose token is known, by the engine's own reader."""
    from federatedscope.core.message import Message
    from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol

    from fs_lowrank.engines.federatedscope import messages

    request = protocol.MessageRequest.FromString(forged.content)
    owner = next((n for n, token in scene.tokens.items() if token == forged.token), -1) if forged.to == 0 else 0
    try:
        messages.read(request, forged.to == 0, owner)
    except ValueError:
        pass
    else:
        return "passed the schema"
    try:
        Message().parse(request.msg)
    except Exception:  # whatever the framework raises on values of other types
        return "refused before the schema"
    return "refused by the schema" if set(request.msg) == messages._FIELDS else "refused before the schema"


def forge(scene: Scene, draw: random.Random) -> Forged:
    """A message that, by what the protocol promises, does not change the result of the healthy clients."""
    while True:
        forged, kind, tree = _drawn(scene, draw)
        if _is_harmless(forged, kind, tree, scene):
            return forged


def _drawn(scene: Scene, draw: random.Random) -> tuple[Forged, str, dict[str, Any]]:
    to = 0 if draw.random() < 0.7 else draw.choice(HEALTHY)
    own = scene.tokens.get(to or HOSTILE, "")
    tokens = [own] * 17 + ["", "0" * 32, scene.tokens.get(draw.choice(HEALTHY), "")]
    sender: int = (HOSTILE if HOSTILE in scene.tokens else draw.choice(HEALTHY)) if to == 0 else 0
    if to == 0 and HOSTILE not in scene.tokens:
        tokens = [scene.tokens.get(sender, "")] * 17 + ["", "0" * 32, "ab" * 16]
    token = draw.choice(tokens)
    contents = TO_CLIENT if to else TO_SERVER
    # Some types go to a reader who does not expect them.
    kinds = [*contents] * 6 + [*TO_SERVER, *TO_CLIENT]
    if not to and scene.purpose == "evaluate":
        kinds += ["metrics"] * 20
    kind = draw.choice(kinds)
    content = ({**TO_CLIENT, **TO_SERVER} if to == 0 else {**TO_SERVER, **TO_CLIENT})[kind](scene, draw)
    if kind == "join_in":
        sender = draw.choice([HOSTILE, HOSTILE, -1, 1, 2, 0, 99])
    elif draw.random() < 0.1:
        sender = draw.choice([0, 1, 2, 3, -1, 99, 2**31 - 1])
    state = draw.choice([scene.state] * 6 + [scene.state - 1, scene.state + 1, 0, -1, FAR, 2**31 - 1])
    tree: dict[str, Any] = {
        "msg_type": kind if draw.random() < 0.97 else draw.choice(_TYPES_OF_OTHERS),
        "sender": sender,
        "receiver": [to],
        "state": state,
        "timestamp": 0.0,
        "content": content,
    }
    done = [_mutate(tree, draw) for _ in range(draw.choice((0, 0, 1, 1, 1, 1, 2, 2)))]
    garble = (lambda text: _garble(text, draw)) if draw.random() < 0.08 else None
    sent = encoded(tree, how_encoded(kind), garble)
    if draw.random() < 0.02:
        changed = bytearray(sent)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        sent = bytes(changed)
    what = f"{kind} of {sender} in {state}: {'; '.join(done) or 'valid'}{'; garbled' if garble else ''}"
    return Forged(sent, to, token, what[:200]), kind, tree


def _is_harmless(forged: Forged, kind: str, tree: dict[str, Any], scene: Scene) -> bool:
    """Whether the protocol promises that the message changes nothing for the healthy clients.

    It does not for an order with the server's own proof, nor for an answer with that of a healthy client: these are
    obeyed. Nor for who joins first in the place of a healthy client.
    """
    from federatedscope.core.proto import gRPC_comm_manager_pb2 as protocol
    from google.protobuf.message import DecodeError

    try:
        request = protocol.MessageRequest.FromString(forged.content)
    except DecodeError:
        return True
    said = request.msg["msg_type"].single_msg.str_value if "msg_type" in request.msg else ""
    far = depth(forged, scene)
    if forged.to == 0 and said == "join_in":
        claimed = request.msg["sender"].single_msg.int_value if "sender" in request.msg else 0
        return scene.joined or far != "passed the schema" or claimed not in (*HEALTHY, -1)
    if forged.to == 0:
        if forged.token not in [scene.tokens.get(n) for n in HEALTHY]:
            return True
        if said not in ("model_para", "metrics"):
            return True
        own = forged.token == scene.tokens.get(request.msg["sender"].single_msg.int_value)
        return own and far == "passed the schema" and request.msg["state"].single_msg.int_value >= FAR
    if forged.token != scene.tokens.get(forged.to) or far != "passed the schema":
        return True
    if request.msg["sender"].single_msg.int_value != 0:
        return True
    own_number = said == "assign_client_id" and request.msg["content"].single_msg.str_value == str(forged.to)
    return own_number or said in ("join_again", "ask_for_join_in_info")
