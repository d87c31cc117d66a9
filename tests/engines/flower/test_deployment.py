"""The federation of docs/tutorials/three_sites.md, by the page's commands: TLS, registered nodes, what may fail."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import fs_lowrank
from fs_lowrank.runs.checkpoint import saved_rounds
from tests.cases import lives

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(1500)]
#: seconds for which a test waits for one thing; on a busy machine a process takes half a minute to start
LONGEST = 400.0

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tutorials" / "three_sites.md").read_text(encoding="utf-8")
#: the page's commands, block by block
SITES, CERTIFICATES, SUPERLINK, CONNECTION, OF_SITES, RUN, RESUME = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
PYTHON, YAML = r"^```python\n(.*?)^```$", r"^```yaml\n# (\S+)\n(.*?)^```$"
#: nodes that take their part of the data that the server names
NODES = re.sub(r' cfg="site_\d.yaml" own-data=true', "", OF_SITES)


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

    def do(self, block):
        """Run a block; returns what was printed since it began."""
        for written, free in self.ports.items():
            block = block.replace(written, free)
        before, self.blocks = len(self.printed()), self.blocks + 1
        mark = self.folder / f"done_{self.blocks}"
        self.process.stdin.write(f"set -e\n{block}\nset +e\ntouch {mark}\n".encode())
        self.process.stdin.flush()
        self.until(mark.exists, block)
        return self.printed()[before:]

    def printed(self):
        return (self.folder / "out.log").read_text(errors="replace")

    def until(self, ready, what):
        until = time.monotonic() + LONGEST
        while not ready():
            assert self.process.poll() is None, f"{what}\nended the shell:\n{self.printed()[-4000:]}"
            assert time.monotonic() < until, f"{what}\ntook more than {LONGEST} s:\n{self.printed()[-4000:]}"
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
    path = shell.folder / "run" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def superlink(shell):
    """The SuperLink is up."""
    shell.do(SUPERLINK)
    shell.until(lambda: shell.listens("8000"), SUPERLINK)
    shell.do("jobs -p > jobs")
    return int((shell.folder / "jobs").read_text().split()[-1])


def node(number):
    """The commands of the page that start a node."""
    return "\n".join(NODES.splitlines()[2 * number - 1 : 2 * number + 1])


def start(shell, nodes=3, commands=NODES):
    """The federation is up; the numbers of the processes of SuperLink and nodes."""
    shell.do(CERTIFICATES)
    link = superlink(shell)
    shell.do(CONNECTION)
    shell.do("\n".join(commands.splitlines()[: 2 * nodes + 1]))
    for port in range(8101, 8101 + nodes):
        shell.until(lambda port=port: shell.listens(str(port)), commands)
    shell.do("jobs -p > jobs")
    return link, *[int(line) for line in (shell.folder / "jobs").read_text().split()[-nodes:]]


def below(process, command):
    """The processes below ``process`` that run ``command``."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [child] if command in " ".join(child.cmdline()) else []
    return found


def kill(shell, *processes):
    """End processes at once; Flower leaves what has ended as a zombie."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    shell.until(lambda: not any(map(lives, processes)), "the end of what was killed")


def tree(process):
    """A process and all below it."""
    return *psutil.Process(process).children(recursive=True), psutil.Process(process)


def test_the_page(shell):
    """Its files and commands, in its order: each site has rows of its own, and the server sees none of them."""
    [program], [(name, config)] = (re.findall(p, PAGE, re.M | re.S) for p in (PYTHON, YAML))
    (shell.folder / name).write_text(config)
    (shell.folder / "step.py").write_text(program)
    shell.do("python step.py")
    shell.do(SITES)
    start(shell, commands=OF_SITES)
    assert "finished: " in shell.do(RUN)
    assert [r["clients"] for r in records(shell)] == [[1, 2, 3]] * 3
    assert (shell.folder / "run" / "adapter" / "adapter_model.safetensors").exists()


def test_parts_of_one_data_set(quick, shell):
    """The same commands, where each node takes its part of the server's data: the embedded engine's result."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1}
    config = configuration(quick, shell.folder, keys)
    start(shell)
    printed = shell.do(RUN)
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
    superlink(shell)
    shell.do(
        "ssh-keygen -q -t ecdsa -b 384 -N '' -f stranger; openssl req -x509 -newkey rsa:3072 -nodes -days 9 "
        '-subj "/CN=another authority" -keyout other.key -out other.crt'
    )
    command = " ".join(line.rstrip("\\ &") for line in node(1).splitlines())
    for old, new, reason in (
        ("ca.crt", "other.crt", "CERTIFICATE_VERIFY_FAILED"),
        ("node_1", "stranger", "Failed to activate SuperNode"),
    ):
        said = shell.do(f"timeout 200 {command.replace(old, new)} --max-retries 1 || echo ended")
        assert reason in said and "SuperNode ID" not in said, said


def test_what_is_killed_comes_back(quick, shell):
    """A node that has its order to train, the server's process, the SuperLink: lost is the node's update alone."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "lowrank.timeout": 300.0, "lowrank.checkpoint_freq": 1}
    configuration(quick, shell.folder, {**keys, "federate.client_num": 2, "federate.total_round_num": 3})
    link, _, second = start(shell, nodes=2)
    worked, kept = set(), shell.folder / "run" / "checkpoint"

    def trains():  # Flower starts a process for every message, and the first one asks who the node is
        worked.update(process.pid for process in below(second, "flwr-clientapp"))
        return len(worked) == 2

    shell.do("fs-lowrank flower app app --cfg run.yaml && (flwr run app ours --stream &)")
    shell.until(trains, "the second node's order to train")
    kill(shell, *tree(second))
    shell.until(lambda: 1 in saved_rounds(kept), "the first round's checkpoint")
    [server] = below(link, "flwr-serverapp")
    kill(shell, server)
    shell.do(node(2))
    shell.do(f"({RESUME.strip()} &)")
    shell.until(lambda: 2 in saved_rounds(kept), "the second round's checkpoint")
    kill(shell, *tree(link))
    superlink(shell)
    assert "finished: " in shell.do(RESUME)
    first, *others = records(shell)
    assert first["clients"] == [1] and [r["clients"] for r in others] == [[1, 2], [1, 2]]
    assert [(f["client"], f["kind"]) for f in first["failed"]] == [(2, "absent")]
    assert not any(r["failed"] for r in others)
