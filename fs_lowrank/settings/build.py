"""Build checked sections from plain nested data."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UserError, nearest
from . import framework
from .check import check_value, keys_of
from .origin import Origin
from .schema import known_keys


def read_section(cls: type, raw: Any, prefix: str, origin: Origin, others: dict[str, Any]) -> Any:
    """An instance of ``cls`` from its section of the file. FederatedScope's other keys go to ``others``."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        origin.wrong(prefix.rstrip("."), raw, "a section with keys of its own")
    keys = {name: of for name, of in keys_of(cls).items() if not {"open", "hidden"} & of.meta.keys()}
    rest = next((name for name, of in keys_of(cls).items() if "open" in of.meta), None)
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in raw.items():
        name = prefix + key
        if (of := keys.get(key)) and isinstance(of.hint, type) and dataclasses.is_dataclass(of.hint):
            values[key] = read_section(of.hint, value, name + ".", origin, others)
        elif of:
            values[key] = check_value(name, value, of.hint, of.meta, origin)
        elif _framework_key(name, value, origin, others):
            continue
        elif rest is None:
            unknown_key(name, origin)
        else:
            extra[key] = value  # a further key, which is checked when the section is used
    return cls(**values, **({rest: extra} if rest else {}))


def unknown_key(name: str, origin: Origin, more: Sequence[str] = ()) -> NoReturn:
    """Refuse the key ``name``; the message names our keys and sections with this last part, or one of the same section
    that is spelled alike. That two keys are of one section does not make them alike.
    """
    known, (section, _, last) = [*known_keys(), *more], name.lower().rpartition(".")
    ours = [key for key in known if key not in framework.DEFAULTS]
    ours += sorted({key.rsplit(".", depth)[0] for key in ours for depth in range(1, key.count(".") + 1)})
    same = [key for key in ours if key.rpartition(".")[2] == last]
    same = [key for key in same if key.startswith(f"{section}.")] or same
    if not 0 < len(same) <= 3:
        beside = {key.rpartition(".")[2]: key for key in ours if key.rpartition(".")[0] == section}
        same = [beside[close] for close in difflib.get_close_matches(last, beside, n=1)]
    hint = f"; did you mean {' or '.join(map(repr, same))}?" if same else nearest(name, known, 0.8)
    raise UserError(f"{origin.where(name)}unknown key {name!r}{hint}")


def _framework_key(name: str, value: Any, origin: Origin, others: dict[str, Any]) -> bool:
    """Whether FederatedScope has this key. A value other than its default is added to ``others``."""
    if name in framework.DEFAULTS:
        default = framework.DEFAULTS[name]
        value = check_value(name, value, type(default), {}, origin)
        if value != default:
            others[name] = value
        return True
    if framework.within(name, framework.OPEN) and name not in framework.OPEN:
        others[name] = value
        return True
    if name not in framework.OPEN and not any(key.startswith(name + ".") for key in framework.DEFAULTS):
        return False
    if value is not None and not isinstance(value, Mapping):
        origin.wrong(name, value, "a section with keys of its own")
    for key, item in (value or {}).items():
        if not _framework_key(f"{name}.{key}", item, origin, others):
            unknown_key(f"{name}.{key}", origin)
    return True
