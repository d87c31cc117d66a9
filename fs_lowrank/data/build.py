"""From a data set to the data of a federated run: split, encoded and partitioned among clients."""

from __future__ import annotations

import hashlib
import logging
import zlib
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.duplicates import row_keys
from fs_lowrank.data.examples import Examples
from fs_lowrank.data.federated import FederatedData
from fs_lowrank.data.images import ImageExamples, Pipeline
from fs_lowrank.data.labels import as_classes, edges
from fs_lowrank.data.partition import Partition, Rows, apportion, matching_shares, partition
from fs_lowrank.data.ragged import Ragged
from fs_lowrank.data.sources import CAUSAL_LM, RawData, data_args, length_of, load_raw
from fs_lowrank.data.tables import MULTI_LABEL, REGRESSION, count_skipped
from fs_lowrank.data.tokenize import (
    check_vocabulary,
    clear_truncation,
    tokenize_classification,
    tokenize_instructions,
    tokenizer_fingerprint,
)
from fs_lowrank.errors import ROWS_LOGGER, UserError, say_once
from fs_lowrank.jobs.memo import free_last_run, memoized
from fs_lowrank.settings import Settings, one_mapping
from fs_lowrank.settings.sections import Data

#: the longest text that ``llm.tok_len: auto`` accepts from a model without a limit, in tokens
LONGEST = 1 << 15


def build_data(cfg: Settings, tokenizer: Any = None, raw: RawData | None = None) -> FederatedData:
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
        raw = load_raw(cfg.data, origin=cfg.source, task=cfg.model.task)
    inputs = cfg, tokenizer, raw
    free_last_run()
    data = memoized(lambda: _memo_key(*inputs), lambda: _build(*inputs), lambda built: built.nbytes)
    clear_truncation(tokenizer)
    say_once(data.describe(), logging.WARNING if any(data.repeated.values()) else logging.INFO, ROWS_LOGGER)
    return data


def _memo_key(cfg: Settings, tokenizer: Any, raw: RawData) -> dict[str, Any] | None:
    """The inputs that decide the result of ``_build``; None if unknown, or if building takes no time (images)."""
    if not isinstance(cfg, Settings) or getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    frames = (raw.train, raw.validation, raw.test)
    keys = {name: asdict(getattr(cfg, name)) for name in ("data", "llm")} | {"task": cfg.model.task}
    return {
        "keys": [keys, cfg.federate.client_num, cfg.alone, cfg.seed, cfg.lowrank.test_seed, _client_lengths(cfg)],
        "raw": [raw.fingerprint, raw.source, raw.fields, raw.skipped],
        "rows": [None if p is None else hashlib.sha256(p.index.to_numpy(np.int64)).hexdigest() for p in frames],
        "tokenizer": [tokenizer_fingerprint(tokenizer), repr(tokenizer)],
    }


def _build(cfg: Settings, tokenizer: Any, raw: RawData) -> FederatedData:
    args = data_args(cfg.data, cfg.source)
    frames = _frames(cfg, raw)
    read = _count_read(cfg, raw)
    examples: dict[str, Any] = {}
    texts = image_shape = None
    if raw.images is None:
        texts = _Texts(cfg, tokenizer, raw, args, frames["train"])
        for split in frames:
            examples[split], frames[split] = texts.examples(frames[split], split)
    else:
        examples = _images(cfg, raw, frames)
        image_shape = examples["train"].shape
    keys = {split: row_keys(frame, raw.task, raw.images) for split, frame in frames.items()}
    parts, shares = _partitioned(cfg, raw, frames, examples)
    if texts is not None:
        examples["train"] = texts.cut_by_client(examples["train"], frames["train"], parts)
    if cfg.alone:
        parts.indices = Ragged.of([parts.indices[cfg.alone - 1]])
        shares = Ragged.of([shares[cfg.alone - 1]]) if "test" in examples else shares
    return FederatedData(
        train=examples["train"],
        validation=examples.get("validation"),
        test=examples.get("test"),
        task=raw.task,
        label_names=raw.label_names,
        num_labels=raw.num_labels,
        source=raw.source,
        fingerprint=_digest(examples, parts),
        partition=parts,
        majority=_majority(examples.get("test")) if raw.task != REGRESSION else None,
        skipped=texts.skipped if texts else dict(raw.skipped),
        read=read,
        keys=keys["train"],
        repeated={split: int(np.isin(keys[split], keys["train"]).sum()) for split in frames if split != "train"},
        truncated=texts.truncated if texts else {},
        tok_len=texts.length if texts else None,
        image_shape=image_shape,
        test_shares=shares,
        rows={split: frame.index.to_numpy(np.int64) for split, frame in frames.items()},
        cut=tuple(split for split in ("validation", "test") if getattr(raw, split) is None),
        columns=raw.columns,
    )


def _frames(cfg: Settings, raw: RawData) -> dict[str, pd.DataFrame]:
    """The rows of ``train``, and of ``validation`` and ``test`` if the run has them."""
    seed, test_seed, test_share = cfg.seed, cfg.lowrank.test_seed, cfg.data.test_subsample
    test_seed = seed if test_seed < 0 else test_seed
    train, validation, test = _split(raw, list(cfg.data.splits), seed, test_seed)
    if raw.test is not None and test_seed != seed and test_share == 1:
        say_once(
            f"lowrank.test_seed = {test_seed} has no effect: the data have test rows of their own, and "
            "data.test_subsample = 1 takes all of them"
        )
    train = _subsample(train, "subsample", cfg.data.subsample, seed)
    test = None if test is None else _subsample(test, "test_subsample", test_share, test_seed)
    frames = {"train": train, "validation": validation, "test": test}
    return {split: frame for split, frame in frames.items() if frame is not None}


def _count_read(cfg: Settings, raw: RawData) -> int:
    """The number of rows of the source, rows left out included; too many empty rows are an error."""
    loaded = sum(len(frame) for frame in (raw.train, raw.validation, raw.test) if frame is not None)
    read = loaded + sum(raw.skipped.values())
    for reason, count in raw.skipped.items():
        if reason.startswith("empty "):
            _check_dropped(cfg, count, read, f"are without what they need ({reason})", "fill or remove them")
    return read


class _Texts:
    """How the rows of a run are encoded.

    Args:
        args: of ``data.args``. train: the training rows, from which ``llm.tok_len: auto`` takes the length.
    Attributes:
        length: of a text, in tokens, at most. skipped, truncated: as in ``FederatedData``, so far.
    """

    def __init__(self, cfg: Settings, tokenizer: Any, raw: RawData, args: dict[str, Any], train: pd.DataFrame):
        self.cfg, self.tokenizer, self.raw = cfg, tokenizer, raw
        self.options = {key: args[key] for key in ("template", "loss_on") if key in args}
        self.paired = cfg.model.task == "Seq2SeqLM"
        self.skipped, self.truncated = dict(raw.skipped), dict[str, int]()
        self.key, length = length_of(cfg)
        self.length = self._fitting_length(train) if isinstance(length, str) else length
        check_vocabulary(train, tokenizer)

    def _fitting_length(self, train: pd.DataFrame) -> int:
        """The length in tokens, up to the limit of the model, with which 99 % of the training rows are not cut."""
        examples, _ = self._encoded(train, min(self.tokenizer.model_max_length, LONGEST))
        lengths = examples.lengths
        if examples.paired:  # the answers are cut to it as well
            lengths = np.maximum(lengths, examples.columns["labels"].lengths)
        return int(np.quantile(lengths, 0.99, method="higher"))

    def _encoded(self, frame: pd.DataFrame, length: int) -> tuple[Examples, np.ndarray]:
        """The rows of ``frame`` as examples, and a mask of the rows retained, bool ``(rows,)``."""
        if self.raw.task == CAUSAL_LM:
            return tokenize_instructions(frame, self.tokenizer, length, **self.options, paired=self.paired)
        examples = tokenize_classification(frame, self.tokenizer, length)
        if self.raw.task == MULTI_LABEL:
            examples.sets = self.raw.num_labels
        return examples, np.ones(len(frame), dtype=bool)

    def examples(self, frame: pd.DataFrame, split: str) -> tuple[Examples, pd.DataFrame]:
        """The rows of a split as examples, and the rows retained."""
        examples, retained = self._encoded(frame, self.length)
        dropped = int((~retained).sum())
        reason = f"of {split} have a prompt that fills {self.key} = {self.length}"
        remedy = f"raise {self.key}" + (" (auto: to fit the data)" if self.key == "llm.tok_len" else "")
        _check_dropped(self.cfg, dropped, len(frame), reason, remedy)
        count_skipped(self.skipped, "prompt too long", dropped)
        self.truncated[split] = examples.truncated
        return examples, frame[retained]

    def cut_by_client(self, examples: Examples, train: pd.DataFrame, parts: Partition) -> Examples:
        """``examples`` with the rows of the clients that have a length of their own (``lowrank.clients``) cut to that.

        Rows whose answer is cut away are removed from ``parts`` and counted.

        Raises:
            UserError: a client would have no row left, or more of their rows than ``data.max_dropped`` would be left
                out.
        """
        for length, clients in _client_lengths(self.cfg).items():
            indices = list(parts.indices)
            rows = np.sort(np.concatenate([indices[client - 1] for client in clients]))
            try:
                shorter, retained = self._encoded(train.iloc[rows], length)
            except UserError as error:
                raise UserError(f"lowrank.clients: tok_len = {length}, of client {clients[0]}: {error}") from error
            for client in clients:
                client_rows = indices[client - 1]
                indices[client - 1] = client_rows[retained[np.searchsorted(rows, client_rows)]]
                if not len(indices[client - 1]):
                    raise UserError(f"lowrank.clients: tok_len = {length} leaves client {client} no answer; raise it")
            if not retained.all():
                reason = f"of the clients with tok_len = {length} (lowrank.clients) have a prompt that fills it"
                _check_dropped(self.cfg, int((~retained).sum()), len(retained), reason, "raise it")
                parts.indices = Ragged.of(indices)
                count_skipped(self.skipped, "prompt too long", int((~retained).sum()))
            # Texts of these rows that were counted as cut when they were encoded at the usual length.
            counted = self._encoded(train.iloc[rows], self.length)[0].truncated
            truncated = examples.truncated - counted + shorter.truncated
            order = np.arange(len(examples))
            order[rows[retained]] = len(examples) + np.arange(len(shorter))
            both = Examples.together((part, np.arange(len(part))) for part in (examples, shorter))
            examples = both.select(order)
            examples.truncated = truncated
        self.truncated["train"] = examples.truncated
        return examples


def _partitioned(
    cfg: Settings, raw: RawData, frames: dict[str, pd.DataFrame], examples: dict[str, Any]
) -> tuple[Partition, Ragged]:
    """The training rows divided among the clients, and the rows of ``test`` likewise, if any exist."""
    seed, train = cfg.seed, frames["train"]
    # Numbers are divided into classes of equal size; the same bounds give the classes of held-out rows.
    bounds = edges(examples["train"].labels) if raw.task == REGRESSION else None
    fields = [name for name in raw.fields if name in train]

    def rows(split: str) -> Rows:
        labels, frame = examples[split].labels, frames[split]
        kinds = None if labels is None else as_classes(np.asarray(labels), bounds)
        return Rows(len(examples[split]), kinds, {name: frame[name].to_numpy() for name in fields if name in frame})

    train_rows = rows("train")
    args = one_mapping("data.splitter_args", cfg.data.splitter_args, cfg.source)
    parts = partition(cfg.data.splitter, train_rows, cfg.federate.client_num, _rng(seed, "partition"), args, cfg.source)
    parts.label_names = raw.label_names or None
    if raw.task in (REGRESSION, MULTI_LABEL):
        parts.labels = parts.label_names = None  # no counts of classes
    if "test" not in examples:
        return parts, Ragged.of([])
    return parts, matching_shares(parts, train_rows, rows("test"), _rng(seed, "client tests"))


def _digest(examples: dict[str, Any], parts: Partition) -> str:
    """The fingerprint of the data: SHA-256 in hex of the examples and of each client's row numbers."""
    digest = hashlib.sha256()
    for split in ("train", "validation", "test"):
        digest.update((examples[split].fingerprint() if split in examples else "none").encode())
    sizes, indices = parts.sizes(), parts.indices.values
    # For each client the number of its rows, then the rows.
    digest.update(np.insert(indices, np.cumsum(sizes) - sizes, sizes).astype("<i8").tobytes())
    return digest.hexdigest()


def _majority(test: Any) -> float | None:
    """The fraction of the most frequent class; None without rows or classes."""
    if test is None or test.labels is None or not len(test):
        return None
    return float(np.unique(test.labels, return_counts=True)[1].max() / len(test))


def _client_lengths(cfg: Settings) -> dict[int, list[int]]:
    """The clients with a text length of their own (``lowrank.clients``), by that length."""
    clients: dict[int, list[int]] = {}
    for client, overrides in cfg.client_settings.items():
        if "tok_len" in overrides:
            clients.setdefault(overrides["tok_len"], []).append(client)
    return clients


def _check_dropped(cfg: Settings, dropped: int, rows: int, reason: str, remedy: str) -> None:
    """Raise ``UserError`` if more than ``data.max_dropped`` of so many rows would be left out."""
    limit = cfg.data.max_dropped
    if dropped > limit * rows:
        raise UserError(
            f"{dropped} of {rows} rows {reason} and would be left out, more than data.max_dropped = {limit:g} of them; "
            f"{remedy}, or raise data.max_dropped"
        )


def _images(cfg: Settings, raw: RawData, frames: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The rows of each split as images, with the transforms of the split."""
    usual = [["Normalize", {"mean": list(raw.mean), "std": list(raw.std)}]]
    pipelines = {"train": Pipeline(cfg.data.transform or usual, "data.transform", cfg.source)}
    for split, key in (("validation", "val_transform"), ("test", "test_transform")):
        steps = getattr(cfg.data, key)
        pipelines[split] = Pipeline(steps, f"data.{key}", cfg.source) if steps else pipelines["train"]
    images: Any = raw.images
    examples = {s: ImageExamples(images, f["image"], f["label"], pipelines[s]) for s, f in frames.items()}
    shape = examples["train"].shape
    for split, part in examples.items():
        if part.shape != shape:
            raise UserError(f"the transforms of {split} images give shape {part.shape}, those of training {shape}")
    return examples


def _rng(seed: int, purpose: str) -> np.random.Generator:
    """A separate stream for each purpose, so that the order of use has no effect."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def _split(
    raw: RawData, shares: list[float], seed: int, test_seed: int
) -> tuple[pd.DataFrame, pd.DataFrame | None, pd.DataFrame | None]:
    train, validation, test = raw.train, raw.validation, raw.test
    validation_share = shares[1]
    present = [split for split, frame in (("test", test), ("validation", validation)) if frame is not None]
    if len(present) == 1:  # with both, the run reports data.splits as a whole
        index = 2 if present == ["test"] else 1
        if shares[index] not in (0, Data().splits[index]):
            share = f"the share of {shares[index]:g} for {present[0]} rows (data.splits = {shares})"
            say_once(f"{share} has no effect: the data have {present[0]} rows of their own")
    if test is None:
        train, test = _divide(train, shares[2], _rng(test_seed, "split/test"))
        validation_share = shares[1] / (1 - shares[2]) if shares[2] < 1 else 0.0
    if validation is None:
        train, validation = _divide(train, validation_share, _rng(seed, "split/validation"))
    if not len(train):
        raise UserError(f"data.splits {shares} leave no row to train on")
    return train, validation, test


def _divide(frame: pd.DataFrame, share: float, rng: np.random.Generator) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """``(remaining, sample)``: a stratified sample of ``share`` of the rows. Order and index stay."""
    chosen = _stratified(frame, share, rng)
    return (frame[~chosen], frame[chosen]) if chosen.any() else (frame, None)


def _stratified(frame: pd.DataFrame, share: float, rng: np.random.Generator) -> np.ndarray:
    """A bool array that selects ``share`` of the rows of every class, up to rounding."""
    labels = as_classes(frame["label"].to_numpy()) if "label" in frame else np.zeros(len(frame), dtype=np.int64)
    kinds, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sizes = apportion(share * counts, round(share * len(frame)))
    chosen = np.zeros(len(frame), dtype=bool)
    for kind in range(len(kinds)):
        members = rng.permutation(np.flatnonzero(inverse == kind))
        chosen[members[: sizes[kind]]] = True
    return chosen


def _subsample(frame: pd.DataFrame, key: str, share: float, seed: int) -> pd.DataFrame:
    if share == 1:
        return frame
    chosen = _stratified(frame, float(share), _rng(seed, key))
    if not chosen.any():
        raise UserError(f"data.{key} {share} of {len(frame)} rows leaves none")
    return frame[chosen]
