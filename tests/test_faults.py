"""Failures during a run, and the results that are required nevertheless."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fs_lowrank.jobs.files as files
import fs_lowrank.rounds.trainer as trainer
import fs_lowrank.runs.checkpoint as checkpoint
from fs_lowrank import cli, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.errors import RunFailed, UserError
from fs_lowrank.methods import get_method_class
from fs_lowrank.models.names import named_tensors
from fs_lowrank.rounds.ledger import Ledger
from fs_lowrank.rounds.round import Round
from fs_lowrank.runs.checkpoint import load_checkpoint
from fs_lowrank.runs.records import Records
from fs_lowrank.testing.bench import without_seconds
from fs_lowrank.training import train_client
from tests.torture.child import difference, fork

RUNS = {
    "rolora under FedAdam": {
        "federate.method": "rolora",
        "fedopt.use": True,
        "fedopt.optimizer": {"type": "Adam", "lr": 0.01},
    },
    "flexlora of three ranks": {"federate.method": "flexlora", "lowrank.ranks": [1, 3, 2]},
    "flora of three ranks": {"federate.method": "flora", "lowrank.ranks": [1, 3, 2]},
    "fedavg": {"federate.method": "fedavg"},
}


#: 4 clients, 2 per round, and 4 rounds
FEW = {
    **{"federate.client_num": 4, "federate.sample_client_num": 2, "federate.total_round_num": 4},
    **{"train.local_update_steps": 2, "eval.split": ["test"], "eval.freq": 2},
}


@pytest.fixture
def make(few):
    """``make(folder, keys)``: an engine of a run as in ``FEW``."""
    return lambda folder, keys=None, **callbacks: LocalEngine(few(folder, keys), **callbacks)


def tensors_of(engine):
    return {
        **{f"state {n}": t for n, t in engine.ledger.state.items()},
        **{f"model {n}": p.detach() for n, p in engine.model.named_parameters()},
        **{f"client {c} {n}": t for c, own in engine.workspace.personal.items() for n, t in own.items()},
    }


def records_of(folder):
    """The records on disk, without durations."""
    return without_seconds(map(json.loads, (folder / "rounds.jsonl").read_text().splitlines()))


def saved_by(folder):
    """Every tensor in the files that a run leaves, and in its last checkpoint."""
    paths = [
        *folder.glob("adapter/*.safetensors"),
        *folder.glob("model/*.safetensors"),
        *max(folder.glob("checkpoint/round_*")).glob("*.safetensors"),
    ]
    return {f"{path.relative_to(folder)} {n}": t for path in paths for n, t in load_file(path).items()}


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype, name


def check_equal_runs(engine, reference):
    """Compare bit by bit: state, model, personal tensors, records, histories, files, and inputs of later rounds."""
    equal(tensors_of(engine), tensors_of(reference))
    equal(saved_by(engine.recorder.outdir), saved_by(reference.recorder.outdir))
    assert records_of(engine.recorder.outdir) == records_of(reference.recorder.outdir)
    assert without_seconds(engine.recorder.history) == without_seconds(reference.recorder.history)
    assert engine.ledger.synced == reference.ledger.synced
    sizes = [{n: (came, t.shape, t.dtype) for n, (came, t) in e.ledger.outbox.items()} for e in (engine, reference)]
    assert sizes[0] == sizes[1]


# -- killed --------------------------------------------------------------------------------------------

#: every step of a round that writes to the disk, and the training between them
STEPS = [
    (trainer, "train_client"),
    (Round, "finish"),
    (Records, "add"),
    (checkpoint, "save_file"),
    (files, "sync"),
    (Path, "write_text"),
    (os, "replace"),
    (shutil, "rmtree"),
]


def count_steps(monkeypatch, act):
    """Call ``act(number, name)`` before and after each step, numbered from 1."""
    count = 0

    def wrap(owner, name):
        original = getattr(owner, name)

        def stepped(*args, **options):
            nonlocal count
            count += 1
            act(count, f"before {name}")
            result = original(*args, **options)
            count += 1
            act(count, f"after {name}")
            return result

        monkeypatch.setattr(owner, name, stepped)

    for owner, name in STEPS:
        wrap(owner, name)


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.slow if run.startswith("flora") else ()) for run in RUNS]
)
def test_killed_at_any_step_and_resumed(make, monkeypatch, tmp_path, run):
    # The first run of all would keep the frozen layers' states for the others, which takes further steps.
    keys = {**RUNS[run], "train.cache_frozen_shared": 0}
    reference = make("whole", keys)
    steps = []
    with monkeypatch.context() as patch:
        count_steps(patch, lambda number, name: steps.append(name))
        reference.run()
    # Many steps from the second round's training to the end of its checkpoint for one of the methods, where each has
    # something to lose; a few, spread over the run, for the others.
    moments = {len(steps) * i // 5 for i in (1, 2, 3)}
    if run == "rolora under FedAdam":
        ends = [i for i, name in enumerate(steps, start=1) if name == "after replace"]
        moments = {3, len(steps)} | set(range(ends[1] + 1, ends[2] + 1, 8))
    for moment in sorted(moments):

        def die(moment=moment):
            with pytest.MonkeyPatch.context() as patch:
                count_steps(patch, lambda number, name: number == moment and os.kill(os.getpid(), signal.SIGKILL))
                make(f"killed {moment}", keys).run()

        assert fork(die, tmp_path / "out").code == -signal.SIGKILL, f"step {moment} was never reached"
        resumed = make(f"killed {moment}", keys)
        resumed.run(resume=True)
        check_equal_runs(resumed, reference)
        assert not list(resumed.recorder.outdir.glob("checkpoint/.*"))
        shutil.rmtree(resumed.recorder.outdir)


@pytest.fixture
def config_file(settings, tmp_path):
    """The configuration as a file, with enough rounds to be stopped in the middle."""
    path, keys = tmp_path / "run.yaml", {"federate.method": "rolora", "federate.client_num": 4}
    load_config(settings, {**keys, "federate.total_round_num": 12, "outdir": str(tmp_path / "run")}).dump(path)
    return path


def wait_for_rounds(folder, rounds):
    deadline = time.time() + 120
    while not (folder / "rounds.jsonl").exists() or (folder / "rounds.jsonl").read_text().count("\n") < rounds:
        assert time.time() < deadline, "no round in two minutes"
        time.sleep(0.01)


def test_interrupted_from_the_keyboard(config_file, tmp_path):
    def interrupt():
        wait_for_rounds(tmp_path / "run", 2)
        os.kill(os.getpid(), signal.SIGINT)

    def work():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
        # So many rounds that the signal arrives during the run.
        return cli.main(["run", "--cfg", str(config_file), "federate.total_round_num", "5000"])

    ended = fork(work, tmp_path / "output")
    text = ended.out + ended.err
    assert ended.code == 130, text
    assert "interrupted" in text and "--resume" in text and str(config_file) in text and "Traceback" not in text


# -- damaged -------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_record_cut_short(make):
    reference = make("whole")
    reference.run()
    shutil.copytree(reference.recorder.outdir, reference.recorder.outdir.parent / "cut")
    shutil.rmtree(reference.recorder.outdir.parent / "cut" / "checkpoint" / "round_000004")
    records = reference.recorder.outdir.parent / "cut" / "rounds.jsonl"
    records.write_text(records.read_text()[:-25])
    engine = make("cut")
    engine.run(resume=True)
    check_equal_runs(engine, reference)
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match="does not hold the rounds 1 to 4 once each"):
        make("cut").run(resume=True)


@pytest.mark.slow
def test_a_run_of_another_revision_of_its_method_is_not_continued(make, monkeypatch):
    """The configuration is the same, but the method computes something else."""
    keys = {"federate.method": "rolora", "federate.total_round_num": 3}
    make("earlier", {**keys, "federate.total_round_num": 2}).run()
    make("both", {**keys, "federate.total_round_num": 2}).run()
    make("both", keys).run(resume=True)
    engine = make("earlier", keys)
    monkeypatch.setattr(type(engine.method), "revision", 2)
    before = tensors_of(engine)
    with pytest.raises(UserError, match="revision 1 of rolora.*has revision 2.*another outdir"):
        engine.run(resume=True)
    equal(tensors_of(engine), before)
    assert len(records_of(engine.recorder.outdir)) == 2
    make("later", {**keys, "federate.total_round_num": 2}).run()
    make("later", keys).run(resume=True)
    monkeypatch.setattr(type(engine.method), "revision", 1)
    with pytest.raises(UserError, match="revision 2 of rolora"):
        make("later", keys).run(resume=True)


# -- full disks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.4, 0.8])
def test_a_file_system_that_is_too_small(config_file, tmp_path, share):
    """The command ends with one line, and goes on to the same files where the file system has grown."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("no file system of a given size can be mounted")
    keys = ["federate.total_round_num", "3", "lowrank.pictures", "False", "outdir"]
    command = ["run", "--cfg", str(config_file), *keys]
    assert cli.main([*command, str(tmp_path / "whole")]) == 0
    pages = sum(-(-file.stat().st_size // 4096) for file in (tmp_path / "whole").rglob("*") if file.is_file())
    disk, run = tmp_path / "disk", shlex.join([sys.executable, "-m", "fs_lowrank", *command])
    disk.mkdir()
    script = f"""mount -t tmpfs -o size={int(4 * share * pages)}k none {disk} || exit 9
        {run} {disk}/run && exit 8
        mount -o remount,size=64m {disk}
        {run} {disk}/run --resume && cp -r {disk}/run {tmp_path}/run"""
    given = {"cwd": Path(cli.__file__).parents[1], "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, **given)
    assert ended.returncode == 0, ended
    (line,) = (line for line in ended.stderr.splitlines() if "error: " in line)
    assert "No space left on device; make room" in line and "Traceback" not in ended.stderr
    assert not difference(tmp_path / "run", tmp_path / "whole", disk / "run")


# -- resumed with other keys ---------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize(
    "keys, message",
    [
        ({"train.optimizer.lr": 0.5}, "another train.optimizer.lr"),
        ({"lowrank.mix": 0.25}, "another .*lowrank.mix"),
        ({"federate.total_round_num": 4}, "another federate.total_round_num"),  # the mix counts rounds
        ({"dataloader.batch_size": 4, "train.optimizer.weight_decay": 0.5}, "dataloader.batch_size"),
        ({"seed": 9}, "data is not what"),
    ],
)
def test_another_configuration_is_named(make, keys, message):
    method = {"federate.method": "rolora", "lowrank.mix": 0.5, "federate.total_round_num": 2}
    make("run", method).run()
    before = records_of(make("run", method).recorder.outdir)
    with pytest.raises(UserError, match=message):
        make("run", {**method, **keys}).run(resume=True)
    assert records_of(make("run", method).recorder.outdir) == before


@pytest.mark.more
@pytest.mark.parametrize(
    "keys",
    [
        {"train.cache_frozen": "off"},
        {"lowrank.save_merged": True, "lowrank.checkpoint_freq": 2, "lowrank.keep_checkpoints": 1},
    ],
)
def test_keys_that_do_not_affect_the_result_may_change(make, keys):
    reference = make("whole")
    reference.run()
    make("run", {"federate.total_round_num": 2}).run()
    engine = make("run", keys)
    engine.run(resume=True)
    for name, value in tensors_of(engine).items():
        torch.testing.assert_close(value, tensors_of(reference)[name], atol=1e-5, rtol=1e-4)


# -- clients that fail ---------------------------------------------------------------------------------

ALL = {"federate.sample_client_num": -1}


def without_client_2(monkeypatch, rounds=(2,)):
    select = Ledger.select
    monkeypatch.setattr(
        Ledger, "select", lambda self, round: [c for c in select(self, round) if c != 2 or round not in rounds]
    )


def failing(monkeypatch, rounds=(2,), client=2):
    """Let ``client`` fail after training, when the shared model holds its tensors."""
    seen = []

    def train(model, examples, phases, config, *, owner, **options):
        seen.append(owner)
        result = train_client(model, examples, phases, config, owner=owner, **options)
        if owner == f"client {client}" and seen.count(owner) in rounds:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(float("nan"))
            raise RuntimeError("out of memory\nsecond line")
        return result

    monkeypatch.setattr(trainer, "train_client", train)


@pytest.mark.parametrize("run", RUNS)
def test_a_client_that_fails_is_recorded_and_changes_nothing(make, monkeypatch, run):
    keys = {**RUNS[run], **ALL, "federate.total_round_num": 3}
    with monkeypatch.context() as patch:
        without_client_2(patch)
        absent = make("absent", keys)
        absent.run()
    failing(monkeypatch)
    engine = make("failing", keys)
    result = engine.run()
    equal(tensors_of(engine), tensors_of(absent))
    record = result.history[1]
    assert record["selected"] == [1, 2, 3, 4] and record["clients"] == [1, 3, 4]
    (failed,) = record["failed"]
    assert (failed["client"], failed["kind"]) == (2, "failed")
    assert re.fullmatch(r"RuntimeError: out of memory\nsecond line \(test_faults.py, line \d+\)", failed["reason"])
    assert "2" not in record["client_uplink_bytes"] and record["client_downlink_bytes"]["2"] > 0
    assert record["loss"] == absent.recorder.history[1]["loss"]
    assert not result.history[0]["failed"] and not result.history[2]["failed"]


def sending(engine, monkeypatch, change, at=2):
    """Client 2 sends what ``change`` makes of its tensors in the round ``at``."""
    upload = engine.method.upload

    def send(model, round, client):
        tensors = {n: t.detach().clone() for n, t in upload(model, round, client).items()}
        return change(tensors) if (round, client.id) == (at, 2) else tensors

    monkeypatch.setattr(engine.method, "upload", send)


@pytest.mark.more
@pytest.mark.parametrize("freq", [1, 3, 0])
def test_too_few_clients_stop_the_run_and_leave_the_last_good_round(make, monkeypatch, freq):
    keys = {**RUNS["flora of three ranks"], "lowrank.min_clients": 2, "lowrank.checkpoint_freq": freq}
    reference = make("whole", keys)
    reference.run()
    broken = reference.recorder.history[2]["selected"][1]
    with monkeypatch.context() as patch:
        calls = []

        def train(model, examples, phases, config, *, owner, **options):
            calls.append(owner)
            if len(calls) > 4 and owner == f"client {broken}":
                raise MemoryError("the battery is empty")
            return train_client(model, examples, phases, config, owner=owner, **options)

        patch.setattr(trainer, "train_client", train)
        engine = make("run", keys)
        with pytest.raises(
            UserError,
            match="(?s)round 3: 1 usable updates, lowrank.min_clients is 2.*the battery is empty.*last good round",
        ):
            engine.run()
    assert load_checkpoint(engine.recorder.outdir / "checkpoint").round == 2
    assert len(records_of(engine.recorder.outdir)) == 2
    engine = make("run", keys)
    engine.run(resume=True)
    equal(tensors_of(engine), tensors_of(reference))
    assert records_of(engine.recorder.outdir) == records_of(reference.recorder.outdir)


@pytest.mark.more
def test_a_run_is_resumed_after_a_round_with_too_few_clients(make):
    keys = {"lowrank.drop_rate": 0.3, "lowrank.min_clients": 2, "federate.total_round_num": 6, "seed": 5}
    with pytest.raises(UserError, match="smaller lowrank.min_clients"):
        make("run", keys).run()
    with pytest.raises(UserError, match="lowrank.min_clients is 2"):  # the same clients drop out again
        make("run", keys).run(resume=True)
    done = len(records_of(make("run").recorder.outdir))
    result = make("run", {**keys, "lowrank.min_clients": 1}).run(resume=True)
    assert 0 < done < 6 and [r["round"] for r in result.history] == [*range(1, 7)]


@pytest.fixture(scope="module")
def left_without():
    """The adapter of a run in which client 2 was absent."""
    return {}


#: what a client sends in place of its tensors
SENDS = {
    "nan": lambda sent: {n: torch.full_like(t, math.nan) for n, t in sent.items()},
    "another shape": lambda sent: {n: t[..., :1].contiguous() for n, t in sent.items()},
    "beyond the bound on norms": lambda sent: {n: torch.full_like(t, 1e19) for n, t in sent.items()},
    "nothing": lambda sent: {},
    "no text as a name": lambda sent: {**sent, 7: torch.ones(2)},
    "half of a letter": lambda sent: {**sent, "\ud800": torch.ones(2)},
    "a name without end": lambda sent: {**sent, "a" * 100_000: torch.ones(2)},
    "sparse": lambda sent: {n: t.to_sparse() for n, t in sent.items()},
    "quantised": lambda sent: {n: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8) for n, t in sent.items()},
    "complex": lambda sent: {n: t.to(torch.complex64) for n, t in sent.items()},
    "10^12 values": lambda sent: {n: torch.zeros(1).expand(10**12) for n in sent},
    "64 dimensions": lambda sent: {n: t.reshape(*[1] * (64 - t.ndim), *t.shape) for n, t in sent.items()},
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("what", [pytest.param(w, marks=() if w == "nan" else pytest.mark.more) for w in SENDS])
def test_a_client_that_sends_anything_does_not_end_a_command(
    config_file, monkeypatch, capsys, tmp_path, what, left_without
):
    keys = {"federate.total_round_num": 2, "lowrank.pictures": False, "lowrank.max_update_norm_factor": 1000}
    keys |= {"fedopt.use": True, "fedopt.optimizer.type": "Adam"}
    command = ["run", "--cfg", str(config_file), *(str(word) for pair in keys.items() for word in pair)]
    if "command" not in left_without:
        with monkeypatch.context() as patch:
            without_client_2(patch, rounds=(1, 2))
            assert cli.main([*command, "outdir", str(tmp_path / "absent")]) == 0
        left_without["command"] = load_file(tmp_path / "absent" / "adapter" / "adapter_model.safetensors")
    method = get_method_class("rolora")
    upload = method.upload

    def sends(self, model, round, client):
        sent = {n: t.detach().clone() for n, t in upload(self, model, round, client).items()}
        return SENDS[what](sent) if client.id == 2 else sent

    monkeypatch.setattr(method, "upload", sends)
    assert cli.main(command) == 0
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed and "please report" not in printed
    records = records_of(tmp_path / "run")
    assert len(records) == 2
    for record in records:
        (failure,) = record["failed"]
        assert (failure["client"], failure["kind"], record["clients"]) == (2, "refused", [1, 3, 4])
        assert re.fullmatch("client 2: .{5,400}", failure["reason"])
    equal(load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors"), left_without["command"])


def test_too_few_clients_from_the_first_round(config_file, monkeypatch, capsys, tmp_path):
    def train(*args, **options):
        raise RuntimeError("no luck")

    monkeypatch.setattr(trainer, "train_client", train)
    assert cli.main(["run", "--cfg", str(config_file)]) == 1
    err = capsys.readouterr().err
    assert "round 1: 0 usable updates" in err and "no luck" in err and "Traceback" not in err
    assert not list((tmp_path / "run").glob("checkpoint/round_*"))


# -- a round that the server cannot finish -----------------------------------------------------------------


def breaking(monkeypatch, engine, rounds):
    """Let the server step raise in ``rounds``, after using the model as methods with validation do."""
    aggregate = engine.method.aggregate

    def broken(updates, state, round):
        if round in rounds:
            with torch.no_grad():
                for parameter in named_tensors(engine.model, engine.method.shared).values():
                    parameter.fill_(3.0)
            raise ArithmeticError("no convergence\nsecond line")
        return aggregate(updates, state, round)

    monkeypatch.setattr(engine.method, "aggregate", broken)


PERSONAL = {"federate.method": "pfedlora", "train.optimizer.lr": 0.05}


@pytest.mark.more
@pytest.mark.parametrize("freq", [1, 0])
@pytest.mark.parametrize("run", [*RUNS, "with personal parts"])
def test_a_bad_round_stops_the_run_and_leaves_the_last_good_one(make, monkeypatch, run, freq):
    keys = {**RUNS.get(run, PERSONAL), "lowrank.checkpoint_freq": freq, "federate.total_round_num": 3}
    reference = make("whole", keys)
    reference.run()
    engine = make("run", keys)
    breaking(monkeypatch, engine, (2,))
    with pytest.raises(
        RunFailed, match="round 2: the server's step failed: ArithmeticError: no convergence .*on_bad_r"
    ):
        engine.run()
    assert load_checkpoint(engine.recorder.outdir / "checkpoint").round == 1
    assert len(records_of(engine.recorder.outdir)) == 1
    engine = make("run", keys)
    engine.run(resume=True)
    equal(tensors_of(engine), tensors_of(reference))
    assert records_of(engine.recorder.outdir) == records_of(reference.recorder.outdir)


@pytest.mark.more
@pytest.mark.parametrize("run", [*RUNS, "with personal parts"])
def test_a_bad_round_is_skipped_with_on_bad_round_skip(make, monkeypatch, run):
    keys = {
        **RUNS.get(run, PERSONAL),
        "federate.sample_client_num": 4,
        "federate.total_round_num": 3,
        "lowrank.on_bad_round": "skip",
    }
    seen, engines = [], []

    def note(record):
        seen.append(({n: t.clone() for n, t in tensors_of(engines[-1]).items()}, dict(engines[-1].ledger.outbox)))

    engines.append(make("run", keys, on_round=note))
    breaking(monkeypatch, engines[0], (2,))
    history = engines[0].run().history
    equal(seen[1][0], seen[0][0])  # state, model and personal tensors
    assert seen[1][1] == seen[0][1] and engines[0].ledger.synced == dict.fromkeys((1, 2, 3, 4), 1)
    good, bad, later = history
    said = r"round 2: the server's step failed: ArithmeticError: no convergence \(test_faults.py, line \d+\)"
    assert re.fullmatch(said, bad["skipped"])
    assert bad["clients"] == [] and bad["selected"] == [1, 2, 3, 4] and bad["failed"] == []
    assert bad["uplink_bytes"] == sum(bad["client_uplink_bytes"].values()) > 0 and 0 < bad["loss"] < 10
    assert "skipped" not in good and "skipped" not in later and later["clients"] == [1, 2, 3, 4]
    if bad["metrics"] and good["metrics"]:
        assert bad["metrics"] == good["metrics"]
    # What was sent to clients in the bad round has arrived, and is not sent again.
    assert bad["downlink_bytes"] > 0 and later["downlink_bytes"] == 0
    # A run that stops in the bad round and is resumed with ``skip`` is the same run.
    engines.append(make("resumed", {**keys, "lowrank.on_bad_round": "stop"}))
    breaking(monkeypatch, engines[1], (2,))
    with pytest.raises(RunFailed):
        engines[1].run()
    engines.append(make("resumed", keys))
    breaking(monkeypatch, engines[2], (2,))
    engines[2].run(resume=True)
    check_equal_runs(engines[2], engines[0])
    # So is one that is resumed after it.
    engines.append(make("after", {**keys}, on_round=lambda record: record["round"] == 2))
    breaking(monkeypatch, engines[3], (2,))
    engines[3].run()
    engines.append(make("after", keys))
    engines[4].run(resume=True)
    check_equal_runs(engines[4], engines[0])


def huge(engine, monkeypatch, round=2, size=1e19):
    sending(engine, monkeypatch, lambda tensors: {n: torch.full_like(t, size) for n, t in tensors.items()}, round)


def test_one_client_does_not_end_a_run(make, monkeypatch, capsys):
    """FlexLoRA cannot decompose a product beyond float32; without a bound on norms, the round is a bad one."""
    keys = {**RUNS["flexlora of three ranks"], **ALL, "federate.total_round_num": 3, "lowrank.on_bad_round": "skip"}
    engine = make("run", keys)
    huge(engine, monkeypatch, size=3e38)
    result = engine.run()
    assert [bool(r.get("skipped")) for r in result.history] == [False, True, False]
    assert all(t.isfinite().all() for t in tensors_of(engine).values() if isinstance(t, torch.Tensor))


@pytest.mark.more
def test_more_samples_than_the_bound_are_refused(make):
    engine = make("run", {**ALL, "lowrank.max_samples": 1})
    with pytest.raises(UserError, match="0 usable updates.*client 1: says it has .* samples, expected .* from 1 to 1"):
        engine.run()


def test_data_of_another_task_than_the_models(make, causal_settings, settings):
    with pytest.raises(
        UserError,
        match="SequenceClassification, but data.type = .* no labels; take NAME@huggingface_llm",
    ):
        make("run", {"data": causal_settings["data"]})
    with pytest.raises(UserError, match="no column is the instruction .* there are: text, label, domain"):
        make("run", {**{k: causal_settings[k] for k in ("model", "llm")}, "data": settings["data"]})


# -- a folder in use -----------------------------------------------------------------------------------


@pytest.mark.more
def test_a_model_of_huge_weights_is_recorded_in_valid_json(make, monkeypatch):
    """Its weights are finite but its loss is not: the run continues, and all of its files can be read."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    keys = {**ALL, "federate.total_round_num": 2, "eval.freq": 1, "early_stop.patience": 1, "eval.client_scores": True}
    keys |= {"eval.best_res_update_round_wise_key": "test_loss"}
    engine = make("run", {**keys, "train.local_update_steps": 1})
    for round in (1, 2):
        huge(engine, monkeypatch, round=round, size=3e37)
    result = engine.run()
    assert math.isnan(result.final["test_loss"]) and "best_round" not in result.final
    assert all(math.isnan(scores["loss"]) for scores in result.history[0]["client_scores"].values())
    for path in (engine.recorder.outdir / "rounds.jsonl", engine.recorder.outdir / "summary.json"):
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            assert "null" in text and json.loads(text, parse_constant=refuse)
    make("run", {**keys, "train.local_update_steps": 1}).run(resume=True)


def test_a_finished_run_is_not_overwritten(make):
    keys = {"lowrank.checkpoint_freq": 0}
    engine = make("run", keys)
    engine.run()
    before = {path: path.read_bytes() for path in engine.recorder.outdir.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="holds a run already"):
        make("run", {**keys, "seed": 9}).run()
    with pytest.raises(UserError, match="without a checkpoint.*choose another outdir"):
        make("run", keys).run(resume=True)
    assert before == {path: path.read_bytes() for path in engine.recorder.outdir.rglob("*") if path.is_file()}


# -- nothing to evaluate -------------------------------------------------------------------------------


@pytest.mark.more
def test_an_empty_validation_split(make):
    result = make("some", {"data.splits": [0.8, 0.0, 0.2], "eval.split": ["val", "test"]}).run()
    assert set(result.final) >= {"test_acc", "test_loss"} and "val_acc" not in result.final
    with pytest.raises(UserError, match="eval.split asks for 'val', but none is held out; give data.splits a share"):
        make("none", {"data.splits": [0.8, 0.0, 0.2], "eval.split": ["val"]})


def test_stopped_before_anything_was_evaluated(make):
    engine = make("run", {"eval.freq": -1}, on_round=lambda record: record["round"] == 2)
    result = engine.run()
    assert len(result.history) == 2 and result.saved["adapter"].exists()


@pytest.mark.more
def test_early_stopping_is_the_same_after_a_resume(make):
    keys = {
        "early_stop.patience": 1,
        "eval.best_res_update_round_wise_key": "test_loss",
        "eval.freq": 1,
        "train.optimizer.lr": 0.2,
        "federate.total_round_num": 8,
    }
    reference = make("whole", keys)
    reference.run()
    assert len(reference.recorder.history) < 8
    engine = make("run", keys, on_round=lambda record: record["round"] == 1)
    engine.run()
    engine = make("run", keys)
    engine.run(resume=True)
    check_equal_runs(engine, reference)
    make("run", keys).run(resume=True)
    assert records_of(engine.recorder.outdir) == records_of(reference.recorder.outdir)  # it ends there again
