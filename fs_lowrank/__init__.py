"""Federated low-rank methods, configured by one YAML file, on an embedded engine or on FederatedScope.

>>> import fs_lowrank
>>> config = fs_lowrank.load_config("demo.yaml", **{"federate.method": "rolora"})
>>> result = fs_lowrank.run(config)
>>> result.final["test_acc"], result.save_adapter("adapter")

Modules are imported on first use, so that ``import fs_lowrank`` is fast.
"""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

from .versions import __version__ as __version__

if (_beside := Path(__file__).parents[1] / "setup.py").exists():
    # a clone, which has ``benchmark``, ``hpo`` and ``examples`` beside this package; a wheel has them in it
    __path__.append(str(_beside.parent))

_LAZY = {
    "load_config": "config",
    "Config": "config",
    "UserError": "errors",
    "RunFailed": "errors",
    "run": "api",
    "compare": "api",
    "list_engines": "engines",
    "create_method": "methods",
    "list_methods": "methods",
    "register_method": "methods",
    "Method": "methods",
    "Averaging": "methods",
    "Gathering": "methods",
    "Requires": "methods",
    "Phase": "methods",
    "Update": "methods",
    "RunResult": "runs.result",
    "Callback": "callbacks",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fs_lowrank' has no attribute {name!r}")
    state = random.getstate()  # rich draws from it when it is imported, and it is the user's
    try:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return __all__
