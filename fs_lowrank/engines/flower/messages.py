"""Parcels as the content of Flower's messages: safetensors bytes, which Flower carries and does not read.

An array of Flower is ``.npy`` otherwise, which has no bfloat16. Its mods and strategies cannot change such a parcel:
they raise an error instead (docs/guides/flower.md says why that is right).
"""

from __future__ import annotations

from hashlib import sha256

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ...rounds.parcel import Parcel

#: bytes of one array at most; a parcel travels as so many as it needs. Flower's HTTP cuts each of them into objects of
#: 5 MB, so that no message is too large for it
PIECE = 2**28
#: names in a message: of the parcel, and of the hashes of its pieces in their order
PARCEL, HASHES = "parcel", "pieces"
#: what Flower calls the encoding of an array
ENCODING = "safetensors"


def packed(parcel: Parcel) -> RecordDict:
    """``parcel`` as the content of a message."""
    data = parcel.to_bytes()
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    arrays = {_name(i, len(pieces)): Array("uint8", (len(p),), ENCODING, p) for i, p in enumerate(pieces)}
    hashes = ConfigRecord({"sha256": [sha256(piece).hexdigest() for piece in pieces]})
    return RecordDict({PARCEL: ArrayRecord(arrays), HASHES: hashes})


def unpacked(content: RecordDict) -> Parcel:
    """The parcel in the content of a message.

    Raises:
        ValueError: there is none, one of its pieces is missing, too many or changed, or it cannot be read.
    """
    arrays = content.array_records.get(PARCEL)
    if not arrays or any(array.stype != ENCODING for array in arrays.values()):
        raise ValueError(f"the message holds no parcel in {ENCODING}, but {', '.join(content) or 'nothing'}")
    hashes = content.config_records.get(HASHES, {}).get("sha256")
    if not isinstance(hashes, list):
        raise ValueError("the message does not say of which pieces its parcel is made")
    wanted = {_name(i, len(hashes)): value for i, value in enumerate(hashes)}
    if wrong := sorted(arrays.keys() - wanted.keys()):
        raise ValueError(f"the message holds {wrong[0]!r:.60}, which is not one of its {len(hashes)} pieces")
    for name, value in wanted.items():
        if name not in arrays:
            raise ValueError(f"{name} of the message is missing")
        if sha256(arrays[name].data).hexdigest() != value:
            raise ValueError(f"{name} of the message was changed: its SHA-256 is another")
    return Parcel.of(b"".join(arrays[name].data for name in wanted))


def _name(place: int, count: int) -> str:
    return f"piece {place + 1} of {count}"
