"""Hashes of a model and of its configuration: whether two processes, or a run and its continuation, have the same.

A configuration is hashed as transformers has read it, without the place it was read from, so that the same files in
another folder, or with other spaces between their values, are the same.
"""

from __future__ import annotations

import json

from torch import nn

from ..algebra import digest
from .kinds import unwrapped
from .quantised import beside

#: where a configuration was read from, by which version, and what ``lowrank.dtype`` decides
_EXCLUDED = ("_name_or_path", "transformers_version", "dtype")


def model_fingerprint(model: nn.Module) -> str:
    """A hash over names, shapes, dtypes and values of all parameters, and scales of quantised ones, 12 digits."""
    return digest({**dict(model.named_parameters()), **beside(model)})[:12]


def configuration_fingerprint(model: nn.Module, labelled: bool = False) -> str:
    """A hash, 12 digits, of the values of the model's configuration and generation config that are not their classes'
    defaults; empty if it has none. For a model of ``build_model``, as in its files, before ``settle_ends``.

    Args:
        labelled: as it is now, with the names of the classes, as development versions of 0.2.0 had it.
    """
    inner = unwrapped(model)
    if "configured" in vars(inner) and not labelled:
        return vars(inner)["configured"]
    configs = [getattr(inner, name, None) for name in ("config", "generation_config")]
    changed = [config.to_diff_dict() for config in configs if config is not None and hasattr(config, "to_diff_dict")]
    settings = [{k: v for k, v in diff.items() if k not in _EXCLUDED} for diff in changed]
    return digest({}, json.dumps(settings, sort_keys=True, default=str))[:12] if settings else ""
