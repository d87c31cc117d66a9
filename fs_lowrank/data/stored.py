"""Arrow data: parquet and arrow files (streams), folders of ``save_to_disk``, and data sets of the hub, as tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from fs_lowrank.data.files import refuse_pointer
from fs_lowrank.errors import UserError, user_errors

SUFFIXES = (".parquet", ".arrow")


def is_saved(path: Path) -> bool:
    """Whether ``path`` is a folder of ``save_to_disk``."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def is_stored(path: Path) -> bool:
    """Whether ``path`` is read by ``read_stored``."""
    return path.suffix.lower() in SUFFIXES or is_saved(path)


def class_names(feature: Any) -> list[str] | None:
    """The names of the classes, if a column of ``datasets`` is a ``ClassLabel``, or a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return list(names) if names else None


def frame_of(dataset: Any) -> pd.DataFrame:
    """The rows of a ``datasets.Dataset``, with the values that ``files.read_table`` would give.

    A missing value is None, and a class of a ``ClassLabel`` its name, or None for a number without a name, for
    example the hidden -1 of test rows. ``attrs["classes"]`` has the names of the classes of these columns, in order.
    """
    # Reading a text by a damaged offset would end the process.
    dataset.data.table.validate(full=True)
    table = dataset.with_format("arrow")[:]
    values = {name: table[name].to_pylist() for name in table.column_names}
    classes = {name: names for name, feature in dataset.features.items() if (names := class_names(feature))}
    for name, names in classes.items():
        by_number = dict(enumerate(names))
        values[name] = [
            [by_number.get(v) for v in row] if isinstance(row, list) else by_number.get(row) for row in values[name]
        ]
    frame = pd.DataFrame({name: pd.Series(column, dtype=object) for name, column in values.items()})
    frame.attrs["classes"] = classes
    return frame


def read_stored(path: Path) -> dict[str, pd.DataFrame]:
    """The tables of a file or a folder by split; without splits all rows are ``train``.

    Raises:
        UserError: it cannot be read, or has no rows to train on.
    """
    import datasets
    from pyarrow.parquet import ParquetFile

    if not path.exists():
        raise UserError(f"no file {path}")
    refuse_pointer(path)
    with silent(datasets), user_errors(f"{path}: reading it", "write or copy it again"):
        if is_saved(path):
            content = datasets.load_from_disk(str(path))
        elif path.suffix.lower() == ".parquet":
            content = datasets.Dataset(ParquetFile(path).read())
        else:
            content = datasets.Dataset.from_file(str(path))
        splits = content if isinstance(content, Mapping) else {"train": content}
        frames = {name: frame_of(dataset) for name, dataset in splits.items() if len(dataset)}
    if "train" not in frames:
        raise UserError(f"{path}: no rows in a split 'train'; with rows it has: {', '.join(frames) or 'none'}")
    return frames


@contextmanager
def silent(library: Any, level: int = logging.CRITICAL) -> Iterator[None]:
    """Switch off the progress bars of ``library``, datasets or transformers, and its messages below ``level``, in the
    block.

    datasets logs that a file is damaged before it raises the error.
    """
    log = library.logging
    had_bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity(level)
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()
