"""Strict reading of YAML with the line of every key, and of overrides such as those of a command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import yaml

from ..errors import UserError, hint, nearest, say_once
from .origin import Origin, show


class Loader(yaml.SafeLoader):
    """YAML 1.1 as FederatedScope reads it, except that ``5e-3`` is a number and ``2026-01-01`` is text."""


class Dumper(yaml.SafeDumper):
    """The writer for ``Loader``: text such as ``5e-3`` is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
                    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.X,
)
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


#: the endings of files of configurations
_YAML = (".yaml", ".yml")
#: a file of a few hundred bytes can stand for more values than any machine can hold
_MOST_VALUES = 1_000_000


def read_packaged(package: str, name: str) -> Any:
    """The content of a YAML file that is part of ``package``, such as a table; numbers need YAML 1.1's spelling."""
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, since this is read on every start
    return yaml.load(resources.files(package).joinpath(name).read_text(encoding="utf-8"), fast)


def yaml_beside(path: str | os.PathLike[str]) -> list[str]:
    """The names of the YAML files in the folder of ``path``, to suggest one for a misspelt name."""
    folder = os.path.dirname(os.path.expanduser(path)) or "."
    return [f for f in os.listdir(folder) if f.endswith(_YAML)] if os.path.isdir(folder) else []


def read_text(path: str | os.PathLike[str], candidates: Callable[[str], Iterable[str]]) -> tuple[str, str]:
    """The name of a file, with the user's folder for ``~``, and its text.

    Args:
        candidates: gives the names of files to suggest for a missing one.
    Raises:
        UserError: it cannot be read.
    """
    name = os.path.expanduser(os.fspath(path))
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            return name, file.read()
    except FileNotFoundError:
        raise UserError(f"{name}: no such file{nearest(os.path.basename(name), candidates(name), 0.75)}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise UserError(f"{name!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_yaml(path: str | os.PathLike[str]) -> tuple[Origin, dict[str, Any]]:
    name, text = read_text(path, yaml_beside)
    tip = "" if name.endswith(_YAML) else f"; for a file of data, {hint('init', name)} writes a configuration"
    lines: dict[str, int] = {}
    try:
        loader = Loader(text)
        if (node := loader.get_single_node()) is None:
            return Origin(name), {}
        _lines(node, "", lines, name, iter(range(_MOST_VALUES)))
        content = loader.construct_document(node)
    except UserError:
        raise
    except _WRONG as error:
        mark = getattr(error, "problem_mark", None)
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{name}{position}: invalid YAML: {_problem(error)}{tip}") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} holds a {type(content).__name__}: expected sections and keys such as `federate:`{tip}")
    return Origin(name, lines), content


#: errors of PyYAML: its own, and those of Python for values that do not suit an explicit tag
_WRONG = (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError)


def _problem(error: Exception) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)


def read_value(text: str) -> Any:
    """The value of ``text`` in YAML.

    Raises:
        ValueError: invalid YAML; the text says why.
    """
    try:
        return yaml.load(text, Loader) if text.strip() else ""
    except _WRONG as error:
        raise ValueError(_problem(error)) from None


def _lines(node: yaml.Node, prefix: str, lines: dict[str, int], file: str, remaining: Iterator[int]) -> None:
    """Record the line of every key. A key given twice is an error; YAML would silently use the last one.

    Args:
        remaining: has one item for each value that may follow, with every alias written out.
    """
    if next(remaining, None) is None:
        raise UserError(f"{file}: its aliases stand for more than {_MOST_VALUES:,} values; write the values out")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag.endswith(":merge") or not isinstance(key, yaml.ScalarNode):
                continue
            name, line = prefix + key.value, key.start_mark.line + 1
            if name in lines:
                raise UserError(f"{file}, line {line}: {name} is given twice; first in line {lines[name]}")
            lines[name] = line
            if key.tag.endswith(":bool"):  # a bare off, which is False as a key
                lines.setdefault(f"{prefix}{Loader.bool_values[key.value.lower()]}", line)
            _lines(value, name + ".", lines, file, remaining)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _lines(item, f"{prefix}{index}.", lines, file, remaining)


def as_overrides(overrides: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    if overrides is None:
        return {}
    if isinstance(overrides, Mapping):
        return {key.replace("__", ".") if isinstance(key, str) else key: value for key, value in overrides.items()}
    if isinstance(overrides, str):
        raise UserError(f"overrides = {overrides!r}: expected a mapping, or a list of keys and values in turn")
    return parse_overrides(overrides)


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """``["train.optimizer.lr", "5e-3", …]`` as a mapping; values are read as YAML.

    Raises:
        UserError: a key without a value, or a value that is not YAML.
    """
    pairs = list(pairs)
    for key in pairs[::2]:
        if key.startswith("-") or "=" in key:
            name = key.lstrip("-").split("=")[0]
            raise UserError(f"override {key!r}: write overrides as pairs, `{name} VALUE`")
    if len(pairs) % 2:
        raise UserError(f"override {pairs[-1]!r} has no value: overrides come in pairs, `key value key value`")
    parsed: dict[str, Any] = {}
    for key, text in zip(pairs[::2], pairs[1::2]):
        if key in parsed:
            say_once(f"{key} is given more than once; the last, {show(text)}, is taken")
        try:
            parsed[key] = read_value(text)
        except ValueError as error:
            if text.lstrip()[:1] in tuple("[{!"):
                raise UserError(f"override {key} = {show(text)} is not valid YAML: {error}") from None
            parsed[key] = text
    return parsed
