"""Runs the framework's launcher after our registration: ``python -m fs_lowrank.engines.federatedscope --cfg FILE``."""

import runpy
import sys
import traceback

import fs_lowrank.engines.federatedscope  # noqa: F401  (registers)
from fs_lowrank.engines.federatedscope.config import unknown_key_in
from fs_lowrank.errors import UserError

try:
    runpy.run_module("federatedscope.main", run_name="__main__", alter_sys=True)
except UserError as error:
    sys.exit(f"error: {error}")
except (AssertionError, KeyError, ValueError) as error:
    # The framework's configuration raises these for a key or a value of the user that is wrong.
    if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith("yacs_config.py"):
        raise
    message = unknown_key_in(error) or str(error.args[0] if error.args else error)
    sys.exit(f"error: {message.splitlines()[0]}")
