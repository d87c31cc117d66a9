"""Messages between a server and its clients: named tensors and a few facts, as safetensors bytes.

Nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

from ..algebra import nbytes


class Parcel:
    """Named tensors and facts (JSON values by name).

    A parcel that does not leave its process may hold tensors on ``meta``, which have only sizes, or a model's own.
    """

    __slots__ = ("tensors", "facts")

    def __init__(self, tensors: Mapping[str, Tensor], /, **facts: Any):
        self.tensors, self.facts = tensors, facts

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' values."""
        return nbytes(self.tensors)

    def to_bytes(self) -> bytes:
        """As safetensors, with the facts in the header."""
        plain = {n: t.detach().cpu().contiguous().clone() for n, t in self.tensors.items()}
        return safetensors.torch.save(plain, {"facts": json.dumps(self.facts)})

    @classmethod
    def of(cls, data: bytes) -> Parcel:
        """The parcel that ``to_bytes`` wrote, its tensors on the CPU.

        Raises:
            ValueError: it is not a parcel.
        """
        if not isinstance(data, bytes):
            raise ValueError(f"the content is {type(data).__name__}, not a parcel of tensors")
        try:
            tensors = safetensors.torch.load(data)  # first, since it refuses a header of more than 100 MB unread
            (length,) = struct.unpack("<Q", data[:8])
            facts = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["facts"])
        except Exception as error:  # of whatever kind: these are another process's bytes
            raise ValueError(f"the content cannot be read: {str(error)[:300]}") from None
        if not isinstance(facts, dict):
            raise ValueError("the content cannot be read: its facts are not a mapping")
        return cls(tensors, **facts)
