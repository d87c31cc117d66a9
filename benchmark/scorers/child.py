"""The child process that runs one program written by a model. ``humaneval`` runs this file; do not import it.

Limits, all set before the program starts:

* time: the parent kills the child's process group; CPU seconds are limited as well;
* memory: the address space is limited, and no second process can be started to avoid the limit;
* network: no socket can be created.

On Linux with x86-64 a seccomp filter makes the kernel refuse sockets, new processes and programs, signals to other
processes, and every call that opens a file for writing, or changes or removes one. On other systems
only an audit hook of Python refuses these, which native code can bypass. The hook is also set on Linux.

This is not a sandbox: the program can read what the user can read, and shares the kernel. For a model that may be
hostile, run the benchmark in a container or a virtual machine.
"""

import json
import os
import resource
import struct
import sys

# x86-64 numbers of the calls that are refused
_REFUSED = {
    "network": (41, 49, 42, 425),  # socket, bind, connect, io_uring_setup
    "processes": (57, 58, 59, 322, 435),  # fork, vfork, execve, execveat, clone3
    "signals, other processes": (62, 200, 234, 129, 297, 424, 434, 438, 101, 310, 311),
    "limits, kernel": (160, 302, 272, 308, 165, 166, 321, 248, 250, 319, 29, 240),
    "files": (
        85,
        437,
        87,
        263,
        82,
        264,
        316,
        84,
        83,
        258,
        76,
        86,
        265,
        88,
        266,
        90,
        91,
        268,
        452,
        92,
        93,
        94,
        260,
        133,
        259,
        132,
        235,
        261,
        280,
        188,
        189,
        190,
        197,
        198,
        199,
    ),  # the last ten: times and attributes
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_THREAD = 0x10000  # CLONE_THREAD: a clone that is a thread is allowed


def limit(seconds: int, memory: int) -> None:
    """Limit CPU seconds and address space; allow no core file and no file above 64 KiB."""
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
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, 0xC000003E),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (answer, 0, 0, refuse),
    ]  # the x32 calls
    for number in (n for group in _REFUSED.values() for n in group):
        # glibc falls back to clone, whose flags can be looked at, if clone3 is not there.
        steps += [(equal, 0, 1, number), (answer, 0, 0, 0x00050000 | 38 if number == 435 else refuse)]
    for number, argument, bits, with_bits, without in (
        (56, 0, _THREAD, allow, refuse),
        (2, 1, _WRITES, refuse, allow),
        (257, 2, _WRITES, refuse, allow),
    ):  # clone, open, openat
        steps += [
            (equal, 0, 4, number),
            (load, 0, 0, 16 + 8 * argument),
            (any_bit, 0, 1, bits),
            (answer, 0, 0, with_bits),
            (answer, 0, 0, without),
        ]
    steps.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    program = Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    return (
        libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
        and libc.prctl(seccomp, by_filter, ctypes.byref(program), 0, 0) == 0
    )


def audit(event: str, args: tuple) -> None:
    """The audit hook, which refuses the same operations."""
    if event == "open":
        _, mode, flags = args
        writes = (flags & _WRITES) if isinstance(flags, int) else any(c in (mode or "r") for c in "wax+")
        if writes:
            raise PermissionError("no file may be written")
    elif event.startswith(
        (
            "socket.__new__",
            "socket.connect",
            "socket.bind",
            "socket.getaddrinfo",
            "subprocess.",
            "os.exec",
            "os.fork",
            "os.posix_spawn",
            "os.spawn",
            "os.system",
            "os.kill",
            "os.remove",
            "os.rename",
            "os.rmdir",
            "os.mkdir",
            "os.link",
            "os.symlink",
            "os.truncate",
            "os.chmod",
            "os.chown",
            "os.utime",
            "os.setxattr",
            "os.removexattr",
            "shutil.",
            "ctypes.",
            "resource.",
            "pty.",
            "signal.pthread_kill",
        )
    ):
        raise PermissionError(f"{event} is not allowed")


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    limit(task["seconds"], task["memory"])
    guard = "seccomp and audit hook" if filter_calls() else "audit hook"
    sys.addaudithook(audit)
    os.write(answer, f"{guard}\n".encode())
    code = None
    try:
        code = compile(task["program"], "<program>", "exec")
        exec(code, {"__name__": "__program__"})
        verdict = task["passed"]
    except BaseException as error:  # SystemExit and a stack overflow are verdicts too
        verdict = type(error).__name__
    os.write(answer, f"{verdict}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
