"""The Hugging Face hub: asked once, with a limit, whether it answers, before a library waits for it many times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import requests

from fs_lowrank.data.fetch.attempts import reason_of
from fs_lowrank.errors import say_once

#: the longest wait for the first answer of the hub
HUB_SECONDS = 10.0


@cache
def _failure(endpoint: str) -> str:
    """Why ``endpoint`` cannot be used; empty if it answers."""
    say_once(f"asking {endpoint} for what is not on this machine; waiting at most {HUB_SECONDS:g} s")
    try:
        requests.head(endpoint, timeout=HUB_SECONDS, allow_redirects=False)
    except requests.RequestException as error:
        return reason_of(error)
    return ""


@contextlib.contextmanager
def hub() -> Iterator[None]:
    """A context for loading from the hub through transformers or datasets.

    A hub that does not answer within ``HUB_SECONDS`` is reported, and only its cache is used in the context. Without
    this, the libraries repeat their requests for every file, which takes minutes.
    """
    import datasets
    from huggingface_hub import constants

    failure = "" if constants.HF_HUB_OFFLINE else _failure(constants.ENDPOINT)
    if not failure:
        yield
        return
    say_once(
        f"{constants.ENDPOINT} does not answer ({failure}); only what is in the cache of the hub (HF_HOME) is used"
    )
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
