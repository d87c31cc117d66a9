"""The keys that the file of a suite may have, by section; ``docs/guides/benchmark.md`` describes them."""

from __future__ import annotations

from fs_lowrank.settings import Key

SIZES = ("small", "paper")

_MAPPING, _SWITCH = Key(dict | None), Key(bool)
_COUNT = Key(int | None, {"min": 1})
_SOME = {"filled": True, "once": True}
EXPERIMENT = {
    "title": Key(str | None),
    "note": Key(str | None),
    "config": _MAPPING,
    "methods": Key(list | str, {"words": "a list of methods, or all"}),
    "grid": _MAPPING,
    "seeds": Key(list[int], {**_SOME, "min": 0}),
    "learning_rates": _MAPPING,
    "evaluation": Key(list | dict | None, {"words": "a list of mappings, each with a scorer"}),
    "metrics": Key(list[str], {"once": True}),
    "reference": Key(dict | str | None, {"words": "the name of figures, or a mapping"}),
    "samples": _COUNT,
    "evaluations": _COUNT,
    "test": Key(str, {"choices": ("once", "rounds", "none")}),
    "script": Key(str | None),
    "args": Key(list),
    "values": Key(dict),
    "by_seed": Key(dict),
    "training_file": _MAPPING,
    "extra": _SWITCH,
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
    "experiments": Key(list, _SOME, required=True),
    "rule": Key(list, {**_SOME, "words": "a list of conditions"}, required=True),
}
CAUSE = {"says": Key(str, required=True), "experiments": Key(list[str], _SOME, required=True)}
