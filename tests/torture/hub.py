"""Slow hubs: a local server that never answers, or answers wrongly, in place of a hub or a package index."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import yaml

from .bench import Bench, Outcome
from .tiny import settings

SHARD = 5

_OK = (
    b'HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\nETag: "abc"\r\nX-Repo-Commit: '
    + b"a" * 40
    + b"\r\n\r\n"
)
_JSON, _HTML = b"application/json", b"text/html"
#: behaviours of the server after a request, by name: bytes that it sends at once, bytes that it sends one per second,
#: and whether it then waits for ever or closes the connection
ANSWERS: dict[str, tuple[bytes, bytes, bool]] = {
    "never answers": (b"", b"", False),
    "closes at once": (b"", b"", True),
    "stops inside the status line": (b"HTTP/1.1 2", b"", False),
    "stops after the headers": (_OK % (_JSON, 1000), b"", False),
    "sends a byte a second": (_OK % (_JSON, 10**6), b"{" * 10**4, False),
    "closes inside the body": (_OK % (_JSON, 1000) + b'{"a": ', b"", True),
    "answers 500": (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", b"", True),
    "answers 503, later": (b"HTTP/1.1 503 No\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n", b"", True),
    "answers 429": (b"HTTP/1.1 429 Slow\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n", b"", True),
    "answers 401": (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", b"", True),
    "answers 404": (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", b"", True),
    "redirects to itself": (b"HTTP/1.1 302 On\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n", b"", True),
    "answers with HTML": (_OK % (_HTML, 20) + b"<html>log in</html>\n", b"", True),
    "answers with null": (_OK % (_JSON, 4) + b"null", b"", True),
    "answers with noise": (b"\x00\xff" * 500, b"", True),
    "sends headers without end": (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100_000, b"", False),
}
ASKS = ("model", "data", "fetch")


@contextlib.contextmanager
def server(answer: str) -> Iterator[str]:
    """The address of a server with one behaviour."""
    first, slowly, closes = ANSWERS[answer]
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    open_: list[socket.socket] = []
    stopped = threading.Event()

    def talk(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.recv(65536)
            peer.sendall(first)
            for byte in slowly:
                if stopped.wait(1.0):
                    return
                peer.sendall(bytes([byte]))
            if closes:
                peer.close()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                open_.append(peer)
                threading.Thread(target=talk, args=(peer,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stopped.set()
        for each in (listener, *open_):
            with contextlib.suppress(OSError):
                each.close()


def case(seed: int, bench: Bench) -> list[Outcome]:
    answer, ask = list(ANSWERS)[seed % len(ANSWERS)], ASKS[seed // len(ANSWERS) % len(ASKS)]
    if ANSWERS[answer][1] and ask == "fetch":  # a slow download goes on, and shows its progress
        ask = "model"
    what = f"the {'package index' if ask == 'fetch' else 'hub'} {answer}; asked for: {ask}"
    with bench.place() as outdir, server(answer) as address:
        tree = settings(bench.inputs, outdir, "rolora, two of three")
        if ask == "model":
            tree["model"]["type"] = "someone/model@transformers"
        elif ask == "data":
            tree["data"]["type"] = "rte@huggingface_datasets"
        file, home = outdir.with_name("config.yaml"), outdir.with_name("home")
        file.write_text(yaml.safe_dump(tree))
        argv = ["fetch", "minilm"] if ask == "fetch" else ["run", "--cfg", str(file)]
        env = {
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "FS_LOWRANK_HOME": str(home),
            "PIP_INDEX_URL": address,
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        started = time.monotonic()
        ended = bench.command(argv, outdir.with_name("printed.out"), env=env)
        seconds = time.monotonic() - started
        if ended.fault:
            return [Outcome("failed", what, ended.fault, ask)]
        if ended.code == 2 and not any(word in ended.err for word in ("someone/model", "rte", "minilm")):
            return [Outcome("failed", what, f"refused for something else: {ended.err}", ask)]
        if ended.code != 2:
            return [Outcome("failed", what, f"exit code {ended.code}: {ended.err or ended.out[-300:]}", ask)]
        return [Outcome("refused", what, f"after {seconds:.0f} s: {ended.err}", ask)]
