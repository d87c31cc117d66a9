"""The keys of FederatedScope that our typed sections do not have, read from ``framework.yaml``.

An engine accepts a key at its default, a key that it honours, and a key without effect, and refuses any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .reading import read_packaged
from .tree import flatten, sections

_TABLES = read_packaged(__package__, "framework.yaml")

#: dotted name -> FederatedScope's default
DEFAULTS = flatten(_TABLES["defaults"])
#: sections that accept unknown keys
OPEN: list[str] = _TABLES["open"]
#: all sections of FederatedScope's keys
SECTIONS = {*OPEN, *sections([*DEFAULTS, *OPEN])}
#: keys and sections that do not affect the result of a run in one process
HARMLESS: list[str] = _TABLES["harmless"]
#: keys that are in every fingerprint, also at their defaults
HASHED: list[str] = _TABLES["hashed"]
#: values that agree with the behaviour of the local engine
SAME_AS_OURS: dict[str, list[object]] = _TABLES["same_as_ours"]
#: section -> the key that turns it on; other sections have the key ``use``
SWITCHES: dict[str, str] = _TABLES["switches"]
#: key or section that is refused or without effect -> its replacement
INSTEAD: dict[str, str] = _TABLES["instead"]
#: engine -> keys and sections that it follows
FOLLOWED: dict[str, list[str]] = _TABLES["followed"]
#: engine -> keys and sections without effect
IDLE: dict[str, list[str]] = {"local": HARMLESS, "flower": HARMLESS, "federatedscope": _TABLES["no_effect"]}
#: engine -> keys of ours that have no effect on it, or that it refuses, and why
OURS_IDLE: dict[str, dict[str, str]] = _TABLES["ours"]["no_effect"]
OURS_REFUSED: dict[str, dict[str, str]] = _TABLES["ours"]["refused"]
#: method of FederatedScope -> our method, if ``llm.adapter.use`` is True
WITH_ADAPTERS = {"fedavg": "fedlora"}


def within(name: str, sections: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``sections`` or a key inside one."""
    return any(name == s or name.startswith(s + ".") for s in sections)


def switches(name: str) -> Iterator[str]:
    """The keys that turn on the features of FederatedScope to which ``name`` belongs, the outermost first."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        section = ".".join(parts[:end])
        key = SWITCHES.get(section, f"{section}.use")
        if key in DEFAULTS and key != name:
            yield key


def off_switch(name: str, values: Mapping[str, object]) -> str | None:
    """The key that would turn on the feature of FederatedScope to which ``name`` belongs; None if ``values`` do."""
    return next((key for key in switches(name) if values.get(key, DEFAULTS[key]) == DEFAULTS[key]), None)


def decides_nothing(name: str, values: Mapping[str, object]) -> bool:
    """Whether ``values[name]`` does not affect the result of a run in one process."""
    as_ours = values[name] in SAME_AS_OURS.get(name, ())
    return within(name, HARMLESS) or bool(off_switch(name, values)) or as_ours


def treatment(name: str, engine: str, values: Mapping[str, object] | None = None) -> str:
    """How an engine treats a key whose value is not the default: ``followed``, ``no effect`` or ``refused``.

    Args:
        values: of this key and others; None: any, with all features turned on.
    """
    if values is not None and off_switch(name, values):
        return "no effect"
    value = values[name] if values else None
    if name == "trainer.type" and isinstance(value, str):
        value = value.lower()  # as FederatedScope reads it
    if within(name, FOLLOWED[engine]) or values and value in SAME_AS_OURS.get(name, ()):
        return "followed"
    return "no effect" if within(name, IDLE[engine]) else "refused"
