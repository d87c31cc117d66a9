"""The schema of every message between processes: a message that does not fit reaches no handler.

The models below are the protocol. A message has six fields, and the type of ``content`` depends on ``msg_type``.
Tensors are a parcel in base64 (``wire``), whose facts have a schema of their own. From other clients, a client takes
nothing but shares.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Annotated, Any, Literal

from federatedscope.core.message import Message
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from ...rounds.parcel import Parcel
from . import wire

#: the number of the server
SERVER = 0
#: characters of a text from outside that a message of ours shows
_SHOWN = 300
_FIELDS = {"msg_type", "sender", "receiver", "state", "timestamp", "content"}

Number = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Name = Annotated[str, StringConstraints(max_length=500)]
Token = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
#: a parcel; gRPC bounds the message
Base64 = Annotated[str, StringConstraints(max_length=2**31 - 1)]


class _Strict(BaseModel):
    # Every text has a longest length, also because pydantic only then refuses what is not Unicode: JSON has escapes for
    # lone surrogates, which no message to others could hold.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=wire.LONGEST_TEXT
    )


# -- contents ------------------------------------------------------------------------------------------


class Address(_Strict):
    """Where a process listens."""

    host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:\[\]-]{1,255}$")]
    port: Annotated[int, Field(ge=1, le=65535)]

    @field_validator("host")
    @classmethod
    def _plain(cls, host: str) -> str:
        """Else a colon would make gRPC connect otherwise, as by ``unix:``."""
        if ":" in host or "[" in host or "]" in host:
            try:
                ipaddress.IPv6Address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
            except ValueError:
                raise ValueError(f"{host!r}: expected a name or an IP address") from None
        return host

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Neighbour(_Strict):
    """Another client, and the token by which the two know each other."""

    address: Name
    token: Token


class Request(_Strict):
    """What a client sends to join.

    Attributes:
        token: proves from now on that a message is of this client, or for it; kept over a restart.
        process: drawn by each process, so that a restart is noticed.
        proof: hashes of the model at the start. config: the configuration. revisions: of the method.
        samples: the size of its training set.
    """

    address: Address
    token: Token
    process: Token
    proof: dict[Name, Name]
    config: dict[str, Any]
    revisions: dict[Name, int]
    samples: int


class Info(_Strict):
    """What ``federate.join_in_info`` may ask of a client; only what is asked for is set."""

    num_sample: Annotated[int, Field(ge=0)] | None = None
    client_resource: Annotated[float, Field(gt=0)] | None = None


# -- facts of parcels ----------------------------------------------------------------------------------


class Trained(_Strict):
    """The facts of an update."""

    round: int
    samples: int
    loss: float


class Failed(_Strict):
    """The facts of a client that could not train."""

    round: int
    error: str
    lost: bool


class Ordered(_Strict):
    """The facts of what a client is sent; see ``rounds.round.Order``."""

    round: int
    purpose: Literal["train", "follow", "evaluate"]
    since: int | None
    stands: int
    whole: Literal[True] | None = None
    encoded: Literal[True] | None = None
    undo: int | None = None
    stamp: str | None = None


class Nothing(_Strict):
    """A share has no facts."""


# -- messages ------------------------------------------------------------------------------------------


class _Message(_Strict):
    sender: Number
    receiver: Number | Annotated[list[Number], Field(max_length=2**20)]
    state: Number
    timestamp: Annotated[float, Field(ge=0)]


class JoinIn(_Message):
    msg_type: Literal["join_in"]
    content: Json[Request]


class JoinInInfo(_Message):
    msg_type: Literal["join_in_info"]
    content: Info

    @field_validator("content")
    @classmethod
    def _as_asked(cls, content: Info, info: ValidationInfo) -> Info:
        had, asked = sorted(content.model_fields_set), sorted((info.context or {}).get("asked", ()))
        if had != asked:
            raise ValueError(f"it has {had}, federate.join_in_info asks for {asked}")
        return content


class Update(_Message):
    msg_type: Literal["model_para"]
    content: Base64


class Metrics(_Message):
    """The metrics of an evaluation by the framework's names (``scores``); ``none`` of one that did not evaluate."""

    msg_type: Literal["metrics"]
    content: Annotated[dict[Name, float], Field(max_length=100)] | Literal["none"]


class Share(_Message):
    msg_type: Literal["ss_model_para"]
    content: Base64


class Order(_Message):
    msg_type: Literal["model_para", "evaluate"]
    content: Base64


class AssignId(_Message):
    msg_type: Literal["assign_client_id"]
    content: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


class AskForInfo(_Message):
    msg_type: Literal["ask_for_join_in_info"]
    content: Annotated[list[Literal["num_sample", "client_resource"]], Field(max_length=2)]


class Neighbours(_Message):
    msg_type: Literal["address"]
    content: dict[Number, Neighbour]


class Word(_Message):
    """The run is over, or the server does not want this client, or asks it to join again."""

    msg_type: Literal["finish", "converged", "refused", "stopped", "join_again"]
    content: str


#: by who reads and who sends: every message; and by whether the server reads, the facts of the parcels
_TO_SERVER: TypeAdapter[Any] = TypeAdapter(
    Annotated[JoinIn | JoinInInfo | Update | Metrics, Field(discriminator="msg_type")]
)
_FROM_SERVER: TypeAdapter[Any] = TypeAdapter(
    Annotated[Order | AssignId | AskForInfo | Neighbours | Word, Field(discriminator="msg_type")]
)
_AMONG_CLIENTS: TypeAdapter[Any] = TypeAdapter(Share)
_FACTS: dict[tuple[bool, str], TypeAdapter[Any]] = {
    (True, "model_para"): TypeAdapter(
        Annotated[
            Annotated[Trained, Tag("Trained")] | Annotated[Failed, Tag("Failed")],
            Discriminator(lambda facts: "Failed" if "error" in facts else "Trained"),
        ]
    ),
    (False, "model_para"): TypeAdapter(Ordered),
    (False, "evaluate"): TypeAdapter(Ordered),
    (False, "ss_model_para"): TypeAdapter(Nothing),
}


def read(request: Any, serves: bool, sender: int, asked: Collection[str] = ()) -> Message:
    """The message in a protobuf ``request``, checked; a parcel in it is opened.

    Args:
        serves: the reader is the server.
        sender: whose token came with it; a client that has no number yet may name the one that it wants, or -1.
        asked: what ``federate.join_in_info`` asks of clients.
    Raises:
        ValueError: it is not a message of the protocol; the text names the field.
    """
    message = Message()
    try:
        message.parse(request.msg)
    except Exception as error:  # the framework's setters raise errors of many classes
        raise ValueError(f"it is not a message: {type(error).__name__}: {str(error)[:_SHOWN]}") from None
    if set(request.msg) != _FIELDS:
        raise ValueError(f"its fields are {sorted(request.msg)!r:.{_SHOWN}}, expected {sorted(_FIELDS)}")
    values = {name: getattr(message, name) for name in _FIELDS}
    schema = _TO_SERVER if serves else _FROM_SERVER if sender == SERVER else _AMONG_CLIENTS
    checked = _check(schema, values, asked)
    if checked.msg_type != "join_in" and checked.sender != sender:
        raise ValueError(f"sender: {checked.sender} with the token of {sender}")
    message.content = checked.content
    facts = _FACTS.get((serves, message.msg_type))
    if facts is not None:
        parcel = wire.parcel_of(message.content)
        _check(facts, parcel.facts)
        message.content = wire.Sealed(Parcel(parcel.tensors, **parcel.facts))
    return message


def _check(schema: TypeAdapter[Any], value: object, asked: Collection[str] = ()) -> Any:
    try:
        return schema.validate_python(value, context={"asked": asked})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "it"
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{field:.{_SHOWN}}: {reason:.{_SHOWN}}") from None
