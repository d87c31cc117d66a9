"""The reference of all configuration keys, made from the schema: type, default, engines, and what a key means.

What a key means is written once, where the key is defined: in the comment ``#:`` above a field, in the metadata
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
from .settings.clients import OfClient
from .settings.effects import on_engine

#: section → the module and the dataclass that its further arguments belong to
_MEANT = {
    "train.scheduler": ("fs_lowrank.training.schedule", "Schedule"),
    "fedopt.optimizer": ("fs_lowrank.methods.server_optimizer", "ServerOptimizer"),
}


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        name: dotted, as it stands in a file.
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
        """What is expected, in words, with bounds and choices."""
        return expected(self.key)

    @property
    def default(self) -> str:
        """As it would stand in a file; empty where the key must be given."""
        return "" if self.key.required else shown(self.key.default)

    @property
    def engines(self) -> str:
        """Where it has an effect; of FederatedScope's other keys, what ``federatedscope`` does with it."""
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
        names = [name for name, same in partitioners.items() if same is function]
        entries += _section("data.splitter_args.0.", f"data.splitter: {' or '.join(names)}", function, skip=3)
    for name, step in declared("fs_lowrank.data.images").STEPS.items():
        entries += _section("data.transform.N.1.", f"data.transform: {name}", step, skip=2)
    entries += _section("llm.adapter.args.0.", "llm.adapter.args", AdapterSpec, leave_out=("method", "extra"))
    entries += _section("lowrank.clients.N.", "lowrank.clients", OfClient)
    for name in methods().list_methods():
        cls = methods().get_method_class(name)
        if dataclasses.fields(cls.Params):
            entries += _section("lowrank.", f"federate.method: {name}", cls.Params)
    return entries


def others() -> list[Entry]:
    """FederatedScope's keys that this package hands to it and does not interpret."""
    keys = {name: Key(type(value), default=value) for name, value in sorted(framework.DEFAULTS.items())}
    return [Entry(name, "FederatedScope", "A key of FederatedScope's own", key) for name, key in keys.items()]


def find(name: str) -> list[Entry]:
    """The entries of a key, of all keys below a section, or of all keys with this last part.

    Raises:
        UserError: there is none; names the nearest.
    """
    wanted = name.strip(".")
    everything = [*reference(), *others()]
    exact = [e for e in everything if e.name == wanted or e.name.startswith(wanted + ".")]
    found = exact or [e for e in everything if e.name.rpartition(".")[2] == wanted]
    found = found or [e for e in everything if e.group.rpartition(": ")[2] == wanted]
    if not found:
        names = [e.name for e in everything]
        raise UserError(
            f"no key {name!r}{nearest(wanted, [*names, *(n.rpartition('.')[2] for n in names)])}; "
            "`fs-lowrank keys` lists them"
        )
    return found


#: sections that take further keys, which are checked when they are used
_OPEN = (*framework.OPEN, "train.optimizer", "train.scheduler", "fedopt.optimizer", "llm.adapter.args.0")
#: what a client may have for itself is also taken by the names that all clients have it by
_OF_CLIENTS = {"clients": {}, **{name: {"$ref": f"#/properties/{name}"} for name in ("dataloader", "train", "llm")}}


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of configuration files, by which editors complete and check a YAML."""
    root = json_schemas.section()

    def at(name: str) -> dict[str, Any]:
        return functools.reduce(json_schemas.within, filter(None, name.split(".")), root)

    for entry in (*reference(), *others()):
        above, _, name = entry.name.rpartition(".")
        if above == "data.transform.N.1":  # a list of a name and a mapping
            continue
        known, value = at(above)["properties"], json_schemas.value_schema(entry.key)
        if above == "llm.adapter.args.0" and "items" in (listed := value.get("anyOf", [{}])[0]):
            value["anyOf"].append(listed["items"])  # one in place of a list of one
        if name not in known:
            known[name] = value | {"description": entry.meaning}
        elif value not in (known[name], *(alike := known[name].setdefault("anyOf", [dict(known[name])]))):
            known[name] = {"description": known[name]["description"], "anyOf": [*alike, value]}
    at("federate")["properties"]["method"]["examples"] = methods().list_methods()
    for name in _OPEN:
        at(name)["additionalProperties"] = True
    at("lowrank.clients.N")["properties"] |= _OF_CLIENTS
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fs-lowrank", **root}


def _section(prefix: str, group: str, what: Any, skip: int = 0, leave_out: Sequence[str] = ()) -> Iterator[Entry]:
    """The fields of a dataclass or the arguments of a function, as keys below ``prefix``; and sections below it."""
    meanings, keys = sentences(what), keys_of(what, skip)
    for name, key in keys.items():
        if name in leave_out or {"hidden", "open"} & key.meta.keys():
            continue
        if dataclasses.is_dataclass(key.hint):
            yield from _section(f"{prefix}{name}.", f"{prefix}{name}", key.hint)
        else:
            yield Entry(prefix + name, group, meanings.get(name, ""), key)
    if not leave_out and prefix.rstrip(".") in _MEANT:
        module, cls = _MEANT[prefix.rstrip(".")]
        yield from _section(prefix, group, getattr(declared(module), cls), leave_out=list(keys))


def shown(value: Any) -> str:
    """``value`` as it would stand in a YAML file, on one line."""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("\n...").strip()


# -- what is written of a key ----------------------------------------------------------------------------


def sentences(what: type | Callable[..., Any]) -> dict[str, str]:
    """What is written of each field of a dataclass, or of each argument of a function."""
    found: dict[str, str] = {}
    for cls in reversed(what.__mro__) if isinstance(what, type) else ():
        if dataclasses.is_dataclass(cls):
            comments = _comments(inspect.getfile(cls))
            found |= {name: comments.get(f"{cls.__qualname__}.{name}", "") for name in inspect.get_annotations(cls)}
    found |= {name: key.meta["help"] for name, key in keys_of(what).items() if "help" in key.meta}
    return {name: _sentence(text) for name, text in found.items() if text}


@functools.cache
def _comments(file: str) -> dict[str, str]:
    """The comments ``#:`` above the fields of all classes of a file, by the qualified name of the field."""
    found: dict[str, str] = {}
    said: list[str] = []
    around: dict[int, str] = {}  # indentation -> the class or function
    for line in linecache.getlines(file):
        comment = line.strip()
        indent = len(line) - len(line.lstrip())
        if opened := re.match(r"(class|def) (\w+)", comment):
            around = {depth: name for depth, name in around.items() if depth < indent}
            around[indent] = opened[2] + ".<locals>" * (opened[1] == "def")
        elif field := re.match(r"(\w+):", comment):
            found[".".join([*(name for depth, name in around.items() if depth < indent), field[1]])] = " ".join(said)
        said = [*said, comment.removeprefix("#:").strip()] if comment.startswith("#:") else []
    return found


def _sentence(text: str) -> str:
    text = text.strip().replace("``", "`")
    text = text[:1].upper() + text[1:] if re.match(r"[A-Za-z]+[ ,;:]", text) else text
    return text if not text or text.endswith((".", "?", "!")) else text + "."
