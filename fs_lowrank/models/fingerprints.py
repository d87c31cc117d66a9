"""Hashes of a model and of its configuration: whether two processes, or a run and its continuation, have the same.

A configuration is hashed as transformers has read it, without the place it was read from, so that the same files in
another folder, or with other spaces between their values, are the same.
"""

from __future__ import annotations

import json

from torch import nn

from ..algebra import digest
from ..jobs.memo import memoized
from .kinds import unwrapped
from .quantised import beside

#: where a configuration was read from, by which version, and what ``lowrank.dtype`` decides
_NOT_ITS_OWN = ("_name_or_path", "transformers_version", "dtype")


def fingerprint_of(plain: nn.Module) -> str:
    """``model_fingerprint`` of a model as ``build_model`` gave it; computed once for models that are kept."""
    return memoized("fingerprint", lambda: vars(plain).get("decided_by"), lambda: model_fingerprint(plain))


def model_fingerprint(model: nn.Module) -> str:
    """A hash over names, shapes, dtypes and values of all parameters, and scales of quantised ones, 12 digits."""
    return digest({**dict(model.named_parameters()), **beside(model)})[:12]


def configuration_fingerprint(model: nn.Module) -> str:
    """A hash over what the configurations of the model, and of how it generates, change of their classes' defaults, 12
    digits; empty if it has none. Of a model that ``build_model`` gave, as its files say, without what it settled of the
    ends of answers.
    """
    inner = unwrapped(model)
    if "configured" in vars(inner):
        return vars(inner)["configured"]
    found = [getattr(inner, name, None) for name in ("config", "generation_config")]
    changed = [of.to_diff_dict() for of in found if of is not None and hasattr(of, "to_diff_dict")]
    settings = [{k: v for k, v in each.items() if k not in _NOT_ITS_OWN} for each in changed]
    return digest({}, json.dumps(settings, sort_keys=True, default=str))[:12] if settings else ""
