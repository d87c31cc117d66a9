"""The data of a federated run, encoded and partitioned: the result of ``build_data``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fs_lowrank.data.examples import Examples
from fs_lowrank.data.images import ImageExamples
from fs_lowrank.data.partition import Partition, class_counts
from fs_lowrank.data.ragged import Lazy, Ragged
from fs_lowrank.data.tables import MULTI_LABEL, REGRESSION
from fs_lowrank.errors import between, counted


@dataclass
class FederatedData:
    """The data that a run trains and evaluates on.

    Attributes:
        train: the training examples of all clients, which ``partition`` divides.
        validation, test: None if the split is empty.
        task: that of ``RawData``.
        num_labels: 0 for a causal language model.
        source: a description of where the data come from.
        fingerprint: SHA-256 in hex over all tokens or images, labels and the partition.
        partition: indices into the retained training rows, in the order of the source.
        majority: fraction of the most frequent class in ``test``, the accuracy of a constant prediction; None without
            classes.
        skipped: number of rows left out, by reason.
        read: number of rows of the source, rows left out included.
        repeated: by held-out split, the number of rows that are training rows as well (``duplicates``).
        keys: hashes of the training rows, to recognise repeated rows: int64, from ``duplicates.row_keys``.
        truncated: number of texts cut to ``tok_len`` tokens, by split.
        tok_len: the maximum number of tokens; None for images.
        image_shape: ``(channels, height, width)`` of the model's input; None for text.
        test_shares: the rows of ``test`` of each client, for ``client_tests``.
        rows: row numbers of ``train`` (which ``partition`` divides), ``validation`` and ``test`` in the loaded data:
            int64, from 0, as in ``RawData``.
        columns: the columns of the source, as in ``RawData``.
        cut: which of ``validation`` and ``test`` were split off the training rows; the others have their own source.
    """

    train: Examples | ImageExamples
    validation: Examples | ImageExamples | None
    test: Examples | ImageExamples | None
    task: str
    label_names: list[str]
    num_labels: int
    source: str
    fingerprint: str
    partition: Partition
    majority: float | None
    skipped: dict[str, int] = field(default_factory=dict)
    read: int = 0
    repeated: dict[str, int] = field(default_factory=dict)
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    truncated: dict[str, int] = field(default_factory=dict)
    tok_len: int | None = None
    image_shape: tuple[int, int, int] | None = None
    test_shares: Ragged = field(default_factory=lambda: Ragged.of([]), repr=False)
    rows: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    cut: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The split as plain data for ``data.json``, without the arrays by row or client (``arrays``).

        Of ``validation`` and ``test``, ``from`` names the source that their rows are numbered in, and ``labels`` are
        the counts of their classes by name.
        """
        classes = self.label_names and self.task not in (REGRESSION, MULTI_LABEL)
        held_out: dict[str, Any] = {
            split: {
                "from": "train" if split in self.cut else split,
                "size": len(self.rows[split]),
                **({"labels": class_counts(np.asarray(examples.labels), self.label_names)} if classes else {}),
            }
            for split, examples in (("validation", self.validation), ("test", self.test))
            if examples is not None
        }
        return {
            "source": self.source,
            "fingerprint": self.fingerprint,
            **self.counts(),
            "partition": {
                "name": self.partition.name,
                "args": self.partition.args,
                **({"files": self.partition.files} if self.partition.files else {}),
            },
            "classes": self.partition.classes(),
            "clients": len(self.partition),
            **held_out,
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The part of ``record`` by row and client, int64: the arrays of ``rows.npz`` (``runs.split``).

        In contrast to these rows, the indices of ``partition`` count only the retained training rows.
        """
        order = self.partition.indices.values
        labels = {} if self.partition.labels is None else {"labels": self.partition.labels[order]}
        held_out = {split: rows for split, rows in self.rows.items() if split != "train"}
        numbers = {"clients": self.rows["train"][order], "sizes": self.partition.sizes()}
        return {**numbers, **labels, **held_out, "keys": np.unique(self.keys)}

    def counts(self) -> dict[str, Any]:
        """Rows read, left out, cut and repeated, and the maximum length, for ``data.json`` and ``summary.json``."""
        lost = {"read": self.read, "skipped": self.skipped, "truncated": self.truncated, "tok_len": self.tok_len}
        return {**lost, "repeated": self.repeated}

    def describe(self) -> str:
        """One line for the screen: rows read, left out and cut, sizes of the splits and clients, classes."""
        sizes = self.partition.sizes()
        parts = row_lines(self.counts())
        clients = counted(len(sizes), "client")
        parts.append(f"{sizes.sum()} for training by {clients} ({between(sizes)} each)")
        held_out = {"validation": self.validation, "test": self.test}
        parts += [f"{len(examples)} for {split}" for split, examples in held_out.items() if examples is not None]
        if self.task == REGRESSION:
            parts.append("a number to predict")
        elif self.num_labels:
            parts.append(f"{'sets of ' * (self.task == MULTI_LABEL)}{self.num_labels} classes")
        return f"data: {', '.join(parts)}"

    def splits(self) -> list[Examples | ImageExamples]:
        """The training, validation and test examples that exist."""
        return [examples for examples in (self.train, self.validation, self.test) if examples is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return sum(examples.nbytes for examples in self.splits() if isinstance(examples, Examples))

    @cached_property
    def clients(self) -> Sequence[Examples | ImageExamples]:
        """The training examples of each client, selected on access."""
        train, indices = self.train, self.partition.indices
        return Lazy(len(indices), lambda i: train.select(indices[i]))

    @cached_property
    def client_tests(self) -> Sequence[Examples | ImageExamples | None]:
        """Each client's part of the test set, distributed as its training data; None for an empty part.

        Every row of the test set goes to one client, in proportion to the clients' training rows of the same class,
        or of the same value of the column by which the training data were partitioned.
        """
        test, shares = self.test, self.test_shares
        if test is None:
            return Lazy(len(self.clients), lambda i: None)
        return Lazy(len(shares), lambda i: test.select(shares[i]) if len(shares[i]) else None)

    @cached_property
    def client_majority(self) -> float | None:
        """The accuracy over ``client_tests`` of answering each client with the most frequent class of its training
        data; None without classes or a test set. A client's own model must exceed it.
        """
        test, labels = self.test, self.partition.labels
        if test is None or test.labels is None or labels is None or self.task in (REGRESSION, MULTI_LABEL):
            return None
        clients, truth = self.tested(), np.asarray(test.labels)
        hits = sum(int((truth[self.test_shares[i]] == _mode(labels[self.partition.indices[i]])).sum()) for i in clients)
        return hits / int(self.test_shares.lengths.sum())

    def tested(self) -> list[int]:
        """The positions in ``client_tests`` of the clients with a share of the test set."""
        return [] if self.test is None else np.flatnonzero(self.test_shares.lengths).tolist()


def _mode(labels: np.ndarray) -> int:
    """The most frequent class; of equally frequent ones the first."""
    return int(np.bincount(labels).argmax())


def row_lines(counts: Mapping[str, Any]) -> list[str]:
    """``FederatedData.counts`` in words: rows read, left out by reason, cut and repeated by split."""
    lines = [f"{counts['read']} rows read"]
    lines += [f"{count} left out ({reason})" for reason, count in counts["skipped"].items() if count]
    ends = {"truncated": f"cut to {counts.get('tok_len')} tokens", "repeated": "are training rows as well"}
    entries = ((end, *item) for key, end in ends.items() for item in counts.get(key, {}).items())
    return lines + [f"{count} of {split} {end}" for end, split, count in entries if count]
