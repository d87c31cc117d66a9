"""How many samples the clients of a run train on, with repetitions, and how many rounds a budget of samples allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fs_lowrank import Config, UserError
from fs_lowrank.data import build_data, load_raw
from fs_lowrank.models.build import build_tokenizer
from fs_lowrank.rounds.ledger import clients_of_round
from fs_lowrank.rounds.workspace import method_of
from fs_lowrank.training import samples_trained

from .job import Cell, Search

#: ``data_key`` -> the rows of each client
_COUNTED: dict[str, list[int]] = {}


def within_budget(job: Cell | Search) -> Config:
    """The configuration of a job, with as many rounds as its budget of samples allows.

    The plan, which reads no data, counts every batch as full. Here the sizes of the clients are known.

    Raises:
        UserError: the budget is less than one round takes.
    """
    config, experiment = job.config, job.experiment
    budget = job.spec.get("samples", experiment.samples) if isinstance(job, Search) else experiment.samples
    if not budget:
        return config
    if config.dataloader.batch_tokens and config.train.batch_or_epoch == "batch":
        raise UserError(
            f"samples = {budget}: steps of dataloader.batch_tokens have no number of samples that is known before the "
            "run; give the number of rounds, or take dataloader.batch_size"
        )
    sizes = _sizes(config)
    rounds, used = 0, 0
    for round_samples in _by_round(config, sizes):
        if used + round_samples > budget:
            break
        rounds, used = rounds + 1, used + round_samples
    if not rounds:
        raise UserError(
            f"samples = {budget} is less than one round takes, {round_samples}: {config.sampled_per_round} clients × "
            f"{config.train.local_update_steps} steps × {config.dataloader.batch_size}, or less for small clients"
        )
    if rounds == config.federate.total_round_num:
        return config
    keys: dict[str, Any] = {"federate.total_round_num": rounds}
    if experiment.evaluations and isinstance(job, Cell):
        keys["eval.freq"] = max(1, rounds // experiment.evaluations)
    return config.replace(keys)


def samples_of(config: Config) -> int:
    """The samples that all clients train on in a run, with repetitions, if no client drops out or fails; 0 where steps
    of ``dataloader.batch_tokens`` leave it open.
    """
    if config.dataloader.batch_tokens and config.train.batch_or_epoch == "batch":
        return 0
    return sum(itertools.islice(_by_round(config, _sizes(config)), config.federate.total_round_num))


def _by_round(config: Config, sizes: Sequence[int]) -> Iterator[int]:
    """The samples of round 1, 2, …, if no client drops out or fails."""
    method = method_of(config)
    for round in itertools.count(1):
        clients = clients_of_round(round, len(sizes), config.sampled_per_round, config.seed)
        yield sum(samples_trained(sizes[k - 1], method.phases(round, k), config.of_client(k)) or 0 for k in clients)


def data_key(config: Config) -> str:
    """A text that is the same for two configurations that give the same clients."""
    key = config.seed, config.federate.client_num, config.data, config.llm.tok_len, config.model.type
    return repr((key, config.lowrank.test_seed, config.model.task, config.client_settings))


def _sizes(config: Config) -> list[int]:
    """The rows of each client; those of a configuration are counted once."""
    if (key := data_key(config)) not in _COUNTED:
        raw = load_raw(config.data, task=config.model.task)
        _COUNTED[key] = build_data(config, build_tokenizer(config), raw).partition.sizes().tolist()
    return _COUNTED[key]


def counted(record: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """``samples`` of a result, and ``samples_estimated``: whether it may have been fewer.

    Results before version 0.2.0 have counted every batch as full. Their samples are counted here: from the
    sizes of the clients, the seed that draws the clients of a round, and the configuration. It is an estimate where
    clients dropped out or failed, whose rounds are not known.

    Args:
        config: of the cell.
    """
    if record.get("samples_counted"):
        return {"samples": record["samples"], "samples_estimated": False}
    by_round = _by_round(config, record["data"]["clients"])
    samples = sum(next(by_round) for _ in range(record["rounds"]))
    return {"samples": samples, "samples_estimated": record["history"]["failed_clients"] > 0}
