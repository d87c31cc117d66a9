"""Clients with settings of their own (``lowrank.clients``), on the embedded engine."""

import json
import subprocess
import sys

import pytest

import fs_lowrank
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.rounds.trainer import Trainer
from fs_lowrank.rounds.workspace import Workspace
from tests.cases import same_model

pytestmark = pytest.mark.more

OWN = [
    {"clients": 2, "batch_size": 3, "lr_factor": 0.25},
    {"clients": [4, 5], "local_update_steps": 5, "batch_size": 16},
]


def test_settings_that_all_clients_have_are_those_of_the_run(few):
    own = {"batch_size": 5, "local_update_steps": 1, "batch_or_epoch": "epoch", "lr_factor": 0.5}
    keys = {"dataloader.batch_size": 5, "train.local_update_steps": 1, "train.batch_or_epoch": "epoch"}
    schedule = {"train.scheduler.type": "cosine", "eval.batch_size": 8}
    run = fs_lowrank.run(few("run", {**keys, **schedule, "train.optimizer.lr": 2.5e-3}))
    clients = fs_lowrank.run(few("clients", {**schedule, "lowrank.clients": [{"clients": "1-5", **own}]}))
    same_model(run, clients)
    assert [r["samples"] for r in run.history] == [r["samples"] for r in clients.history]
    assert [r["metrics"] for r in run.history] == [r["metrics"] for r in clients.history]


def test_each_client_trains_by_its_own(few):
    workspace, trained = Workspace(few("run", {"lowrank.clients": OWN})), {}
    for client in (2, 3, 5):
        workspace.load_client(workspace.initial_state, client)
        result = Trainer(workspace).fit(workspace.task(client, 1), workspace.model, workspace.prefix).result
        trained[client] = (result.steps, result.samples)
    assert trained == {2: (2, 6), 3: (2, 16), 5: (5, 80)}


def test_cohorts_train_clients_of_unequal_batches_and_steps(few):
    """Clients of one learning rate train together; the result is that of one by one."""
    alone = fs_lowrank.run(few("alone", {"lowrank.clients": OWN}))
    config = few("together", {"lowrank.clients": OWN, "train.cohort": 4})
    workspace = Workspace(config)
    cohorts = Trainer(workspace).cohorts([workspace.task(client, 1) for client in (1, 2, 3, 4, 5)])
    assert sorted([task.client for task in of] for of in cohorts) == [[1, 3, 4, 5], [2]]
    same_model(alone, fs_lowrank.run(config), atol=2e-5)


def test_processes_and_a_resumed_run_have_the_same_result(few):
    keys = {"lowrank.clients": OWN, "federate.total_round_num": 3}
    whole = fs_lowrank.run(few("whole", keys))
    config = few("parts", {**keys, "federate.process_num": 2})
    fs_lowrank.run(config, on_round=lambda record: record["round"] == 1)
    for other in ([], [{"clients": 2, "batch_size": 4}]):
        with pytest.raises(fs_lowrank.UserError, match="was started with another lowrank.clients; continue it"):
            fs_lowrank.run(config.replace({"lowrank.clients": other}), resume=True)
    same_model(whole, fs_lowrank.run(config, resume=True))


def test_a_client_is_reused_only_where_it_trains_alike(few, tmp_path):
    keys = {"federate.total_round_num": 1, "lowrank.reuse_clients": str(tmp_path / "kept")}
    fs_lowrank.run(few("one", {**keys, "lowrank.clients": OWN}))
    changed = [{**OWN[0], "lr_factor": 0.5}, OWN[1]]
    spent = fs_lowrank.run(few("two", {**keys, "lowrank.clients": changed})).history[0]["client_seconds"]
    assert len(spent) == 5 and [client for client, cost in spent.items() if not cost["reused"]] == ["2"]


def test_a_rank_of_its_own_decides_what_a_client_sends(few):
    keys = {"federate.method": "flora", "federate.total_round_num": 1, "lowrank.clients": [{"clients": 3, "rank": 4}]}
    sent = fs_lowrank.run(few("run", keys)).history[0]["client_uplink_bytes"]
    assert sent["3"] > sent["1"] == sent["2"] == sent["5"]


@pytest.mark.parametrize("kind", ["settings", "causal_settings"])
def test_a_length_of_its_own(few, kind, request):
    of = request.getfixturevalue(kind)
    limit = 48 if "causal" in kind else 5
    plain = Workspace(few("plain", of=of)).data
    keys = {"lowrank.clients": [{"clients": 2, "tok_len": limit}], "data.max_dropped": 1.0}
    own = Workspace(few("own", keys, of)).data
    assert own.fingerprint != plain.fingerprint
    for client in (0, 2, 3, 4):
        assert own.clients[client].fingerprint() == plain.clients[client].fingerprint()
    mine, before = own.clients[1], plain.clients[1]
    assert mine.lengths.max() == limit < before.lengths.max()
    ids = {tuple(row[: limit - 1]) for row in before.columns["input_ids"]}
    assert all(tuple(row[: limit - 1]) in ids for row in mine.columns["input_ids"])
    left_out = sum(own.skipped.values()) - sum(plain.skipped.values())
    assert len(mine) == len(before) - left_out
    if left_out:
        why = f"{left_out} of {len(before)} rows of the clients with tok_len = {limit} .* data.max_dropped = 0.01"
        with pytest.raises(fs_lowrank.UserError, match=why):
            Workspace(few("refused", {**keys, "data.max_dropped": 0.01}, of))


def test_a_text_that_is_cut_is_counted_once(few, settings):
    complete = [client.lengths for client in Workspace(few("complete", of=settings)).data.clients]
    keys = {"llm.tok_len": 7, "lowrank.clients": [{"clients": 2, "tok_len": 5}]}
    cut = Workspace(few("own", keys, settings)).data.truncated["train"]
    assert cut == sum(int((lengths > (5 if i == 1 else 7)).sum()) for i, lengths in enumerate(complete))


def test_a_length_that_leaves_no_answer_is_refused(few, causal_settings):
    with pytest.raises(fs_lowrank.UserError, match="lowrank.clients: tok_len = 3, of client 2: all .* prompts fill"):
        Workspace(few("own", {"lowrank.clients": [{"clients": 2, "tok_len": 3}]}, causal_settings))
    with pytest.raises(fs_lowrank.UserError, match="tok_len = 4000: the model at .* has 128 positions"):
        Workspace(few("own", {"lowrank.clients": [{"clients": 2, "tok_len": 4000}]}, causal_settings))


def test_an_engine_knows_the_settings_before_the_first_round(few):
    engine = LocalEngine(few("run", {"lowrank.clients": OWN}))
    assert engine.ledger.samples_trained({2: 50, 4: 50}, 1) == 2 * 3 + 50 + 16


@pytest.mark.slow
def test_the_commands_option(settings, tmp_path):
    path, own = tmp_path / "run.yaml", tmp_path / "own.yaml"
    fs_lowrank.load_config(settings, {"federate.total_round_num": 1, "lowrank.pictures": False}).dump(path)
    own.write_text("client_2: {dataloader: {batch_size: 3}, train: {local_update_steps: 1}}\n")
    command = [sys.executable, "-m", "fs_lowrank", "run", "--cfg", str(path), "--client_cfg"]
    done = subprocess.run([*command, str(own)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert record["clients"] == [1, 2, 3, 4, 5]
    own.write_text("client_2: {dataloader: {batch_size: none}}\n")
    done = subprocess.run([*command, str(own)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "own.yaml, line 1: client_2.dataloader.batch_size = 'none': " in done.stderr
