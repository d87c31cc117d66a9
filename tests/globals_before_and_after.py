"""Compares what belongs to the whole process before and after calls of the library; run by ``test_globals``."""

import decimal
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import warnings
from pathlib import Path

import datasets
import fs_lowrank.hpo as hpo
import matplotlib
import numpy as np
import optuna
import pandas as pd
import peft
import torch
import transformers

import fs_lowrank
from fs_lowrank.draw.figures import figure, save, svg
from fs_lowrank.draw.panels import Line, Panel
from fs_lowrank.draw.report import write_page
from fs_lowrank.runs.shown import read_runs


def found() -> dict:
    """What a library could change, by name."""
    decided = matplotlib.rcParams._get("backend")  # looking it up the usual way would choose one
    files = (transformers.logging, datasets.logging, optuna.logging)
    return {
        "matplotlib's backend": decided if isinstance(decided, str) else "not chosen",
        "matplotlib's settings": {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"},
        "pyplot": "matplotlib.pyplot" in sys.modules,
        # Libraries add filters of their own warnings when they are imported.
        "warnings": [f for f in warnings.filters if f[1] is None and f[3] is None and f[2].__module__ == "builtins"],
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "logging errors": (logging.raiseExceptions, logging.getLoggerClass(), logging.lastResort),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.is_anomaly_enabled(),
            torch.multiprocessing.get_sharing_strategy(),
        ),
        "generators": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "numpy": (np.get_printoptions(), np.geterr()),
        "pandas": [pd.get_option(o) for o in ("display.max_rows", "display.width")],
        "verbosity": [module.get_verbosity() for module in files],
        "bars": (transformers.logging.is_progress_bar_enabled(), datasets.is_progress_bar_enabled()),
        "datasets": (datasets.is_caching_enabled(), datasets.config.HF_HUB_OFFLINE),
        "processes": multiprocessing.get_start_method(allow_none=True),
        "python": (sys.stdout, sys.stderr, sys.excepthook, sys.displayhook, sys.argv, sys.getrecursionlimit()),
        "more": (gc.isenabled(), socket.getdefaulttimeout(), decimal.getcontext().prec, sys.getswitchinterval()),
        "peft": peft.__version__,
    }


def small_config(folder: Path, name: str):
    few = {"federate.client_num": 2, "federate.total_round_num": 2, "train.local_update_steps": 1}
    return fs_lowrank.load_config(folder / "run.yaml", {**few, "outdir": str(folder / name)})


def call(what: str, folder: Path) -> None:
    if what == "run":
        fs_lowrank.run(small_config(folder, "run"))
    elif what == "compare":
        fs_lowrank.compare(small_config(folder, "compare"), ["rolora", "fedavg"])
    elif what == "report":
        write_page(read_runs([folder / "run", folder / "compare"]), folder / "page.html")
    elif what == "federatedscope":
        fs_lowrank.run(small_config(folder, "plugged"), "federatedscope")
    elif what == "tune":
        config = small_config(folder, "tune").replace({"data.splits": [0.6, 0.2, 0.2]})
        space = hpo.space_from({"train.optimizer.lr": {"grid": [1e-3, 1e-2]}})
        options = hpo.Search(name="s", folder=folder / "hpo", workers=0, confirm=0)
        hpo.tune(config, space, options, say=lambda text: None)
    else:
        panel = Panel("k", "title", "x", "y", [Line("a", [1, 2], [1, 2])])
        save(figure([panel]), folder / "figure.png")
        svg(panel)


folder = Path(sys.argv[1])
transformers.logging.set_verbosity_info()
warnings.simplefilter("once", FutureWarning)
before = found()
for what in sys.argv[2:]:
    call(what, folder)
    after = found()
    for name, was in before.items():
        now = after[name]
        if isinstance(was, dict):
            keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
            was, now = ({key: each.get(key) for key in keys} for each in (was, now))
        assert now == was, f"{what} changed {name}: it was {was}, and is {now}"
print(f"unchanged by {', '.join(sys.argv[2:])}")
