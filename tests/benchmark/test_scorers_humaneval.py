"""HumanEval's child process: correct code passes; wrong code, and code that exceeds limits, does not."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import scorers
from benchmark.scorers import humaneval

REAL = Path(os.environ.get("FS_LOWRANK_EVAL_DATA", "no such folder"))
PROBLEM = {
    "task_id": "x/0",
    "prompt": "def double(x):\n",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}


def outcome(body, **options):
    return humaneval.run(PROBLEM, "".join(f"    {line}\n" for line in body.split("\n")), **options)[0]


def test_the_canonical_solution_passes_and_a_wrong_one_does_not():
    result, guard = humaneval.run(PROBLEM, PROBLEM["canonical_solution"])
    assert result == "passed" and "audit hook" in guard
    assert outcome("return x + 2") == "AssertionError"
    assert outcome("return (") == "SyntaxError"


def test_an_endless_loop_is_ended():
    assert outcome("while True: pass", timeout=1) == "timed out"
    assert outcome("import time\ntime.sleep(60)", timeout=1) == "timed out"


def test_memory_is_limited():
    assert outcome("hog = []\nwhile True: hog.append(bytearray(1 << 24))", memory_mb=512) == "MemoryError"


@pytest.mark.parametrize(
    "body",
    [
        "import socket\nsocket.socket()",
        "import _socket\n_socket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.kill(os.getppid(), 0)",
        "open('left_behind', 'w')",
        "import os\nos.open('left_behind', os.O_CREAT | os.O_WRONLY)",
        "import shutil\nshutil.rmtree('.')",
        "import os\nos.unlink(__import__('sys').executable)",
        "import os\nos.utime(__import__('sys').executable)",
        "import os\nos.setxattr(__import__('sys').executable, 'user.x', b'1')",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "import ctypes\nctypes.CDLL(None)",
    ],
)
def test_the_network_processes_and_files_are_out_of_reach(body):
    assert outcome(f"{body}\nreturn 2 * x") in ("PermissionError", "URLError")


@pytest.mark.parametrize(
    "body, expected",
    [
        ("import os\nos._exit(0)", "died"),
        ("raise SystemExit(0)", "SystemExit"),
        ("print('passed')\nreturn x", "AssertionError"),
        ("import os, sys\nsys.stdout.write('audit hook\\npassed\\n')\nos._exit(0)", "died"),
    ],
)
def test_ending_early_is_not_passing(body, expected):
    assert outcome(body) == expected


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="the kernel's filter is for Linux on x86-64"
)
def test_the_kernel_refuses_by_itself(tmp_path):
    """Without the audit hook, which native code could get round."""
    tries = """
import importlib.util, os, socket, subprocess, sys, threading
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
keep = open("keep", "w")
if not child.filter_calls():
    raise SystemExit("this kernel has no filter")
def refused(call, *args):
    try:
        call(*args)
    except PermissionError:
        return True
    return False
print([refused(*t) for t in [
    (socket.socket,), (socket.socket, socket.AF_UNIX), (os.fork,), (subprocess.run, ["true"]),
    (os.kill, os.getpid(), 0), (os.execv, sys.executable, ["python"]),
    (open, "new", "w"), (open, "keep", "a"), (os.remove, "keep"), (os.rename, "keep", "kept"), (os.mkdir, "d"),
    (os.truncate, "keep", 0), (os.symlink, "keep", "s"), (os.chmod, "keep", 0),
    (os.utime, "keep"), (os.setxattr, "keep", "user.x", b"1")]])
thread = threading.Thread(target=lambda: print("a thread runs"))
thread.start(); thread.join()
print(len(open(sys.argv[1]).read()) > 0)
"""
    ran = subprocess.run(
        [sys.executable, "-c", tries, humaneval.__file__.replace("humaneval.py", "child.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "no filter" in ran.stderr:
        pytest.skip("this kernel has no seccomp filter")
    assert ran.stdout.splitlines() == [str([True] * 16), "a thread runs", "True"], ran.stderr
    assert os.listdir(tmp_path) == ["keep"]


def test_pass_at_1_of_a_tiny_model(tiny_causal, tmp_path):
    """A model that writes no code passes nothing; the outcomes add up."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "humaneval").mkdir()
    with gzip.open(tmp_path / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({**PROBLEM, "task_id": f"x/{i}"}) + "\n" for i in range(3))
    spec = {"scorer": "humaneval", "run_unsafe_code": True, "limit": 2, "max_new_tokens": 4}
    result = scorers.score(
        AutoModelForCausalLM.from_pretrained(tiny_causal), AutoTokenizer.from_pretrained(tiny_causal), spec, tmp_path
    )["humaneval"]
    assert result["pass@1"] == 0.0 and result["n"] == 2 and sum(result["outcomes"].values()) == 2
    assert "at most 4 new tokens" in result["decoding"] and "audit hook" in result["guard"]


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "humaneval").mkdir()
    path = tmp_path / "humaneval" / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(PROBLEM).encode())[:-12])
    with pytest.raises(scorers.UserError, match="is damaged"):
        scorers.check({"scorer": "humaneval", "run_unsafe_code": True}, tmp_path)
    path.write_bytes(gzip.compress(b'{"prompt": ""}\n'))
    with pytest.raises(scorers.UserError, match="problem 0 should have entry_point, prompt"):
        scorers.check({"scorer": "humaneval", "run_unsafe_code": True}, tmp_path)


def test_real_canonical_solutions_pass():
    path = REAL / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip("HumanEval is not below $FS_LOWRANK_EVAL_DATA")
    for problem in humaneval.problems(REAL)[::20]:
        assert humaneval.run(problem, problem["canonical_solution"], timeout=30)[0] == "passed", problem["task_id"]
        assert humaneval.run(problem, "    return None\n", timeout=30)[0] != "passed", problem["task_id"]
