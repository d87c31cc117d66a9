"""Arrow data on disk: mapped into memory, of which only what a split needs is read into it.

Folders of ``save_to_disk``, ``.arrow`` files (streams, as ``datasets`` writes them), and ``.parquet`` files, which
``datasets`` converts to arrow files in its cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.files import as_text, refuse_pointer
from fs_lowrank.errors import UserError

SUFFIXES = (".parquet", ".arrow")
#: rows that are read at a time
CHUNK = 1 << 10
#: a text column with more different values is not kept in memory, and cannot divide the data
_KINDS = 1000


def is_saved(path: Path) -> bool:
    """Whether ``path`` is a folder of ``save_to_disk``."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def is_stored(path: Path) -> bool:
    """Whether ``path`` is read by ``open_stored``."""
    return path.suffix.lower() in SUFFIXES or is_saved(path)


class Stored:
    """The rows of a ``datasets.Dataset``; it has as much of a DataFrame as checks of columns use."""

    def __init__(self, dataset: Any):
        self.dataset = dataset.with_format("arrow")
        #: columns beside those of the dataset, which are kept in memory
        self.more: dict[str, pd.Series] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def columns(self) -> list[str]:
        """The names of all columns."""
        return [*self.dataset.column_names, *self.more]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def rows(self, rows: slice | np.ndarray, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Some rows, with the values that ``files.read_table`` would give; the index are their numbers."""
        chosen = self.dataset if columns is None else self.dataset.select_columns(list(columns))
        numbers = np.arange(len(self))[rows]
        table = chosen[rows if isinstance(rows, slice) else rows.tolist()]
        values = {name: table[name].to_pylist() for name in table.column_names}
        return pd.DataFrame({name: pd.Series(of, numbers, object) for name, of in values.items()}, index=numbers)

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[pd.DataFrame]:
        """All rows, ``CHUNK`` at a time."""
        for start in range(0, len(self), CHUNK):
            yield self.rows(slice(start, min(start + CHUNK, len(self))), columns)

    def arrays(self, column: str) -> Iterator[Any]:
        """The values of a column as arrow's arrays, ``CHUNK`` at a time."""
        only = self.dataset.select_columns([column])
        for start in range(0, len(self), CHUNK):
            yield only[start : start + CHUNK][column].combine_chunks()

    def there(self, column: str) -> np.ndarray:
        """Which rows have something other than blanks in a column, bool."""
        values = (value for array in self.arrays(column) for value in array.to_pylist())
        return np.array([bool(as_text(value).strip()) for value in values], dtype=bool)

    def values(self, column: str) -> pd.Series:
        """A whole column in memory."""
        return pd.concat([array.to_pandas() for array in self.arrays(column)], ignore_index=True)

    def outline(self, texts: Sequence[str], labels: Sequence[str]) -> pd.DataFrame:
        """All rows in memory, with ``x`` for every text that is not empty, and columns that may divide the data."""
        frame = {name: np.where(self.there(name), "x", "").astype(object) for name in texts}
        frame |= {name: self.values(name) for name in labels}
        return pd.DataFrame({**frame, **self.fields([*texts, *labels])})

    def fields(self, without: Sequence[str]) -> dict[str, pd.Series]:
        """Columns that may divide the data: numbers, texts of few different values, and ``more``."""
        found = {name: self._field(name) for name in self.dataset.column_names if name not in without}
        return {**{name: values for name, values in found.items() if values is not None}, **self.more}

    def _field(self, column: str) -> pd.Series | None:
        import pyarrow as pa

        kind = self.dataset.features.arrow_schema.field(column).type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            return self.values(column)
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return None
        numbers: dict[Any, int] = {}
        codes = []
        for array in self.arrays(column):
            own, kinds = pd.factorize(np.asarray(array.to_pylist(), dtype=object))
            codes.append(np.append([numbers.setdefault(k, len(numbers)) for k in kinds], -1).astype(np.int32)[own])
            if len(numbers) > _KINDS:
                return None
        return pd.Series(pd.Categorical.from_codes(np.concatenate(codes), list(numbers)))

    def state(self) -> list[tuple[str, int, int]]:
        """Names, sizes and times of the files, by which a change is noticed."""
        paths = [Path(file["filename"]) for file in self.dataset.cache_files]
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


class StoredFrame:
    """Rows of ``Stored`` with as much of a DataFrame as is used of a split; texts are read when they are asked for.

    Args:
        kept: what is in memory of each row, such as its label; the index are the numbers of the rows.
        stored: where the texts are.
        columns: the names of the columns that ``convert`` gives.
        convert: gives the texts of rows, from what is stored of them.
    """

    def __init__(
        self,
        kept: pd.DataFrame,
        stored: Stored,
        columns: Sequence[str],
        convert: Callable[[pd.DataFrame], pd.DataFrame],
    ):
        self.kept, self.stored, self.columns, self.convert = kept, stored, list(columns), convert

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.columns, *self.kept])

    def __contains__(self, column: str) -> bool:
        return column in self.columns or column in self.kept

    @property
    def index(self) -> pd.Index:
        """The numbers of the rows."""
        return self.kept.index

    def __getitem__(self, what: Any) -> Any:
        """A column that is kept, or the rows that a bool array chooses."""
        if isinstance(what, str):
            return self.kept[what]
        return StoredFrame(self.kept[what], self.stored, self.columns, self.convert)

    @property
    def iloc(self) -> _Rows:
        """``iloc[positions]``: a DataFrame of rows with their texts."""
        return _Rows(self, self.kept.iloc)

    @property
    def loc(self) -> _Rows:
        """``loc[numbers, columns]``: the same by the numbers of the rows."""
        return _Rows(self, self.kept.loc)


class _Rows:
    def __init__(self, frame: StoredFrame, kept: Any):
        self.frame, self.kept = frame, kept

    def __getitem__(self, what: Any) -> pd.DataFrame:
        rows, columns = what if isinstance(what, tuple) else (what, None)
        kept = self.kept[rows]
        texts = self.frame.convert(self.frame.stored.rows(kept.index.to_numpy(np.int64)))
        whole = pd.concat([texts.set_axis(kept.index), kept], axis=1)
        return whole if columns is None else whole[columns]


def class_names(feature: Any) -> list[str] | None:
    """The names of the classes, if a column of ``datasets`` is a ``ClassLabel``, or a list of them."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return list(names) if names else None


def open_stored(files: Sequence[Path], names: Sequence[str]) -> dict[str, Stored]:
    """The data of ``files`` by split; ``train`` is all that has no splits of its own.

    Args:
        names: what each file is called in the column ``file``, where there are several.
    Raises:
        UserError: a file cannot be read, or the files have other columns.
    """
    import datasets

    if len(files) == 1 and (files[0] / "dataset_dict.json").is_file():
        found = {name: Stored(dataset) for name, dataset in _opened(files[0]).items() if len(dataset)}
        if "train" not in found:
            raise UserError(
                f"{files[0]}: a DatasetDict without rows in a split 'train'; with rows it has: "
                f"{', '.join(found) or 'none'}"
            )
        return found
    parts = [_opened(file) for file in files]
    for file, part in zip(files, parts):
        if isinstance(part, dict):
            raise UserError(f"{file}: a DatasetDict, of which only one can be read; name its folder alone in data.type")
        if part.features != parts[0].features:
            raise UserError(
                f"{file}: its columns are {_columns(part)}, those of {files[0]} {_columns(parts[0])}; "
                "one table needs the same in all files"
            )
    whole = Stored(datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0])
    if not len(whole):
        raise UserError(f"{files[0]}: the file has no rows")
    if len(files) > 1 and "file" not in whole.columns:
        codes = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in parts])
        whole.more["file"] = pd.Series(pd.Categorical.from_codes(codes, list(names)))
    return {"train": whole}


def _columns(dataset: Any) -> str:
    return ", ".join(f"{name} ({getattr(of, 'dtype', of)})" for name, of in dataset.features.items())


def sound(dataset: Any) -> Any:
    """``dataset``, a ``Dataset`` or a mapping of them by split, if arrow finds it whole.

    Reading a text by a damaged offset ends the process without an error, so all texts and offsets are read once here,
    part by part. They stay mapped, and are not copied into memory.

    Raises:
        ValueError: names the column.
    """
    for part in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        table = part.data.table
        for name, column in zip(table.column_names, table.columns):
            for chunk in column.chunks:
                try:
                    chunk.validate(full=True)
                except ValueError as error:  # ArrowInvalid is one
                    raise ValueError(f"it is damaged in column {name!r}: {str(error).splitlines()[0]}") from error
    return dataset


@contextmanager
def silent(library: Any, level: int = logging.CRITICAL) -> Iterator[None]:
    """Without the progress bars of ``library``, datasets or transformers, and its messages below ``level``, which are
    as they were before after the block.

    datasets logs that a file is damaged before it raises the error.
    """
    said = library.logging
    shown, verbosity = said.is_progress_bar_enabled(), said.get_verbosity()
    said.disable_progress_bar()
    said.set_verbosity(level)
    try:
        yield
    finally:
        said.set_verbosity(verbosity)
        if shown:
            said.enable_progress_bar()


def _opened(path: Path) -> Any:
    import datasets

    try:
        if not path.exists():
            raise FileNotFoundError(f"no file {path}; check data.root and data.type")
        of_file = datasets.Dataset.from_parquet if path.suffix.lower() == ".parquet" else datasets.Dataset.from_file
        with silent(datasets):
            return sound((datasets.load_from_disk if is_saved(path) else of_file)(str(path)))
    except Exception as error:  # of arrow and of datasets, whose errors for damaged files have no common class
        refuse_pointer(path)
        if isinstance(error, FileNotFoundError):
            raise UserError(str(error)) from None
        cause = error if isinstance(error, ValueError) else error.__cause__ or error
        first = (str(cause).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} cannot be read: {first}; write or copy it again") from error
