"""Standalone with ``federate.process_num`` above 1: the clients run in other processes, with the same result."""

import os
import signal
import time

import pytest
import torch

import fs_lowrank
from fs_lowrank.errors import UserError

pytestmark = pytest.mark.federatedscope
THREE = {"federate.process_num": 3}


@pytest.fixture
def sites(monkeypatch):
    """The clients' processes of the runs in a test, in the order of their start."""
    started = []

    class Site(parallel()._ClientProcess):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(parallel(), "_ClientProcess", Site)
    return started


def parallel():
    from fs_lowrank.engines.federatedscope import parallel

    return parallel


def same(a, b):
    for name, tensor in a.model.named_parameters():
        assert tensor.equal(dict(b.model.named_parameters())[name]), name
    for x, y in zip(a.history, b.history, strict=True):
        assert {k: x[k] for k in x if "seconds" not in k} == {k: y[k] for k in y if "seconds" not in k}


@pytest.mark.parametrize(
    "keys",
    [
        {"federate.method": "rolora", "federate.sample_client_num": 3, "federate.share_local_model": True},
        {
            "federate.method": "fedloru",
            "lowrank.tau": 2,
            "federate.sample_client_num": 2,
            "federate.share_local_model": True,
        },
        {"federate.method": "fedloru", "lowrank.tau": 2, "federate.sample_client_num": 2},
        {"federate.method": "flora", "lowrank.ranks": [1, 3, 2], "federate.share_local_model": True},
        {"federate.method": "pfedloru", "lowrank.tau": 2, "federate.share_local_model": True},
        {"federate.method": "fedavg", "federate.share_local_model": True, "lowrank.drop_rate": 0.3},
        {"federate.method": "fedlora", "federate.online_aggr": True},
        {
            "federate.method": "fedlora",
            "quantization.method": "uniform",
            "quantization.nbits": 8,
            "federate.share_local_model": True,
        },
        {"federate.method": "fedlora", "federate.make_global_eval": False},
        {
            "federate.method": "pfedloru",
            "lowrank.tau": 2,
            "federate.make_global_eval": False,
            "federate.sample_client_num": 1,
        },
    ],
    ids=lambda k: "-".join(str(v) for v in k.values()),
)
def test_processes_do_not_change_the_result(quick, keys):
    alone = fs_lowrank.run(quick("alone", keys), "federatedscope")
    apart = fs_lowrank.run(quick("apart", {**keys, **THREE}), "federatedscope")
    same(alone, apart)
    assert [sorted(map(int, r["client_seconds"])) for r in apart.history] == [r["clients"] for r in apart.history]
    assert "process_num: 3" in next(apart.outdir.glob("config.yaml")).read_text()


def test_secret_sharing_works_between_processes(quick, assert_same):
    keys = {"federate.method": "fedlora"}
    shared = fs_lowrank.run(quick("apart", {**keys, **THREE, "federate.use_ss": True}), "federatedscope")
    assert_same(fs_lowrank.run(quick("alone", keys)), shared)


PERSONAL = {
    "federate.method": "pfedloru",
    "lowrank.tau": 2,
    "federate.sample_client_num": 4,
    "lowrank.drop_rate": 0.3,
    **THREE,
}


def killing(monkeypatch, when):
    """The processes to which a message is sent of whose facts ``when`` is true are killed; the list of these facts."""
    killed, plain = [], parallel()._ClientProcess.send

    def send(self, item):
        plain(self, item)
        facts = item.facts.get("facts", {})
        if when(facts, item.facts, killed):
            killed.append({**facts, "client": item.facts.get("receiver")})
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(parallel()._ClientProcess, "send", send)
    return killed


@pytest.mark.parametrize("share", [False, True], ids=["own_models", "one_model"])
def test_a_process_that_is_killed_is_replaced(quick, sites, share, monkeypatch):
    """And the run, which was stopped after its third round, is resumed."""
    keys = {**PERSONAL, "federate.share_local_model": share}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")

    def once_a_round(facts, item, killed):
        return facts.get("purpose") == "train" and facts["round"] in (2, 3) and facts["round"] not in _rounds(killed)

    killed = killing(monkeypatch, once_a_round)
    config = quick("killed", keys)
    fs_lowrank.run(config, "federatedscope", on_round=lambda record: record["round"] == 3)
    assert _rounds(killed) == [2, 3]
    rest = fs_lowrank.run(config, "federatedscope", resume=True)
    for name, tensor in whole.model.named_parameters():
        assert tensor.equal(dict(rest.model.named_parameters())[name]), name
    for x, y in zip(whole.history, rest.history, strict=True):
        assert all(x[k] == y[k] for k in ("clients", "loss", "metrics", "uplink_bytes", "failed"))
        # A copy that died with its process is sent the whole model again, and so are all when a run is resumed.
        assert x["downlink_bytes"] <= y["downlink_bytes"]
        assert not share or x["downlink_bytes"] == y["downlink_bytes"] or x["round"] > 3
    assert all(site.process.poll() is not None for site in sites)


def _rounds(killed):
    return [facts["round"] for facts in killed]


def test_a_client_of_which_two_processes_die_costs_its_update(quick, sites, monkeypatch):
    killed = killing(monkeypatch, lambda facts, item, _: facts.get("purpose") == "train" and item["receiver"] == 3)
    config = quick("run", {"federate.method": "rolora", "federate.total_round_num": 1, **THREE})
    (record,) = fs_lowrank.run(config, "federatedscope").history
    assert record["clients"] == [1, 2, 4, 5] and len(killed) == 2
    (failure,) = record["failed"]
    assert failure["client"] == 3
    assert "two processes ended while they did it, the last one: signal 9" in failure["reason"]


def test_a_process_that_dies_while_it_loads_is_replaced(quick, sites, monkeypatch, caplog):
    """Before its clients have joined: those of the process in its place do."""
    keys = {"federate.method": "pfedlora", "federate.total_round_num": 1, "federate.share_local_model": True}
    alone = fs_lowrank.run(quick("alone", keys), "federatedscope")
    killed = killing(monkeypatch, lambda facts, item, killed: "config" in item and not killed)
    apart = fs_lowrank.run(quick("apart", {**keys, **THREE}), "federatedscope")
    assert len(killed) == 1 and len(sites) == 3
    same(alone, apart)
    assert "process 1 (clients 1, 3, 5) ended while it loaded (signal 9); another takes its place" in caplog.text


def test_the_servers_process_evaluates_what_two_others_die_of(quick, sites, monkeypatch, caplog):
    keys = {"federate.method": "pfedloru", "lowrank.tau": 1, "federate.total_round_num": 2}
    keys |= {"federate.make_global_eval": False, "federate.share_local_model": True}
    alone = fs_lowrank.run(quick("alone", keys), "federatedscope")

    def twice(facts, item, killed):
        return item.get("kind") == "evaluate" and item["receiver"] == 3 and len(killed) < 2

    killed = killing(monkeypatch, twice)
    apart = fs_lowrank.run(quick("apart", {**keys, **THREE}), "federatedscope")
    assert len(killed) == 2
    same(alone, apart)
    assert caplog.text.count("the server's process evaluates in place of client 3, with the same result") == 1


def test_shares_that_died_with_a_process_end_the_run(quick, sites, monkeypatch):
    killing(monkeypatch, lambda facts, item, killed: facts.get("purpose") == "train" and not killed)
    config = quick("run", {"federate.method": "fedlora", "federate.use_ss": True, **THREE})
    with pytest.raises(UserError, match=r"process \d \(clients .*\) is gone, and with it the secret shares"):
        fs_lowrank.run(config, "federatedscope")
    assert all(site.process.poll() is not None for site in sites)


def test_a_process_that_is_silent_is_not_waited_for(quick, sites, monkeypatch):
    plain = parallel()._ClientProcess.send

    def send(self, item):
        plain(self, item)
        os.kill(self.process.pid, signal.SIGSTOP)

    monkeypatch.setattr(parallel()._ClientProcess, "send", send)
    with pytest.raises(UserError, match="process 1 .* of federate.process_num could not start"):
        fs_lowrank.run(quick("run", {"federate.method": "rolora", "lowrank.timeout": 0.5, **THREE}), "federatedscope")
    assert all(site.process.poll() is not None for site in sites)


def test_sending_to_a_stopped_process_takes_no_longer_than_the_timeout():
    from fs_lowrank.rounds.parcel import Parcel

    site = parallel()._ClientProcess(0, [1, 2], timeout=0.5)
    try:
        site.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        site.send(Parcel({"more than a pipe holds": torch.zeros(4_000_000)}))
        assert site.receive() is None
        assert time.monotonic() - started < 20
    finally:
        site.end()
    assert site.process.poll() is not None


def test_the_error_of_a_process_is_reported(quick, sites, monkeypatch, tmp_path):
    send = parallel()._ClientProcess.send

    def elsewhere(site, parcel):
        if "config" in parcel.facts:
            parcel.facts["config"]["data"] |= {"root": str(tmp_path), "type": "missing@file"}
        send(site, parcel)

    monkeypatch.setattr(parallel()._ClientProcess, "send", elsewhere)
    with pytest.raises(UserError, match="process [12] .*missing@file"):
        fs_lowrank.run(quick("run", {"federate.method": "rolora", **THREE}), "federatedscope")
    assert all(site.process.poll() is not None for site in sites)


def test_processes_in_distributed_mode(quick):
    with pytest.raises(UserError, match="federate.process_num = 3 divides the clients of a standalone run"):
        fs_lowrank.run(
            quick("run", {"federate.method": "rolora", "federate.mode": "distributed", **THREE}), "federatedscope"
        )


@pytest.mark.parametrize("training, started", [(3, [4]), (1, [])])
def test_auto_is_the_number_of_the_embedded_engine_and_the_servers_process(quick, monkeypatch, training, started):
    from fs_lowrank.engines.federatedscope import run as module

    class Chosen(Exception):
        pass

    asked = []

    def chosen(processes=None, **given):
        asked.extend([processes] if processes else [])
        raise Chosen

    monkeypatch.setattr(module, "ParallelRunner", chosen)
    monkeypatch.setattr(module, "get_runner", chosen)
    monkeypatch.setattr(module, "processes_of", lambda config: training)
    keys = {"federate.method": "rolora", "federate.process_num": "auto"}
    with pytest.raises(Chosen):
        fs_lowrank.run(quick("run", keys), "federatedscope")
    assert asked == started
    with pytest.raises(UserError, match="federate.process_num = auto divides the clients of a standalone run"):
        fs_lowrank.run(quick("apart", {**keys, "federate.mode": "distributed"}), "federatedscope")


def test_the_frameworks_own_methods_keep_its_runner():
    from federatedscope.core.auxiliaries import runner_builder
    from federatedscope.core.configs.config import global_cfg
    from federatedscope.core.parallel.parallel_runner import StandaloneMultiGPURunner

    assert runner_builder.StandaloneMultiGPURunner is not StandaloneMultiGPURunner
    assert parallel().choose_runner(lambda config: "its own")(config=global_cfg.clone()) == "its own"


def test_the_frameworks_launcher_with_enough_gpus(quick, monkeypatch):
    """The framework keeps ``process_num`` if there are enough GPUs, and ``get_runner`` then makes our runner."""
    from federatedscope.core.auxiliaries.data_builder import get_data
    from federatedscope.core.auxiliaries.runner_builder import get_runner
    from federatedscope.core.auxiliaries.worker_builder import get_client_cls, get_server_cls

    from fs_lowrank.engines.federatedscope.config import to_framework
    from fs_lowrank.engines.federatedscope.session import close_session, current

    keys = {"federate.method": "rolora", "federate.share_local_model": True}
    alone = fs_lowrank.run(quick("alone", keys), "federatedscope")
    cfg = to_framework(quick("apart", keys))
    data, changed = get_data(config=cfg.clone(), client_cfgs=None)
    cfg.merge_from_other_cfg(changed)
    cfg.freeze(inform=False, save=False)
    cfg.defrost()
    cfg.federate.process_num = 3
    cfg._immutable(True)
    try:
        get_runner(
            data=data, server_class=get_server_cls(cfg), client_class=get_client_cls(cfg), config=cfg.clone()
        ).run()
        same(alone, current().result)
    finally:
        close_session()


def test_a_method_of_the_running_script_is_refused_with_further_processes(quick, monkeypatch):
    from fs_lowrank.methods import get_method_class
    from fs_lowrank.methods.registry import registered

    mine = type("Mine", (get_method_class("rolora"),), {"__module__": "__main__", "name": "mine"})
    monkeypatch.setitem(registered(), "mine", mine)
    keys = {"federate.method": "mine", "federate.total_round_num": 1}
    assert fs_lowrank.run(quick("one", keys), "federatedscope").history
    with pytest.raises(fs_lowrank.UserError, match="federate.method = mine: other processes do not have"):
        fs_lowrank.run(quick("two", {**keys, "federate.process_num": 2}), "federatedscope")
