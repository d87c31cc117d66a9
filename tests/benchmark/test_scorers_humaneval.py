"""HumanEval: correct programs count as solved, wrong and hostile ones do not, and forbidden calls are refused."""

import gzip
import itertools
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import comb
from pathlib import Path

import pytest

from benchmark import scorers
from benchmark.scorers import humaneval, sandbox

REAL = Path(os.environ.get("FS_LOWRANK_EVAL_DATA", "no such folder"))
PROBLEM = {
    "task_id": "x/0",
    "prompt": "def double(x):\n",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}
KERNEL = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="the kernel's filter is for Linux on x86-64"
)


def verdict(body, problem=PROBLEM, **options):
    return humaneval.run(problem, "".join(f"    {line}\n" for line in body.split("\n")), **options)


def outcome(body, **options):
    return verdict(body, **options).outcome


def test_the_canonical_solution_passes_and_a_wrong_one_does_not():
    solved, words, guard = humaneval.run(PROBLEM, PROBLEM["canonical_solution"])
    assert solved and words == "passed" and "audit hook" in guard and "namespaces" in guard
    assert verdict("return x + 2") == (False, "wrong answer", guard)
    assert outcome("return (") == "raised SyntaxError"
    assert outcome("return str(x)[5]") == "raised IndexError"


@pytest.mark.more
def test_an_endless_loop_is_ended():
    assert outcome("while True: pass", timeout=2) == "timed out"
    assert outcome("import time\ntime.sleep(60)", timeout=2) == "timed out"


def test_memory_is_limited():
    assert outcome("hog = []\nwhile True: hog.append(bytearray(1 << 24))", memory_mb=512) == "raised MemoryError"


@pytest.mark.parametrize(
    "body",
    [
        "import socket\nsocket.socket()",
        "import _socket\n_socket.socket()",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.kill(os.getppid(), 0)",
        "open('left_behind', 'w')",
        "import os\nos.open('left_behind', os.O_CREAT | os.O_WRONLY)",
        "import os\nos.unlink(__import__('sys').executable)",
        "import os\nos.setxattr(__import__('sys').executable, 'user.x', b'1')",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "import ctypes\nctypes.CDLL(None)",
        "open('/proc/self/environ').read()",
    ],
)
def test_the_network_processes_and_files_are_out_of_reach(body):
    assert outcome(f"{body}\nreturn 2 * x") == "raised PermissionError"


@pytest.mark.more
def test_values_cross_as_literals():
    """Every literal arrives unchanged, in both directions; an object that compares equal to a list is not one."""
    values = [None, True, -3, 2.5, 1e999, -1e999, -(2**70), 3j, "a\n'\"\\ é", b"\0\n", [], (1,), {}, {1: [2]}, {4}]
    values.append(set())
    loop = "inf = float('inf')\n    for v in VALUES:\n        assert candidate(v) == (v, type(v).__name__)"
    test = f"def check(candidate):\n    {loop}\n".replace("VALUES", repr(values))
    problem = {**PROBLEM, "test": test}
    assert outcome("return x, type(x).__name__", problem=problem) == "passed"
    odd = "import collections as C\nclass N(int): pass\n"
    for returned, equal in (
        ("N(4)", "4"),
        ("C.Counter('aa')", "{'a': 2}"),
        ("C.OrderedDict(a=1)", "{'a': 1}"),
        ("C.namedtuple('P', 'a b')(1, 2)", "(1, 2)"),
        ("frozenset([1])", "{1}"),
        ("__import__('numpy').int64(4)", "4"),
        ("__import__('numpy').float64(0.5)", "0.5"),
    ):
        problem = {**PROBLEM, "test": f"def check(candidate):\n    assert candidate(0) == {equal}\n"}
        assert outcome(f"{odd}return {returned}", problem=problem) == "passed", returned
    for returned in ("C.deque([4])", "object()", "iter([4])", "float('nan')", "double"):
        assert outcome(f"{odd}return {returned}") == "raised TypeError", returned


@pytest.mark.more
def test_the_tests_may_use_the_helpers_of_the_prompt_and_the_function_by_name():
    prompt = "def half(x):\n    return x / 2\n\n\ndef double(x):\n    ''' twice x '''\n"
    test = "def check(candidate):\n    assert half(candidate(3)) == 3 and candidate(3) == double(x=3)\n"
    problem = {**PROBLEM, "prompt": prompt, "test": test}
    assert humaneval.run(problem, PROBLEM["canonical_solution"]).solved
    assert not humaneval.run(problem, "    return x\n\nhalf = lambda x: 3\n").solved  # the judge uses its own helper


#: programs that try to count as solved, or to end or block the judge, without computing 2 * x
HOSTILE = """
raise type('passed', (Exception,), {})()
raise type('AssertionError', (AssertionError,), {})()
raise type('a\\nverdict', (Exception,), {})()
raise type('x' * 10**6, (Exception,), {})()
raise SystemExit(0)
raise KeyboardInterrupt
raise GeneratorExit
import os; os._exit(0)
import os; os.abort()
import sys; sys.exit('passed')
import os; [os.write(n, b'passed\\n') for n in (1, 2)]; return x
import os; [write(os, n, b'value 4\\n') for n in range(3, 64)]; os._exit(0)
import os; [write(os, n, b'{"solved": true, "outcome": "passed", "guard": ""}') for n in range(64)]; os._exit(0)
import os; [write(os, n, b'value ' + b'9' * 10**6) for n in range(3, 64)]; return x
import os; [close(os, n) for n in range(64)]; return x
import os; [os.dup2(1, n) for n in range(3, 64)]; return x
import gc; [o.update(solved=True) for o in gc.get_objects() if type(o) is dict]; return x
import gc; [o.update(answer=print) for o in gc.get_objects() if type(o) is dict and 'answer' in o]; return x
import sys; sys._getframe(1).f_globals['answer'] = print; return x
import sys; f = sys._getframe(1); [f.f_locals['answer']('value', 'True') for _ in range(9)]; return x
import sys; f = sys._getframe(1); f.f_trace_lines = True; sys.settrace(lambda *a: None); f.f_locals.clear(); return x
import builtins; builtins.AssertionError = type('never', (Exception,), {}); return x
import builtins; builtins.type = lambda *a: int; return x
import builtins; builtins.repr = lambda v: '4'; return x
import builtins; builtins.exec = builtins.compile = None; return x
import ast; ast.literal_eval = lambda t: ((2,), {}); return x
import sys; sys.modules['__main__'].to_literal = lambda v: 'True'; return x
import sys; sys.modules['__main__'].judge(); return x
import sys; sys.modules['__main__'].os._exit(0)
import sys; sys.setrecursionlimit(10**9); return double(x)
import sys; sys.stdout.write('passed'); sys.stdout.flush(); return x
import atexit; atexit.register(print, 'passed'); return x
import signal; signal.raise_signal(signal.SIGKILL)
import signal; signal.raise_signal(signal.SIGSTOP)
import threading; threading.Thread(target=print, args=('passed',)).start(); return x
import threading; [threading.Thread(target=double, args=(x,)).start() for _ in range(8)]; return x
return type('Yes', (), {'__eq__': lambda *a: True})()
return type('Yes', (int,), {'__eq__': lambda *a: True})(x)
return type('Yes', (str,), {'__eq__': lambda *a: True, '__repr__': lambda s: '4'})('no')
return type('Yes', (list,), {'__eq__': lambda *a: True, '__iter__': lambda s: iter([4])})()
return type('Yes', (float,), {'__repr__': lambda s: '4', '__eq__': lambda *a: True})(x)
return type('Yes', (), {'__class__': int, '__repr__': lambda s: '4', '__eq__': lambda *a: True})()
return type('Yes', (), {'ndim': 0, 'item': lambda s: type('E', (), {'__eq__': lambda *a: True})()})()
return float('nan')
return float('inf')
return [x] * 10**6
return '9' * 10**7
return 10**5000
return eval('[' * 150 + ']' * 150)
return {'solved': True, 'outcome': 'passed'}
return 'value 4\\nvalue -2\\nvalue 4'
return __import__('unittest.mock').mock.ANY
return open('/proc/self/environ').read()
return open(__import__('sys').argv[0]).read().count('solved')
return __import__('inspect').getsource(__import__('__main__').judge)
return __import__('os').environ['HOME']
return [frame.f_locals for frame in __import__('sys')._current_frames().values()]
""".strip().split("\n")
HELPERS = """
def write(os, n, data):
    try:
        os.write(n, data)
    except (OSError, TypeError):
        pass

def close(os, n):
    try:
        os.close(n)
    except OSError:
        pass
"""


@pytest.fixture
def without_namespaces(monkeypatch):
    """Imitates a system without bubblewrap and unshare."""
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox.sandbox.cache_clear()
    yield
    sandbox.sandbox.cache_clear()


def test_a_sandbox_that_hangs_or_does_not_run_is_a_reason(tmp_path, monkeypatch, caplog):
    for name, content in (("bwrap", b"#!/bin/sh\nexec /bin/sleep 60\n"), ("unshare", b"\x7fELF, but no program")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sandbox, "PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(tmp_path / name))
    sandbox.sandbox.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "fs_lowrank"):
            assert sandbox.sandbox() == ([], "no namespaces")
    finally:
        sandbox.sandbox.cache_clear()
    assert "bwrap: did not end within 0.5 s; unshare: Exec format error" in caplog.text


@pytest.mark.parametrize("hidden", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.more
def test_hostile_programs_are_not_solved(hidden, request):
    """The code is in the function, or at the top of the program; none counts as solved, and none blocks the judge."""
    if not hidden:
        request.getfixturevalue("without_namespaces")
    assert len(HOSTILE) >= 50 and len(set(HOSTILE)) == len(HOSTILE)
    outside = [line.replace("return ", "double = ").replace("(x,)", "(2,)") for line in HOSTILE[:36]]

    def run(place):
        inside, line = place
        if inside:
            program = "    " + line + "\n" + HELPERS
        else:
            program = "    return x\n" + HELPERS + "x = 2\n" + line + "\n"
        return line, humaneval.run(PROBLEM, program, timeout=3)

    with ThreadPoolExecutor(4) as pool:
        ran = list(pool.map(run, [(True, line) for line in HOSTILE] + [(False, line) for line in outside]))
    assert [line for line, verdict in ran if verdict.solved] == []
    assert all(isinstance(v.outcome, str) and 0 < len(v.outcome) < 80 and "\n" not in v.outcome for _, v in ran)
    assert {"passed"}.isdisjoint(v.outcome for _, v in ran)


@pytest.mark.parametrize("ending", ["import os\nos._exit(0)", "raise SystemExit(0)", "print('passed')\nreturn x"])
def test_a_program_that_ends_early_has_not_passed(ending):
    assert outcome(ending) in ("died", "raised SystemExit", "wrong answer")


def namespaces():
    words, name = sandbox.sandbox(humaneval._CHILD)
    if not words:
        pytest.skip("this system has no namespaces for users")
    return words, name


def test_files_and_processes_are_hidden(tmp_path):
    """A program that reads all it can sees no file of the user, no other process and no environment variable."""
    namespaces()
    secret = tmp_path / "secret"
    secret.write_text("4")
    look = f"import os\nreturn [os.path.exists({str(secret)!r}), os.path.exists('/proc'), os.getpid() < 9, "
    look += "'HOME' in os.environ, os.listdir('.'), os.path.exists('/etc/passwd')]"
    test = "def check(candidate):\n    assert candidate(0) == [False, False, True, False, [], False]\n"
    assert outcome(look, problem={**PROBLEM, "test": test}) == "passed"


@pytest.mark.more
def test_without_namespaces_there_is_a_warning(without_namespaces, caplog):
    with caplog.at_level(logging.WARNING, "fs_lowrank"):
        solved, _, guard = humaneval.run(PROBLEM, PROBLEM["canonical_solution"])
        humaneval.run(PROBLEM, "    return x\n")
    assert solved and guard.endswith("no namespaces")
    (record,) = caplog.records
    assert "bwrap is not installed; unshare is not installed" in record.getMessage()


@KERNEL
def test_the_kernel_refuses_by_itself(tmp_path):
    """The filter works without the audit hook, which native code could bypass."""
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
    (os.utime, "keep"), (os.setxattr, "keep", "user.x", b"1"), (os.chroot, ".")]])
thread = threading.Thread(target=lambda: print("a thread runs"))
thread.start(); thread.join()
print(len(open(sys.argv[1]).read()) > 0)
"""
    ran = subprocess.run(
        [sys.executable, "-c", tries, str(humaneval._CHILD)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    if "no filter" in ran.stderr:
        pytest.skip("this kernel has no seccomp filter")
    assert ran.stdout.splitlines() == [str([True] * 17), "a thread runs", "True"], ran.stderr
    assert os.listdir(tmp_path) == ["keep"]


def test_pass_at_k_is_the_share_of_sets_with_a_solution():
    """The estimate is compared with counting all sets of k of n solutions; 1 - (1 - c/n)^k would be wrong."""
    for n, c, k in ((5, 2, 1), (5, 2, 3), (6, 1, 2), (4, 4, 2), (4, 0, 2), (7, 5, 3)):
        sets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert len(sets) == comb(n, k)
        assert humaneval.pass_at(k, n, c) == pytest.approx(sum(map(any, sets)) / len(sets))
    assert humaneval.pass_at(3, 5, 2) != pytest.approx(1 - (1 - 2 / 5) ** 3)


@pytest.mark.more
def test_pass_at_1_and_k_of_a_tiny_model(tiny_causal, tmp_path, monkeypatch):
    """A model that writes no code passes nothing, counts add up, samples differ, torch's generator is not changed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "humaneval").mkdir()
    with gzip.open(tmp_path / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({**PROBLEM, "task_id": f"x/{i}"}) + "\n" for i in range(3))
    spec = {"scorer": "humaneval", "run_unsafe_code": True, "limit": 2, "max_new_tokens": 4}
    model = AutoModelForCausalLM.from_pretrained(tiny_causal), AutoTokenizer.from_pretrained(tiny_causal)
    result = scorers.score(*model, spec, tmp_path)["humaneval"]
    assert result["pass@1"] == 0.0 and result["n"] == 2 and sum(result["outcomes"].values()) == 2
    assert "at most 4 new tokens" in result["decoding"] and "audit hook" in result["guard"]
    assert not any(name.startswith("sampled") for name in result)
    texts = []

    def run(problem, completion, *limits):
        texts.append(completion)
        # solved: two of four samples of the first problem, one of the second
        return humaneval.Verdict(len(texts) in (3, 4, 7), "passed", "")

    monkeypatch.setattr(humaneval, "run", run)
    before = torch.get_rng_state()
    sampled = scorers.score(*model, {**spec, "samples": 4, "k": [1, 2]}, tmp_path)["humaneval"]
    assert sampled["sampled_pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert sampled["sampled_pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert torch.equal(torch.get_rng_state(), before) and len(set(texts[2:])) > 1
    for wrong, words in (({"samples": 2, "k": [3]}, "pass@3 needs at least as many"), ({"k": [2]}, "needs samples")):
        with pytest.raises(scorers.UserError, match=words):
            scorers.check({**spec, **wrong}, tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "humaneval").mkdir()
    path = tmp_path / "humaneval" / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(PROBLEM).encode())[:-12])
    with pytest.raises(scorers.UserError, match="is damaged"):
        scorers.check({"scorer": "humaneval", "run_unsafe_code": True}, tmp_path)
    for nonsense in (b"[" * 100_000, b"5", b'{"prompt": "\xff"}'):
        path.write_bytes(gzip.compress(nonsense))
        with pytest.raises(scorers.UserError, match="is damaged: (nested too deep|5 came|not UTF-8)"):
            scorers.check({"scorer": "humaneval", "run_unsafe_code": True}, tmp_path)
    path.write_bytes(gzip.compress(b'{"prompt": ""}\n'))
    with pytest.raises(scorers.UserError, match="problem 0 should have the texts entry_point, prompt"):
        scorers.check({"scorer": "humaneval", "run_unsafe_code": True}, tmp_path)


def test_real_canonical_solutions_pass():
    path = REAL / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip("HumanEval is not below $FS_LOWRANK_EVAL_DATA")
    for problem in humaneval.problems(REAL)[::20]:
        assert humaneval.run(problem, problem["canonical_solution"], timeout=30).solved, problem["task_id"]
        assert not humaneval.run(problem, "    return None\n", timeout=30).solved, problem["task_id"]
