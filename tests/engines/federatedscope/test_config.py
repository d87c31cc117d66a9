"""Our keys in the framework's configuration, and the features and values that are refused."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

import fs_lowrank
from fs_lowrank import cli
from fs_lowrank.errors import UserError

pytestmark = pytest.mark.federatedscope


@pytest.fixture
def cfg(quick):
    from fs_lowrank.engines.federatedscope.config import to_framework

    return to_framework(quick("run", {"federate.method": "rolora"}))


def there_and_back(config):
    from fs_lowrank.engines.federatedscope.config import from_framework, to_framework

    return from_framework(to_framework(config))


@pytest.mark.parametrize(
    "keys",
    [
        {"federate.method": "rolora", "lowrank.mix": 0.25},
        {"federate.method": "fedavg"},
        {"federate.method": "flora", "lowrank.ranks": [1, 2]},
        {"federate.sample_client_num": 2},
        {"federate.sample_client_rate": 0.5},
        {"fedopt.use": True, "fedopt.optimizer.momentum": 0.9},
        {"train.scheduler.type": "cosine", "train.scheduler.min_lr": 0.001},
        {"eval.freq": 2, "early_stop.patience": 3},
        {"lowrank.min_clients": 2, "lowrank.timeout": 5.0, "train.cache_frozen": "off"},
        {"lowrank.clients": [{"clients": 2, "batch_size": 3, "lr_factor": 0.25}, {"clients": [4, 5], "tok_len": 6}]},
    ],
    ids=lambda k: "+".join(k),
)
def test_keys_survive_the_translation_to_the_framework_and_back(quick, keys):
    config = quick("run", keys)
    assert there_and_back(config).decisive() == config.decisive()


def test_our_keys_on_the_command_line(cfg):
    from fs_lowrank.engines.federatedscope.config import from_framework

    cfg.merge_from_list(["lowrank.mix", "0.5", "lowrank.min_clients", "3", "train.cache_frozen", "off"])
    assert (cfg.lowrank.mix, cfg.lowrank.min_clients) == (0.5, 3)
    cfg.merge_from_list(["lowrank.mix", "1.5"])
    with pytest.raises(UserError, match="lowrank.mix = 1.5: expected a number, at least 0 and at most 1"):
        from_framework(cfg)


def test_a_key_of_another_method(cfg):
    from fs_lowrank.engines.federatedscope.config import from_framework

    cfg.merge_from_list(["lowrank.tau", "3"])
    with pytest.raises(UserError, match="unknown key 'lowrank.tau'.*keys of rolora: mix"):
        from_framework(cfg)
    cfg.lowrank.pop("mix", None)
    cfg.merge_from_list(["federate.method", "fedloru", "lowrank.tau", "2.5"])
    with pytest.raises(UserError, match="lowrank.tau = 2.5"):
        from_framework(cfg)


def test_a_file_is_checked_with_the_command_line_applied(tmp_path):
    """The file alone has keys of another method than the one that the command line names, and no method at all."""
    from federatedscope.core.configs.config import global_cfg

    from fs_lowrank.engines.federatedscope.config import from_framework

    (tmp_path / "run.yaml").write_text("federate: {method: roloora}\nlowrank: {tau: 3}\n")
    cfg = global_cfg.clone()
    cfg.merge_from_file(str(tmp_path / "run.yaml"))
    cfg.merge_from_list(["federate.method", "fedloru", "model.type", "a@transformers", "data.type", "a.csv"])
    cfg.federate.client_num = 3
    assert from_framework(cfg).method_params["tau"] == 3


def test_the_frameworks_own_methods_keep_its_server_and_client():
    from federatedscope.core.auxiliaries.worker_builder import get_client_cls, get_server_cls
    from federatedscope.core.configs.config import global_cfg
    from federatedscope.core.workers import Client, Server

    from fs_lowrank.engines.federatedscope.server import LowRankServer

    cfg = global_cfg.clone()
    for method in ("FedAvg", "ditto", "local"):
        cfg.merge_from_list(["federate.method", method])
        assert (get_server_cls(cfg), get_client_cls(cfg)) == (Server, Client)
    for method in ("rolora", "RoLoRA", "lowrank_fedavg", "fedit"):
        cfg.merge_from_list(["federate.method", method])
        assert get_server_cls(cfg) is LowRankServer


def test_a_method_that_another_plug_in_registered_is_left_alone(cfg):
    from federatedscope import register

    from fs_lowrank.engines.federatedscope.config import check_method_name

    register.register_worker("theirs", lambda method: {"client": 1, "server": 2} if method == "theirs" else None)
    try:
        cfg.merge_from_list(["federate.method", "theirs"])
        check_method_name("theirs")
    finally:
        register.worker_dict.pop("theirs")


def test_registering_after_the_framework_built_its_configuration(tmp_path):
    script = tmp_path / "late.py"
    script.write_text("""
import os, sys
sys.path.append(os.environ["FEDERATEDSCOPE_ROOT"]) if "FEDERATEDSCOPE_ROOT" in os.environ else None
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
from federatedscope.core.configs.config import global_cfg
early = global_cfg.clone()
import fs_lowrank.engines.federatedscope
from fs_lowrank.engines.federatedscope import compat
cfg = global_cfg.clone()
cfg.merge_from_list(["federate.method", "rolora", "lowrank.mix", 0.5, "lowrank.min_clients", 2])
from federatedscope.core.auxiliaries.data_builder import get_data
cfg.merge_from_list(["federate.method", "nonsense"])
try:
    get_data(config=cfg, client_cfgs=None)
except ValueError as error:
    print("refused", error)
print(cfg.lowrank.mix, [*compat.applied])
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused federate.method: no method 'nonsense'" in done.stdout and "0.5 [" in done.stdout
    assert "protobuf" not in done.stdout.splitlines()[-1], "mended although it was not needed"


@pytest.mark.parametrize(
    "key, value, why",
    [
        ("asyn.use", True, "our methods do not use it"),
        ("personalization.local_param", ["lora_B"], "our methods do not use it"),
        ("aggregator.robust_rule", "krum", "take lowrank.robust in place of it"),
        ("trainer.type", "graphminibatch_trainer", "our methods do not use it"),
        ("regularizer.type", "proximal_regularizer", "our methods do not use it"),
        ("llm.retry_on_nan_loss", True, "our methods do not use it"),
        ("model.dropout", 0.4, "our methods do not use it"),
    ],
)
def test_features_that_do_not_work_with_our_methods_are_refused(cfg, key, value, why):
    from fs_lowrank.engines.federatedscope.config import _node, from_framework

    node, last = _node(cfg, key)
    node[last] = value
    with pytest.raises(
        UserError,
        match=f"federate.method = rolora on engine='federatedscope' does not honour; remove:\n  {key} = .*{why}",
    ):
        from_framework(cfg)


def test_a_number_of_bits_that_cannot_be(cfg):
    from fs_lowrank.engines.federatedscope.config import from_framework

    cfg.quantization.method, cfg.quantization.nbits = "uniform", 4
    with pytest.raises(UserError, match="nbits = 4: expected 8 or 16"):
        from_framework(cfg)


QUANTISED, SHARED = {"quantization.method": "uniform"}, {"federate.use_ss": True}
BY_CLIENTS, ONLINE = {"federate.make_global_eval": False}, {"federate.online_aggr": True}
BEST = "eval.best_res_update_round_wise_key"
BETWEEN, CLIENT = {"federate.mode": "distributed"}, {"federate.mode": "distributed", "distribute.role": "client"}


@pytest.mark.parametrize(
    "keys, said",
    [
        ({**SHARED, **QUANTISED}, "quantization.method = 'uniform': with federate.use_ss the server sees"),
        ({**QUANTISED, "quantization.nbits": 4}, "quantization.nbits = 4: expected 8 or 16"),
        ({"quantization.method": "other"}, "quantization.method = 'other': expected none or uniform"),
        ({**SHARED, "lowrank.drop_rate": 0.1}, "lowrank.drop_rate = 0.1: with federate.use_ss"),
        ({**SHARED, "lowrank.max_update_norm": 1}, "lowrank.max_update_norm = 1.0: with federate.use_ss"),
        ({**SHARED, "lowrank.max_update_norm_factor": 10}, "norm_factor = 10.0: with federate.use_ss"),
        ({**SHARED, "federate.sample_client_num": 3}, "federate.use_ss = True: it needs at least two clients"),
        ({**ONLINE, "lowrank.max_update_norm_factor": 10}, "norm_factor = 10.0: with federate.online_aggr"),
        ({BEST: "client_test_acc"}, f"{BEST} = 'client_test_acc': the framework files clients' own metrics under"),
        (
            {BEST: "test_f1", "eval.metrics": ["f1"], **BY_CLIENTS},
            f"{BEST} = 'test_f1': with federate.make_gl",
        ),
        ({**BETWEEN, "federate.join_in_info": ["num_sample"]}, "join_in_info = .'num_sample'.: between processes"),
        ({**BETWEEN, "federate.save_client_model": True}, "save_client_model = True: between processes"),
        ({**BETWEEN, **BY_CLIENTS, "eval.before": True}, "eval.before = True: between processes and with"),
        ({**BETWEEN, "distribute.role": "boss"}, "distribute.role = 'boss': expected server or client"),
        ({**BETWEEN, "federate.process_num": 3}, "process_num = 3: .* divides the clients of a standalone run"),
        ({**BETWEEN, "federate.process_num": "auto"}, "process_num = 0: .* also auto .0., it divides the clients"),
        ({"federate.sampler": "group", "federate.process_num": 3}, "sampler = 'group': it needs one process"),
        ({"federate.save_client_model": True, "federate.process_num": 3}, "save_client_model = True: it needs one"),
        ({**CLIENT, "distribute.data_idx": 9}, "distribute.data_idx = 9: expected 1 to 5"),
        ({"model.device_map": "auto"}, "model.device_map = 'auto': a client's copy of the model lies on one device"),
    ],
)
def test_what_cannot_be_is_refused(quick, keys, said, tmp_path):
    with pytest.raises(UserError, match=f"on engine='federatedscope' does not honour; remove:\n  .*{said}"):
        fs_lowrank.run(quick("run", {"federate.method": "fedlora", **keys}), "federatedscope")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_what_the_engine_refuses(settings, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**settings, "federate.save_client_model": True, "federate.process_num": 3}))
    assert cli.main(["run", "--cfg", str(file), "--engine", "federatedscope", "--dry-run"]) == 2
    line = file.read_text().splitlines().index("federate.save_client_model: true") + 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"federate.save_client_model = True (line {line}): it needs one process" in said


def test_the_launchers_client_cfg(quick, settings, tmp_path):
    """The framework's launcher with a file that names two of five clients; and with one that is wrong."""
    import json

    config, own = tmp_path / "run.yaml", tmp_path / "own.yaml"
    keys = {"federate.total_round_num": 1, "train.cache_frozen": "off"}
    config.write_text(yaml.safe_dump({**settings, "outdir": str(tmp_path / "run")}))
    own.write_text("client_2:\n  dataloader: {batch_size: 3}\nclient_5:\n  train: {local_update_steps: 1}\n")
    command = [sys.executable, "-m", "fs_lowrank.engines.federatedscope", "--cfg", config, "--client_cfg", own]
    command += [str(part) for pair in {**keys, "train.local_update_steps": 2}.items() for part in pair]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("run/**/rounds.jsonl")
    same = [{"clients": 2, "batch_size": 3}, {"clients": 5, "local_update_steps": 1}]
    ours = fs_lowrank.run(quick("ours", {**keys, "lowrank.clients": same})).history[0]
    theirs = json.loads(file.read_text().splitlines()[0])
    assert (theirs["samples"], theirs["clients"]) == (ours["samples"], [1, 2, 3, 4, 5])
    own.write_text("client_2:\n  dataloader: {drop_last: True}\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert "error: client_2.dataloader.drop_last cannot be set by client" in done.stderr


def test_numbers_to_predict(quick, assert_same, task_files):
    keys = {"data.type": str(task_files / "scores.csv"), "data.args": [{"label": "score"}]}
    keys |= {
        "model.task": "SequenceRegression",
        "federate.total_round_num": 2,
        "eval.best_res_update_round_wise_key": "val_pearson",
    }
    ours = fs_lowrank.run(quick("ours", keys))
    theirs = fs_lowrank.run(quick("theirs", keys), "federatedscope")
    assert_same(ours, theirs)
    assert theirs.final["test_pearson"] == pytest.approx(ours.final["test_pearson"], abs=1e-4)
    assert theirs.best["by"] == "val_pearson"
    keys |= {"federate.make_global_eval": False, "eval.best_res_update_round_wise_key": "test_loss"}
    clients = fs_lowrank.run(quick("clients", {**keys, "federate.total_round_num": 1}), "federatedscope")
    scores = clients.history[-1]["client_scores"].values()
    assert scores and all(score.keys() == {"loss", "samples"} and score["loss"] > 0 for score in scores)


@pytest.mark.parametrize("device, told", [("cuda:1", 1), ("cuda:0", 0), ("cpu", -1)])
def test_the_framework_is_told_where_the_sessions_model_is(cfg, monkeypatch, device, told):
    """By itself it would take the GPU with the most free memory."""
    from fs_lowrank.engines.federatedscope import data

    config, workspace = SimpleNamespace(alone=False), SimpleNamespace(device=torch.device(device))
    session = SimpleNamespace(role="standalone", workspace=workspace, config=config)
    monkeypatch.setattr(data, "open_session", lambda config: session)
    monkeypatch.setattr(data, "worker_data", lambda session, config: {})
    cfg.merge_from_list(["federate.method", "rolora", "device", -1])
    _, changed = data.load(cfg)
    assert changed.device == told


def test_a_gpu_is_not_used_where_the_device_is_the_cpu(quick):
    from fs_lowrank.engines.federatedscope.config import to_framework

    asked = [to_framework(quick("run", {"use_gpu": True, "device": device})).use_gpu for device in ("cpu", -1, 1)]
    assert asked == [False, True, True]
