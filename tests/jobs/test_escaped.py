"""What comes from outside controls no terminal and forges no message: on the console, in errors and in logs."""

import logging
import sys

import pytest
from rich.logging import RichHandler
from rich.text import Text

from fs_lowrank.errors import RunFailed
from fs_lowrank.jobs import shell, tables
from fs_lowrank.jobs.escaped import log_to, message, printable

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202eneg\u2028"
SHOWN = r"\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202eneg\u2028"


def test_what_is_shown_of_text():
    assert printable(HOSTILE) == SHOWN and printable(SHOWN) == SHOWN
    plain = "naïve 中文 👩‍🔬 فارسی\u200cها\tx\ny"
    assert printable(plain) == plain
    assert message("remove:\n  a = 1\nerror: b\n  c") == "remove:\n  a = 1\\nerror: b\n  c"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_console(capsys, terminal):
    console = shell.make_console(200, force_terminal=terminal)
    console.print(f"a client says {HOSTILE}", soft_wrap=True)
    console.print(Text.assemble((f"styled {HOSTILE}", "bold red")), soft_wrap=True)
    tables.show(console, [("class", "rows"), (HOSTILE, "1")])
    with console.status(f"round {HOSTILE}"):
        pass
    out = capsys.readouterr().out
    assert ("\x1b[1;31m" in out) == terminal, "its own styles"
    assert not any(text in out for text in ("\x1b[2J", "\x1b]0", "\x9b", "\u202e", "\x07", "\x7f"))
    # Text of rich leaves out some controls, such as the bell.
    assert out.count(r"\x1b[2J\x1b]0;title") >= 3


def test_an_error(capsys):
    assert shell.explain(RunFailed(f"client 3: {HOSTILE}\nerror: all is lost")) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and r"\x1b[2J" in err and r"\nerror: all is lost" in err


def test_the_log(capsys):
    console = shell.make_console(400)
    for log in (logging.StreamHandler(sys.stdout), RichHandler(console=console, show_path=False, show_time=False)):
        log_to(log)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            error = sys.exc_info()
        record = logging.LogRecord("x", logging.WARNING, "", 1, "%s\nforged", (HOSTILE,), error)
        log.handle(record)
        out = capsys.readouterr().out
        assert "\x1b[2J" not in out and r"\nforged" in out and "\nforged" not in out
        assert "Traceback" in out and out.count("\n") > 3
