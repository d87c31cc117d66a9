"""The journal of a search: Optuna's own format, one JSON object per line, with a checksum in each line.

Optuna's own backend cannot read beyond a line that was cut off by a full disk or a power failure, and does not notice a
figure that was changed by hand. This one removes a cut last line on opening and before writing, and names the file and
the line of any other damage. Optuna's backend, and so its dashboard, can read these files and append to them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages import journal

from fs_lowrank import RunFailed, UserError
from fs_lowrank.jobs.files import remedy_of

logger = logging.getLogger("fs_lowrank")
_SUM = b',"sum":"'


class Journal(journal.BaseJournalBackend):
    """A journal file, for ``optuna.storages.JournalStorage``.

    Args:
        path: created if there is none.

    Raises:
        UserError: the file cannot be created or repaired.
    """

    def __init__(self, path: Path):
        self.path = path
        #: lines read, and the number of their bytes
        self.lines, self.offset = 0, 0
        # With a relative path the link would lead nowhere, and Optuna would wait for ever for a process that was killed
        # while it held the lock; as it is, it waits for half a minute.
        self._lock = journal.JournalFileSymlinkLock(str(path.absolute()))
        if not path.exists():
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        if self._cut():
            with self._locked():
                self._repair()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The lines from ``log_number_from`` (from 0) on, as objects; a line that is being written is left for later.

        Raises:
            UserError: a line is not one that a search wrote; names file and line.
        """
        if log_number_from != self.lines:
            self.lines = self.offset = 0
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                number, entry = self.lines, self._parsed(line)
                self.lines, self.offset = self.lines + 1, self.offset + len(line)
                if number >= log_number_from:
                    yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines; they are on the disk when this returns.

        Raises:
            RunFailed: they cannot be written; the file is what it was.
        """
        with self._locked(), self._writing():
            self._repair()
            with self.path.open("ab") as file:
                start = end = file.tell()
                text = b""
                for log in logs:
                    line = _signed(json.dumps(log, separators=(",", ":")).encode(), end)
                    text, end = text + line, end + len(line)
                try:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), start)
                    raise

    def _parsed(self, line: bytes) -> dict[str, Any]:
        place = f"{self.path}, line {self.lines + 1}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not {"op_code", "worker_id"} <= entry.keys():
            raise UserError(
                f"{place}: this is not a line of a journal of studies; put the file back as the search wrote it, "
                "or name another storage"
            )
        content = line.rpartition(_SUM)[0]
        if content and line != _signed(content + b"}", self.offset):
            raise UserError(
                f"{place}: this is not the line that the search wrote there; put the file back as it was, "
                "or name another storage"
            )
        return entry

    def _cut(self) -> bool:
        """Whether the last line has no end."""
        with self.path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"

    def _repair(self) -> None:
        """Remove a last line without an end. The lock is held: its writer has died."""
        if not self._cut():
            return
        with self._writing(), self.path.open("r+b") as file:
            complete, _, rest = file.read().rpartition(b"\n")
            if not complete and b'"op_code"' not in rest:
                raise UserError(f"{self.path} is not a journal of studies; name another storage")
            file.truncate(len(complete) + bool(complete))
        logger.warning(
            "%s: the last line was cut off while it was written (a full disk, a power failure), and has been removed",
            self.path,
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._writing():
            self._lock.acquire()
        try:
            yield
        finally:
            with self._writing():
                self._release()

    def _release(self) -> None:
        for last in (False, True):
            try:
                return self._lock.release()
            except RuntimeError as error:  # Optuna's, whatever the file system said
                cause = error.__context__
                if isinstance(cause, FileNotFoundError) or not isinstance(cause, OSError):
                    return  # released, or another process broke a lock that was held for too long
                if last:
                    raise cause from None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"{self.path} cannot be written: {error.strerror or error}; {remedy_of(error)} or name another file as "
                "the storage, and give the same command again"
            ) from error


def _signed(content: bytes, offset: int) -> bytes:
    """The line of a JSON object that begins at byte ``offset``: with a checksum of its text and its place."""
    digest = hashlib.sha256(b"%d:%s" % (offset, content)).hexdigest()[:16]
    return content[:-1] + _SUM + digest.encode() + b'"}\n'
