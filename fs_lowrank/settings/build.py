"""Build checked sections from plain nested data."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UserError, nearest
from . import framework
from .check import Key, check_value, keys_of
from .origin import Origin
from .schema import known_keys
from .tree import sections


def read_section(cls: type | None, raw: Any, prefix: str, origin: Origin, framework_keys: dict[str, Any]) -> Any:
    """An instance of ``cls`` from its section of the file; None for a section of FederatedScope alone.

    Args:
        framework_keys: is filled with FederatedScope's other keys whose values differ from its defaults.
    Raises:
        UserError: an unknown key, or a value of the wrong type or out of range.
    """
    if raw is not None and not isinstance(raw, Mapping):
        origin.wrong(prefix.rstrip("."), raw, "a section with keys of its own")
    keys: Mapping[str, Key] = keys_of(cls) if cls else {}
    open_key = next((name for name, spec in keys.items() if "open" in spec.meta), None)
    values: dict[str, Any] = {open_key: {}} if open_key else {}
    for key, value in (raw or {}).items():
        name, spec = prefix + key, keys.get(key)
        if spec and not {"open", "hidden"} & spec.meta.keys():
            if isinstance(spec.hint, type) and dataclasses.is_dataclass(spec.hint):
                values[key] = read_section(spec.hint, value, f"{name}.", origin, framework_keys)
            else:
                values[key] = check_value(name, value, spec, origin)
        elif name in framework.DEFAULTS:
            default = framework.DEFAULTS[name]
            if (checked := check_value(name, value, Key(type(default)), origin)) != default:
                framework_keys[name] = checked
        elif framework.within(name, framework.OPEN) and name not in framework.OPEN:
            framework_keys[name] = value
        elif name in framework.SECTIONS:
            read_section(None, value, f"{name}.", origin, framework_keys)
        elif open_key:
            values[open_key][key] = value  # which is checked when the section is used
        else:
            unknown_key(name, origin)
    return cls(**values) if cls else None


def unknown_key(name: str, origin: Origin, extra: Sequence[str] = ()) -> NoReturn:
    """Refuse the key ``name``; the message names a key of its section with nearly this last part, or our keys and
    sections with this last part, or one of its section with a similar one. The section alone does not make two keys
    similar.
    """
    valid, (section, _, last) = [*known_keys(), *extra], name.lower().rpartition(".")
    ours = {key for key in valid if key not in framework.DEFAULTS}
    ours |= sections(ours)

    def siblings(keys: Iterable[str], cutoff: float) -> list[str]:
        named = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
        return [named[close] for close in difflib.get_close_matches(last, named, n=1, cutoff=cutoff)]

    if not (alike := siblings([*valid, *ours], 0.85)):
        alike = sorted(key for key in ours if key.rpartition(".")[2] == last)
        alike = [key for key in alike if key.startswith(f"{section}.")] or alike
    if not 0 < len(alike) <= 3:
        alike = siblings(ours, 0.6)
    hint = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else nearest(name, valid, 0.8)
    raise UserError(f"{origin.where(name)}unknown key {name!r}{hint}")
