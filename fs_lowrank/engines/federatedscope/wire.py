"""The content of messages.

Tensors are sent as safetensors, and nothing that is received is unpickled. The framework's messages have fields for
text but none for bytes, so between processes tensors are base64-encoded, a third larger than the counted bytes.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json

from federatedscope.core.message import Message

from ...rounds.parcel import Parcel

#: characters of the longest text in a message, but for parcels and requests to join
LONGEST_TEXT = 4000


class Sealed:
    """A parcel as the content of a message that stays in this process.

    The framework measures the size of a message by ``sys.getsizeof`` and its attributes, which does not include the
    storage of tensors. The parcel is therefore hidden in a closure, and ``__sizeof__`` gives its size.
    """

    __slots__ = ("_opened",)

    def __init__(self, parcel: Parcel):
        self._opened = lambda: parcel

    def opened(self) -> Parcel:
        return self._opened()

    def __sizeof__(self) -> int:
        parcel = self.opened()
        return parcel.nbytes + len(json.dumps(parcel.facts))


def content_of(parcel: Parcel, distributed: bool) -> Sealed | str:
    """The content of a message with ``parcel``: base64 text if ``distributed``, else the parcel itself."""
    if not distributed:
        return Sealed(parcel)
    facts = {n: encodable(v)[:LONGEST_TEXT] if isinstance(v, str) else v for n, v in parcel.facts.items()}
    return base64.b64encode(Parcel(parcel.tensors, **facts).to_bytes()).decode("ascii")


def encodable(text: str) -> str:
    """``text`` as it can be sent: with question marks for what UTF-8 cannot encode, such as lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def parcel_of(content: object) -> Parcel:
    """The parcel in the content of a message.

    Raises:
        ValueError: there is none in it.
    """
    if isinstance(content, Sealed):
        return content.opened()
    if not isinstance(content, str):
        raise ValueError(f"the content is {type(content).__name__}, not a parcel of tensors")
    try:
        data = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the content cannot be read: {str(error)[:300]}") from None
    return Parcel.of(data)


def message(worker, kind: str, receivers: list[int], content: object, state=None, timestamp=0) -> Message:
    """A message of ``worker``, whose round of the framework it is if ``state`` is None."""
    return Message(
        msg_type=kind,
        sender=worker.ID,
        receiver=receivers,
        state=worker.state if state is None else state,
        timestamp=timestamp,
        content=content,
    )


def send(worker, kind: str, receivers: list[int], content: object, state=None, timestamp=0) -> None:
    """Send ``message`` through the worker's communication manager."""
    worker.comm_manager.send(message(worker, kind, receivers, content, state, timestamp))


def with_content(message: Message, content: object) -> Message:
    """A copy of ``message`` with other content."""
    other = copy.copy(message)
    other.content = content
    return other
