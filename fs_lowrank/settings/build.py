"""Build checked sections from plain nested data."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UserError, nearest
from . import framework
from .check import Key, check_value, keys_of
from .origin import Origin
from .schema import known_keys
from .tree import sections


def read_section(cls: type | None, raw: Any, prefix: str, origin: Origin, others: dict[str, Any]) -> Any:
    """An instance of ``cls`` from its section of the file; None for a section that FederatedScope alone has.

    Args:
        others: where FederatedScope's other keys go, if their values differ from its defaults.
    Raises:
        UserError: an unknown key, or a value of the wrong type or out of range.
    """
    if raw is not None and not isinstance(raw, Mapping):
        origin.wrong(prefix.rstrip("."), raw, "a section with keys of its own")
    keys: Mapping[str, Key] = keys_of(cls) if cls else {}
    rest = next((name for name, of in keys.items() if "open" in of.meta), None)
    values: dict[str, Any] = {rest: {}} if rest else {}
    for key, value in (raw or {}).items():
        name, of = prefix + key, keys.get(key)
        if of and not {"open", "hidden"} & of.meta.keys():
            if isinstance(of.hint, type) and dataclasses.is_dataclass(of.hint):
                values[key] = read_section(of.hint, value, f"{name}.", origin, others)
            else:
                values[key] = check_value(name, value, of, origin)
        elif name in framework.DEFAULTS:
            default = framework.DEFAULTS[name]
            if (checked := check_value(name, value, Key(type(default)), origin)) != default:
                others[name] = checked
        elif framework.within(name, framework.OPEN) and name not in framework.OPEN:
            others[name] = value
        elif name in framework.SECTIONS:
            read_section(None, value, f"{name}.", origin, others)
        elif rest:
            values[rest][key] = value  # which is checked when the section is used
        else:
            unknown_key(name, origin)
    return cls(**values) if cls else None


def unknown_key(name: str, origin: Origin, more: Sequence[str] = ()) -> NoReturn:
    """Refuse the key ``name``; the message names our keys and sections with this last part, or one of the same section
    that is spelled alike. That two keys are of one section does not make them alike.
    """
    known, (section, _, last) = [*known_keys(), *more], name.lower().rpartition(".")
    ours = [key for key in known if key not in framework.DEFAULTS]
    ours += sorted(sections(ours))
    same = [key for key in ours if key.rpartition(".")[2] == last]
    same = [key for key in same if key.startswith(f"{section}.")] or same
    if not 0 < len(same) <= 3:
        beside = {key.rpartition(".")[2]: key for key in ours if key.rpartition(".")[0] == section}
        same = [beside[close] for close in difflib.get_close_matches(last, beside, n=1)]
    hint = f"; did you mean {' or '.join(map(repr, same))}?" if same else nearest(name, known, 0.8)
    raise UserError(f"{origin.where(name)}unknown key {name!r}{hint}")
