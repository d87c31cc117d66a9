"""Data of a federated run: a data set by name or from files, encoded and partitioned among clients."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.examples import Examples
from fs_lowrank.data.fetch import FETCHABLE, fetch, home, resolve
from fs_lowrank.data.images import ImageExamples, Pipeline
from fs_lowrank.data.partition import (
    PARTITIONERS,
    Partition,
    Rows,
    matching_shares,
    partition,
    register_partitioner,
)
from fs_lowrank.data.ragged import Lazy, Ragged
from fs_lowrank.data.sources import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    RawData,
    data_args,
    load_raw,
    own_files,
)
from fs_lowrank.data.tables import count_skipped
from fs_lowrank.data.tokenize import check_vocabulary, tokenize_causal, tokenize_classification
from fs_lowrank.errors import ROWS_LOGGER, UserError, say_once
from fs_lowrank.jobs.kept import kept
from fs_lowrank.settings import Origin, Settings, one_mapping

__all__ = [
    "CAUSAL_LM",
    "CLASSIFICATION",
    "FETCHABLE",
    "IMAGE_CLASSIFICATION",
    "PARTITIONERS",
    "Examples",
    "FederatedData",
    "ImageExamples",
    "Partition",
    "RawData",
    "Rows",
    "build_data",
    "fetch",
    "home",
    "load_raw",
    "own_files",
    "partition",
    "register_partitioner",
    "resolve",
]


#: the longest text that ``llm.tok_len: auto`` accepts from a model without a limit, in tokens
LONGEST = 1 << 15


@dataclass
class FederatedData:
    """The data that a run trains and evaluates on.

    Attributes:
        train: the training examples of all clients, which ``partition`` divides.
        validation, test: None if the split is empty.
        task: ``"classification"``, ``"causal_lm"`` or ``"image_classification"``.
        num_labels: 0 for a causal language model.
        source: a description of where the data come from.
        fingerprint: SHA-256 in hex over all tokens or images, labels and the partition.
        partition: indices into the training rows that were kept, in the order of the source.
        majority: fraction of the most frequent class in ``test``, the accuracy of a constant prediction; None without
            classes.
        skipped: number of rows left out, by reason.
        read: number of rows of the source, with those left out.
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
    truncated: dict[str, int] = field(default_factory=dict)
    tok_len: int | None = None
    image_shape: tuple[int, int, int] | None = None
    test_shares: Ragged = field(default_factory=lambda: Ragged.of([]), repr=False)
    rows: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    cut: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The split as plain data for ``data.json``, without what there is of every row or client (``arrays``).

        Of ``validation`` and ``test``, ``from`` names the source that their rows are numbered in, and ``labels`` are
        the counts of their classes by name.
        """
        held_out: dict[str, Any] = {
            split: {
                "from": "train" if split in self.cut else split,
                "size": len(self.rows[split]),
                **({"labels": self._counts(part)} if self.label_names and part is not None else {}),
            }
            for split, part in (("validation", self.validation), ("test", self.test))
            if split in self.rows
        }
        return {
            "source": self.source,
            "fingerprint": self.fingerprint,
            **self.counts(),
            "partition": {"name": self.partition.name, "args": self.partition.args},
            "classes": self.partition.classes(),
            "clients": len(self.partition),
            **held_out,
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """What belongs to ``record`` of every row and client, int64: the arrays of ``rows.npz`` (``runs.split``).

        In contrast to these rows, the indices of ``partition`` count only the training rows that were kept.
        """
        order = self.partition.indices.flat()
        labels = {} if self.partition.labels is None else {"labels": self.partition.labels[order]}
        held_out = {split: rows for split, rows in self.rows.items() if split != "train"}
        return {"clients": self.rows["train"][order], "sizes": self.partition.sizes(), **labels, **held_out}

    def _counts(self, part: Examples | ImageExamples) -> dict[str, int]:
        counts = np.bincount(np.asarray(part.labels), minlength=len(self.label_names))
        return {name: int(count) for name, count in zip(self.label_names, counts, strict=True)}

    def counts(self) -> dict[str, Any]:
        """Rows read, left out and cut, and the maximum length, as plain data for ``data.json`` and ``summary.json``."""
        return {"read": self.read, "skipped": self.skipped, "truncated": self.truncated, "tok_len": self.tok_len}

    def describe(self) -> str:
        """One line for the screen: rows read, left out and cut, sizes of the splits and clients, classes."""
        sizes = self.partition.sizes()
        parts = rows_said(self.counts())
        parts.append(f"{sizes.sum()} for training by {len(sizes)} clients ({sizes.min()} to {sizes.max()} each)")
        held_out = {"validation": self.validation, "test": self.test}
        parts += [f"{len(examples)} for {split}" for split, examples in held_out.items() if examples is not None]
        if self.num_labels:
            parts.append(f"{self.num_labels} classes")
        return f"data: {', '.join(parts)}"

    def splits(self) -> list[Examples | ImageExamples]:
        """The training, validation and test examples that there are."""
        return [part for part in (self.train, self.validation, self.test) if part is not None]

    @cached_property
    def clients(self) -> Sequence[Examples | ImageExamples]:
        """The training examples of each client, selected when they are asked for."""
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

    def tested(self) -> list[int]:
        """The positions in ``client_tests`` of the clients that have such a part."""
        return [] if self.test is None else np.flatnonzero(self.test_shares.lengths).tolist()


def rows_said(counts: Mapping[str, Any]) -> list[str]:
    """What ``FederatedData.counts`` says in words: rows read, left out by reason, and cut by split."""
    said = [f"{counts['read']} rows read"]
    said += [f"{count} left out ({reason})" for reason, count in counts["skipped"].items() if count]
    cut = {split: count for split, count in counts["truncated"].items() if count}
    return said + [f"{count} of {split} cut to {counts['tok_len']} tokens" for split, count in cut.items()]


def build_data(cfg: Any, tokenizer: Any = None, raw: RawData | None = None) -> FederatedData:
    """Load (unless ``raw`` is given), split, encode and partition the configured data.

    ``data.splits`` [train, validation, test] apply to splits that the source does not have: a missing test set is its
    fraction of the rows, and so is a missing validation set (of the training rows if the source has a test set).
    Splits are stratified by class. A fraction of 0 gives None. ``data.subsample`` reduces only the training rows, so
    that scores remain comparable; ``data.test_subsample`` reduces the test rows, alike for all runs with one test seed.

    Args:
        cfg: ``data.{type,root,args,splits,splitter,splitter_args,subsample,test_subsample}``, ``federate.client_num``,
            ``llm.tok_len`` (tokens; ``max_len`` in ``data.args`` overrides it), ``seed``,
            ``lowrank.test_seed``; for images ``data.{transform,val_transform,test_transform}``.
        tokenizer: a transformers tokenizer; not needed for images.

    Raises:
        UserError: see ``load_raw`` and ``partition``; splits without training rows; a tokenizer that does not know
            the training text; an invalid transform, or one that does not fit the images.
    """
    if raw is None:
        raw = load_raw(cfg.data, origin=getattr(cfg, "source", None) or Origin())
    given = cfg, tokenizer, raw
    data, cut = kept(
        "data",
        lambda: _decides(*given),
        lambda: (_built(*given), _cutting(tokenizer)),
        size=lambda pair: sum(
            p.nbytes for p in (pair[0].train, pair[0].validation, pair[0].test) if isinstance(p, Examples)
        ),
    )
    _cut_alike(tokenizer, cut)
    lost = any(data.skipped.values()) or any(data.truncated.values())
    say_once(data.describe(), logging.WARNING if lost else logging.INFO, ROWS_LOGGER)
    return data


def _decides(cfg: Any, tokenizer: Any, raw: RawData) -> dict[str, Any] | None:
    """All that decides what ``_built`` gives; None if that is not known, or takes no time, as with images."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(cfg, Settings) or backend is None:
        return None
    parts = (raw.train, raw.validation, raw.test)
    keys = {name: asdict(getattr(cfg, name)) for name in ("data", "llm")}
    return {
        "keys": [keys, cfg.federate.client_num, cfg.seed, cfg.lowrank.test_seed],
        "raw": [raw.fingerprint, raw.source, raw.fields, raw.skipped],
        "rows": [None if p is None else hashlib.sha256(p.index.to_numpy(np.int64)).hexdigest() for p in parts],
        "tokenizer": [hashlib.sha256(backend.to_str().encode()).hexdigest(), repr(tokenizer), tokenizer.chat_template],
    }


def _cutting(tokenizer: Any) -> tuple[Any, Any]:
    """How a tokenizer was last told to cut and to pad, which is saved with it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (backend.truncation, backend.padding) if backend is not None else (None, None)


def _cut_alike(tokenizer: Any, cut: tuple[Any, Any]) -> None:
    """Tell ``tokenizer`` to cut and to pad as another one was told."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or _cutting(tokenizer) == cut:
        return
    truncation, padding = cut
    _ = backend.no_truncation() if truncation is None else backend.enable_truncation(**truncation)
    _ = backend.no_padding() if padding is None else backend.enable_padding(**padding)


def _built(cfg: Any, tokenizer: Any, raw: RawData) -> FederatedData:
    origin = getattr(cfg, "source", None) or Origin()
    seed = int(cfg.seed)
    args = data_args(cfg.data, origin)
    test_seed = getattr(getattr(cfg, "lowrank", None), "test_seed", -1)
    test_seed = seed if test_seed < 0 else test_seed
    train, validation, test = _split(raw, getattr(cfg.data, "splits", None), seed, test_seed)
    train = _subsample(train, "subsample", getattr(cfg.data, "subsample", 1.0), seed)
    if test is not None:
        test = _subsample(test, "test_subsample", getattr(cfg.data, "test_subsample", 1.0), test_seed)
    skipped = dict(raw.skipped)
    read = sum(len(part) for part in (raw.train, raw.validation, raw.test) if part is not None) + sum(skipped.values())
    truncated: dict[str, int] = {}
    max_len = args.get("max_len", None) or cfg.llm.tok_len
    options: dict[str, Any] = {key: args[key] for key in ("template", "loss_on") if key in args}
    if max_len == "auto" and raw.images is None:
        max_len = _fitting_length(train, tokenizer, raw.task, options)

    pipelines = _pipelines(cfg.data, raw, origin) if raw.images is not None else {}
    if raw.images is None:
        check_vocabulary(train, tokenizer)

    def ready(frame: pd.DataFrame | None, split: str):
        """The rows as examples, and the frame of the rows that were kept."""
        if frame is None:
            return None, None
        if raw.images is not None:
            return ImageExamples(raw.images, frame["image"], frame["label"], pipelines[split]), frame
        if raw.task == CLASSIFICATION:
            examples, kept = tokenize_classification(frame, tokenizer, max_len), np.ones(len(frame), dtype=bool)
        else:
            examples, kept = tokenize_causal(frame, tokenizer, max_len, **options)
        dropped, limit = int((~kept).sum()), getattr(cfg.data, "max_dropped", 1.0)
        if dropped > limit * len(frame):
            raise UserError(
                f"{dropped} of {len(frame)} rows of {split} have a prompt that fills llm.tok_len = {max_len} and would "
                f"be left out, more than data.max_dropped = {limit:g} of them; raise llm.tok_len (auto: to fit the "
                "data), or data.max_dropped"
            )
        count_skipped(skipped, "prompt too long", dropped)
        truncated[split] = examples.truncated
        return examples, frame[kept]

    train_examples, train = ready(train, "train")
    validation_examples, validation = ready(validation, "validation")
    test_examples, test = ready(test, "test")
    image_shape = _image_shape(train_examples, [validation_examples, test_examples]) if pipelines else None

    fields = {name: train[name].to_numpy() for name in raw.fields if name in train}
    rows = Rows(len(train_examples), train_examples.labels, fields)
    name = getattr(cfg.data, "splitter", None) or "iid"
    splitter_args = one_mapping("data.splitter_args", getattr(cfg.data, "splitter_args", None), origin)
    parts = partition(name, rows, cfg.federate.client_num, _rng(seed, "partition"), splitter_args, origin)
    parts.label_names = raw.label_names or None
    shares = Ragged.of([])
    if test_examples is not None:
        held = Rows(
            len(test_examples), test_examples.labels, {name: test[name].to_numpy() for name in fields if name in test}
        )
        shares = matching_shares(parts, rows, held, _rng(seed, "client tests"))

    digest = hashlib.sha256()
    for part in (train_examples, validation_examples, test_examples):
        digest.update((part.fingerprint() if part is not None else "none").encode())
    sizes, indices = parts.sizes(), parts.indices.flat()
    # Of each client the number of its rows, and the rows.
    digest.update(np.insert(indices, np.cumsum(sizes) - sizes, sizes).astype("<i8").tobytes())
    majority = None
    if test_examples is not None and test_examples.labels is not None and len(test_examples):
        majority = float(np.bincount(test_examples.labels).max() / len(test_examples))
    return FederatedData(
        train=train_examples,
        validation=validation_examples,
        test=test_examples,
        task=raw.task,
        label_names=raw.label_names,
        num_labels=raw.num_labels,
        source=raw.source,
        fingerprint=digest.hexdigest(),
        partition=parts,
        majority=majority,
        skipped=skipped,
        read=read,
        truncated=truncated,
        tok_len=None if raw.images is not None else max_len,
        image_shape=image_shape,
        test_shares=shares,
        rows={
            split: frame.index.to_numpy(np.int64)
            for split, frame in (("train", train), ("validation", validation), ("test", test))
            if frame is not None
        },
        cut=tuple(split for split in ("validation", "test") if getattr(raw, split) is None),
        columns=raw.columns,
    )


def _fitting_length(train: pd.DataFrame, tokenizer: Any, task: str, options: dict[str, Any]) -> int:
    """The length in tokens, up to the limit of the model, with which 99 % of the training rows are not cut."""
    limit = min(tokenizer.model_max_length, LONGEST)
    if task == CLASSIFICATION:
        examples = tokenize_classification(train, tokenizer, limit)
    else:
        examples, _ = tokenize_causal(train, tokenizer, limit, **options)
    return int(np.quantile(examples.lengths, 0.99, method="higher"))


def _pipelines(data_cfg: Any, raw: RawData, origin: Origin) -> dict[str, Pipeline]:
    """The transforms of images for ``train``, ``validation`` and ``test``."""
    usual = [["Normalize", {"mean": list(raw.mean), "std": list(raw.std)}]]
    train = list(getattr(data_cfg, "transform", None) or usual)
    pipelines = {"train": Pipeline(train, "data.transform", origin)}
    for split, key in (("validation", "val"), ("test", "test")):
        steps = getattr(data_cfg, f"{key}_transform", None)
        pipelines[split] = Pipeline(steps, f"data.{key}_transform", origin) if steps else pipelines["train"]
    return pipelines


def _image_shape(train: ImageExamples, held_out: Iterable[ImageExamples | None]) -> tuple[int, int, int]:
    """The shape of the training images, with and without random steps, and of all others."""
    channels, height, width = train.batch([0], _rng(0, "shape"))["pixel_values"].shape[1:]
    for part in (train, *held_out):
        if part is not None and part.shape != (channels, height, width):
            raise UserError(
                f"{part.pipeline.key} makes images of shape {part.shape}, in training they are "
                f"{(channels, height, width)}"
            )
    return channels, height, width


def _rng(seed: int, purpose: str) -> np.random.Generator:
    """A separate stream for each purpose, so that the order of use has no effect."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def _split(
    raw: RawData, splits: Any, seed: int, test_seed: int
) -> tuple[pd.DataFrame, pd.DataFrame | None, pd.DataFrame | None]:
    shares = [0.8, 0.1, 0.1] if splits is None else list(splits)
    train, validation, test = raw.train, raw.validation, raw.test
    validation_share = shares[1]
    if test is None:
        train, test = _divide(train, shares[2], _rng(test_seed, "split/test"))
        validation_share = shares[1] / (1 - shares[2]) if shares[2] < 1 else 0.0
    if validation is None:
        train, validation = _divide(train, validation_share, _rng(seed, "split/validation"))
    if not len(train):
        raise UserError(f"data.splits {shares} leave no row to train on")
    return train, validation, test


def _divide(frame: pd.DataFrame, share: float, rng: np.random.Generator) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """``(rest, taken)``: a stratified sample of ``share`` of the rows is taken. Order and index are kept."""
    taken = _stratified(frame, share, rng)
    return (frame[~taken], frame[taken]) if taken.any() else (frame, None)


def _stratified(frame: pd.DataFrame, share: float, rng: np.random.Generator) -> np.ndarray:
    """A bool array that selects ``share`` of the rows of every class, up to rounding."""
    labels = frame["label"].to_numpy() if "label" in frame else np.zeros(len(frame), dtype=np.int64)
    kinds, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    quota = share * counts
    take = np.floor(quota + 1e-9).astype(np.int64)
    missing = int(round(share * len(frame))) - int(take.sum())
    take[np.argsort(take - quota, kind="stable")[: max(missing, 0)]] += 1
    chosen = np.zeros(len(frame), dtype=bool)
    for kind in range(len(kinds)):
        members = rng.permutation(np.flatnonzero(inverse == kind))
        chosen[members[: take[kind]]] = True
    return chosen


def _subsample(frame: pd.DataFrame, key: str, share: float, seed: int) -> pd.DataFrame:
    if share == 1:
        return frame
    chosen = _stratified(frame, float(share), _rng(seed, key))
    if not chosen.any():
        raise UserError(f"data.{key} {share} of {len(frame)} rows leaves none")
    return frame[chosen]
