"""What the command lines share: exit codes, how errors and Ctrl-C end a command, ``-v`` and ``--debug``."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from ..errors import RunFailed, UserError, nearest

#: exit codes: success; it could not go on; wrong use; Ctrl-C
OK, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def make_console(width: int) -> Console:
    """A console; ``width`` is that of a pipe, which has none of its own: 80 columns would turn every table in a log."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def run(
    make_parser: Callable[[], tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]],
    argv: Sequence[str] | None,
    console: Console,
    again: Callable[[argparse.Namespace], str] = lambda args: "",
) -> int:
    """Run one command; returns the exit code.

    0 success, or what the command returned; 1 it could not go on, though it was asked for rightly (``RunFailed``);
    2 wrong use (``UserError``); 130 interrupted.

    Args:
        make_parser: the parser and those of its commands, each of which has a function ``do`` of the arguments as
            default; among them is ``again``, the command as it was given. again: after Ctrl-C, how to go on.
    """
    args = None
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, commands = make_parser()
        args = _arguments(parser, commands, argv)
        args.again = shlex.join([*parser.prog.split(), *argv])
        _log(args, console)
        return args.do(args) or OK
    except UserError as error:
        if args and args.debug:
            Console(stderr=True).print_exception()
        return explain(error)
    except KeyboardInterrupt:
        console.print(f"\ninterrupted{again(args) if args else ''}", soft_wrap=True, markup=False)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); what is left to print has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def explain(error: UserError) -> int:
    """Print the error in one line; returns the exit code that it means."""
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
    return FAILED if isinstance(error, RunFailed) else WRONG_USE


def _log(args: argparse.Namespace, console: Console) -> None:
    """Warnings on the console; with ``-v`` the package's information too, with ``--debug`` all that it logs."""
    handler = RichHandler(console=console, show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    if args.verbose or args.debug:
        logging.getLogger("fs_lowrank").setLevel(logging.DEBUG if args.debug else logging.INFO)


def _arguments(
    parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser], argv: Sequence[str]
) -> argparse.Namespace:
    """The command line read; overrides, where a command takes them, may stand before, between and after options."""
    for command in commands:
        command.add_argument("-v", "--verbose", action="store_true", help="say more of what is done")
        command.add_argument("--debug", action="store_true", help="log everything; show where an error came from")
        command.set_defaults(parser=command)
    # To argparse -1e0 is an option; with a blank before it, it is a value.
    args, rest = parser.parse_known_args([f" {text}" if re.match(r"-\.?\d", text) else text for text in argv])
    options = [text for text in rest if text.startswith("-")]
    takes_overrides = hasattr(args, "overrides")
    if options or (rest and not takes_overrides):
        hint = nearest(options[0], re.findall(r"--[a-z]+", args.parser.format_usage())) if options else ""
        plain = " (overrides are plain `key value` pairs, without dashes)" if takes_overrides else ""
        args.parser.error(f"unrecognised: {' '.join(options or rest)}{hint}{plain}")
    if takes_overrides:
        # argparse takes the first row of them and leaves the others over, in their order.
        args.overrides = [text[1:] if text.startswith(" -") else text for text in (*args.overrides, *rest)]
    return args


def names(text: str | None) -> tuple[str, ...]:
    """The parts of ``A,B,C``."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def gpus(text: str | None) -> tuple[str, ...]:
    """The numbers of GPUs that ``0,1`` or ``all`` means.

    Raises:
        UserError: torch finds no GPU.
    """
    if text != "all":
        return names(text)
    import torch

    if not torch.cuda.device_count():
        raise UserError("--gpus all: torch finds no GPU here")
    return tuple(map(str, range(torch.cuda.device_count())))
