"""Hidden states of frozen layers in files: of one run, or kept and shared by the runs and processes of a machine.

What is shared is named by a hash of all that decides its values: the weights of the frozen layers, the samples, the
precision, the kind of attention, the device and its instructions, the number of threads, and the versions of the
libraries. So a run gives the same numbers whether an earlier one has kept them or not.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...data.fetch import home
from ...errors import RunFailed, UserError
from ...jobs.files import disk_error, replacing
from ...jobs.locks import exclusive

logger = logging.getLogger("fs_lowrank")

#: an entry's values are read and checked in pieces of so many bytes
_PIECE = 1 << 24
#: seconds after which a file that is being written has been left by a process that was killed
_ABANDONED = 3600.0


def shared_folder() -> Path:
    """Where the entries are: ``$FS_LOWRANK_FROZEN``, else ``frozen`` in the folder of fetched items."""
    folder = os.environ.get("FS_LOWRANK_FROZEN")
    return Path(folder).expanduser() if folder else home() / "frozen"


@dataclass(frozen=True)
class Entry:
    """What stands in the header of a file.

    Attributes:
        model: the class of the model; in words if an earlier version wrote the file, or it cannot be read.
        layers: how many layers are frozen below, of how many. samples: their number. All three are text.
        tokens: rows of the states; None if the file cannot be read.
        size: bytes on disk. used: when it was last used, in seconds since 1970.
    """

    model: str
    layers: str
    samples: str
    tokens: int | None
    size: int
    used: float


@dataclass
class States:
    """The states of an entry, ``(tokens, width)``: those of the file, memory-mapped, as soon as it is written."""

    values: Tensor


class SharedStates:
    """The entries of one folder; the least recently used are removed where they exceed the limit.

    Args:
        limit: bytes on disk.
    """

    def __init__(self, folder: Path, limit: float):
        self.folder, self.limit = folder, limit
        #: after an error of the disk nothing more is written; the states are computed as without the folder
        self.usable = limit > 0
        #: writes one entry while the next is computed
        self._writer: threading.Thread | None = None

    def entries(self) -> list[Path]:
        """The files, the least recently used first."""
        return sorted(self.folder.glob("*.safetensors"), key=_used)

    def contents(self) -> list[Entry]:
        """What they are of, the last used first."""
        return [entry for path in reversed(self.entries()) if (entry := _entry(path)) is not None]

    def get(self, key: str, compute: Callable[[], Tensor], about: Mapping[str, str] | None = None) -> States:
        """The states under ``key``, memory-mapped from the disk; computed and kept if there are none.

        Of several processes that need the same entry one computes it, and the others wait. Once it is written, that
        one, too, has it from the file, so that it is in memory once for all of them.

        Args:
            compute: gives the states, ``(tokens, width)``.
            about: kept beside them for ``contents``: ``model``, ``layers`` and ``samples``.
        """
        if not self.usable:
            return States(compute())
        found = self._read(key)
        if found is not None:
            return States(found)
        with ExitStack() as held:
            try:
                held.enter_context(exclusive(self.folder / "locks" / f"{key[:2]}.lock"))
            except OSError as error:
                self._stop(error)
                return States(compute())
            found = self._read(key)  # another process may have written it meanwhile
            if found is not None:
                return States(found)
            states = States(compute())
            self.settle()
            self._writer = threading.Thread(target=self._keep, args=(key, states, about or {}, held.pop_all()))
            self._writer.start()
        return states

    def settle(self) -> None:
        """Wait until the last entry that was computed is written. The interpreter does so before it ends."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _keep(self, key: str, states: States, about: Mapping[str, str], held: ExitStack) -> None:
        """Write an entry, whose lock is ``held`` until then, and take its values from the file."""
        with held:
            try:
                self._write(key, states.values, about)
            except OSError as error:
                self._stop(error)
                return
            mapped = self._read(key)
            if mapped is not None:
                states.values = mapped

    def _stop(self, error: OSError) -> None:
        if self.usable:
            logger.warning(
                "%s cannot be used (%s): the states of frozen layers are not kept for other runs; make room there, or "
                "set train.cache_frozen_shared 0",
                self.folder,
                error,
            )
        self.usable = False

    def _read(self, key: str) -> Tensor | None:
        path = self.folder / f"{key}.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                states: Tensor = file.get_tensor("states")
                expected = int(file.metadata()["crc32"])
            if _checksum(key, states) != expected:
                raise ValueError("its checksum does not match")
        except FileNotFoundError:  # another process has made room meanwhile
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged (%s) and is made again", path, error)
            return None
        with suppress(OSError):  # in a folder that is only read, the order of use is not kept
            os.utime(path)
        return states

    def _write(self, key: str, states: Tensor, about: Mapping[str, str]) -> None:
        size = states.numel() * states.element_size()
        if size > self.limit:
            return
        self.make_room(self.limit - size)
        try:
            with replacing(self.folder / f"{key}.safetensors", durable=False) as aside:
                save_file({"states": states}, aside, {**about, "crc32": str(_checksum(key, states))})
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


def _entry(path: Path) -> Entry | None:
    """What the file holds; None if another process has removed it."""
    facts: Mapping[str, str] = {}
    tokens, unknown = None, "of an earlier version"
    try:
        with safe_open(path, "np") as file:
            tokens = int(file.get_slice("states").get_shape()[0])
            facts = file.metadata() or {}
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, IndexError):
        unknown = "damaged"
    model, layers, samples = facts.get("model", unknown), facts.get("layers", ""), facts.get("samples", "")
    return Entry(model, layers, samples, tokens, _size(path), _used(path))


def _checksum(key: str, states: Tensor) -> int:
    """Of the entry's key too, so that an entry under another's name is not taken for it."""
    values = states.flatten().view(torch.uint8).numpy().data
    crc = zlib.crc32(key.encode())
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


# -- files of one run (train.cache_frozen_dir) ---------------------------------------------------------


def own_folder(folder: Path) -> None:
    """Create the folder and check that it is writable.

    Raises:
        UserError: it is not. RunFailed: the disk is full, broken or read-only.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _kind(error)(
            f"train.cache_frozen_dir: {folder} cannot be used as a folder for the frozen layers' states "
            f"({error.strerror}); name another, or leave the key out to keep them in memory"
        ) from None


def mapped_file(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor of ``shape`` in a new file, which is not left when the process ends.

    Raises:
        UserError, RunFailed: as for ``own_folder``.
    """
    reserve(path, shape[0] * shape[1] * dtype.itemsize)
    buffer = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)
    path.unlink()  # the mapping remains valid
    return buffer


def reserve(path: Path, size: int) -> None:
    """Create the file and allocate its disk space; a full disk would later crash the process at the mapping."""
    try:
        with open(path, "wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _kind(error)(
            f"train.cache_frozen_dir: {path} cannot hold the {size / 1e6:.3g} MB of cached states "
            f"({error.strerror}); choose another folder, or set train.cache_frozen: off"
        ) from None


def _kind(error: OSError) -> type[UserError]:
    return RunFailed if disk_error(error) else UserError
