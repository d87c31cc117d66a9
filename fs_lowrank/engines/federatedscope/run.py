"""Runs the framework from our configuration."""

from __future__ import annotations

import numpy as np
import torch
from federatedscope.core.auxiliaries.data_builder import get_data
from federatedscope.core.auxiliaries.runner_builder import get_runner
from federatedscope.core.auxiliaries.utils import setup_seed
from federatedscope.core.auxiliaries.worker_builder import get_client_cls, get_server_cls

from ...config import Config, check_engine
from ...errors import RunFailed
from ...jobs.files import cannot_write
from ...runs.folder import outdir_of
from ...runs.result import RunResult
from ..pool import processes_of
from ..process_settings import preserving_settings
from . import session as sessions
from .config import to_framework
from .logs import log_to
from .runner import LoopRunner


def run(config: Config, resume: bool = False, on_round=None, on_client=None, callbacks=()) -> RunResult:
    """Run as ``fs_lowrank.run`` does. In a client process of a distributed run the result has no history.

    Raises:
        UserError: the configuration, data or model is wrong, or the server refused this client.
        RunFailed: the run ended before its last round.
    """
    check_engine(config, "federatedscope")  # ``from_framework`` checks what the framework's own launchers read
    standalone, cfg = config.federate.mode == "standalone", to_framework(config)
    # The framework itself would choose a new folder for each run.
    outdir = outdir_of(config)
    is_client = not standalone and cfg.distribute.role == "client"
    outdir = outdir / f"client_{max(cfg.distribute.data_idx, 0)}" if is_client else outdir
    outdir.mkdir(parents=True, exist_ok=True)
    cfg.outdir = str(outdir)
    threads = torch.get_num_threads()
    # The framework reads back as JSON the numbers that it prints (``compat``).
    with (
        preserving_settings(),
        np.printoptions(legacy="1.25"),
        log_to(outdir / "exp_print.log", config.verbose),
    ):
        try:
            setup_seed(cfg.seed)
            several = standalone and processes_of(config) > 1
            if several:
                session = sessions.open_session(cfg)
                session.config = session.config.replace({"federate.process_num": processes_of(config)})
            else:
                data, changed = get_data(config=cfg.clone(), client_cfgs=None)
                cfg.merge_from_other_cfg(changed)
                session = sessions.current()
            session.resume, session.own_callbacks = resume, callbacks
            session.on_round, session.on_client = on_round or session.on_round, on_client or session.on_client
            cfg.freeze(inform=False, save=False)
            if several:
                LoopRunner(cfg).run()
            else:
                workers = {"server_class": get_server_cls(cfg), "client_class": get_client_cls(cfg)}
                get_runner(data=data, config=cfg.clone(), **workers).run()
            if session.result is None and standalone:
                raise RunFailed(
                    f"the run ended before its last round: a round could not be completed; see "
                    f"{outdir / 'exp_print.log'}"
                )
            return session.result or session.client_result()
        except OSError as error:
            raise cannot_write(error.filename or outdir, error) from error
        finally:
            sessions.close_session()
            torch.set_num_threads(threads)  # the framework has set it to 1
