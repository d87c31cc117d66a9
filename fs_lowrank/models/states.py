"""Hidden states of frozen layers, kept on disk and shared by the runs and processes of a machine.

An entry is named by a hash of all that decides its values: the weights of the frozen layers, the samples, the
precision, the kind of attention, the device and its instructions, the number of threads, and the versions of the
libraries. So a run gives the same numbers with and without.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..data.fetch import home
from ..jobs.files import replacing
from ..jobs.locks import exclusive

logger = logging.getLogger("fs_lowrank")

#: an entry's values are read and checked in pieces of so many bytes
_PIECE = 1 << 24
#: seconds after which a file that is being written has been left by a process that was killed
_ABANDONED = 3600.0


def shared_folder() -> Path:
    """Where the entries are: ``$FS_LOWRANK_FROZEN``, else ``frozen`` in the folder of fetched items."""
    folder = os.environ.get("FS_LOWRANK_FROZEN")
    return Path(folder).expanduser() if folder else home() / "frozen"


class SharedStates:
    """The entries of one folder; the least recently used are removed where they exceed the limit.

    Args:
        limit: bytes on disk.
    """

    def __init__(self, folder: Path, limit: float):
        self.folder, self.limit = folder, limit
        #: after an error of the disk nothing more is written; the states are computed as without the folder
        self.usable = limit > 0

    def entries(self) -> list[Path]:
        """The files, the least recently used first."""
        return sorted(self.folder.glob("*.safetensors"), key=_used)

    def get(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """The states under ``key``, memory-mapped from the disk; computed and kept if there are none.

        Of several processes that need the same entry one computes it, and the others wait.

        Args:
            compute: gives the states, ``(tokens, width)``.
        """
        if not self.usable:
            return compute()
        states = self._read(key)
        if states is not None:
            return states
        try:
            with exclusive(self.folder / "locks" / f"{key[:2]}.lock"):
                states = self._read(key)  # another process may have written it meanwhile
                if states is None:
                    states = compute()
                    self._write(key, states)
                return states
        except OSError as error:
            self.usable = False
            logger.warning(
                "%s cannot be used (%s): the states of frozen layers are not kept for other runs; make room there, or "
                "set train.cache_frozen_shared 0",
                self.folder,
                error,
            )
            return compute() if states is None else states

    def _read(self, key: str) -> Tensor | None:
        path = self.folder / f"{key}.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                states: Tensor = file.get_tensor("states")
                expected = int(file.metadata()["crc32"])
            if _checksum(states) != expected:
                raise ValueError("its checksum does not match")
        except FileNotFoundError:  # another process has made room meanwhile
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged (%s) and is made again", path, error)
            return None
        with suppress(OSError):  # in a folder that is only read, the order of use is not kept
            os.utime(path)
        return states

    def _write(self, key: str, states: Tensor) -> None:
        size = states.numel() * states.element_size()
        if size > self.limit:
            return
        self.make_room(self.limit - size)
        try:
            with replacing(self.folder / f"{key}.safetensors", durable=False) as aside:
                save_file({"states": states}, aside, {"crc32": str(_checksum(states))})
        except SafetensorError as error:  # a full disk
            raise OSError(str(error)) from error

    def make_room(self, limit: float) -> int:
        """Remove the least recently used entries until they have ``limit`` bytes at most; returns how many went.

        What a process that was killed while it wrote has left is removed, too. An entry that another process has mapped
        stays on the disk until that process ends.
        """
        for path in self.folder.glob(".*.writing"):
            if time.time() - _used(path) > _ABANDONED:
                path.unlink(missing_ok=True)
        entries = self.entries()
        sizes = [_size(path) for path in entries]
        removed, total = 0, sum(sizes)
        while removed < len(entries) and total > limit:
            entries[removed].unlink(missing_ok=True)
            total -= sizes[removed]
            removed += 1
        return removed

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(map(_size, self.entries()))


def _checksum(states: Tensor) -> int:
    values = states.flatten().view(torch.uint8).numpy().data
    crc = 0
    for start in range(0, len(values), _PIECE):
        crc = zlib.crc32(values[start : start + _PIECE], crc)
    return crc


def _used(path: Path) -> float:
    """When an entry was last used; another process may have removed it meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
