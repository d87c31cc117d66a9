"""Mutations of a configuration by the schema: type, range, name, nesting, encoding."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import random
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

#: keys with which a run takes long, which is not a fault
LENGTHS = {
    *("federate.total_round_num", "train.local_update_steps", "grad.grad_accum_count", "federate.client_num"),
    *(
        "lowrank.epochs",
        "lowrank.generator_steps",
        "lowrank.steps",
        "lowrank.images",
        "lowrank.sweeps",
        "lowrank.draws",
    ),
    *("lowrank.personal_steps", "lowrank.global_steps", "lowrank.channels", "lowrank.latent", "lowrank.width"),
    *("dataloader.num_workers", "federate.process_num"),
}
#: keys that name files, with which a run would write outside the folder of the case
PLACES = {"outdir", "expname", "data.root", "lowrank.reuse_clients", "train.cache_frozen_dir", "federate.save_to"}


@dataclass(frozen=True)
class Key:
    """A key of a configuration: its dotted name, annotated type, bounds and choices, and default."""

    name: str
    hint: Any
    meta: Mapping[str, Any]
    default: Any


def keys_of(method: str) -> list[Key]:
    """The keys that a file for ``method`` may have."""
    from fs_lowrank.methods import get_method_class
    from fs_lowrank.settings import Settings
    from fs_lowrank.settings.check import keys_of as fields_of

    def below(section: Any, prefix: str) -> list[Key]:
        keys: list[Key] = []
        for f in dataclasses.fields(section):
            value = getattr(section, f.name)
            if f.metadata.get("hidden") or f.metadata.get("open"):
                continue
            if dataclasses.is_dataclass(value):
                keys += below(value, f"{prefix}{f.name}.")
            else:
                keys.append(Key(prefix + f.name, fields_of(type(section))[f.name].hint, f.metadata, value))
        return keys

    params = get_method_class(method).Params
    own = [Key(f"lowrank.{k.name}", k.hint, k.meta, k.default) for k in below(params(), "")]
    at = "llm.adapter.args.0."
    adapter = [
        Key(f"{at}r", int, {"min": 1}, 2),
        Key(f"{at}alpha", float, {"above": 0.0}, 4.0),
        Key(f"{at}dropout", float, {"min": 0.0, "below": 1.0}, 0.0),
        Key(f"{at}use_rslora", bool, {}, False),
        Key(f"{at}layers", list[int], {"min": 0}, [0]),
    ]
    return [*below(Settings(), ""), *own, *adapter]


class Document:
    """A configuration that is being broken: nested data, changes of its text and bytes, and what was changed."""

    def __init__(self, tree: dict[str, Any], draw: random.Random, keys: list[Key]):
        self.tree, self.draw, self.keys = copy.deepcopy(tree), draw, keys
        self.done: list[str] = []
        #: whether the schema forbids it; None: unknown
        self.forbidden: bool | None = None
        #: changes of the text, and then of the bytes
        self.text: list[Callable[[str], str]] = []
        self.bytes: Callable[[str], bytes] = lambda text: text.encode("utf-8", "surrogatepass")

    def content(self) -> bytes:
        text = yaml.dump(self.tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        for change in self.text:
            text = change(text)
        return self.bytes(text)

    def set(self, name: str, value: Any) -> None:
        """Set the value of a dotted name; sections that are not mappings are replaced."""
        *sections, last = name.split(".")
        node: Any = self.tree
        for section in sections:
            if isinstance(node, list):
                node = node[int(section)]
                continue
            if not isinstance(node.get(section), (dict, list)) or not node[section]:
                node[section] = [{}] if section == "args" else {}
            node = node[section]
        if isinstance(node, dict):
            node[last] = value
        for short, long in (("alpha", "lora_alpha"), ("layers", "layers_to_transform"), ("dropout", "lora_dropout")):
            if isinstance(node, dict) and short in node and long in node:
                del node[long]

    def sections(self) -> list[tuple[dict[str, Any], Any]]:
        """Every mapping, with a key of it whose value is a mapping as well."""
        found: list[tuple[dict[str, Any], Any]] = []

        def walk(node: Any) -> None:
            for key, value in node.items() if isinstance(node, dict) else []:
                found.append((node, key))
                walk(value)

        walk(self.tree)
        return found


class _Dumper(yaml.SafeDumper):
    """Writes values of any type, also those that a configuration must not have."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


# -- type and range ----------------------------------------------------------------------------------------

_WRONG: dict[Any, list[Any]] = {
    bool: [2, "abc", [True], {"a": 1}, 0.5, -1],
    int: ["abc", 1.5, [1], {"a": 1}, True, "1e400", float("nan"), float("inf"), "", b"1"],
    float: ["abc", [1.0], {"a": 1}, True, float("nan"), float("-inf"), "", "1,5", "0x10", b"1"],
    str: [3, ["abc"], {"a": 1}, True, 1.5, float("nan")],
    list: ["abc", 3, True, 1.5],
    dict: ["abc", 3, [1], True],
    tuple: ["abc", 3, True, 1.5],
}


def of_type(doc: Document) -> None:
    """A value of a type that the key does not accept."""
    key = doc.draw.choice(doc.keys)
    kinds = {typing.get_origin(part) or part for part in parts(key.hint)}
    wrong = [v for kind in kinds for v in _WRONG.get(kind, [])]
    takes_int = int in kinds or float in kinds
    spellings = key.meta.get("also", {})

    def taken(value: Any) -> bool:
        return (
            (str in kinds and isinstance(value, str))
            or (bool in kinds and isinstance(value, bool))
            or (takes_int and type(value) is int)
            or (float in kinds and type(value) is float and value == value and abs(value) != float("inf"))
            or (list in kinds and isinstance(value, list))
            or any(type(value) is type(s) and value == s for s in spellings)
        )

    wrong = [v for v in wrong if not taken(v)]
    if key.name.endswith(("modules", "layers")):  # a single name or number is read as a list of one
        wrong = [v for v in wrong if not isinstance(v, (str, int)) or isinstance(v, bool)]
    if not wrong:
        return
    value = doc.draw.choice(wrong)
    doc.set(key.name, value)
    doc.done.append(f"type: {key.name} = {value!r}")
    doc.forbidden = True


def of_range(doc: Document) -> None:
    """A value outside the bounds or choices of the key, or at a bound."""
    key, draw = doc.draw.choice(doc.keys), doc.draw
    whole = int in parts(key.hint) or key.hint in (list[int], tuple[int, ...])
    many = typing.get_origin(key.hint) in (list, tuple)
    outside: list[Any] = []
    inside: list[Any] = []
    step: Any = 1 if whole else 1e-3
    for bound, sign, inclusive in (("min", -1, True), ("above", -1, False), ("max", 1, True), ("below", 1, False)):
        limit = key.meta.get(bound)
        if limit is not None:
            outside += [limit + sign * step, limit + sign * 10**18, *([] if inclusive else [limit])]
            inside += [limit, limit - sign * step] if inclusive else [limit - sign * step]
    choices = key.meta.get("choices") or key.meta.get("items")
    if choices:
        outside += [f"{choices[-1]}x", "none of these", "\u0000"]
        inside += list(choices)
        many = many or "items" in key.meta
    numeric = whole or float in parts(key.hint) or key.hint in (list[float], tuple[float, ...])
    if numeric and key.name not in LENGTHS:
        inside += [10**9, 10**18, 2**63, 10**400, -(10**9)] if whole else [1e-320, 1e30, 1e300, 5e-324, -1e30]
    if numeric and not key.name.endswith("batch_size"):
        inside += [2, 7] if whole else [0.5, 1.5]
    if str in parts(key.hint) and not choices and key.name not in PLACES:
        inside += ["", " ", "abc", "../../x", "a" * 10_000, "\u0000", "é", "\ud83d\ude00", "\u202e", "-", "~", "*"]
    if not outside and not inside:
        return
    value = draw.choice(outside + inside)
    doc.forbidden = any(value is v for v in outside) or None
    if any(value == v and type(value) is type(v) for v in inside):
        doc.forbidden = None
    value = [value] if many else value
    doc.set(key.name, value)
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else f"10^{len(str(value)) - 1}"
    doc.done.append(f"range: {key.name} = {shown[:80]}")


# -- names and nesting -------------------------------------------------------------------------------------


def of_name(doc: Document) -> None:
    """A key with another name, or one that does not exist."""
    node, key = doc.draw.choice(doc.sections())
    if not isinstance(key, str):
        return
    text = str(key)
    at = doc.draw.randrange(len(text)) if text else 0
    new: Any = doc.draw.choice(
        [
            text[:at] + text[at + 1 :],
            text[:at] + "x" + text[at:],
            text[::-1],
            text + "s",
            f"_{text}",
            f"{text}.{text}",
            f" {text}",
            "unknown_key",
            3,
            None,
            True,
            1.5,
            "",
            "\u0000",
            "a" * 5_000,
            ("a", "b"),
            "é",
        ]
    )
    if new in node:
        return
    if doc.draw.random() < 0.5:
        node[new] = node.pop(key)
    else:
        node[new] = copy.deepcopy(node[key])
    doc.done.append(f"name: {str(new)[:60]!r} for {key}")


def of_nesting(doc: Document) -> None:
    """A section that is not a mapping, or is in another place."""
    node, key = doc.draw.choice(doc.sections())
    value = node[key]
    deep: Any = 1
    for _ in range(doc.draw.choice((20, 200))):
        deep = [deep] if doc.draw.random() < 0.5 else {"a": deep}
    doc.done.append(f"nesting: {key}")
    how = doc.draw.randrange(9)
    if how == 0:
        node[key] = [value]
    elif how == 1:
        node[key] = {key: value}
    elif how == 2:
        node[key] = None
    elif how == 3:
        node[key] = doc.draw.choice(["abc", 3, [], {}, [[]], [{}], True])
    elif how == 4:
        doc.tree[key] = value
    elif how == 5:
        node[key] = deep
    elif how == 6:
        del node[key]
    elif how == 7:
        node[key] = [value, value] if not isinstance(value, list) else value * 2
    else:
        doc.tree = {"federate": doc.tree} if doc.draw.random() < 0.5 else {**doc.tree, "federate": doc.tree}
    doc.done[-1] += f", way {how}"


# -- encoding ----------------------------------------------------------------------------------------------


def of_encoding(doc: Document) -> None:
    """A change of the text or the bytes of the file."""
    draw = doc.draw

    def at_line(insert: Callable[[str], str]) -> Callable[[str], str]:
        moment = draw.random()

        def change(text: str) -> str:
            lines = text.splitlines(keepends=True) or ["\n"]
            i = int(moment * len(lines))
            return "".join([*lines[:i], insert(lines[i]), *lines[i + 1 :]])

        return change

    def value_of_line(value: str) -> Callable[[str], str]:
        return at_line(lambda line: f"{line.split(':')[0]}: {value}\n" if ":" in line else f"{line.rstrip()} {value}\n")

    part, bit, noise = draw.random(), draw.randrange(8), draw.randbytes(500)
    bombs = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    texts: dict[str, Callable[[str], str]] = {
        "a tab": at_line(lambda line: "\t" + line),
        "a space": at_line(lambda line: " " + line),
        "a NUL": at_line(lambda line: line[: len(line) // 2] + "\0" + line[len(line) // 2 :]),
        "a bell": at_line(lambda line: line[:-1] + "\a\n"),
        "a surrogate": value_of_line('"\\ud800"'),
        "a surrogate pair": value_of_line('"\\ud83d\\ude00"'),
        "400 digits": value_of_line("9" * 400),
        "5000 digits": value_of_line("9" * 5000),
        "400 digits of a fraction": value_of_line("0." + "9" * 400),
        "a base of 60": value_of_line("1:30"),
        "octal": value_of_line("0o17"),
        "an exponent": value_of_line("1e400"),
        "a date": value_of_line("2026-01-01"),
        "an alias of nothing": value_of_line("*nothing"),
        "an alias of itself": value_of_line("&me [*me]"),
        "a tag": value_of_line("!!python/object/apply:os.system ['exit 3']"),
        "a tag of Python": value_of_line("!!python/name:os.system"),
        "a set": value_of_line("!!set {a, b}"),
        "binary": value_of_line("!!binary aGVsbG8="),
        "a wrong binary": value_of_line("!!binary é"),
        "an int that is none": value_of_line("!!int abc"),
        "a float that is none": value_of_line("!!float abc"),
        "a bool that is none": value_of_line("!!bool abc"),
        "a merge": value_of_line("{<<: {a: 1}}"),
        "a merge of a number": value_of_line("{<<: 3}"),
        "a mapping as a key": value_of_line("{{a: 1}: 2}"),
        "a list as a key": value_of_line("{[a]: 2}"),
        "an open bracket": value_of_line("["),
        "an open quotation": value_of_line('"abc'),
        "percent": at_line(lambda line: "%" + line),
        "a directive": lambda text: "%YAML 3.0\n---\n" + text,
        "two documents": lambda text: text + "---\n" + text,
        "an end": at_line(lambda line: "...\n" + line),
        "a line twice": at_line(lambda line: line + line),
        "bombs": lambda text: "a0: &a0 [x, x]\n" + bombs + text,
        "1000 levels": value_of_line("[" * 1000 + "]" * 1000),
        "1000 open levels": value_of_line("{a: " * 1000),
        "100000 levels": value_of_line("[" * 100_000),
        "a long line": value_of_line("a" * 1_000_000),
        "many lines": lambda text: text + "#\n" * 200_000,
        "a cut": lambda text: text[: int(part * len(text))],
        "nothing": lambda text: "",
        "a comment": lambda text: "# nothing\n",
        "a number": lambda text: "3\n",
        "a list": lambda text: "- 1\n- 2\n",
    }
    coded: dict[str, Callable[[str], bytes]] = {
        "utf-16": lambda text: text.encode("utf-16"),
        "utf-32": lambda text: text.encode("utf-32"),
        "utf-7 with latin-1": lambda text: text.encode() + b"# \xe9\n",
        "a BOM": lambda text: b"\xef\xbb\xbf" + text.encode(),
        "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
        "CR": lambda text: text.replace("\n", "\r").encode(),
        "U+2028": lambda text: text.replace("\n", "\u2028", 3).encode(),
        "a flipped bit": lambda text: _flipped(text.encode(), part, bit),
        "a lost byte": lambda text: _without(text.encode(), part),
        "noise": lambda text: noise,
        "gzip": lambda text: gzip.compress(text.encode()),
    }
    name = draw.choice([*texts, *coded])
    if name in texts:
        doc.text.append(texts[name])
    else:
        doc.bytes = coded[name]
    doc.done.append(f"encoding: {name}")


def _flipped(content: bytes, at: float, bit: int) -> bytes:
    changed = bytearray(content)
    changed[int(at * len(changed))] ^= 1 << bit
    return bytes(changed)


def _without(content: bytes, at: float) -> bytes:
    i = int(at * len(content))
    return content[:i] + content[i + 1 :]


MUTATIONS = {"type": of_type, "range": of_range, "name": of_name, "nesting": of_nesting, "encoding": of_encoding}
