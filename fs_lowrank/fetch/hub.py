"""The Hugging Face hub: asked once, with a limit, whether it answers, before a library waits for it many times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import cache

import requests

from fs_lowrank.errors import say_once

#: the longest wait for the first ``HUB_BYTES`` of the hub's answer
HUB_SECONDS, HUB_BYTES = 5.0, 64


def reason_of(error: BaseException) -> str:
    """The innermost message: requests wraps urllib3's error, which wraps the socket's."""
    while isinstance(inner := getattr(error, "reason", None) or (error.args and error.args[0]), BaseException):
        error = inner
    return inner if inner and isinstance(inner, str) else str(error) or type(error).__name__


@cache
def _failure(endpoint: str) -> str:
    """Why ``endpoint`` cannot be asked; empty if it answers."""
    until = time.monotonic() + HUB_SECONDS
    try:
        with requests.get(endpoint, timeout=HUB_SECONDS, allow_redirects=False, stream=True) as answer:
            # Some servers send headers, and then next to nothing.
            for _ in zip(range(HUB_BYTES), answer.iter_content(1)):
                if time.monotonic() > until:
                    return f"fewer than {HUB_BYTES} bytes came within {HUB_SECONDS:g} s"
    except requests.RequestException as error:
        late = isinstance(error, requests.Timeout)
        return f"nothing came within {HUB_SECONDS:g} s" if late else reason_of(error)
    return ""


def silence() -> str:
    """Why something that is not in the hub's cache cannot be had, as a part of a sentence; empty if the hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off (HF_HUB_OFFLINE), and it is not in its cache (HF_HOME)"
    failure = _failure(constants.ENDPOINT)
    return f"{constants.ENDPOINT} does not answer ({failure}), and it is not in its cache (HF_HOME)" if failure else ""


@contextlib.contextmanager
def hub() -> Iterator[None]:
    """A context for loading from the hub through transformers or datasets.

    It is asked once, for ``HUB_SECONDS``; if it does not answer, only its cache is used in the context. Without this,
    the libraries repeat their requests for every file, which takes minutes.
    """
    import datasets
    from huggingface_hub import constants

    failure = "" if constants.HF_HUB_OFFLINE else _failure(constants.ENDPOINT)
    if not failure:
        yield
        return
    previous = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = previous
    say_once(f"{constants.ENDPOINT} does not answer ({failure}); its cache (HF_HOME) is used")
