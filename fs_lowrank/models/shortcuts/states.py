"""Hidden states of frozen layers in files, which the runs and processes of a machine share.

An entry is named by a hash of all that decides its values: the weights of the frozen layers, the samples, the
precision, the kind of attention, the device and its instructions, the number of threads, and the versions of the
libraries. So a run gives the same numbers whether an earlier one has stored them or not.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor

from ...errors import say_once
from ...fetch import home
from ...jobs.locks import exclusive
from .entries import read_entry, write_entry

#: seconds after which a file that is being written has been left by a process that was killed
_ABANDONED = 3600.0


def shared_folder(path: str = "") -> Path:
    """Where the entries are: ``path``, else ``$FS_LOWRANK_FROZEN``, else ``frozen`` in the folder of fetched items."""
    folder = path or os.environ.get("FS_LOWRANK_FROZEN")
    return Path(folder).expanduser() if folder else home() / "frozen"


class SharedStates:
    """The entries of one folder; the least recently used are removed where they exceed the limit.

    Args:
        limit: bytes on disk.
    """

    def __init__(self, folder: Path, limit: float):
        self.folder, self.limit = folder, limit

    def entries(self) -> list[Path]:
        """The files, the least recently used first."""
        return sorted(self.folder.glob("*.safetensors"), key=_used_and_size)

    def get(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """The states under ``key``, ``(tokens, width)``, memory-mapped from the disk; computed and stored if there
        are none.

        Of several processes that need the same entry one computes it, and the others wait. That one, too, has it from
        the file, so that it is in memory once for all of them.

        Args:
            compute: gives the states.
        """
        if (stored := self._read(key)) is not None:
            return stored
        with ExitStack() as held:
            try:
                held.enter_context(exclusive(self.folder / "locks" / f"{key[:2]}.lock"))
            except OSError as error:
                self._say_unusable(error)
                return compute()
            if (stored := self._read(key)) is not None:  # another process may have written it meanwhile
                return stored
            states = compute()
            try:
                self._write(key, states)
            except OSError as error:
                self._say_unusable(error)
            written = self._read(key)
            return states if written is None else written

    def _say_unusable(self, error: OSError) -> None:
        say_once(
            f"{self.folder} cannot be used ({error.strerror or error}): the states of frozen layers are not stored for "
            "other runs; make room there, or set train.cache_frozen_shared 0"
        )

    def _read(self, key: str) -> Tensor | None:
        path = self.folder / f"{key}.safetensors"
        entry = read_entry(path, lambda tensors, metadata: int(metadata["crc32"]) == _checksum(key, tensors["states"]))
        if entry is None:
            return None
        with suppress(OSError):  # in a read-only folder, the order of use is not updated
            os.utime(path)
        return entry[0]["states"]

    def _write(self, key: str, states: Tensor) -> None:
        size = states.numel() * states.element_size()
        if size > self.limit:
            return
        self.make_room(self.limit - size)
        write_entry(self.folder / f"{key}.safetensors", {"states": states}, {"crc32": str(_checksum(key, states))})

    def make_room(self, limit: float) -> int:
        """Remove the least recently used entries until they have ``limit`` bytes at most; returns how many went.

        Unfinished files of processes that were killed are removed, too. An entry that another process has mapped
        stays on the disk until that process ends.
        """
        for path in self.folder.glob(".*.writing"):
            if time.time() - _used_and_size(path)[0] > _ABANDONED:
                path.unlink(missing_ok=True)
        entries = self.entries()
        sizes = [_used_and_size(path)[1] for path in entries]
        removed, total = 0, sum(sizes)
        while removed < len(entries) and total > limit:
            entries[removed].unlink(missing_ok=True)
            total -= sizes[removed]
            removed += 1
        return removed

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(_used_and_size(path)[1] for path in self.entries())


def _checksum(key: str, states: Tensor) -> int:
    """Of the entry's key too, so that an entry under another's name is not taken for it."""
    return zlib.crc32(states.flatten().view(torch.uint8).numpy().data, zlib.crc32(key.encode()))


def _used_and_size(path: Path) -> tuple[float, int]:
    """When an entry was last used, and its bytes; another process may have removed it meanwhile."""
    try:
        state = path.stat()
        return state.st_mtime, state.st_size
    except FileNotFoundError:
        return time.time(), 0
