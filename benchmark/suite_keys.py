"""The keys that the file of a suite may have, by section; ``docs/guides/benchmark.md`` describes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fs_lowrank.settings import Key, key, keys_of

SIZES = ("small", "paper")

_MAPPING, _SWITCH = Key(dict | None), Key(bool)
_COUNT = Key(int | None, {"min": 1})
_FILLED = {"filled": True, "once": True}


@dataclass(frozen=True, kw_only=True)
class PlainKeys:
    """The keys of an experiment that are used as they are in the file; None means the same as no key.

    Attributes:
        samples: number of samples that all clients together train on in a run; sets the rounds. evaluations:
            approximate number in a run. test: ``once``, after the last round, ``rounds`` or ``none``.
        script: a module to run instead of a grid, with ``args``; values: metric -> dotted path in its JSON;
            by_seed: metric -> path to its values by seed.
        extra: runs only if ``--only`` names it. fixed_methods: ``--methods`` selects among its own, and adds none.
    """

    title: str = ""
    note: str = ""
    seeds: tuple[int, ...] = key((0,), filled=True, once=True, min=0)
    metrics: tuple[str, ...] = key(("test_acc",), once=True)
    samples: int | None = key(None, min=1)
    evaluations: int | None = key(None, min=1)
    test: str = key("once", choices=("once", "rounds", "none"))
    script: str = ""
    args: tuple = ()
    values: dict = key({})
    by_seed: dict = key({})
    extra: bool = False
    fixed_methods: bool = False


EXPERIMENT = {
    **{name: replace(spec, hint=spec.hint | None) for name, spec in keys_of(PlainKeys).items()},
    "config": _MAPPING,
    "methods": Key(list | str, {"words": "a list of methods, or all"}),
    "grid": _MAPPING,
    "learning_rates": _MAPPING,
    "evaluation": Key(list | dict | None, {"words": "a list of mappings, each with a scorer"}),
    "reference": Key(dict | str | None, {"words": "the name of figures, or a mapping"}),
    "training_file": _MAPPING,
}
SIZE = {**EXPERIMENT, "experiments": _MAPPING}
SUITE = {
    **SIZE,
    "source": Key(str),
    "imports": Key(list[str]),
    "figures": Key(dict),
    "claims": Key(dict),
    **dict.fromkeys(SIZES, _MAPPING),
}
METHOD = {
    "name": Key(str),
    "method": Key(str, required=True),
    "config": _MAPPING,
    "where": _MAPPING,
    "extra": _SWITCH,
}
RATES = {"table": Key(dict), "budget": Key(str), "found_by": Key(str), "search": Key(dict)}
SEARCH = {
    "space": Key(dict, {"words": "a mapping such as {train.optimizer.lr: {grid: [1e-3, 1e-2]}}"}, required=True),
    "each": Key(list),
    "at": Key(dict),
    "config": Key(dict),
    "seed": Key(int, {"min": 0}),
    "seeds": Key(int, {"min": 1}),
    "objective": Key(str),
    "samples": _COUNT,
    "grow": Key(int, {"min": 0}),
}
TRAINING_FILE = {"tasks": Key(list[str], {"once": True}), "per_task": _COUNT, "seed": Key(int, {"min": 0})}
REFERENCE = {
    "from": Key(str),
    "setting": Key(str),
    "scorer": Key(str),
    "values": Key(dict),
}
CLAIM = {
    "says": Key(str, required=True),
    "source": Key(str),
    "needs": Key(str),
    "cause": Key(dict, {"words": "a mapping with says and experiments"}),
    "remark": Key(str),
    "experiments": Key(list, _FILLED, required=True),
    "rule": Key(list, {**_FILLED, "words": "a list of conditions"}, required=True),
}
CAUSE = {"says": Key(str, required=True), "experiments": Key(list[str], _FILLED, required=True)}
