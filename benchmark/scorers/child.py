"""The two processes that decide whether a program written by a model solves a problem. ``humaneval`` runs this file.

``program`` runs the model's code and answers calls of its function. ``judge`` has the problem's tests, calls the
function by sending its arguments, and decides by the values that come back. Arguments and values are sent as Python
literals, so no object of the program reaches the judge. Other output of the program, and its exit, are only data.

Limits on both, all set before the tests or the program start:

* time: the parent kills the processes; CPU seconds are limited as well;
* memory: the address space is limited, and no second process can be started to avoid the limit;
* network: no socket can be created.

On Linux with x86-64 a seccomp filter makes the kernel refuse sockets, new processes and programs, mounts, signals to
other processes, and every call that opens a file for writing, or changes or removes one. On other systems only an
audit hook of Python refuses these, which native code can bypass. The hook is also set on Linux.

The limits do not hide files. ``sandbox`` puts the program into namespaces of its own where the system allows it.
"""

import ast
import json
import os
import resource
import struct
import sys
from typing import Any

#: bytes of a value that the judge reads
LONGEST = 1 << 18
# x86-64 numbers of the calls that are refused
_REFUSED = {
    "network": "41 49 42 425",  # socket, bind, connect, io_uring_setup
    "processes": "57 58 59 322 435",  # fork, vfork, execve, execveat, clone3
    "signals, other processes": "62 200 234 129 297 424 434 438 101 310 311",
    "limits, kernel": "160 302 272 308 321 248 250 319 29 240",
    "mounts": "165 166 155 161 428 429 430 431 432 433 442",
    # the last ten: times and attributes
    "files": "85 437 87 263 82 264 316 84 83 258 76 86 265 88 266 90 91 268 452 92 93 94 260 133 259 "
    "132 235 261 280 188 189 190 197 198 199",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_THREAD = 0x10000  # CLONE_THREAD: a clone that is a thread is allowed
_NO_CORE = 4  # PR_SET_DUMPABLE: at 0, no other process of the user can read this one's memory or environment


def limit(seconds: int, memory: int) -> None:
    """Limit CPU seconds and bytes of address space; allow no core file and no file above 64 KiB."""
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds + 1),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 1 << 16),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def filter_calls() -> bool:
    """Install the seccomp filter; False if the system does not support it."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or sys.maxsize < 1 << 32:
        return False
    import ctypes

    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # EPERM
    steps = [(load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (answer, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # the x32 calls
    for number in (int(n) for group in _REFUSED.values() for n in group.split()):
        # without clone3, glibc uses clone, whose flags can be checked
        steps += [(equal, 0, 1, number), (answer, 0, 0, 0x00050000 | 38 if number == 435 else refuse)]
    for number, argument, bits, with_bits, without in (
        (56, 0, _THREAD, allow, refuse),
        (2, 1, _WRITES, refuse, allow),
        (257, 2, _WRITES, refuse, allow),
    ):  # clone, open, openat
        steps += [(equal, 0, 4, number), (load, 0, 0, 16 + 8 * argument), (any_bit, 0, 1, bits)]
        steps += [(answer, 0, 0, with_bits), (answer, 0, 0, without)]
    steps.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    program = Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    libc.prctl(_NO_CORE, 0, 0, 0, 0)
    return (
        libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
        and libc.prctl(seccomp, by_filter, ctypes.byref(program), 0, 0) == 0
    )


#: audit events that are refused, by their beginnings
_EVENTS = """socket.__new__ socket.connect socket.bind socket.getaddrinfo subprocess. os.exec os.fork os.posix_spawn
    os.spawn os.system os.kill os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate os.chmod os.chown
    os.utime os.setxattr os.removexattr shutil. ctypes. resource. pty. signal.pthread_kill""".split()


def audit(event: str, args: tuple) -> None:
    """The audit hook, which refuses the same operations, and reading the files of ``/proc``."""
    if event == "open":
        path, mode, flags = args
        writes = (flags & _WRITES) if isinstance(flags, int) else any(c in (mode or "r") for c in "wax+")
        if writes:
            raise PermissionError("no file may be written")
        if not isinstance(path, int) and os.path.abspath(os.fsdecode(path)).startswith("/proc"):
            raise PermissionError("/proc may not be read")
    elif event.startswith(tuple(_EVENTS)):
        raise PermissionError(f"{event} is not allowed")


def confine(seconds: int, memory: int) -> str:
    """Set all limits; returns them in words."""
    limit(seconds, memory)
    filtered = filter_calls()
    sys.addaudithook(audit)
    return "seccomp and audit hook" if filtered else "audit hook"


def to_literal(value: object) -> str:
    """``value`` as a Python literal. Instances of subclasses of the built-in types, and numpy's scalars, are converted.

    Raises:
        TypeError: it is not a number, text, bytes, None, or a collection of these. NaN has no literal either.
    """
    if hasattr(value, "item") and not isinstance(value, (int, float, complex)) and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a scalar of numpy
    if value is None or isinstance(value, bool):
        return repr(value)
    for kind in (int, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, float) and value == value:
        return {float("inf"): "1e999", float("-inf"): "-1e999"}.get(value, float.__repr__(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_literal(k)}: {to_literal(v)}" for k, v in dict.items(value)) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [to_literal(item) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        if isinstance(value, tuple):
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        return "{" + ", ".join(items) + "}" if items else "set()"
    if isinstance(value, complex) and value == value:
        return complex.__repr__(value)
    raise TypeError(f"{type(value).__name__} has no literal")


def program() -> None:
    """Run the program of the first line of standard input, then answer the calls in the next lines."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    task = json.loads(calls.readline())
    guard = confine(task["seconds"], task["memory"])

    def answer(kind: str, text: str) -> None:
        left = memoryview(f"{kind} {text}\n".encode(errors="replace"))
        while left:
            left = left[os.write(answers, left) :]

    answer("guard", guard)
    function: Any = None
    try:
        space: dict = {"__name__": "__program__"}
        exec(compile(task["program"], "<program>", "exec"), space)
        function = space[task["entry_point"]]
        answer("ready", "")
    except BaseException as error:  # SystemExit and a stack overflow are outcomes too
        answer("raised", type(error).__name__)
    for line in calls:
        try:
            args, named = ast.literal_eval(line.decode())
            answer("value", to_literal(function(*args, **named)))
        except BaseException as error:
            answer("raised", type(error).__name__)
    os._exit(0)


class Unsolved(Exception):
    """The program returned no value; the message describes what it did instead."""


class Candidate:
    """The function of the program for the tests; each call writes a line to the program and reads one from it."""

    def __init__(self, calls: int, answers: int):
        self.calls, self.answers = calls, os.fdopen(answers, "rb")

    def send(self, line: str) -> None:
        try:
            os.write(self.calls, f"{line}\n".encode())
        except BrokenPipeError:
            raise Unsolved("died") from None

    def receive(self) -> tuple[str, str]:
        line = self.answers.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise Unsolved("returned too long a value" if len(line) >= LONGEST else "died")
        kind, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
        if kind == "raised":
            raise Unsolved(f"raised {text}" if text.isidentifier() and len(text) < 60 else "raised an exception")
        return kind, text

    def __call__(self, *args: object, **named: object) -> object:
        self.send(f"({to_literal(args)}, {to_literal(named)})")
        _, text = self.receive()
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise Unsolved("returned no Python literal") from None


def judge() -> None:
    """Run the tests of the problem on standard input, and write the verdict to standard output as JSON."""
    task, guard = json.loads(sys.stdin.buffer.read()), "none: the program did not start"
    candidate = Candidate(task.pop("calls"), task.pop("answers"))
    test, prompt, name = task.pop("test"), task.pop("prompt"), task["entry_point"]
    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    confine(task["seconds"], 4 * task["memory"])
    solved, outcome = False, ""
    try:
        candidate.send(json.dumps(task))
        guard = candidate.receive()[1][:80]
        candidate.receive()
        # The tests use the helpers of the prompt, and the function by its name.
        space: dict = {"__name__": "__judge__"}
        exec(compile(f"{prompt}    pass\n", "<prompt>", "exec"), space)
        space[name] = candidate
        exec(compile(test, "<test>", "exec"), space)
        space["check"](candidate)
        solved, outcome = True, "passed"
    except Unsolved as error:
        outcome = str(error)
    except AssertionError:
        outcome = "wrong answer"
    except BaseException as error:  # the test could not use the value
        outcome = f"{type(error).__name__} in the test"
    os.write(verdicts, json.dumps({"solved": solved, "outcome": outcome, "guard": guard}).encode())
    os._exit(0)


if __name__ == "__main__":
    {"program": program, "judge": judge}[sys.argv[1]]()
