"""Our command, the framework's own launcher, its shipped configurations, and what is said when something is missing."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from fs_lowrank.engines import locate_federatedscope
from fs_lowrank.errors import UserError

framework = pytest.mark.federatedscope


def call(*command, env=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {})},
    )


def launch(overrides, cwd, *arguments):
    """The framework's launcher through ours, with keys and values on the command line."""
    pairs = [part for pair in overrides.items() for part in pair]
    return call("fs_lowrank.engines.federatedscope", *arguments, *pairs, cwd=cwd)


@pytest.fixture
def config_file(settings, tmp_path):
    from fs_lowrank import load_config

    path = tmp_path / "run.yaml"
    load_config(settings, {"federate.total_round_num": 2, "outdir": str(tmp_path / "run")}).dump(path)
    return path


@framework
def test_our_command(config_file, tmp_path):
    done = call("fs_lowrank", "run", "--engine", "federatedscope", "--cfg", config_file, "federate.method", "rolora")
    assert done.returncode == 0, done.stderr
    # What the framework logs is in its files; what we say of the data is on the screen.
    assert "round   2/2" in done.stdout and "INFO:" not in done.stdout + done.stderr
    assert "INFO:" in (tmp_path / "run" / "exp_print.log").read_text()
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"adapter", "checkpoint", "config.yaml", "curves.png", "environment.json", "rounds.jsonl"} <= left
    assert {"summary.json", "exp_print.log", "eval_results.log"} <= left


@framework
def test_a_shipped_configuration(tiny_causal, instructions_jsonl, tmp_path):
    from fs_lowrank.engines.federatedscope import FRAMEWORK

    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(instructions_jsonl, data / "tiny.jsonl")
    overrides = {
        "federate.method": "rolora",
        "use_gpu": False,
        "data.root": data,
        "data.type": "tiny.jsonl@llm",
        "data.splits": "[0.6,0.2,0.2]",
        "model.type": f"{tiny_causal}@huggingface_llm",
        "llm.tok_len": 64,
        "federate.total_round_num": 2,
        "federate.client_num": 3,
        "federate.sample_client_num": 3,
        "train.local_update_steps": 2,
        "eval.freq": 1,
        "outdir": tmp_path / "exp",
        "expname": "x",
        "lowrank.min_clients": 2,
    }
    done = launch(overrides, tmp_path, "--cfg", FRAMEWORK / "llm/baseline/testcase.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = [json.loads(line) for line in (tmp_path / "exp/x/rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in rounds] == [1, 2] and all(r["uplink_bytes"] > 0 for r in rounds)
    assert "Results_weighted_avg" in (tmp_path / "exp/x/eval_results.log").read_text()
    # Only one half of the pairs is sent, and the framework's own config.yaml is left as it wrote it.
    assert rounds[0]["uplink_bytes"] != rounds[1]["uplink_bytes"]
    assert "__cfg" not in (tmp_path / "exp/x/config.yaml").read_text()
    assert (tmp_path / "exp/x/lowrank.yaml").exists()


@framework
def test_the_frameworks_own_fedavg_still_runs(tmp_path):
    overrides = {
        "federate.client_num": 3,
        "federate.total_round_num": 2,
        "data.type": "toy",
        "model.type": "lr",
        "criterion.type": "MSELoss",
        "trainer.type": "general",
        "eval.metrics": "['loss']",
        "outdir": tmp_path / "exp",
    }
    done = launch(overrides, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Final evaluation is finished" in done.stderr
    assert not list(tmp_path.rglob("rounds.jsonl"))


@framework
@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"federate.method": "roloora"}, "error: federate.method: no method 'roloora'; did you mean 'rolora'"),
        ({"lowrank.timout": 9, "federate.method": "rolora"}, "unknown key 'lowrank.timout'; did you mean 'timeout'"),
        ({"federate.metod": "rolora"}, "unknown key 'federate.metod'; did you mean 'federate.method'"),
        ({"federate.client_num": "many"}, "Type mismatch"),
    ],
)
def test_a_wrong_key_or_value_is_one_line(tmp_path, overrides, said):
    done = launch(overrides, tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert said in done.stderr.splitlines()[-1]


@framework
def test_a_users_own_launcher(config_file, tmp_path):
    config = yaml.safe_load(config_file.read_text())
    script = tmp_path / "mine.py"
    script.write_text(f"""
import fs_lowrank.engines.federatedscope
from federatedscope.core.configs.config import global_cfg
from federatedscope.core.auxiliaries.data_builder import get_data
from federatedscope.core.auxiliaries.runner_builder import get_runner
from federatedscope.core.auxiliaries.worker_builder import get_client_cls, get_server_cls
cfg = global_cfg.clone()
cfg.merge_from_list(["federate.method", "ffa_lora", "federate.client_num", 3, "federate.total_round_num", 2,
    "data.type", {json.dumps(config["data"]["type"])}, "model.type", {json.dumps(config["model"]["type"])},
    "data.splitter", "iid", "early_stop.patience", 0, "outdir", {json.dumps(str(tmp_path / "mine"))},
    "llm.adapter.args", [{{"r": 2, "target_modules": ["query"]}}], "eval.metrics", ["acc"], "llm.tok_len", 24,
    "federate.make_global_eval", True])
data, changed = get_data(cfg.clone())
cfg.merge_from_other_cfg(changed)
cfg.freeze()
best = get_runner(data=data, server_class=get_server_cls(cfg), client_class=get_client_cls(cfg),
                  config=cfg.clone()).run()
print("best", sorted(best["server_global_eval"]))
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "best ['test_acc', 'test_avg_loss'" in done.stdout
    assert (tmp_path / "mine" / "adapter").is_dir()


# -- without the framework, or with another one --------------------------------------------------------


def checkout(folder, version="0.3.0", branch=True):
    """The package folder of what looks like a checkout of the framework."""
    package = folder / "federatedscope"
    (package / "llm/trainer").mkdir(parents=True)
    if branch:
        (package / locate_federatedscope.BRANCH_FILE).touch()
    (package / "__init__.py").write_text(f"__version__ = '{version}'\n")
    return package


def test_a_framework_that_cannot_be_used(tmp_path, monkeypatch):
    def refusal(folder=None, root=""):
        monkeypatch.setenv("FEDERATEDSCOPE_ROOT", str(root))
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(locate_federatedscope, "_importable", lambda: folder)
        with pytest.raises(UserError) as caught:
            locate_federatedscope.require()
        return str(caught.value)

    assert "FederatedScope is not installed" in refusal()
    assert f"{tmp_path} has no package federatedscope" in refusal(root=tmp_path)
    older = checkout(tmp_path / "version", version="0.2.0")
    assert "is version 0.2.0; this plug-in is written for 0.3.0" in refusal(older)
    assert "is not the branch llm" in refusal(checkout(tmp_path / "branch", branch=False))
    monkeypatch.setattr(locate_federatedscope, "NEEDS", ("torch", "no-such-package"))
    lacks = refusal(checkout(tmp_path / "whole"))
    assert lacks.endswith("packages that it needs are not installed; pip install no-such-package")


@framework
def test_the_doctor_says_what_was_mended():
    done = call("fs_lowrank", "doctor")
    assert "0.3.0 (branch llm)" in done.stdout and "mended:" in done.stdout
