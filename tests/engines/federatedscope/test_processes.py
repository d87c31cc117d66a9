"""Standalone with ``federate.process_num`` above 1: the clients run in other processes, with the same result."""

import pytest
import torch

import fs_lowrank
from tests.cases import same_run

pytestmark = pytest.mark.federatedscope
THREE = {"federate.process_num": 3}


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
        {"federate.method": "fedlora", "train.cohort": 3},
        {
            "federate.method": "fedlora",
            "quantization.method": "uniform",
            "quantization.nbits": 8,
            "federate.share_local_model": True,
        },
    ],
    ids=lambda k: "-".join(str(v) for v in k.values()),
)
def test_processes_do_not_change_the_result(quick, keys):
    alone = fs_lowrank.run(quick("alone", keys), "federatedscope")
    apart = fs_lowrank.run(quick("apart", {**keys, **THREE}), "federatedscope")
    same_run(alone, apart)
    assert [sorted(map(int, r["client_seconds"])) for r in apart.history] == [r["clients"] for r in apart.history]
    processes = min(3, keys.get("federate.sample_client_num", 3))
    assert f"process_num: {processes}" in next(apart.outdir.glob("config.yaml")).read_text()


@pytest.mark.parametrize("method", ["fedlora", "pfedloru"])
def test_clients_scores_are_those_of_the_embedded_engine(quick, method):
    keys = {"federate.method": method, "federate.make_global_eval": False, "federate.sample_client_num": 2}
    keys |= {"lowrank.tau": 2} if method == "pfedloru" else {}
    local = fs_lowrank.run(quick("local", keys))
    same_run(local, fs_lowrank.run(quick("apart", {**keys, **THREE}), "federatedscope"))


def test_secret_sharing_works_between_processes(quick, assert_same):
    keys = {"federate.method": "fedlora"}
    shared = fs_lowrank.run(quick("apart", {**keys, **THREE, "federate.use_ss": True}), "federatedscope")
    assert_same(fs_lowrank.run(quick("alone", keys)), shared)


def test_the_files_of_save_to_and_a_run_that_is_restored(quick, assert_same, tmp_path):
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 4, **THREE}
    keys |= {"federate.save_to": str(tmp_path / "saved.pt"), "federate.save_freq": 2, "eval.freq": 1}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")
    assert {path.name for path in tmp_path.glob("*.pt")} == {"saved.pt", "2_saved.pt", "final_saved.pt"}
    rest = quick("rest", {**keys, "federate.save_to": "", "federate.restore_from": str(tmp_path / "2_saved.pt")})
    rest = fs_lowrank.run(rest, "federatedscope")
    assert [r["round"] for r in rest.history] == [3, 4]
    assert_same(whole, rest, atol=0)
    single = {
        **keys,
        "federate.process_num": 1,
        "federate.save_to": "",
        "federate.restore_from": str(tmp_path / "2_saved.pt"),
    }
    single = fs_lowrank.run(quick("single", single), "federatedscope")
    for key in ("client_uplink_bytes", "client_downlink_bytes"):
        assert [r[key] for r in rest.history] == [r[key] for r in single.history]


@pytest.mark.parametrize("processes", [{}, THREE])
def test_the_last_file_of_save_to_where_a_run_ends_early(quick, tmp_path, processes):
    keys = {"federate.method": "rolora", "federate.save_to": str(tmp_path / "saved.pt"), **processes}
    config = quick("early", {**keys, "federate.total_round_num": 3})
    result = fs_lowrank.run(config, "federatedscope", on_round=lambda record: record["round"] == 2)
    assert len(result.history) == 2 and torch.load(tmp_path / "final_saved.pt", weights_only=True)["cur_round"] == 2


def test_auto_is_the_number_of_the_embedded_engine(quick, monkeypatch):
    monkeypatch.setattr("fs_lowrank.engines.federatedscope.run.processes_of", lambda config: 2)
    keys = {"federate.method": "rolora", "federate.process_num": "auto", "federate.total_round_num": 1}
    result = fs_lowrank.run(quick("run", keys), "federatedscope")
    assert "process_num: 2" in (result.outdir / "config.yaml").read_text()


def test_the_frameworks_own_methods_keep_its_runner():
    from federatedscope.core.auxiliaries import runner_builder
    from federatedscope.core.configs.config import global_cfg
    from federatedscope.core.parallel.parallel_runner import StandaloneMultiGPURunner

    from fs_lowrank.engines.federatedscope.runner import choosing_ours

    assert runner_builder.StandaloneMultiGPURunner is not StandaloneMultiGPURunner
    own = choosing_ours(lambda config, client_configs: client_configs)
    assert own(config=global_cfg.clone(), client_configs="its own") == "its own"


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
    on_gpus = cfg.clone()
    on_gpus.federate.process_num = 3
    data, changed = get_data(config=on_gpus, client_cfgs=None)
    cfg.merge_from_other_cfg(changed)
    cfg.freeze(inform=False, save=False)
    cfg.defrost()
    cfg.federate.process_num = 3
    cfg._immutable(True)
    try:
        get_runner(
            data=data, server_class=get_server_cls(cfg), client_class=get_client_cls(cfg), config=cfg.clone()
        ).run()
        same_run(alone, current().result)
        assert "process_num: 3" in (current().outdir / "config.yaml").read_text()
    finally:
        close_session()
