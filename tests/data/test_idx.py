import gzip
import struct

import numpy as np
import pytest

from fs_lowrank.data.idx import read_idx
from fs_lowrank.errors import UserError


def write_idx(path, array, code=0x08, pack=lambda raw: raw):
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(pack(header + array.astype(array.dtype.newbyteorder(">")).tobytes()))
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_images_plain_and_gzipped(tmp_path, pack):
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    got = read_idx(write_idx(tmp_path / "images", images, pack=pack))
    assert got.dtype == np.uint8 and np.array_equal(got, images)
    got[0] = 0  # the caller owns it


def test_wider_types_come_in_native_order(tmp_path):
    values = np.array([1, -70000], dtype=np.int32)
    got = read_idx(write_idx(tmp_path / "x", values, 0x0C))
    assert got.dtype == np.dtype(np.int32) and got.tolist() == [1, -70000]


def test_broken_files_say_what_is_wrong(tmp_path):
    whole = write_idx(tmp_path / "x", np.zeros((2, 5), np.uint8)).read_bytes()
    cases = {
        "truncated: 21 bytes came, 22 are expected": whole[:-1],
        "too long: 23 bytes came, 22 are expected": whole + b"x",
        "truncated in the header": whole[:7],
        "too few": b"\0\0",
        "not an IDX file: it begins with 50 4b 03 04": b"PK\3\4....",
        "gzip data are truncated": gzip.compress(whole)[:-4],
    }
    for message, raw in cases.items():
        path = tmp_path / "broken"
        path.write_bytes(raw)
        with pytest.raises(UserError, match=message):
            read_idx(path)
    with pytest.raises(UserError, match="cannot read .*missing"):
        read_idx(tmp_path / "missing")
