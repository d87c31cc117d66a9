"""The reference of all configuration keys, made from the schema: type, default, engines and meaning.

The meaning of a key is written once, where the key is defined: in the comment ``#:`` above a field, in the metadata
``help`` of a hyperparameter or of an argument of a function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from .declared import declared, methods
from .errors import UserError, nearest
from .settings import AdapterSpec, DataArgs, Key, Settings, framework, keys_of
from .settings import json_schema as json_schemas
from .settings.check import expected
from .settings.clients import ClientKeys
from .settings.effects import on_engine

#: section → the module and the dataclass that its further arguments belong to
_FURTHER = {
    "train.scheduler": ("fs_lowrank.training.schedule", "Schedule"),
    "fedopt.optimizer": ("fs_lowrank.methods.server_optimizer", "ServerOptimizer"),
}


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        name: dotted, as in a file.
        group: the heading it belongs under.
        meaning: one sentence or more; empty for keys of FederatedScope that this package does not interpret.
        key: type, default, bounds and choices.
    """

    name: str
    group: str
    meaning: str
    key: Key

    @property
    def type(self) -> str:
        """The expected values in words, with bounds and choices."""
        return expected(self.key)

    @property
    def default(self) -> str:
        """The default as in a file; empty for a required key."""
        return "" if self.key.required else as_yaml(self.key.default)

    @property
    def engines(self) -> str:
        """The engines with an effect of the key; for FederatedScope's other keys, how ``federatedscope`` treats it."""
        if self.name in framework.DEFAULTS:
            return on_engine(self.name, "federatedscope")
        words = {engine: on_engine(self.name, engine) for engine in framework.FOLLOWED}
        return ", ".join(f"{word} on {engine}" for engine, word in words.items() if word != "followed") or "all"


def reference() -> list[Entry]:
    """Every key that a configuration may have, in the order of the schema."""
    entries = [*_section("", "general", Settings)]
    entries += _section("data.args.0.", "data.args", DataArgs)
    partitioners = declared("fs_lowrank.data.partition").PARTITIONERS
    for function in dict.fromkeys(partitioners.values()):
        names = [name for name, registered in partitioners.items() if registered is function]
        entries += _section("data.splitter_args.0.", f"data.splitter: {' or '.join(names)}", function, skip=3)
    for name, step in declared("fs_lowrank.data.images").STEPS.items():
        entries += _section("data.transform.N.1.", f"data.transform: {name}", step, skip=2)
    entries += _section("llm.adapter.args.0.", "llm.adapter.args", AdapterSpec, excluded=("method", "extra"))
    entries += _section("lowrank.clients.N.", "lowrank.clients", ClientKeys)
    for name in methods().list_methods():
        cls = methods().get_method_class(name)
        if dataclasses.fields(cls.Params):
            entries += _section("lowrank.", f"federate.method: {name}", cls.Params)
    return entries


def framework_entries() -> list[Entry]:
    """FederatedScope's keys that this package hands to it and does not interpret."""
    keys = {name: Key(type(value), default=value) for name, value in sorted(framework.DEFAULTS.items())}
    text = "A key of FederatedScope's own: {} with our methods"
    words = {name: text.format(on_engine(name, "federatedscope")) for name in keys}
    return [Entry(name, "FederatedScope", words[name], key) for name, key in keys.items()]


def find(name: str) -> list[Entry]:
    """The entries of a key, of all keys below a section, or of all keys with this last part.

    Raises:
        UserError: there is none; names the nearest.
    """
    query = name.strip(".")
    all_entries = [*reference(), *framework_entries()]
    exact = [e for e in all_entries if e.name == query or e.name.startswith(query + ".")]
    entries = exact or [e for e in all_entries if e.name.rpartition(".")[2] == query]
    entries = entries or [e for e in all_entries if e.group.rpartition(": ")[2] == query]
    if not entries:
        names = [e.name for e in all_entries]
        raise UserError(
            f"no key {name!r}{nearest(query, [*names, *(n.rpartition('.')[2] for n in names)])}; "
            "`fs-lowrank keys` lists them"
        )
    return entries


#: sections that take further keys, which are checked when they are used
_OPEN = (*framework.OPEN, "train.optimizer", "train.scheduler", "fedopt.optimizer", "llm.adapter.args.0")
#: a client's own settings may also have the names of the keys for all clients
_OF_CLIENTS = {"clients": {}, **{name: {"$ref": f"#/properties/{name}"} for name in ("dataloader", "train", "llm")}}


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of configuration files, by which editors complete and check a YAML."""
    root = json_schemas.section()

    def node(name: str) -> dict[str, Any]:
        return functools.reduce(json_schemas.within, filter(None, name.split(".")), root)

    for entry in (*reference(), *framework_entries()):
        section, _, name = entry.name.rpartition(".")
        if section == "data.transform.N.1":  # a list of a name and a mapping
            continue
        fields, value = node(section)["properties"], json_schemas.value_schema(entry.key)
        if section == "llm.adapter.args.0" and "items" in (listed := value.get("anyOf", [{}])[0]):
            value["anyOf"].append(listed["items"])  # one in place of a list of one
        if name not in fields:
            fields[name] = value | {"description": entry.meaning}
        elif value not in (fields[name], *(alike := fields[name].setdefault("anyOf", [dict(fields[name])]))):
            fields[name] = {"description": fields[name]["description"], "anyOf": [*alike, value]}
    node("federate")["properties"]["method"]["examples"] = methods().list_methods()
    for name in _OPEN:
        node(name)["additionalProperties"] = True
    node("lowrank.clients.N")["properties"] |= _OF_CLIENTS
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fs-lowrank", **root}


def _section(prefix: str, group: str, definition: Any, skip: int = 0, excluded: Sequence[str] = ()) -> Iterator[Entry]:
    """The fields of a dataclass or the arguments of a function, as keys below ``prefix``; and sections below it."""
    meanings, keys = sentences(definition), keys_of(definition, skip)
    for name, key in keys.items():
        if name in excluded or {"hidden", "open"} & key.meta.keys():
            continue
        if dataclasses.is_dataclass(key.hint):
            yield from _section(f"{prefix}{name}.", f"{prefix}{name}", key.hint)
        else:
            yield Entry(prefix + name, group, meanings.get(name, ""), key)
    if not excluded and prefix.rstrip(".") in _FURTHER:
        module, cls = _FURTHER[prefix.rstrip(".")]
        yield from _section(prefix, group, getattr(declared(module), cls), excluded=list(keys))


def as_yaml(value: Any) -> str:
    """``value`` as in a YAML file, on one line."""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("\n...").strip()


# -- the texts about a key ------------------------------------------------------------------------------


def sentences(definition: type | Callable[..., Any]) -> dict[str, str]:
    """The text about each field of a dataclass, or about each argument of a function."""
    texts: dict[str, str] = {}
    for cls in reversed(definition.__mro__) if isinstance(definition, type) else ():
        if dataclasses.is_dataclass(cls):
            comments = _comments(inspect.getfile(cls))
            texts |= {name: comments.get(f"{cls.__qualname__}.{name}", "") for name in inspect.get_annotations(cls)}
    texts |= {name: key.meta["help"] for name, key in keys_of(definition).items() if "help" in key.meta}
    return {name: _sentence(text) for name, text in texts.items() if text}


@functools.cache
def _comments(file: str) -> dict[str, str]:
    """The comments ``#:`` above the fields of all classes of a file, by the qualified name of the field."""
    texts: dict[str, str] = {}
    lines: list[str] = []
    scopes: dict[int, str] = {}  # indentation -> the class or function
    for line in linecache.getlines(file):
        comment = line.strip()
        indent = len(line) - len(line.lstrip())
        if opened := re.match(r"(class|def) (\w+)", comment):
            scopes = {depth: name for depth, name in scopes.items() if depth < indent}
            scopes[indent] = opened[2] + ".<locals>" * (opened[1] == "def")
        elif field := re.match(r"(\w+):", comment):
            texts[".".join([*(name for depth, name in scopes.items() if depth < indent), field[1]])] = " ".join(lines)
        lines = [*lines, comment.removeprefix("#:").strip()] if comment.startswith("#:") else []
    return texts


def _sentence(text: str) -> str:
    text = text.strip().replace("``", "`")
    text = text[:1].upper() + text[1:] if re.match(r"[A-Za-z]+[ ,;:]", text) else text
    return text if not text or text.endswith((".", "?", "!")) else text + "."
