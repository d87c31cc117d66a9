"""Which keys the engine honours; without Flower, so that it can be asked before anything is installed."""

from __future__ import annotations

from ...config import Config, check_engine
from ...rounds.codec import Codec, Plain, Uniform


def check(config: Config) -> None:
    """Raise ``UserError`` for keys that the engine does not honour, and report those without effect."""
    method, nbits = config.get("quantization.method"), config.get("quantization.nbits")
    wrong = []
    if method not in ("none", "uniform"):
        wrong.append(f"quantization.method = {method}: expected none or uniform")
    if method == "uniform" and nbits not in (8, 16):
        wrong.append(f"quantization.nbits = {nbits}: expected 8 or 16")
    check_engine(config, "flower", wrong)


def codec_of(config: Config) -> Codec:
    """How messages and updates are encoded: as they are, or as the framework's ``quantization`` says."""
    return Uniform(config.get("quantization.nbits")) if config.get("quantization.method") == "uniform" else Plain()
