"""The settings of a run: the schema, the arguments of the adapter, checks of values, reading YAML.

The other packages use ``Settings`` as the type of a configuration. This package does not depend on methods, models or
engines, and does not import torch.
"""

from . import framework
from .adapter import ADDED, ALL_LINEAR, AdapterSpec
from .build import unknown_key
from .check import Key, check_keys, check_value, key, keys_of, one_mapping
from .origin import Origin, show
from .parameters import check_method_params
from .reading import parse_overrides, read_yaml, yaml_beside
from .schema import Settings, flat_keys, known_keys
from .sections import (
    OPTIMIZERS,
    OPTIMIZERS_8BIT,
    VISION_MODELS,
    Data,
    DataArgs,
    Eval,
    Lowrank,
    Optimizer,
    Scheduler,
    robust_needs,
    server_lr,
)
from .tree import flatten
