"""A reader of IDX files, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np

from fs_lowrank.errors import UserError

__all__ = ["read_idx"]

# Third byte of the file; values are big-endian.
TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | os.PathLike) -> np.ndarray:
    """Read an IDX file, plain or gzipped (recognised by its first bytes, not by its name).

    Returns:
        an array in native byte order, with the shape and type given by the header (uint8 for the MNIST family).

    Raises:
        UserError: no such file, not an IDX file, or a size that differs from its header.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise UserError(f"{path}: the gzip data are truncated or damaged ({error})") from error
    if len(raw) < 4:
        raise UserError(f"{path}: {len(raw)} bytes are too few for an IDX file")
    if raw[:2] != b"\0\0" or raw[2] not in TYPES:
        raise UserError(f"{path}: not an IDX file: it begins with {raw[:4].hex(' ')}, not 00 00 <type> <dimensions>")
    dimensions = raw[3]
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise UserError(f"{path}: truncated in the header: {len(raw)} bytes came, {start} are expected")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4))
    dtype = np.dtype(TYPES[raw[2]])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        what = "truncated" if len(raw) < expected else "too long"
        raise UserError(f"{path}: {what}: {len(raw)} bytes came, {expected} are expected for shape {shape}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
