"""Shared by the command lines: exit codes, handling of errors and Ctrl-C, ``-v`` and ``--debug``."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from ..errors import RunFailed, UserError, nearest, user_location
from .escaped import log_to, message, printable
from .progress import above_lines, showing, watched
from .tables import output_of

#: exit codes: success; a valid command could not continue; wrong use; Ctrl-C
OK, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are a ``UserError`` of one line; ``--help`` shows the usage.

    Attributes:
        example: a command line, with which the help of a command begins.
        groups: title -> commands, which the help of a program shows with their examples, and the others by name alone.
    """

    example = ""
    groups: Mapping[str, Sequence[str]] = {}

    def format_help(self) -> str:
        if self.groups:
            return self._overview()
        return f"Example: {self.example}\n\n{super().format_help()}" if self.example else super().format_help()

    def _overview(self) -> str:
        (commands,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        summaries = {choice.dest: choice.help or "" for choice in commands._choices_actions}
        fill = partial(textwrap.fill, width=max(shutil.get_terminal_size().columns - 2, 40), break_on_hyphens=False)
        row = partial(fill, initial_indent="  ", subsequent_indent=" " * 13)
        lines = [self.format_usage(), self.description or "", ""]
        for title, names in self.groups.items():
            lines += [f"{title}:"]
            for name in names:
                lines += [row(f"{name:<10} {summaries.pop(name)}"), f"  {'':<10} $ {commands.choices[name].example}"]
            lines += [""]
        lines += ["More:", *(row(f"{name:<10} {text}") for name, text in summaries.items()), ""]
        return "\n".join([*lines, f"{self.prog} COMMAND --help shows a command's options", fill(self.epilog or ""), ""])

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            if isinstance(action.choices, Mapping):  # the commands
                match = re.search(r"invalid choice: '([^']*)'", message)
                message += nearest(match[1], action.choices) if match else f", one of {', '.join(action.choices)}"
        raise UserError(f"{message}; see {self.prog} --help")


class _Console(Console):
    """A console on which no text controls the terminal; its own styles do."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print(self, *objects: Any, **options: Any) -> None:
        with above_lines():
            super().print(*objects, **options)


def make_console(width: int | None = None, **options: Any) -> Console:
    """A console, ``width`` columns wide if the output is no terminal and ``COLUMNS`` is not set (rich would assume 80).

    Its output is mostly names of files and words of users, in which ``[red]`` and ``:x:`` mean nothing; text with a
    style is a ``rich.text.Text``.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else width
    return _Console(highlight=False, markup=False, emoji=False, width=width, **options)


#: of the commands of ``fs-lowrank``
console = make_console(120)
#: prints a line that a terminal wraps, so that names and commands in it can be copied
say = partial(console.print, soft_wrap=True)


def run(
    make_parser: Callable[[], tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]],
    argv: Sequence[str] | None,
    console: Console,
    again: Callable[[argparse.Namespace], str] = lambda args: "",
    folder: Callable[[argparse.Namespace], Path | None] = lambda args: None,
) -> int:
    """Run one command; returns the exit code.

    0: success, or the command's own result; 1: a valid command could not continue (``RunFailed``, a file that cannot
    be read or written), or the package has an error; 2: wrong use (``UserError``); 130: interrupted. Every error is one
    line; a traceback is printed only with ``--debug``.

    Args:
        make_parser: gives the parser and those of its commands. Each command has as default a function ``do`` of the
            arguments; among these is ``again``, the command as given.
        again: the text after Ctrl-C: how to continue.
        folder: for the traceback of an error of the package.
    """
    args = None
    argv = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(20_000)  # the imports make a million objects and no garbage; with 700, they take a quarter longer
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may have characters that no terminal can show
    try:
        parser, commands = make_parser()
        if "_ARGCOMPLETE" in os.environ:  # set by the shell when it asks for completions
            import argcomplete

            argcomplete.autocomplete(parser)
        args = _arguments(parser, commands, argv)
        args.again = shlex.join([*parser.prog.split(), *argv])
        _log(args, console)
        with output_of(getattr(args, "table", None)), showing(live=watched()):
            return args.do(args) or OK
    except KeyboardInterrupt:
        console.print(f"\ninterrupted{again(args) if args else ''}", soft_wrap=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`), so nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if args and args.debug:
            make_console(stderr=True).print_exception()
        options = [option.removeprefix("--") for option in _options(args.parser)] if args else ()
        return explain(error, folder(args) if args else None, options)


def message_of(error: Exception, folder: Path | None = None) -> str:
    """The message of an error for the user.

    For a ``UserError``, and an ``OSError``, which names file and reason, it is the error's text. Any other error is one
    of the package or of the user's code: its traceback is written to a file, which the message names.

    Args:
        folder: for the traceback; None, or one that cannot be written to: the folder for temporary files.
    """
    if isinstance(error, (UserError, OSError)):
        return str(error)
    path = write_traceback(error, folder) or "that --debug shows"
    location = path if isinstance(path, str) else f"in {path}"
    if line := user_location(error):
        return f"{in_one_line(error)} (in {line}, which is not of fs-lowrank; the traceback is {location})"
    return f"{in_one_line(error)} (an error in fs-lowrank; please report it, with the traceback {location})"


def in_one_line(error: BaseException) -> str:
    """The type and the text of an error, in one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def write_traceback(error: BaseException, folder: Path | None) -> Path | None:
    """Write the traceback of an error into a file of ``folder``, or of the folder for temporary files if that fails.

    Returns:
        Its path; None if neither can be written to.
    """
    text = "".join(traceback.format_exception(error))
    file = f"traceback-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.time_ns() % 10**9:09}.txt"
    for parent in (folder, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
                (parent / file).write_text(text, encoding="utf-8", errors="backslashreplace")
                return parent / file
    return None


def as_options(text: str, options: Iterable[str]) -> str:
    """A message of the library with its arguments written as options of a command.

    The library says ``resume=True`` or ``text='COLUMN'``; a command with these options ``--resume``,
    ``--text COLUMN``.

    Args:
        options: of the command, without dashes before them.
    """
    names = "|".join(sorted((re.escape(name.replace("-", "_")) for name in options), key=len, reverse=True))
    if not names:
        return text

    def as_option(match: re.Match[str]) -> str:
        value = "" if match[2] == "True" else " " + match[2].strip("'")
        return f"--{match[1].replace('_', '-')}{value}"

    return re.sub(rf"(?<![\w.])({names})=(True|\d+|'[^'\n]*')", as_option, text)


def explain(error: Exception, folder: Path | None = None, options: Iterable[str] = ()) -> int:
    """Print ``message_of`` the error, ``as_options``; returns its exit code."""
    text = message(as_options(message_of(error, folder), options))
    make_console(stderr=True).print(Text.assemble(("error:", "bold red"), " ", text), soft_wrap=True)
    return WRONG_USE if isinstance(error, UserError) and not isinstance(error, RunFailed) else FAILED


def _log(args: argparse.Namespace, console: Console) -> None:
    """Warnings on the console; with ``-v`` the package's information too, with ``--debug`` all its records."""
    logging.raiseExceptions = args.debug  # else logging prints a traceback if a message cannot be written

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads the output any more, or it is closed
                level, whole = Text(f"{record.levelname:<8}", "bold"), not console.is_terminal
                console.print(level, self.format(record), soft_wrap=whole)

    log_to(Lines())
    if args.verbose or args.debug:
        logging.getLogger("fs_lowrank").setLevel(logging.DEBUG if args.debug else logging.INFO)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of ``parser``."""
    return re.findall(r"--[a-z-]+", parser.format_usage())


def _arguments(
    parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser], argv: Sequence[str]
) -> argparse.Namespace:
    """Parse the command line. Overrides, if the command takes them, may be before, between and after options."""
    for command in commands:
        command.add_argument("-v", "--verbose", action="store_true", help="say more")
        command.add_argument("--debug", action="store_true", help="log everything; show where an error came from")
        command.set_defaults(parser=command)
    # argparse takes -1e0 for an option; with a blank before it, it is a value.
    args, extra = parser.parse_known_args([f" {text}" if re.match(r"-\.?\d", text) else text for text in argv])
    options = [text for text in extra if text.startswith("-")]
    takes_overrides = hasattr(args, "overrides")
    if options or (extra and not takes_overrides):
        hint = nearest(options[0], _options(args.parser)) if options else ""
        note = " (overrides are plain `key value` pairs, without dashes)" if takes_overrides else ""
        args.parser.error(f"unrecognised: {' '.join(options or extra)}{hint}{note}")
    if takes_overrides:
        # argparse takes the first sequence of them and returns the others in ``extra``, in order.
        args.overrides = [text[1:] if text.startswith(" -") else text for text in (*args.overrides, *extra)]
    return args


def names(text: str | None) -> tuple[str, ...]:
    """The parts of a list such as ``A,B,C``."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def at_least(lowest: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """The ``type`` of an option that is a number, ``lowest`` or more; a whole one where ``kind`` is ``int``."""

    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            if lowest <= (value := kind(text)) < math.inf:
                return value
        prefix = "whole " * (kind is int)
        raise argparse.ArgumentTypeError(f"{text.strip()!r}: expected a {prefix}number, {lowest} or more")

    return number


def gpus(text: str | None) -> tuple[str, ...]:
    """The numbers of the GPUs in a list such as ``0,1``, or of all of them for ``all``.

    The numbers are torch's, counted among the GPUs in ``CUDA_VISIBLE_DEVICES``, if it is set.

    Raises:
        UserError: torch finds no such GPU.
    """
    if not text:
        return ()
    import torch

    available = tuple(map(str, range(torch.cuda.device_count())))
    chosen = available if text == "all" else names(text)
    if not chosen or not {*chosen} <= {*available}:
        ids = ", ".join(available) or "none"
        raise UserError(f"--gpus {text}: expected all, or numbers such as 0,1; the GPUs that torch finds here: {ids}")
    return chosen
