"""What a process has loaded and needs again, such as a model before a method has changed it.

Within ``keeping``, a value is made once for all that decides it, and written to memory that no disk holds. Every use is
a copy of its own, mapped from there: what no copy changes takes memory once, in this process and in others that are
told of it (``Keep.places``). What one copy changes, no other sees.
"""

from __future__ import annotations

import ctypes
import io
import json
import logging
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("fs_lowrank")

Value = TypeVar("Value")

#: addresses keep their remainder by this, because a product's rounding may depend on it
_ALIGNED = 64
#: arrays of fewer bytes are copied
_MAPPED = 1 << 16

_current: Keep | None = None


class Keep:
    """Values by what decides them; the least recently used are dropped where they exceed the limit.

    Args:
        limit: bytes; None: a sixteenth of the machine's memory.
        given: the ``places`` of another process.
    """

    def __init__(self, limit: float | None = None, given: Mapping[str, str] | None = None):
        self.limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 16 if limit is None else limit
        #: key -> the file descriptor and the number of bytes, the least recently used first
        self.files: dict[str, tuple[int, int]] = {}
        self.given = dict(given or {})
        #: keys of values that cannot be kept
        self.refused: set[str] = set()

    @property
    def places(self) -> dict[str, str]:
        """Where other processes of the same user find the values while this one lives and keeps them."""
        return {key: f"/proc/{os.getpid()}/fd/{file}" for key, (file, _) in self.files.items()}

    def value(self, key: str, make: Callable[[], Value]) -> Value:
        """A copy of the value for ``key``, which ``make`` gives if it is not kept yet."""
        if key in self.given:
            try:
                given: Value = _read(self.given[key])
                return given
            except (OSError, RuntimeError) as error:  # that process has ended, or dropped the value
                logger.debug("%s is loaded anew: %s", key, error)
                del self.given[key]
        if key not in self.files:
            made = make()
            if key in self.refused or not self._keep(key, made):
                self.refused.add(key)
                return made
            del made  # what is returned shares its memory with what is kept
            with suppress(AttributeError, OSError):  # of the C library of Linux: gives freed memory back
                ctypes.CDLL(None).malloc_trim(0)
        self.files[key] = self.files.pop(key)
        copy: Value = _read(self.places[key])
        return copy

    def _keep(self, key: str, value: object) -> bool:
        """Keep ``value``; whether that was possible."""
        if not hasattr(os, "memfd_create"):  # only Linux has it
            return False
        try:
            packed = _Packed(value)
        except Exception as error:  # a class may refuse in any way to be pickled
            logger.debug("%s is not kept: %s: %s", key, type(error).__name__, error)
            return False
        if packed.size > self.limit:
            return False
        while self.files and packed.size + sum(size for _, size in self.files.values()) > self.limit:
            self._drop(next(iter(self.files)))
        file = os.memfd_create("fs_lowrank")
        try:
            packed.write(file)
        except OSError as error:
            logger.debug("%s is not kept: %s", key, error)
            os.close(file)
            return False
        self.files[key] = file, packed.size
        return True

    def _drop(self, key: str) -> None:
        os.close(self.files.pop(key)[0])

    def close(self) -> None:
        """Drop everything; copies that are in use keep their memory."""
        for key in list(self.files):
            self._drop(key)


class _Packed(pickle.Pickler):
    """A value as it is kept: the bytes of its tensors and large arrays, then everything else as a pickle."""

    def __init__(self, value: object):
        import torch

        self.torch = torch
        self.pickled = io.BytesIO()
        super().__init__(self.pickled, protocol=5, buffer_callback=self._is_small)
        #: where a run of bytes begins, and the bytes
        self.parts: list[tuple[int, Any]] = []
        self.end = 0
        #: by a storage's address and length: offset and length here
        self.storages: dict[tuple[int, int], tuple[int, int]] = {}
        #: of the large arrays, in the order in which they are read
        self.arrays: list[tuple[int, int]] = []
        self.dump(value)
        self.tail = pickle.dumps(self.arrays)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end + self.pickled.tell() + len(self.tail) + 24

    def _is_small(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether an array goes into the pickle; otherwise it is noted."""
        data = buffer.raw()
        if data.nbytes < _MAPPED:
            return True
        self.arrays.append(self._note(data, 0))
        return False

    def persistent_id(self, value: Any) -> Any:
        """What stands for a tensor's storage in the pickle; None for anything else."""
        if not isinstance(value, self.torch.storage.TypedStorage):
            return None
        storage = value._untyped_storage
        if storage.device.type != "cpu":
            raise pickle.PicklingError(f"a tensor on {storage.device}")
        place = storage.data_ptr(), storage.nbytes()
        if place not in self.storages:
            data = self.torch.empty(0, dtype=self.torch.uint8).set_(storage).numpy().data
            self.storages[place] = self._note(data, storage.data_ptr() % _ALIGNED)
        return *self.storages[place], value.dtype

    def _note(self, data: Any, remainder: int) -> tuple[int, int]:
        start = self.end + (remainder - self.end) % _ALIGNED
        self.parts.append((start, data))
        self.end = start + data.nbytes
        return start, data.nbytes

    def write(self, file: int) -> None:
        """Write everything to ``file``, which is empty."""
        os.ftruncate(file, self.size)
        for start, data in [*self.parts, (self.end, self.pickled.getbuffer())]:
            while data:
                written = os.pwrite(file, data, start)
                start, data = start + written, data[written:]
        sizes = struct.pack("<QQQ", self.end, self.pickled.tell(), len(self.tail))
        os.pwrite(file, self.tail + sizes, self.end + self.pickled.tell())
        self.parts.clear()  # what holds the value itself
        self.clear_memo()


def _read(place: str) -> Any:
    """A copy of the value that ``_Packed`` wrote to ``place``, which only processes of the same worker or run do."""
    import torch

    # Mapped such that what is written changes this process's copy alone.
    mapped: Any = torch.from_file(place, False, os.stat(place).st_size, dtype=torch.uint8).numpy()
    kept = memoryview(mapped)
    end, pickled, tail = struct.unpack("<QQQ", kept[-24:])
    arrays = pickle.loads(kept[end + pickled : end + pickled + tail])

    def storage(found: tuple[int, int, torch.dtype]) -> Any:
        start, size, dtype = found
        data = torch.frombuffer(kept[start : start + size], dtype=torch.uint8) if size else torch.empty(0)
        return torch.storage.TypedStorage(wrap_storage=data.untyped_storage(), dtype=dtype, _internal=True)

    buffers = [kept[start : start + size] for start, size in arrays]
    unpickler = pickle.Unpickler(io.BytesIO(kept[end : end + pickled]), buffers=buffers)
    unpickler.persistent_load = storage  # type: ignore[method-assign]
    return unpickler.load()


@contextmanager
def keeping(keep: Keep | None = None) -> Iterator[Keep]:
    """Within the block, ``kept`` keeps values. In a block inside another, the outer one's values are used.

    Args:
        keep: where, for a caller that closes it; None: what is kept is dropped at the end of the block.
    """
    global _current
    if _current is not None:
        yield _current
        return
    _current = keep or Keep()
    try:
        yield _current
    finally:
        if keep is None:
            _current.close()
        _current = None


def places() -> dict[str, str]:
    """Where other processes find what is kept now (``Keep.places``)."""
    return {} if _current is None else _current.places


def kept(what: str, decides: Callable[[], Mapping[str, Any] | None], make: Callable[[], Value]) -> Value:
    """What ``make`` gives; within ``keeping``, a copy of what it gave before where the same decides it.

    Args:
        what: the kind of value. decides: gives all that decides it, as plain data; None: not known, so it is not kept.
    """
    known = None if _current is None else decides()
    if _current is None or known is None:
        return make()
    return _current.value(json.dumps([what, known], sort_keys=True, default=str), make)
