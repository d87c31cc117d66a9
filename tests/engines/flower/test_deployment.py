"""The federation of three of docs/flower.md, by the page's own commands: TLS, registered nodes, and what may fail."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fs_lowrank

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
#: the commands of the page's section, block by block
SECTION = PAGE.partition("## A federation of three nodes")[2].partition("### What a node may be told")[0]
CERTIFICATES, SUPERLINK, CONNECTION, NODES, RUN, RESUME = re.findall(r"^```sh\n(.*?)^```$", SECTION, re.M | re.S)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Shell:
    """A shell in a folder, to which blocks of commands are given; its ports are free ones."""

    def __init__(self, folder):
        self.folder = folder
        self.ports = {port: str(free_port()) for port in ("8000", "8101", "8102", "8103")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=(folder / "out.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.blocks = 0
        # Nothing of it outlives a test that is itself killed: then its input ends, and with it the shell.
        self.process.stdin.write(b"trap 'trap - TERM; kill 0' EXIT\n")

    def do(self, block, seconds=60.0):
        """Run a block; returns what was printed since it began."""
        for written, free in self.ports.items():
            block = block.replace(written, free)
        before, self.blocks = len(self.printed()), self.blocks + 1
        mark = self.folder / f"done_{self.blocks}"
        self.process.stdin.write(f"set -e\n{block}\nset +e\ntouch {mark}\n".encode())
        self.process.stdin.flush()
        self.until(mark.exists, seconds, block)
        return self.printed()[before:]

    def printed(self):
        return (self.folder / "out.log").read_text(errors="replace")

    def until(self, ready, seconds, what):
        until = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, f"{what}\nended the shell:\n{self.printed()[-4000:]}"
            assert time.monotonic() < until, f"{what}\ntook more than {seconds} s:\n{self.printed()[-4000:]}"
            time.sleep(0.2)

    def listens(self, port):
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", int(self.ports[port]))) == 0

    def end(self):
        os.killpg(self.process.pid, signal.SIGTERM)
        time.sleep(1.0)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "federation").mkdir()
    one = Shell(tmp_path / "federation")
    yield one
    one.end()


def configuration(quick, folder, keys):
    config = quick("unused", {"lowrank.pictures": False, **keys, "outdir": "run"})
    config.dump(folder / "run.yaml")
    return config


def records(shell):
    return [json.loads(line) for line in (shell.folder / "run" / "rounds.jsonl").read_text().splitlines()]


def start(shell):
    """The federation is up."""
    shell.do(CERTIFICATES)
    shell.do(SUPERLINK)
    shell.until(lambda: shell.listens("8000"), 60, SUPERLINK)
    shell.do(CONNECTION)
    shell.do(NODES, 120)
    for port in ("8101", "8102", "8103"):
        shell.until(lambda port=port: shell.listens(port), 60, NODES)
    shell.do("jobs -p > jobs")
    shell.jobs = [int(line) for line in (shell.folder / "jobs").read_text().split()]


def test_the_page(quick, shell):
    """Its commands, in its order; the result is that of the embedded engine."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1}
    config = configuration(quick, shell.folder, keys)
    start(shell)
    printed = shell.do(RUN, 500)
    assert "finished: " in printed, printed
    local = fs_lowrank.run(quick("local", keys))
    history = records(shell)
    assert [r["clients"] for r in history] == [[1, 2, 3]] * config.federate.total_round_num
    assert history[-1]["loss"] == pytest.approx(local.history[-1]["loss"], abs=1e-5)
    from safetensors.torch import load_file

    kind = "model" if local.base_changed else "adapter"
    [ours], [theirs] = (sorted((f / kind).glob("*.safetensors")) for f in (local.outdir, shell.folder / "run"))
    ours, theirs = load_file(ours), load_file(theirs)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    print(json.dumps([r["seconds"] for r in history]))


def test_who_is_not_let_in(shell):
    """A SuperLink whose certificate the node's authority did not sign, and a node whose key nobody registered."""
    shell.do(CERTIFICATES)
    shell.do(SUPERLINK)
    shell.until(lambda: shell.listens("8000"), 60, SUPERLINK)
    shell.do(
        "ssh-keygen -q -t ecdsa -b 384 -N '' -f stranger; openssl req -x509 -newkey rsa:3072 -nodes -days 9 "
        '-subj "/CN=another authority" -keyout other.key -out other.crt'
    )
    node = " ".join(line.rstrip("\\ &") for line in NODES.splitlines()[1:3])
    for old, new, reason in (
        ("ca.crt", "other.crt", "CERTIFICATE_VERIFY_FAILED"),
        ("node_1", "stranger", "Failed to activate SuperNode"),
    ):
        said = shell.do(f"timeout 60 {node.replace(old, new)} --max-retries 1 || echo ended", 90)
        assert reason in said and "SuperNode ID" not in said, said


def test_a_node_and_the_superlink_are_killed(quick, shell):
    """The round goes on without the node, and the run with another SuperLink; the node that is back is counted again.

    The third node of the page is one too many here, and is told so.
    """
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.client_num": 2, "lowrank.timeout": 200.0}
    configuration(quick, shell.folder, keys)
    start(shell)
    run = shell.folder / "run" / "rounds.jsonl"
    shell.do("fs-lowrank flower app app --cfg run.yaml && (flwr run app ours --stream &)")
    shell.until(run.exists, 240, "the start of the run")
    shell.until(lambda: list(shell.folder.glob("memory_2/run_*/client_2/*")), 240, "the second client's training")
    superlink, _, second, _ = shell.jobs
    os.kill(second, signal.SIGKILL)
    shell.until(lambda: records(shell), 300, "the first round")
    os.kill(superlink, signal.SIGKILL)
    shell.until(lambda: not shell.listens("8000"), 30, "the end of the SuperLink")
    shell.do(SUPERLINK)
    shell.until(lambda: shell.listens("8000"), 60, SUPERLINK)
    shell.do("\n".join(NODES.splitlines()[3:5]))
    assert "finished: " in shell.do(RESUME, 400)
    first, second = records(shell)
    assert 1 in first["clients"] and second["clients"] == [1, 2]
    assert all(f["client"] == 2 and f["kind"] in ("absent", "failed") for f in first["failed"])
    assert "partition-id = 2: expected 0 to 1" in shell.printed()
