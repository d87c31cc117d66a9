"""The origin of a value, for error messages: file, line, dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from ..errors import UserError


@dataclass(frozen=True)
class Origin:
    """The file and lines that values were read from."""

    file: str = ""
    #: dotted key -> line number, from 1
    lines: Mapping[str, int] = field(default_factory=dict)
    #: keys set by an override
    overridden: frozenset[str] = frozenset()
    #: ``llm.adapter.use`` as given; None: each method decides for itself
    adapter: bool | None = None
    #: the missing argument of the adapter whose default is not PEFT's (``adapter.OTHER_DEFAULTS``)
    defaulted: str = ""

    def where(self, key: str) -> str:
        """``"FILE, line N: "``, without unknown parts."""
        parts = key.split(".")
        names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        is_section = key not in self.lines and any(name.startswith(key + ".") for name in self.overridden)
        if is_section or not self.overridden.isdisjoint(names):  # one of these replaces the file's values below it
            return "override: "
        for name in names:
            if name in self.lines:
                return f"{self.file}, line {self.lines[name]}: "
        return f"{self.file}: " if self.file else ""

    def below(self, key: str) -> Origin:
        """The origin of the values below ``key``, with keys relative to it."""
        start = f"{key}."
        lines = {name.removeprefix(start): n for name, n in self.lines.items() if name.startswith(start)}
        overridden = frozenset(name.removeprefix(start) for name in self.overridden if name.startswith(start))
        return replace(self, lines=lines, overridden=overridden)

    def fail(self, key: str, message: str) -> NoReturn:
        raise UserError(f"{self.where(key)}{key} {message}")

    def wrong(self, key: str, value: Any, expected: str) -> NoReturn:
        self.fail(key, f"= {show(value)}: expected {expected}")


#: of values that no file has
NOWHERE = Origin()


def show(value: Any) -> str:
    """``repr``, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
