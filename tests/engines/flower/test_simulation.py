"""``--engine flower``: Flower's simulation on Ray, from Python and from the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import fs_lowrank
from tests.cases import same_model

pytestmark = pytest.mark.flower


@pytest.mark.parametrize(
    "method, keys",
    [
        ("rolora", {}),
        ("flora", {"lowrank.ranks": [1, 3, 2]}),
        ("pfedloru", {"lowrank.tau": 2, "federate.total_round_num": 3}),
    ],
)
def test_the_result_is_that_of_the_embedded_engine(quick, method, keys):
    keys = {"federate.method": method, **keys}
    local, told = fs_lowrank.run(quick("local", keys)), []
    two = {"federate.process_num": 2} if method == "pfedloru" else {}
    other = fs_lowrank.run(quick("flower", keys | two), "flower", on_round=lambda record: told.append(record["round"]))
    same_model(local, other, atol=1e-5)
    assert told == [r["round"] for r in local.history]
    for key in ("selected", "clients", "failed", "client_uplink_bytes"):
        assert [r[key] for r in other.history] == [r[key] for r in local.history]
    names = [{path.name for path in result.outdir.iterdir()} for result in (local, other)]
    assert names[1] == names[0] | {"flower"}
    personal = [sorted((r.outdir / "personal").rglob("*.safetensors")) for r in (local, other)]
    assert [p.parent.name for p in personal[0]] == [p.parent.name for p in personal[1]]
    assert not torch.distributed.is_initialized()


def test_a_wrong_configuration_is_said_before_anything_starts(quick):
    with pytest.raises(fs_lowrank.UserError, match="none are evaluated"):
        fs_lowrank.run(
            quick("wrong", {"federate.method": "rolora", "eval.save_best": True, "data.splits": [0.8, 0.0, 0.2]}),
            "flower",
        )
    config = quick("twice", {"federate.method": "rolora", "federate.total_round_num": 1})
    fs_lowrank.run(config, "flower")
    with pytest.raises(fs_lowrank.UserError, match="holds a run already"):
        fs_lowrank.run(config, "flower")


@pytest.mark.parametrize(
    "gpus, count, each", [(0, 2, 0), (1, 1, 1), (1, 2, 1 / 2), (2, 2, 1), (2, 3, 1 / 2), (3, 2, 1), (4, 2, 2)]
)
def test_gpus_of_a_process(gpus, count, each):
    """Ray takes shares of one GPU, or whole numbers."""
    from fs_lowrank.engines.flower.run import gpus_each

    assert gpus_each(gpus, count) == each


@pytest.mark.parametrize("keys, simulated", [({"use_gpu": True, "device": 1}, -1), ({"device": "cpu"}, "cpu")])
def test_the_device_of_the_server_is_none_of_the_simulation(quick, tmp_path, keys, simulated):
    """In which Ray numbers the GPUs of each process from 0."""
    from fs_lowrank.engines.flower.client import config_of
    from fs_lowrank.rounds.parcel import Parcel

    config = quick("run", keys)
    call = Parcel({}, run="a", config=config.to_dict())
    for folder, device in ((None, config.device), (tmp_path, simulated)):
        own = config_of(call, {"partition-id": 0}, folder)
        assert own.device == device and own.fingerprint() == config.fingerprint()


@pytest.mark.slow
def test_the_command_line_and_a_run_that_is_killed(quick, tmp_path):
    """After ``kill -9`` nothing of it is left, and ``--resume`` ends where a run ends that nobody killed."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 4, "lowrank.pictures": False}
    whole, config = fs_lowrank.run(quick("whole", keys)), quick("killed", keys)
    config.dump(tmp_path / "run.yaml")
    command = [sys.executable, "-m", "fs_lowrank", "run", "--engine", "flower", "--cfg", str(tmp_path / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    records = Path(config.outdir) / "rounds.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (records.exists() and len(records.read_text().splitlines()) > 1):
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    summary = json.loads((Path(config.outdir) / "summary.json").read_text())
    assert summary["final"]["test_acc"] == whole.final["test_acc"]
    # Ray's agents look for their parent now and then.
    _, left = psutil.wait_procs(below, timeout=180)
    assert below and not left, left
    assert summary["final"]["test_loss"] == pytest.approx(whole.final["test_loss"], abs=1e-5)


@pytest.mark.slow
def test_a_process_of_the_simulation_is_killed(quick):
    """Flower starts no other in its place, so the run ends, and can be resumed."""
    keys = {"federate.method": "pfedlora", "federate.total_round_num": 3}
    local, config = fs_lowrank.run(quick("local", keys)), quick("flower", keys)

    def kill(record):
        for process in psutil.Process().children(recursive=True):
            if "ray::ClientAppActor" in " ".join(process.cmdline()):
                process.kill()

    with pytest.raises(fs_lowrank.RunFailed, match="process of Flower's simulation died.*resume=True"):
        fs_lowrank.run(config, "flower", on_round=kill)
    resumed = fs_lowrank.run(config, "flower", resume=True)
    same_model(local, resumed, atol=1e-5)
    assert [r["clients"] for r in resumed.history] == [r["clients"] for r in local.history]
