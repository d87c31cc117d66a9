"""One seed per run: every use of randomness derives its own stream from it."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for ``purpose``, independent of every other purpose and of the order of use.

    Because no stream is shared, a run that resumes at round ``t`` draws the same numbers as an uninterrupted one.
    """
    text = ":".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
