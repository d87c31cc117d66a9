"""What can be configured: the schema, the adapter's arguments, checking one value, reading YAML.

Everything else is typed with ``Settings``. Nothing here knows a method, a model or an engine, and nothing here
imports torch.
"""

from . import framework
from .adapter import AdapterSpec
from .build import check_together, read_section, unknown_key
from .check import Key, check_keys, check_value, key, keys_of, one_mapping
from .origin import Origin, show
from .parameters import check_method_params
from .reading import as_overrides, parse_overrides, read_yaml
from .schema import Settings, flat_keys, infer_task, known_keys
from .sections import OPTIMIZERS, VISION_MODELS, Eval, Lowrank, Optimizer, Scheduler, server_lr
from .tree import assign, flatten, lookup, merge

__all__ = [
    "OPTIMIZERS",
    "VISION_MODELS",
    "AdapterSpec",
    "Eval",
    "Key",
    "Lowrank",
    "Optimizer",
    "Origin",
    "Scheduler",
    "Settings",
    "as_overrides",
    "assign",
    "check_keys",
    "check_method_params",
    "check_together",
    "check_value",
    "flat_keys",
    "flatten",
    "framework",
    "infer_task",
    "key",
    "keys_of",
    "known_keys",
    "lookup",
    "merge",
    "one_mapping",
    "parse_overrides",
    "read_section",
    "read_yaml",
    "server_lr",
    "show",
    "unknown_key",
]
