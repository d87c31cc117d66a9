"""The Python interface: run a configuration, or compare methods."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .config import Config, load_config, load_for
from .engines import get_engine
from .engines.process_settings import preserving_start_method
from .errors import UserError
from .jobs.files import to_json, write_text
from .jobs.memo import memoizing
from .jobs.pool import import_ahead
from .jobs.shell import names
from .jobs.tables import write_tables
from .jobs.workers import INSIDE
from .methods import requirements
from .runs.folder import check_outdir, holds_run, outdir_of, remove_run
from .runs.progress import progress_bar
from .seeds import preserving_generators
from .versions import SCHEMA

if TYPE_CHECKING:  # they take seconds, like the imports inside ``run`` and ``compare``
    from .callbacks import Callback
    from .runs.result import RunResult

Resume = bool | Literal["auto", "overwrite"]


def run(
    config: Config | str | Path,
    engine: str = "local",
    *,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    resume: Resume = False,
    overwrite: bool = False,
    progress: bool | None = None,
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_client: Callable[[int, int, int], object] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run a configuration.

    Args:
        config: from ``load_config``, or the path of a YAML file.
        engine: ``local`` runs all clients in this process; ``list_engines`` names the others.
        data: takes the place of ``data.type``: a ``datasets.Dataset``, a DataFrame or a torch dataset to divide among
            the clients; a list with one for each client; or a ``DatasetDict`` or mapping with ``train`` and perhaps
            ``validation`` and ``test``. They are written to ``given_data`` in ``config.outdir``, from which the run
            can be resumed without them; given again, they have to be the same.
        model: takes the place of ``model.type``: a loaded model of transformers, with its ``tokenizer``, which is
            written to ``given_model`` in ``config.outdir``; or a module of your own for labelled text, which takes
            ``input_ids`` and ``attention_mask`` and gives logits, and has to be given again to resume the run.
            ``model.task`` says what it is for, where its class does not. The model itself is not changed.
        resume: True: continue the run in ``config.outdir`` from its last checkpoint; ``"auto"``: the same, and start
            one if there is none; ``"overwrite"``: remove the run that is there, and start anew; False: start, and
            refuse a folder that holds a run.
        overwrite: True is ``resume="overwrite"``.
        progress: show a bar on standard error. None: on a terminal and in a notebook.
        on_round: called with each round's record; return True to stop.
        on_client: called with (round, clients done, clients of the round).
        callbacks: called at the start, after each round and at the end.
    Raises:
        UserError: an error that the user can correct. RunFailed: a valid run could not continue.
    """
    resume, overwrite = _resume_mode(resume, overwrite)
    config = config if isinstance(config, Config) else load_config(config)
    folder = outdir_of(config)
    if resume is True and config.federate.mode == "standalone" and not holds_run(folder):
        raise UserError(f"{folder} holds no run to continue; resume='auto' starts one where there is none")
    several = config.federate.process_num != 1 and config.sampled_per_round > 1 and INSIDE not in os.environ
    if several and engine == "local":
        import_ahead("fs_lowrank.engines.pool")  # while this process does
    from .callbacks import Callback
    from .models.given import holding
    from .runs.given import DATA, MODEL, with_data, with_model

    if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise UserError(f"callbacks = {callbacks!r}: expected a list of objects derived from fs_lowrank.Callback")
    module = get_engine(engine)
    written, held, existing = [], False, (bool(resume), overwrite)
    if data is not None:
        config, written = with_data(config, data, *existing), [DATA]
    if model is not None:
        config, held = with_model(config, model, tokenizer, *existing)
        written += [] if held else [MODEL]
    if overwrite:  # now that data and model are not refused
        remove_run(folder, keep=written)
    with (
        holding(model, tokenizer) if held else nullcontext(),
        _surrounded(config, config.federate.method, progress, on_round, on_client) as (report, tick),
    ):
        hooks: dict[str, Any] = {"on_round": report, "on_client": tick, "callbacks": callbacks}
        result: RunResult = module.run(config, resume=bool(resume), **hooks)
    return result


@contextmanager
def _surrounded(config: Config, name: str, progress: bool | None, *hooks: Any) -> Iterator[tuple[Any, Any]]:
    """What is around every run: random generators and the start method stay the caller's, and a bar called ``name``
    moves; gives the ``hooks`` of ``progress_bar``.
    """
    with (
        preserving_generators(),
        preserving_start_method(),
        progress_bar(config, f"{name}, rounds", progress, *hooks) as moving,
    ):
        yield moving


def _resume_mode(resume: Resume, overwrite: bool) -> tuple[bool | Literal["auto"], bool]:
    """``resume`` without "overwrite", and whether an existing run is removed."""
    if resume not in (True, False, "auto", "overwrite"):
        raise UserError(f"resume = {resume!r}: expected True, False, 'auto' or 'overwrite'")
    if resume == "overwrite":
        return False, True
    if resume and overwrite:
        raise UserError("resume continues a run and overwrite removes it; choose one of them")
    return resume, overwrite


def compare(
    config: Config | str | Path,
    methods: Sequence[str] | str,
    engine: str = "local",
    *,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    data: Any = None,
    resume: Resume = False,
    overwrite: bool = False,
    progress: bool | None = None,
    on_method: Callable[[str], object] | None = None,
    **told: Any,
) -> dict[str, RunResult]:
    """Run a configuration with several methods, each in a subfolder of ``config.outdir`` with its name.

    Writes ``comparison.json``, the table as ``.csv`` and ``.tex``, and ``curves.png`` (``.pdf``) to
    ``config.outdir``. If the run has one round, the clients are trained once, stored in ``clients``, and shared by all
    methods that train them alike (``lowrank.reuse_clients``).

    Args:
        config: from ``load_config``, or the path of a YAML file. The hyperparameters of its own method also apply to
            the other methods that have them.
        methods: names, as a list or as ``"rolora,fedlora"``; ``local``, ``pooled`` and ``relora`` are rows to compare
            them with (``baselines``), in the embedded engine.
        overrides: values that take precedence, as for ``load_config``. A key in ``lowrank``, such as
            ``lowrank.ranks``, may belong to any of the methods, and applies to those that have it.
        data: as for ``run``; written once, for all methods.
        resume, overwrite, progress: as for ``run``, for the run of every method; a method that has no run yet starts.
        told: ``on_round``, ``on_client`` and ``callbacks``, as for ``run``; the rows have no callbacks.

    Raises:
        UserError: an unknown method, an override that none of the methods has, or a folder that holds a run (raised
            before anything runs); and the errors of ``run``. RunFailed: the comparison cannot be written.
    """
    from .baselines import row_config, run_row, split_names
    from .runs.given import with_data

    get_engine(engine)  # before anything is announced or written
    resume, overwrite = _resume_mode(resume, overwrite)
    existing: dict[str, Any] = {"resume": "auto" if resume else False, "overwrite": overwrite, "progress": progress}
    methods, rows = split_names(names(methods) if isinstance(methods, str) else methods)
    config, keys_of = load_for(config, methods, overrides)
    outdir = outdir_of(config)
    for name in () if resume or overwrite else ("", *keys_of, *rows):
        check_outdir(config.replace({"outdir": str(outdir / name), "expname": ""}), False)
    if data is not None:
        config = with_data(config, data, bool(resume), overwrite)
    configs = _configs_of(config, keys_of, outdir)
    schedule_config = next((c for c in configs.values() if "tau" in c.method_params), config)
    configs |= {name: row_config(name, schedule_config if name == "relora" else config, outdir / name) for name in rows}
    results = {}
    with memoizing():  # the data are loaded once
        for name in configs:
            if on_method:
                on_method(name)
            if name not in rows:
                results[name] = run(configs[name], engine, **existing, **told)
                continue
            if overwrite:
                remove_run(outdir / name)
            with _surrounded(config, name, progress, told.get("on_round"), told.get("on_client")) as hooks:
                results[name] = run_row(name, configs[name], bool(resume), *hooks)
    picture = _write_comparison(config, configs, results, outdir)
    for result in results.values():
        result.saved["comparison"] = picture
    return results


def _configs_of(config: Config, keys_of: Mapping[str, Mapping[str, Any]], outdir: Path) -> dict[str, Config]:
    """The configuration of each method, with its own ``keys_of`` and a folder of its own."""
    configs = {
        name: config.replace({**keys, "federate.method": name, "outdir": str(outdir / name), "expname": ""})
        for name, keys in keys_of.items()
    }
    if config.federate.total_round_num == 1 and not config.lowrank.reuse_clients:
        # All methods start from the same model, so clients that train alike are trained once.
        reuse = {"lowrank.reuse_clients": str(outdir / "clients")}
        idle = {n: requirements(c.federate.method, c.lowrank.params).idle for n, c in configs.items()}
        configs = {n: c if "lowrank.reuse_clients" in idle[n] else c.replace(reuse) for n, c in configs.items()}
    return configs


def _write_comparison(
    config: Config, configs: Mapping[str, Config], results: Mapping[str, RunResult], outdir: Path
) -> Path:
    """Write the curves, the tables and ``comparison.json``; returns the path of the curves."""
    from .draw.figures import save
    from .draw.runs import curves, setting_of
    from .runs.environment import versions
    from .runs.summary import per_client_and_round, seconds
    from .runs.tables import client_lines, result_lines

    first = next(iter(results.values()))
    majority = first.facts["majority"]
    histories = {n: [r.history] for n, r in results.items()}
    sizes, language = first.facts.get("held_out"), first.language
    figure = curves(histories, majority, title=setting_of(config), sizes=sizes, language=language)
    picture = save(figure, outdir / "curves.png")
    write_tables(result_lines(results), outdir / "comparison.csv")
    if lines := client_lines(results):
        write_tables(lines, outdir / "client_scores.csv")
    comparison = {
        n: {
            "schema": SCHEMA,
            "final": r.final,
            **({"best": r.best} if r.best else {}),
            "bytes_per_client_and_round": per_client_and_round(r.history),
            "seconds": seconds(r.history),
            "majority": majority,
            **{k: r.facts[k] for k in ("source", "data", "model", "config")},
            "seed": config.seed,
            "versions": versions(),
            "settings": configs[n].to_dict(),
        }
        for n, r in results.items()
    }
    write_text(outdir / "comparison.json", to_json(comparison, indent=1))
    return picture
