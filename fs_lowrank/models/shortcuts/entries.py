"""Files of tensors that runs and processes share, each named by a hash of all that decides its values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...jobs.files import replacing

logger = logging.getLogger("fs_lowrank")


def read_entry(
    path: Path, intact: Callable[[Mapping[str, Tensor], Mapping[str, str]], bool]
) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """The tensors, memory-mapped from the disk, and the metadata of an entry; None if there is none.

    None as well, with a warning, if it is damaged or under another entry's name.

    Args:
        intact: whether tensors and metadata are those that were written under this name.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        if not intact(tensors, metadata):
            raise ValueError("its checksum does not match")
    except FileNotFoundError:  # another process has made room meanwhile
        return None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s) and is made again", path, error)
        return None
    return tensors, metadata


def write_entry(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write an entry, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with replacing(path, durable=False) as aside:
            save_file(dict(tensors), aside, metadata)
    except SafetensorError as error:  # a full disk
        raise OSError(str(error)) from error
