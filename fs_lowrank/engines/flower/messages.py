"""Parcels as the content of Flower's messages: safetensors bytes, which Flower carries and does not read.

An array of Flower is ``.npy`` otherwise, which has no bfloat16. Its mods and strategies cannot change such a parcel:
they raise an error instead (docs/guides/flower.md says why that is right). Flower's store compares the SHA-256 of all
its objects, and cuts an array into objects of 5 MB, so that no message is too large for it.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

from ...rounds.parcel import Parcel

#: the name of the parcel in a message, and in its record
PARCEL = "parcel"
#: what Flower calls the encoding of an array
ENCODING = "safetensors"


def packed(parcel: Parcel) -> RecordDict:
    """``parcel`` as the content of a message."""
    data = parcel.to_bytes()
    return RecordDict({PARCEL: ArrayRecord({PARCEL: Array("uint8", (len(data),), ENCODING, data)})})


def unpacked(content: RecordDict) -> Parcel:
    """The parcel in the content of a message.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    array = content.array_records.get(PARCEL, {}).get(PARCEL)
    if array is None or array.stype != ENCODING:
        raise ValueError(f"the message holds no parcel in {ENCODING}, but {', '.join(content) or 'nothing'}")
    return Parcel.of(array.data)
