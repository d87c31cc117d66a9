"""From a data set to the data of a federated run: split, encoded and partitioned among clients."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.examples import Examples
from fs_lowrank.data.federated import FederatedData
from fs_lowrank.data.images import ImageExamples, Pipeline
from fs_lowrank.data.labels import as_classes, edges
from fs_lowrank.data.partition import Partition, Rows, matching_shares, partition
from fs_lowrank.data.ragged import Ragged
from fs_lowrank.data.sources import CAUSAL_LM, RawData, data_args, load_raw
from fs_lowrank.data.stored import StoredFrame
from fs_lowrank.data.tables import MULTI_LABEL, REGRESSION, count_skipped
from fs_lowrank.data.tokenize import (
    check_vocabulary,
    cut_alike,
    tokenize_causal,
    tokenize_classification,
    tokenize_pairs,
    tokenizer_fingerprint,
)
from fs_lowrank.errors import ROWS_LOGGER, UserError, say_once
from fs_lowrank.jobs.files import cannot_write
from fs_lowrank.jobs.kept import kept
from fs_lowrank.settings import Origin, Settings, one_mapping
from fs_lowrank.settings.sections import Data

#: the longest text that ``llm.tok_len: auto`` accepts from a model without a limit, in tokens
LONGEST = 1 << 15


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
        task = getattr(getattr(cfg, "model", None), "task", "")
        raw = load_raw(cfg.data, origin=getattr(cfg, "source", None) or Origin(), task=task)
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
    if not isinstance(cfg, Settings) or getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    parts = (raw.train, raw.validation, raw.test)
    keys = {name: asdict(getattr(cfg, name)) for name in ("data", "llm")} | {"task": cfg.model.task}
    return {
        "keys": [keys, cfg.federate.client_num, cfg.alone, cfg.seed, cfg.lowrank.test_seed, _own_lengths(cfg)],
        "raw": [raw.fingerprint, raw.source, raw.fields, raw.skipped],
        "rows": [None if p is None else hashlib.sha256(p.index.to_numpy(np.int64)).hexdigest() for p in parts],
        "tokenizer": [tokenizer_fingerprint(tokenizer), repr(tokenizer)],
    }


def _cutting(tokenizer: Any) -> tuple[Any, Any]:
    """How a tokenizer was last told to cut and to pad, which is saved with it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (backend.truncation, backend.padding) if backend is not None else (None, None)


def _cut_alike(tokenizer: Any, cut: tuple[Any, Any]) -> None:
    """Tell ``tokenizer`` to cut and to pad as another one was told."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None and _cutting(tokenizer) != cut:
        cut_alike(backend, *cut)


def _built(cfg: Any, tokenizer: Any, raw: RawData) -> FederatedData:
    origin = getattr(cfg, "source", None) or Origin()
    seed = int(cfg.seed)
    args = data_args(cfg.data, origin)
    test_seed = getattr(getattr(cfg, "lowrank", None), "test_seed", -1)
    test_seed = seed if test_seed < 0 else test_seed
    train, validation, test = _split(raw, getattr(cfg.data, "splits", None), seed, test_seed)
    if raw.test is not None and test_seed != seed and getattr(cfg.data, "test_subsample", 1.0) == 1:
        say_once(
            f"lowrank.test_seed = {test_seed} has no effect: the data have test rows of their own, and "
            "data.test_subsample = 1 takes all of them"
        )
    train = _subsample(train, "subsample", getattr(cfg.data, "subsample", 1.0), seed)
    if test is not None:
        test = _subsample(test, "test_subsample", getattr(cfg.data, "test_subsample", 1.0), test_seed)
    skipped = dict(raw.skipped)
    read = sum(len(part) for part in (raw.train, raw.validation, raw.test) if part is not None) + sum(skipped.values())
    for reason, count in skipped.items():
        if reason.startswith("empty "):
            _check_dropped(cfg, count, read, f"are without what they need ({reason})", "fill or remove them")
    truncated: dict[str, int] = {}
    max_len = args.get("max_len", None) or cfg.llm.tok_len
    options: dict[str, Any] = {key: args[key] for key in ("template", "loss_on") if key in args}
    paired = getattr(getattr(cfg, "model", None), "task", "") == "Seq2SeqLM"
    folder = _folder(cfg) if isinstance(raw.train, StoredFrame) else None
    if max_len == "auto" and raw.images is None:
        max_len = _fitting_length(train, tokenizer, raw, paired, options, folder)

    pipelines = _pipelines(cfg.data, raw, origin) if raw.images is not None else {}
    if raw.images is None:
        check_vocabulary(train, tokenizer)

    def encode(frame: pd.DataFrame, length: int) -> tuple[Examples, np.ndarray]:
        return _encoded(frame, tokenizer, length, raw, paired, options, folder)

    def ready(frame: pd.DataFrame | None, split: str):
        """The rows as examples, and the frame of the rows that were kept."""
        if frame is None:
            return None, None
        if raw.images is not None:
            return ImageExamples(raw.images, frame["image"], frame["label"], pipelines[split]), frame
        examples, kept = encode(frame, max_len)
        dropped = int((~kept).sum())
        _check_dropped(
            cfg,
            dropped,
            len(frame),
            f"of {split} have a prompt that fills llm.tok_len = {max_len}",
            "raise llm.tok_len (auto: to fit the data)",
        )
        count_skipped(skipped, "prompt too long", dropped)
        truncated[split] = examples.truncated
        return examples, frame[kept]

    train_examples, train = ready(train, "train")
    validation_examples, validation = ready(validation, "validation")
    test_examples, test = ready(test, "test")
    image_shape = _image_shape(train_examples, [validation_examples, test_examples]) if pipelines else None

    fields = {name: train[name].to_numpy() for name in raw.fields if name in train}
    # Numbers have classes of equal size, of which those of held-out rows are found by the same bounds.
    between = edges(train_examples.labels) if raw.task == REGRESSION else None
    kinds = None if train_examples.labels is None else as_classes(np.asarray(train_examples.labels), between)
    rows = Rows(len(train_examples), kinds, fields)
    name = getattr(cfg.data, "splitter", None) or "iid"
    splitter_args = one_mapping("data.splitter_args", getattr(cfg.data, "splitter_args", None), origin)
    parts = partition(name, rows, cfg.federate.client_num, _rng(seed, "partition"), splitter_args, origin)
    parts.label_names = raw.label_names or None
    if raw.task in (REGRESSION, MULTI_LABEL):
        parts.labels = parts.label_names = None  # no counts of classes
    shares = Ragged.of([])
    if test_examples is not None:
        held = Rows(
            len(test_examples),
            None if test_examples.labels is None else as_classes(np.asarray(test_examples.labels), between),
            {name: test[name].to_numpy() for name in fields if name in test},
        )
        shares = matching_shares(parts, rows, held, _rng(seed, "client tests"))

    if raw.images is None:
        for own_len, clients in _own_lengths(cfg).items():
            train_examples = _cut_otherwise(
                cfg, train_examples, train, parts, max_len, own_len, clients, encode, skipped, folder
            )
        truncated["train"] = train_examples.truncated

    if alone := getattr(cfg, "alone", 0):
        parts.indices = Ragged.of([parts.indices[alone - 1]])
        shares = Ragged.of([shares[alone - 1]]) if test_examples is not None else shares

    digest = hashlib.sha256()
    for part in (train_examples, validation_examples, test_examples):
        digest.update((part.fingerprint() if part is not None else "none").encode())
    sizes, indices = parts.sizes(), parts.indices.flat()
    # Of each client the number of its rows, and the rows.
    digest.update(np.insert(indices, np.cumsum(sizes) - sizes, sizes).astype("<i8").tobytes())
    majority = None
    if test_examples is not None and test_examples.labels is not None and raw.task != REGRESSION and len(test_examples):
        majority = float(np.unique(test_examples.labels, return_counts=True)[1].max() / len(test_examples))
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


def _own_lengths(cfg: Any) -> dict[int, list[int]]:
    """The clients by the length of their texts, of those that have one of their own (``lowrank.clients``)."""
    clients: dict[int, list[int]] = {}
    for client, own in getattr(cfg, "own_settings", {}).items():
        if "tok_len" in own:
            clients.setdefault(own["tok_len"], []).append(client)
    return clients


def _check_dropped(cfg: Any, dropped: int, rows: int, why: str, remedy: str) -> None:
    """Raise ``UserError`` if more than ``data.max_dropped`` of so many rows would be left out."""
    limit = getattr(cfg.data, "max_dropped", 1.0)
    if dropped > limit * rows:
        raise UserError(
            f"{dropped} of {rows} rows {why} and would be left out, more than data.max_dropped = {limit:g} of them; "
            f"{remedy}, or raise data.max_dropped"
        )


def _cut_otherwise(
    cfg: Any,
    examples: Examples,
    train: pd.DataFrame,
    parts: Partition,
    usual: int,
    length: int,
    clients: Sequence[int],
    encode: Callable[[pd.DataFrame, int], tuple[Examples, np.ndarray]],
    skipped: dict[str, int],
    folder: Path | None,
) -> Examples:
    """``examples`` with the rows of ``clients`` cut to ``length`` tokens in place of ``usual``; rows that it leaves no
    answer are taken from ``parts`` and counted in ``skipped``.

    Raises:
        UserError: a client would have no row left, or more of their rows than ``data.max_dropped`` would be left out.
    """
    rows = np.sort(np.concatenate([parts.indices[client - 1] for client in clients]))
    try:
        own, fit = encode(train.iloc[rows], length)
    except UserError as error:
        raise UserError(f"lowrank.clients: tok_len = {length}, of client {clients[0]}: {error}") from error
    indices = list(parts.indices)
    for client in clients:
        mine = indices[client - 1]
        indices[client - 1] = mine[fit[np.searchsorted(rows, mine)]]
        if not len(indices[client - 1]):
            raise UserError(f"lowrank.clients: tok_len = {length} leaves client {client} no answer; raise it")
    if not fit.all():
        which = f"of the clients with tok_len = {length} (lowrank.clients) have a prompt that fills it"
        _check_dropped(cfg, int((~fit).sum()), len(fit), which, "raise it")
        parts.indices = Ragged.of(indices)
        count_skipped(skipped, "prompt too long", int((~fit).sum()))
    replaced = examples.replaced(rows[fit], own, folder)
    replaced.truncated -= encode(train.iloc[rows], usual)[0].truncated  # which were counted when these were made
    return replaced


def _folder(cfg: Any) -> Path:
    """Where the tokens of data that stay on disk are kept: the run's folder."""
    folder = Path(cfg.outdir, cfg.expname)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def _encoded(
    frame: pd.DataFrame,
    tokenizer: Any,
    length: int,
    raw: RawData,
    paired: bool,
    options: dict[str, Any],
    folder: Path | None,
) -> tuple[Examples, np.ndarray]:
    """The rows of ``frame`` as examples, and which of them were kept."""
    if raw.task == CAUSAL_LM:
        return (tokenize_pairs if paired else tokenize_causal)(frame, tokenizer, length, **options, folder=folder)
    examples = tokenize_classification(frame, tokenizer, length, folder)
    if raw.task == MULTI_LABEL:
        examples.sets = raw.num_labels
    return examples, np.ones(len(frame), dtype=bool)


def _fitting_length(
    train: pd.DataFrame, tokenizer: Any, raw: RawData, paired: bool, options: dict[str, Any], folder: Path | None
) -> int:
    """The length in tokens, up to the limit of the model, with which 99 % of the training rows are not cut."""
    limit = min(tokenizer.model_max_length, LONGEST)
    examples, _ = _encoded(train, tokenizer, limit, raw, paired, options, folder)
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
    own = [which for which, part in (("test", test), ("validation", validation)) if part is not None]
    if len(own) == 1:  # of both, the run says it of data.splits as a whole
        at = 2 if own == ["test"] else 1
        if shares[at] not in (0, Data().splits[at]):
            share = f"the share of {shares[at]:g} for {own[0]} rows (data.splits = {shares})"
            say_once(f"{share} has no effect: the data have {own[0]} rows of their own")
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
    labels = as_classes(frame["label"].to_numpy()) if "label" in frame else np.zeros(len(frame), dtype=np.int64)
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
