"""Runs the framework's launcher after our registration: ``python -m fs_lowrank.engines.federatedscope --cfg FILE``."""

import runpy
import sys

import fs_lowrank.engines.federatedscope  # noqa: F401  (registers)
from fs_lowrank.errors import UserError

try:
    runpy.run_module("federatedscope.main", run_name="__main__", alter_sys=True)
except UserError as error:
    sys.exit(f"error: {error}")
