"""The Hugging Face hub: asked once, with a limit, whether it answers, before a library waits for it many times.

What a library then loads from it is announced if it takes long, and given up if almost nothing comes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import requests

from fs_lowrank.data.fetch.attempts import WORD_SECONDS, TooSlow, reason_of, watched
from fs_lowrank.errors import say_once

logger = logging.getLogger("fs_lowrank")

#: the longest wait for the first answer of the hub
HUB_SECONDS = 5.0
#: an answer of which fewer bytes than ``LEAST_BYTES`` come in so many seconds is given up
LEAST_BYTES, LEAST_SECONDS = 1 << 16, 30.0
#: the longest wait for a connection, and for a part of an answer
PART_SECONDS = 10.0
#: by address, why a hub that answers was given up; nothing more is asked of it
_given_up: dict[str, str] = {}


@cache
def _failure(endpoint: str) -> str:
    """Why ``endpoint`` cannot be asked; empty if it answers."""
    try:
        watched(
            endpoint,
            lambda: requests.head(endpoint, timeout=HUB_SECONDS, allow_redirects=False),
            2 * HUB_SECONDS,
            logger.info,
        )
    except TooSlow:
        return f"no whole answer came within {2 * HUB_SECONDS:g} s"
    except requests.RequestException as error:
        late = isinstance(error, requests.Timeout)
        return f"nothing came within {HUB_SECONDS:g} s" if late else reason_of(error)
    return ""


def silence() -> str:
    """Why something that is not in the hub's cache cannot be had, as a part of a sentence; empty if the hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off (HF_HUB_OFFLINE), and it is not in its cache (HF_HOME)"
    failure = _given_up.get(constants.ENDPOINT) or _failure(constants.ENDPOINT)
    return f"{constants.ENDPOINT} does not answer ({failure}), and it is not in its cache (HF_HOME)" if failure else ""


@contextlib.contextmanager
def hub() -> Iterator[None]:
    """A context for loading from the hub through transformers or datasets.

    It is asked once, for ``HUB_SECONDS``; if it does not answer, only its cache is used in the context. Without this,
    the libraries repeat their requests for every file, which takes minutes. If it answers, an answer that takes longer
    than ``WORD_SECONDS`` is announced. All files come as plain answers to HTTP requests, so ``hf_xet`` is not used.

    Raises:
        TooSlow: fewer bytes than ``LEAST_BYTES`` came within ``LEAST_SECONDS``, in one answer or in the repeated
            requests for one; or the hub asks to come back later than that.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield
        return
    failure = _given_up.get(constants.ENDPOINT) or _failure(constants.ENDPOINT)
    if not failure:
        if constants.HF_XET_HIGH_PERFORMANCE:
            say_once("HF_XET_HIGH_PERFORMANCE has no effect: files of the hub come as plain answers, which are watched")
        xet = constants.HF_HUB_DISABLE_XET
        constants.HF_HUB_DISABLE_XET = True  # what hf_xet downloads would pass by the watch
        try:
            with _Watch(constants.ENDPOINT).watching():
                yield
        finally:
            constants.HF_HUB_DISABLE_XET = xet
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
    say_once(f"{constants.ENDPOINT} does not answer ({failure}); what is in its cache (HF_HOME) is used")


class _Watch:
    """Announces answers of the hub that take long, and ends those that trickle.

    The limit of a socket, which the hub's client sets, is for each part of an answer.
    """

    def __init__(self, endpoint: str):
        self.endpoint = endpoint
        #: by thread, since when an answer is waited for
        self.asked: dict[int, float] = {}
        #: since when no content has come to its end, however often it was asked for; None: the last one has
        self.fruitless: float | None = None
        self.failure: TooSlow | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        from huggingface_hub import get_session

        client, ended = get_session(), threading.Event()
        before: dict[str, Any] = client.event_hooks
        client.event_hooks = {
            "request": [*before.get("request", ()), self._on_request],
            "response": [*before.get("response", ()), self._on_response],
        }
        threading.Thread(target=self._announce, args=(ended,), name="hub", daemon=True).start()
        try:
            yield
        except Exception as error:  # libraries make other errors of ours, or say that there is no network
            if self.failure is None or error is self.failure:
                raise
            raise self.failure from error
        finally:
            ended.set()
            client.event_hooks = before

    def _announce(self, ended: threading.Event) -> None:
        while not ended.wait(min(WORD_SECONDS, 1.0)):
            if any(time.monotonic() - since > WORD_SECONDS for since in [*self.asked.values()]):
                logger.info(
                    "waiting for %s, which is given up when less than %.0f kB come within %g s",
                    self.endpoint,
                    LEAST_BYTES / 1e3,
                    LEAST_SECONDS,
                )
                return

    def _on_request(self, request: Any) -> None:
        if self.failure is not None:
            raise self.failure  # the libraries try again, or another file
        now = time.monotonic()
        if self.fruitless is not None and now - self.fruitless > LEAST_SECONDS:
            raise self.given_up(0)
        if request.method != "HEAD":  # what has no content may be answered, and the content never come
            self.fruitless = self.fruitless or now
        # Some requests of the libraries wait for a part of an answer without a limit.
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            of: min(limits.get(of) or PART_SECONDS, PART_SECONDS) for of in ("connect", "read", "write", "pool")
        }
        self.asked[threading.get_ident()] = now

    def _on_response(self, response: Any) -> None:
        """Put a watched stream into an answer whose headers have come."""
        later = response.headers.get("Retry-After", "")
        if later.isdigit() and int(later) > LEAST_SECONDS:  # the libraries would wait
            raise self.given_up(0, f"it answers {response.status_code}, to be asked again in {int(later)} s")
        if response.status_code >= 400:  # an answer, whose content nobody may read
            self.fruitless = None
        watch, stream = self, response.stream
        base = next(kind for kind in type(stream).__mro__ if kind.__name__ == "SyncByteStream")

        class Watched(base):  # type: ignore[misc, valid-type]
            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

            def __iter__(self) -> Iterator[bytes]:
                since, come = time.monotonic(), 0
                for part in stream:
                    come += len(part)
                    if time.monotonic() - since > LEAST_SECONDS:
                        if come < LEAST_BYTES:
                            raise watch.given_up(come)
                        since, come = time.monotonic(), 0
                        watch.fruitless = since
                    yield part
                if response.request.method != "HEAD":
                    watch.fruitless = None

            def close(self) -> None:
                watch.asked.pop(threading.get_ident(), None)
                stream.close()

        response.stream = Watched()

    def given_up(self, come: int, why: str = "") -> TooSlow:
        """The error for an answer of which ``come`` bytes came in time, or that is given up for another reason."""
        _given_up[self.endpoint] = why = why or f"{come} bytes came within {LEAST_SECONDS:g} s"
        self.failure = TooSlow(
            f"{self.endpoint} is too slow: {why}; try again later, or set "
            "HF_HUB_OFFLINE=1 to use what is in its cache (HF_HOME)"
        )
        return self.failure
