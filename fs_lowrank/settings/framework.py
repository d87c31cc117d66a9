"""The keys of FederatedScope that our typed sections do not have, read from ``framework.yaml``.

An engine accepts a key at its default, a key that it honours, and a key without effect, and refuses any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .reading import read_packaged
from .tree import flatten

_TABLES = read_packaged(__package__, "framework.yaml")

#: dotted name -> FederatedScope's default
DEFAULTS = flatten(_TABLES["defaults"])
#: sections that accept unknown keys
OPEN: list[str] = _TABLES["open"]
#: keys and sections that do not affect the result of a run in one process
HARMLESS: list[str] = _TABLES["harmless"]
#: of them, those that the engines local and flower follow
FOLLOWED: list[str] = _TABLES["followed"]
#: other keys that the local engine honours
ON_LOCAL: list[str] = _TABLES["local"]["honoured"]
#: key -> why the local engine refuses it, of those that the engine federatedscope honours
REFUSED_HERE: dict[str, str] = _TABLES["local"]["refused"]
#: reason -> keys without effect on every engine
NOWHERE: dict[str, list[str]] = _TABLES["idle"]
#: values that describe what the local engine does anyway
SAME_AS_OURS: dict[str, list[object]] = _TABLES["same_as_ours"]
#: section -> the key that turns it on; other sections have the key ``use``
SWITCHES: dict[str, str] = _TABLES["switches"]
#: what the engine federatedscope does with them, and with keys of ours: see the file
HONOURED: list[str] = _TABLES["federatedscope"]["honoured"]
IDLE: dict[str, list[str]] = {**NOWHERE, **_TABLES["federatedscope"]["idle"]}
AS_IT_IS: dict[str, list[object]] = _TABLES["federatedscope"]["same_as_ours"]
REFUSED: dict[str, str] = _TABLES["federatedscope"]["refused"]
#: the same for the engine flower, where it differs from the embedded one
ON_FLOWER: dict[str, Any] = _TABLES["flower"]
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


def off_switch(name: str, given: Mapping[str, object]) -> str | None:
    """The key that would turn on the feature of FederatedScope to which ``name`` belongs; None if ``given`` does so."""
    return next((key for key in switches(name) if given.get(key, DEFAULTS[key]) == DEFAULTS[key]), None)


def decides_nothing(name: str, given: Mapping[str, object]) -> bool:
    """Whether ``given[name]`` does not affect the result of a run in one process."""
    idle = within(name, HARMLESS) or any(within(name, names) for names in NOWHERE.values())
    return idle or bool(off_switch(name, given)) or given[name] in SAME_AS_OURS.get(name, ())
