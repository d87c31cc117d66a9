"""Parcels as the content of Flower's messages: safetensors bytes, which Flower carries and does not read.

An array of Flower is ``.npy`` otherwise, which has no bfloat16. Its mods and strategies cannot change such a parcel:
they raise an error instead (docs/flower.md says why that is right).
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

from ...rounds.parcel import Parcel

#: bytes of one array at most; a parcel travels as so many as it needs
PIECE = 2**28
#: the name of the parcel in a message, and what Flower calls the encoding of an array
PARCEL, ENCODING = "parcel", "safetensors"


def packed(parcel: Parcel) -> RecordDict:
    """``parcel`` as the content of a message."""
    data = parcel.to_bytes()
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    arrays = {f"{i:06}": Array("uint8", (len(piece),), ENCODING, piece) for i, piece in enumerate(pieces)}
    return RecordDict({PARCEL: ArrayRecord(arrays)})


def unpacked(content: RecordDict) -> Parcel:
    """The parcel in the content of a message.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    arrays = content.array_records.get(PARCEL)
    if not arrays or any(array.stype != ENCODING for array in arrays.values()):
        raise ValueError(f"the message holds no parcel in {ENCODING}, but {', '.join(content) or 'nothing'}")
    return Parcel.of(b"".join(arrays[name].data for name in sorted(arrays)))
