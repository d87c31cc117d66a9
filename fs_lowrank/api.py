"""Running and comparing methods from Python."""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from .config import Config
from .errors import UserError, nearest
from .runs.plots import plot_curves
from .runs.result import RunResult

#: engine name -> the module that has ``run(config, resume, on_round, on_client)``
ENGINES = {"local": "fs_lowrank.engines.local", "federatedscope": "fs_lowrank.engines.federatedscope.run"}


def run(config: Config, engine: str = "local", *, resume: bool = False,
        on_round: Callable[[dict], object] | None = None,
        on_client: Callable[[int, int, int], object] | None = None) -> RunResult:
    """One run.

    Args:
        config: from ``load_config``.
        engine: ``local`` runs all clients in this process.
        resume: continue from the last checkpoint in ``config.outdir``.
        on_round: called with each round's record; return True to stop.
        on_client: called with (round, clients done, clients of the round).
    Raises:
        UserError: anything the user can put right.
    """
    if engine not in ENGINES:
        raise UserError(f"no engine {engine!r}{nearest(engine, ENGINES)}; there are: {', '.join(ENGINES)}")
    return import_module(ENGINES[engine]).run(config, resume=resume, on_round=on_round, on_client=on_client)


def compare(config: Config, methods: Sequence[str], engine: str = "local", *, resume: bool = False,
            on_method: Callable[[str], object] | None = None, **callbacks) -> dict[str, RunResult]:
    """The same run under several methods, each in a folder of its name below ``config.outdir``.

    Writes ``comparison.json`` and ``curves.png`` there. A hyperparameter of one method in ``config.lowrank``
    is given to the methods that have it. In a run of one round, clients are trained once and kept in ``clients``
    there for all methods that train them alike (``lowrank.reuse_clients``).

    Raises:
        UserError: an unknown method, before anything runs; or what ``run`` raises.
    """
    from .methods import get_method_class
    from .runs.environment import environment
    from .runs.summary import per_client_and_round, seconds
    names = [get_method_class(name).name for name in methods]
    if not names or len(set(names)) < len(names):
        raise UserError(f"compare needs distinct methods, got {', '.join(methods) or 'none'}")
    outdir = Path(config.outdir) / config.expname
    configs = {name: config.replace(**{"federate.method": name, "outdir": str(outdir / name), "expname": ""})
               for name in names}
    if config.federate.total_round_num == 1 and not config.lowrank.reuse_clients:
        # All start from one model, so methods whose clients train the same train them once.
        configs = {n: c.replace(**{"lowrank.reuse_clients": str(outdir / "clients")}) for n, c in configs.items()}
    results = {}
    for name, one in configs.items():
        if on_method:
            on_method(name)
        results[name] = run(one, engine, resume=resume and (outdir / name / "checkpoint").exists(), **callbacks)
    majority = next(iter(results.values())).facts["majority"]
    curves = plot_curves({n: r.history for n, r in results.items()}, outdir / "curves.png", majority)
    for result in results.values():
        result.saved["comparison"] = curves
    (outdir / "comparison.json").write_text(json.dumps(
        {n: {"final": r.final, "bytes_per_client_and_round": per_client_and_round(r.history),
             "seconds": seconds(r.history), "majority": majority,
             **{k: r.facts[k] for k in ("source", "data", "model", "config")}, "seed": config.seed,
             "versions": environment()["versions"], "settings": configs[n].to_dict()}
         for n, r in results.items()}, indent=1))
    return results
