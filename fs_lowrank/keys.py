"""The reference of all configuration keys, made from the schema: type, default, engines, and what a key means.

What a key means is written once, where the key is defined: in the comment ``#:`` above a field, in the metadata
``help`` of a hyperparameter, or in the docstring of a function that takes it as an argument.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from .data.images import STEPS
from .data.partition import PARTITIONERS
from .data.sources import DataArgs
from .errors import UserError, nearest
from .methods import get_method_class, list_methods
from .methods.server_optimizer import ServerOptimizer
from .settings import AdapterSpec, Key, OfClient, Settings, framework, keys_of
from .settings.check import expected, hints_of
from .settings.effects import on_flower, on_the_framework
from .training.schedule import Schedule

#: section → the dataclass that its further arguments belong to
_MEANT: dict[str, type] = {"train.scheduler": Schedule, "fedopt.optimizer": ServerOptimizer}


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        name: dotted, as it stands in a file.
        group: the heading it belongs under.
        type: what is expected, in words, with bounds and choices.
        default: as it would stand in a file; empty where the key must be given.
        engines: where it has an effect.
        meaning: one sentence or more; empty for keys of FederatedScope that this package does not interpret.
    """

    name: str
    group: str
    type: str
    default: str
    engines: str
    meaning: str


def reference() -> list[Entry]:
    """Every key that a configuration may have, in the order of the schema."""
    entries = [*_section(Settings, "", "")]
    entries += _arguments("data.args.0.", "data.args", DataArgs)
    for name, function in PARTITIONERS.items():
        alias = next(n for n, f in PARTITIONERS.items() if f is function)
        if alias == name:
            names = [n for n, f in PARTITIONERS.items() if f is function]
            entries += _arguments("data.splitter_args.0.", f"data.splitter: {' or '.join(names)}", function, skip=3)
    for name, step in STEPS.items():
        entries += _arguments("data.transform.N.1.", f"data.transform: {name}", step)
    entries += _arguments("llm.adapter.args.0.", "llm.adapter.args", AdapterSpec, leave_out=("method", "extra"))
    entries += _arguments("lowrank.clients.N.", "lowrank.clients", OfClient)
    for name in list_methods():
        cls = get_method_class(name)
        if dataclasses.fields(cls.Params):
            entries += _arguments("lowrank.", f"federate.method: {name}", cls.Params)
    return entries


def others() -> list[Entry]:
    """FederatedScope's keys that this package hands to it and does not interpret."""
    words = "A key of FederatedScope's own"
    return [
        Entry(name, "FederatedScope", expected(type(value)), shown(value), on_the_framework(name), words)
        for name, value in sorted(framework.DEFAULTS.items())
    ]


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


def markdown() -> str:
    """The reference as a page of the documentation."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    lines = [
        "# Keys",
        "",
        "Every key that a configuration file or the command line may have; this page is made from the schema.",
        "`fs-lowrank keys NAME` shows one key, or all of a section, in a terminal. A key without a word on",
        "engines has the same meaning on every engine.",
        "",
    ]
    for group, entries in _groups(reference()):
        lines += [f"## {group}", "", "| key | expected | default | meaning |", "| --- | --- | --- | --- |"]
        for entry in entries:
            note = "" if entry.engines == "all" else f" Engines: {entry.engines}."
            cells = (f"`{entry.name}`", entry.type, f"`{entry.default}`" if entry.default else "", entry.meaning + note)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines += [
        "## FederatedScope",
        "",
        "These keys are read, so that FederatedScope's files load. The table says what `--engine federatedscope` does",
        "with a value that is not the default, under our methods. The other engines refuse it, unless it has no effect",
        "on a result; they follow `wandb`, whose tracker `lowrank.trackers` has, too. The embedded engine honours",
        f"{listed(framework.ON_LOCAL)}, and `--engine flower` honours {listed(framework.ON_FLOWER['honoured'])}.",
        "",
        "| key | default | with our methods |",
        "| --- | --- | --- |",
        *(f"| `{e.name}` | `{e.default}` | {e.engines} |" for e in others()),
    ]
    return "\n".join(lines) + "\n"


def _groups(entries: Iterable[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    by_group: dict[str, list[Entry]] = {}
    for entry in entries:
        by_group.setdefault(entry.group, []).append(entry)
    return iter(by_group.items())


def _section(cls: type, prefix: str, group: str) -> Iterator[Entry]:
    meanings, defaults, hints = sentences(cls), cls(), hints_of(cls)
    meant = _MEANT.get(prefix.rstrip("."))
    listed = [f.name for f in dataclasses.fields(cls)]
    for f in dataclasses.fields(cls):
        if f.metadata.get("hidden"):
            continue
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _section(hints[f.name], f"{prefix}{f.name}.", f"{prefix}{f.name}")
        elif not f.metadata.get("open"):
            yield _entry(prefix, group or "general", f.name, Key(hints[f.name], f.metadata), defaults, meanings)
    if meant is not None:
        yield from _arguments(prefix, group, meant, leave_out=listed)


def _arguments(prefix: str, group: str, what: Any, skip: int = 0, leave_out: Sequence[str] = ()) -> Iterator[Entry]:
    """The fields of a dataclass or the arguments of a function, as keys below ``prefix``."""
    meanings = sentences(what)
    if dataclasses.is_dataclass(what):
        defaults: Any = {
            f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            for f in dataclasses.fields(what)
        }
    else:
        defaults = {name: p.default for name, p in inspect.signature(what).parameters.items()}
    for name, key in keys_of(what, skip).items():
        if name not in leave_out:
            yield _entry(prefix, group, name, key, defaults, meanings)


def _entry(prefix: str, group: str, name: str, key: Key, defaults: Any, meanings: Mapping[str, str]) -> Entry:
    default = "" if key.required else shown(defaults[name] if isinstance(defaults, dict) else getattr(defaults, name))
    meta, engines = key.meta, "all"
    there = on_the_framework(prefix + name)
    if "local" in meta:
        where = "on federatedscope only" if there == "honoured" else f"on none; federatedscope: {there}"
        engines = f"others than {shown(meta['local'])} {where}"
    elif "idle" in meta:
        where = " on local, flower" * (there == "honoured")
        engines = f"no effect{where} ({meta['idle']})"
    else:
        elsewhere = {"federatedscope": there, "flower": on_flower(prefix + name)}
        differs = [f"{said} on {engine}" for engine, said in elsewhere.items() if said != "honoured"]
        engines = ", ".join(differs) or "all"
    return Entry(
        prefix + name, group, _type(key), default, engines, _sentence(meta.get("help") or meanings.get(name, ""))
    )


def _type(key: Key) -> str:
    words = [expected(key.hint, key.meta)]
    for bound, said in (("min", "at least"), ("above", "above"), ("max", "at most"), ("below", "below")):
        if key.meta.get(bound) is not None:
            words.append(f"{said} {key.meta[bound]:g}" if key.meta[bound] != 10**9 else f"{said} 10⁹")
    choices = key.meta.get("choices") or key.meta.get("items")
    if choices:
        shape = "any of" if "items" in key.meta else "one of"
        return f"{shape} {', '.join(str(choice) or repr('') for choice in choices)}"
    return ", ".join(words)


def shown(value: Any) -> str:
    """``value`` as it would stand in a YAML file, on one line."""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("\n...").strip()


# -- what is written of a key ----------------------------------------------------------------------------


def sentences(what: type | Callable[..., Any]) -> dict[str, str]:
    """What is written of each field of a dataclass, or of each argument of a function."""
    if not isinstance(what, type):
        return _documented(inspect.getdoc(what) or "", "Args")
    found: dict[str, str] = {}
    for cls in reversed(what.__mro__):
        if dataclasses.is_dataclass(cls):
            found |= _documented(inspect.cleandoc(cls.__doc__ or ""), "Attributes") | _commented(cls)
    found |= {f.name: f.metadata["help"] for f in dataclasses.fields(what) if "help" in f.metadata}
    return {name: _sentence(text) for name, text in found.items()}


def _commented(cls: type) -> dict[str, str]:
    """Field → the comment ``#:`` above it."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    body = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)).body
    found = {}
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            above.insert(0, line.strip().removeprefix("#:").strip())
        if above:
            found[node.target.id] = " ".join(above)
    return found


def _documented(text: str, section: str) -> dict[str, str]:
    """Name → text, of one section of a docstring in Google's style; ``a, b: …`` is said of both."""
    match = re.search(rf"^{section}:\n((?:[ ].*\n?|\n)+)", text + "\n", re.MULTILINE)
    if match is None:
        return {}
    found: dict[str, str] = {}
    for item in re.split(r"\n(?=\S)", textwrap.dedent(match[1]).strip()):
        names, _, said = " ".join(item.split()).partition(": ")
        found |= {name.strip(): _sentence(said) for name in names.split(",") if said}
    return found


def _sentence(text: str) -> str:
    text = text.strip().replace("``", "`")
    text = text[:1].upper() + text[1:] if re.match(r"[A-Za-z]+[ ,;:]", text) else text
    return text if not text or text.endswith((".", "?", "!")) else text + "."
