"""Parcels as the content of Flower's messages: safetensors bytes, which Flower carries and does not read.

An array of Flower is ``.npy`` otherwise, which has no bfloat16. Its mods and strategies cannot change such a parcel:
they raise an error instead (docs/guides/flower.md says why that is right). Flower's store compares the SHA-256 of all
that it is given.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

from ...rounds.parcel import Parcel

#: bytes of one array at most; a parcel travels as so many as it needs. Flower's HTTP cuts each of them into objects of
#: 5 MB, so that no message is too large for it
PIECE = 2**28
#: the name of the parcel in a message
PARCEL = "parcel"
#: what Flower calls the encoding of an array
ENCODING = "safetensors"


def packed(parcel: Parcel) -> RecordDict:
    """``parcel`` as the content of a message."""
    data = parcel.to_bytes()
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    arrays = {_name(i, len(pieces)): Array("uint8", (len(p),), ENCODING, p) for i, p in enumerate(pieces)}
    return RecordDict({PARCEL: ArrayRecord(arrays)})


def unpacked(content: RecordDict) -> Parcel:
    """The parcel in the content of a message.

    Raises:
        ValueError: there is none, one of its pieces is missing or too many, or it cannot be read.
    """
    arrays = content.array_records.get(PARCEL)
    if not arrays or any(array.stype != ENCODING for array in arrays.values()):
        raise ValueError(f"the message holds no parcel in {ENCODING}, but {', '.join(content) or 'nothing'}")
    wanted = [_name(i, len(arrays)) for i in range(len(arrays))]
    if wrong := sorted(arrays.keys() - set(wanted)):
        raise ValueError(f"the message holds {len(arrays)} pieces, one of which is {wrong[0]!r:.60}")
    return Parcel.of(b"".join(arrays[name].data for name in wanted))


def _name(place: int, count: int) -> str:
    return f"piece {place + 1} of {count}"
