"""Text from outside, such as a client's error or the name of a class, made safe to show: it cannot control a terminal.

The console of commands (``shell.make_console``), their errors (``shell.explain``) and the handlers of the package's log
show all text through this module.
"""

from __future__ import annotations

import logging
import re

from ..errors import ROWS_LOGGER

#: control characters but tab and line feed, separators of lines and paragraphs, and marks that reverse text
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """``text`` with escapes such as ``\\x1b`` in place of characters that control a terminal; lines stay lines."""
    return _CONTROLS.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if match[0] < "\u0100" else f"\\u{ord(match[0]):04x}", text
    )


def message(text: str) -> str:
    """``printable`` text, no part of which can be mistaken for another message.

    A line feed is escaped, but before two blanks, by which the package indents the lines of a list.
    """
    return printable(re.sub(r"\n(?!  )", r"\\n", text))


class Formatter(logging.Formatter):
    """Formats a record as one ``message``; a traceback after it keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return message(super().formatMessage(record))

    def formatException(self, ei) -> str:  # type: ignore[no-untyped-def]
        return printable(super().formatException(ei))


def log_to(handler: logging.Handler) -> None:
    """Have this process log its warnings and the numbers of rows read to ``handler``, each as one message."""
    handler.setFormatter(Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(ROWS_LOGGER).setLevel(logging.INFO)
