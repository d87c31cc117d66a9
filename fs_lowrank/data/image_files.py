"""Image data sets from their standard files, or from folders with one subfolder per class. Pickles are not read.

=================== ================================================================ =====================
``data.type``       files, in ``data.root`` or in their own folder below it          fetched by
=================== ================================================================ =====================
``mnist``           ``train-images-idx3-ubyte`` …, plain or ``.gz``                  ``fs-lowrank fetch``
``fashion_mnist``   the same; also where Debian's ``dataset-fashion-mnist`` puts it  ``fs-lowrank fetch``
``cifar10``         the binary version: ``data_batch_1.bin`` … ``test_batch.bin``
``cifar100``        the binary version: ``train.bin``, ``test.bin``
``svhn``            ``train_32x32.mat``, ``test_32x32.mat``
a folder            ``train/CLASS/FILE``, optionally ``test/…``, ``val/…``; or ``CLASS/FILE``
=================== ================================================================ =====================
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fs_lowrank.data.files import read_bytes, read_text, refuse_pointer
from fs_lowrank.data.tables import IMAGE_CLASSIFICATION, RawData, count_skipped, several_classes
from fs_lowrank.errors import UserError, nearest, say_once, user_errors
from fs_lowrank.fetch import usable
from fs_lowrank.jobs.progress import steps
from fs_lowrank.settings.reading import read_packaged

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff")


#: a split of a data set: uint8 images ``(n, channels, height, width)``, and one value per image by name
_Part = tuple[np.ndarray, dict[str, np.ndarray]]


def _raw(images: np.ndarray, splits: Mapping[str, Mapping[str, np.ndarray]], names: list[str], **extra: Any) -> RawData:
    """Images with a class each.

    Args:
        images: uint8 ``(n, channels, height, width)``, split after split.
        splits: for each split one value per image by name: ``label``, and others that a partitioner may use.
        names: of the classes, in the order of the labels. extra: attributes of ``RawData``.
    """
    frames, start = {}, 0
    for split, values in splits.items():
        rows = np.arange(start, start + len(values["label"]))
        frames[split] = pd.DataFrame({"image": rows, **{name: data.astype(np.int64) for name, data in values.items()}})
        start += len(rows)
    several_classes(frames[TRAIN]["label"], extra["source"])
    fields = [name for name in splits[TRAIN] if name != "label"]
    return RawData.of(IMAGE_CLASSIFICATION, frames, names, fields, images=images, **extra)


def _find(name: str, folders: Sequence[Path], files: Sequence[str]) -> list[Path]:
    """The paths of ``files`` in the first folder that has all of them."""
    for folder in folders:
        paths = [path for file in files if (path := next(filter(Path.is_file, _spellings(folder, file)), None))]
        if len(paths) == len(files):
            return paths
    where = ", ".join(map(str, folders))
    raise UserError(
        f"data.type {name}: no folder has {', '.join(files)}; looked in: {where}; {IMAGE_SETS[name]['hint']}"
    )


def _spellings(folder: Path, file: str) -> list[Path]:
    """The possible paths of a file: IDX files are compressed or not, and some have a dot in their name."""
    return [folder / f"{name}{end}" for name in (file, file.replace("-idx", ".idx")) for end in ("", ".gz")]


def _idx(path: Path, axes: int) -> np.ndarray:
    """The bytes in an IDX file, the format of MNIST, plain or gzipped: uint8 with so many axes."""
    raw = read_bytes(path)
    shape = np.frombuffer(raw, ">u4", axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape.tolist())


def _read_idx(paths: Sequence[Path], spec: Mapping[str, Any], count: int) -> _Part:
    return _idx(paths[0], 3)[:, None], {"label": _idx(paths[1], 1)}


def _read_cifar(paths: Sequence[Path], spec: Mapping[str, Any], count: int) -> _Part:
    """CIFAR's binary records: a byte for each kind of label, and an image."""
    fields: dict[str, int] = spec["labels"]
    raw = b"".join(read_bytes(path) for path in paths)
    rows = np.frombuffer(raw, np.uint8).reshape(len(paths) * count, len(fields) + 3072)
    values = {field: rows[:, column] for column, field in enumerate(fields)}
    return rows[:, len(fields) :].reshape(-1, 3, 32, 32), values


def _read_svhn(paths: Sequence[Path], spec: Mapping[str, Any], count: int) -> _Part:
    from scipy.io import loadmat

    content = loadmat(paths[0], variable_names=["X", "y"])
    labels = content["y"].reshape(-1).astype(np.int64) % 10  # zero is written as 10
    return np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1)), {"label": labels}


#: name -> format, files, folders, names of classes, mean and std, and what to do if files are missing
IMAGE_SETS: dict[str, dict[str, Any]] = read_packaged(__package__, "image_sets.yaml")
_READERS = {"idx": _read_idx, "cifar": _read_cifar, "svhn": _read_svhn}


def read_image_set(name: str, root: Path) -> RawData:
    """Read the data set ``name`` of ``IMAGE_SETS``.

    Args:
        root: folder to search before the folder of fetched data.
    Raises:
        UserError: files are missing, truncated or invalid; the message names the file and the remedy.
    """
    spec = IMAGE_SETS[name]
    fetched = usable(name)
    folders = [*(root / folder for folder in spec["folders"]), *([fetched] if fetched else [])]
    folders += map(Path, spec.get("more", ()))
    listed: dict[str, list[str]] = spec["files"]
    paths = _find(name, folders, [file for files in listed.values() for file in files])
    remaining, parts, splits = iter(paths), [], {}
    for split, files in listed.items():
        count = spec.get("records", {}).get(split, 0)
        split_paths = list(islice(remaining, len(files)))
        with user_errors(f"{split_paths[0]}: reading it as a file of {name}"):
            images, splits[split] = _READERS[spec["format"]](split_paths, spec, count)
        classes = {"label": len(spec.get("names", ())), **spec.get("labels", {})}
        for kind, labels in splits[split].items():
            if labels.shape != (len(images),) or labels.max() >= classes[kind]:
                actual, expected = f"{len(labels)} labels up to {labels.max()}", f"{len(images)} of 0 … "
                raise UserError(f"{split_paths[-1]}: {actual} came; expected {expected}{classes[kind] - 1}")
        parts.append(images)
    names = spec.get("names") or _names(paths[0].with_name(spec["names_file"]), spec["labels"]["label"])
    mean, std = tuple(spec["mean"]), tuple(spec["std"])
    return _raw(np.concatenate(parts), splits, names, source=spec["source"], mean=mean, std=std)


def _names(path: Path, count: int) -> list[str]:
    """The names of ``count`` classes, one a line; their numbers if there is no such file."""
    names = read_text(path).split() if path.exists() else list(map(str, range(count)))
    if len(set(names)) != count:
        raise UserError(f"{path}: expected the names of {count} classes; without the file they are called by number")
    return names


# Folders

FOLDER_ARGS = ("size", "channels")
_SPLIT_NAMES = {TRAIN: TRAIN, "val": VALIDATION, "valid": VALIDATION, VALIDATION: VALIDATION, TEST: TEST}


def read_folder(folder: Path, args: Mapping[str, Any]) -> RawData:
    """Read the images below ``folder``, which has one subfolder per class, sorted by name.

    Args:
        args: ``size``, to which images of different sizes are resized (``[height, width]`` or a number for both);
            ``channels``, 1 or 3; by default 1 if all images are gray.
    Raises:
        UserError: no class folders, a class without training images, images of different sizes, or an unreadable
            image; the message names the file.
    """
    size, channels = args.get("size"), args.get("channels")
    size = (size, size) if isinstance(size, int) else size
    listed, skipped = _listing(folder)
    names = sorted(listed[TRAIN])
    if len(names) < 2:
        raise UserError(
            f"{folder}: folders with images: {', '.join(names) or 'none'}; expected one for each class, or train/ and "
            f"test/ with one for each class in them. For tables, give a file's name, or a pattern: '{folder}/*.csv'"
        )
    files: list[Path] = []
    splits: dict[str, dict[str, np.ndarray]] = {}
    for split, classes in listed.items():
        for kind in classes:
            if kind not in names:
                raise UserError(f"{folder}: class {kind!r} of {split} does not occur in training{nearest(kind, names)}")
        by_class = [classes.get(kind, []) for kind in names]
        files += [path for paths in by_class for path in paths]
        splits[split] = {"label": np.repeat(np.arange(len(names)), list(map(len, by_class)))}
    images, notes = _decode(files, size, channels)
    if notes:
        say_once(f"{folder}: {notes}")
    middle, source = (0.5,) * images.shape[1], f"the user's images in {folder.name}"
    return _raw(images, splits, names, source=source, skipped=skipped, mean=middle, std=middle)


def _listing(folder: Path) -> tuple[dict[str, dict[str, list[Path]]], dict[str, int]]:
    """Split → class → files, and the number of files left out. Without a folder ``train``, all is training data."""
    skipped: dict[str, int] = {}

    def classes(parent: Path) -> dict[str, list[Path]]:
        kinds = sorted(p for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
        files = {kind.name: [path for path in sorted(kind.iterdir()) if _is_image(path)] for kind in kinds}
        if 0 < len(empty := [name for name, paths in files.items() if not paths]) < len(files):
            say_once(f"{parent}: no image is in the folder of a class: {', '.join(empty)}; it is left out")
        return {name: paths for name, paths in files.items() if paths}

    with user_errors(f"{folder}: listing it"):
        splits = {}
        for name, split in _SPLIT_NAMES.items() if (folder / TRAIN).is_dir() else [(".", TRAIN)]:
            if (folder / name).is_dir() and split in splits:
                raise UserError(f"{folder}: has several folders of {split} data, {name} among them; keep one")
            if (folder / name).is_dir():
                splits[split] = classes(folder / name)
        listed = {path for by_class in splits.values() for paths in by_class.values() for path in paths}
        folders = {path.parent for path in listed}
        for path in folder.rglob("*"):
            if path in listed or not path.is_file():
                continue
            if _is_image(path):
                count_skipped(skipped, "in no folder of a class", 1)
            elif path.parent in folders:
                count_skipped(skipped, "not an image, by its name", 1)
        return splits, skipped


def _is_image(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".") and path.is_file()


def _decode(files: list[Path], size: tuple[int, int] | None, channels: int | None) -> tuple[np.ndarray, str]:
    """uint8 ``(n, channels, height, width)``, turned as viewers show them, and notes on content that was not read.

    They are decoded in threads, as the decoders release the GIL. Gray values of 16 bits are cut to the upper 8 of
    the bits that the largest value of all files needs, since files of 16 bits often hold 10 or 12.
    """
    from PIL import Image, ImageOps

    def read(path: Path) -> tuple[np.ndarray, list[str]]:
        refuse_pointer(path)
        with user_errors(f"{path}: reading it as an image"), Image.open(path) as image:
            deep = image.mode.startswith("I;16") or image.mode == "I" and image.format == "PNG"
            if image.mode in ("I", "F") and not deep:
                raise UserError(f"{path}: its pixels are numbers of 32 bits, of unknown range; save 8 or 16 bits")
            lost = ["several frames, of which the first is read"] * (getattr(image, "n_frames", 1) > 1)
            lost += ["transparency, which is not read"] * ("A" in image.mode or "transparency" in image.info)
            upright = ImageOps.exif_transpose(image)
            gray = upright.mode in ("1", "L", "LA")
            mode = "I" if deep else "L" if channels == 1 or channels is None and gray else "RGB"
            converted = upright if upright.mode == mode else upright.convert(mode)
            if size is not None and converted.size != size[::-1]:
                converted = converted.resize(size[::-1], Image.Resampling.BILINEAR)
            return np.asarray(converted), lost

    with ThreadPoolExecutor(max_workers=min(8, 2 * (os.cpu_count() or 1))) as pool:
        decoded, lost = zip(*(result for _, result in zip(steps(files, "reading images"), pool.map(read, files))))
    shape = decoded[0].shape[:2]
    for path, image in zip(files, decoded):
        if image.shape[:2] != shape:
            raise UserError(
                f"{path}: is {image.shape[0]} × {image.shape[1]}, {files[0].name} is {shape[0]} × "
                f"{shape[1]}; set a common size: data.args [{{size: {shape[0]}}}]"
            )
    depth = channels or (3 if any(image.ndim == 3 for image in decoded) else 1)
    bits = int(max((image.max() for image in decoded if image.dtype != np.uint8), default=0)).bit_length()
    images = np.empty((len(decoded), depth, *shape), dtype=np.uint8)
    for row, image in zip(images, decoded):
        eight = image if image.dtype == np.uint8 else image >> max(bits - 8, 0)
        row[:] = eight if image.ndim == 2 else eight.transpose(2, 0, 1)
    counts = Counter(reason for reasons in lost for reason in reasons)
    notes = [f"{count} files have {reason}" for reason, count in counts.items()]
    notes += [f"gray values of {bits} bits are read as their upper 8"] * (bits > 8)
    return images, "; ".join(notes)
