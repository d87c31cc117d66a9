"""The same config, data and seed give the same global tensors on both engines, for every method."""

import json

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import fs_lowrank
from tests.cases import engine_cases

pytestmark = pytest.mark.federatedscope
CASES = engine_cases()
ACCUMULATING = [m for m, keys in CASES if "lowrank.tau" in keys]
#: the run of one client, settings of single clients, and what has an adapter or a base of another kind
ALONE = {"federate.client_idx_for_local_train": 2}
OWN = [{"clients": 2, "batch_size": 3, "lr_factor": 0.25}, {"clients": [4, 5], "local_update_steps": 4, "tok_len": 6}]
NF4 = {"lowrank.dtype": "nf4", "federate.total_round_num": 2, "federate.client_num": 3}
IDS = [m + "".join(f"-{k.split('.')[1]}" for k in keys) for m, keys in CASES]


def virtual_tokens(kind):
    return [{"adapter_method": kind, "num_virtual_tokens": 3}]


@pytest.mark.parametrize("share", [False, True], ids=["own_models", "one_model"])
@pytest.mark.parametrize("sample", [-1, 2], ids=["all", "two"])
@pytest.mark.parametrize("method, keys", CASES, ids=IDS)
def test_standalone(quick, assert_same, method, keys, sample, share):
    keys = {"federate.method": method, "federate.sample_client_num": sample, **keys}
    local = fs_lowrank.run(quick("local", keys))
    other = fs_lowrank.run(quick("other", {**keys, "federate.share_local_model": share}), "federatedscope")
    assert_same(local, other)
    for a, b in zip(local.history, other.history, strict=True):
        for key in ("selected", "clients", "client_uplink_bytes", "client_downlink_bytes", "uplink_bytes_without_head"):
            assert a[key] == b[key], key
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
        for split in a["metrics"]:
            assert b["metrics"][split] == pytest.approx(a["metrics"][split], abs=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {"lowrank.drop_rate": 0.4, "seed": 5},
        {"train.frozen_dropout": True},
        {"federate.ignore_weight": True},
        {"fedopt.use": True, "fedopt.optimizer.type": "Adam", "fedopt.optimizer.lr": 0.01},
        {"train.scheduler.type": "cosine", "train.scheduler.warmup_ratio": 0.3},
        {"train.is_enable_half": True},
        {"lowrank.mix": 0.5},
        {"lowrank.train_head": False},
        {"grad.grad_accum_count": 2, "grad.grad_clip": 1.0},
        {"eval.freq": 0},
        {"eval.split": []},
        {"lowrank.robust": "norm_bound"},
        {"lowrank.robust": "trimmed_mean"},
        {"lowrank.drift": "scaffold", "train.optimizer": {"type": "SGD", "lr": 0.1}},
        {"lowrank.drift": "feddyn", "lowrank.drop_rate": 0.4, "seed": 5},
        ALONE,
        {**ALONE, "federate.make_global_eval": False},
        {**ALONE, "federate.process_num": 2},
        {"lowrank.clients": OWN, "federate.total_round_num": 2, "federate.share_local_model": True},
        {"lowrank.clients": OWN, "federate.total_round_num": 2, "federate.process_num": 3},
        {"federate.method": "FedAvg", "llm.adapter.use": True, "llm.adapter.args": virtual_tokens("prefix")},
        {"federate.method": "FedAvg", "llm.adapter.use": True, "llm.adapter.args": virtual_tokens("p-tuning")},
        pytest.param({**NF4, "federate.share_local_model": True}, marks=pytest.mark.quantised),
        pytest.param({**NF4, "federate.method": "flora", "lowrank.merge": False}, marks=pytest.mark.quantised),
        pytest.param({"lowrank.dtype": "int8", "federate.client_num": 3}, marks=pytest.mark.quantised),
    ],
    ids=lambda k: next(iter(k)),
)
def test_other_keys_that_affect_the_result(quick, assert_same, keys):
    keys = {"federate.method": "rolora", "federate.sample_client_num": 3, **keys}
    local = fs_lowrank.run(quick("local", keys))
    other = fs_lowrank.run(quick("other", keys), "federatedscope")
    assert_same(local, other)
    assert other.facts["clients"] == local.facts["clients"]
    for a, b in zip(local.history, other.history, strict=True):
        for key in ("clients", "client_uplink_bytes", "samples"):
            assert b[key] == a[key], key
        assert bool(b["metrics"]) == bool(a["metrics"])
        assert [n["client"] for n in b.get("robust", [])] == [n["client"] for n in a.get("robust", [])]


def test_a_causal_model(causal_settings, few, assert_same):
    keys = {"federate.method": "rolora", "federate.sample_client_num": 3, "federate.total_round_num": 4}
    local, other = (fs_lowrank.run(few(name, keys, causal_settings), name) for name in ("local", "federatedscope"))
    assert_same(local, other)
    assert (other.outdir / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("method, keys", CASES, ids=IDS)
def test_distributed(quick, assert_same, cluster, method, keys):
    keys = {"federate.method": method, "federate.total_round_num": 3, "federate.client_num": 2, **keys}
    local, other = fs_lowrank.run(quick("local", keys)), cluster.run(2, keys)[0]
    assert_same(local, other.tensors)
    # Clients that evaluate models of their own get the result of a round for it, here in the next round (``same_run``).
    early = "client_test" in local.history[-1]["metrics"]
    assert [r["client_uplink_bytes"] for r in other.history] == [r["client_uplink_bytes"] for r in local.history]
    sent, expected = ([r["client_downlink_bytes"] for r in run.history] for run in (other, local))
    assert (sent[:-1], min(sent[-1].values()) > 0) == (expected[1:], True) if early else sent == expected


@pytest.mark.parametrize("method", ["rolora", *ACCUMULATING[:1]])
def test_distributed_with_absent_clients(quick, assert_same, cluster, method):
    keys = {"federate.method": method, "federate.total_round_num": 6, "federate.client_num": 3, "seed": 5}
    keys |= {"federate.sample_client_num": 1, **({"lowrank.tau": 2} if method in ACCUMULATING else {})}
    local = fs_lowrank.run(quick("local", keys))
    assert len({c for r in local.history for c in r["selected"]}) > 1, "the seed must let clients come late"
    assert_same(local, cluster.run(3, keys)[0].tensors)


#: the rows of a file are those of one client
ITS_OWN = {"distribute.data_idx": -1, "data.splitter": "iid", "data.splitter_args": []}


def test_clients_with_data_of_their_own(quick, assert_same, cluster, tmp_path, reviews_csv):
    """Clients with files of their own (``distribute.data_idx`` -1) match one engine that divides all rows by owner."""
    reviews = pd.read_csv(reviews_csv)
    reviews["owner"] = np.where(np.arange(len(reviews)) < 200, "a", "b")
    reviews.to_csv(tmp_path / "all.csv", index=False)
    for owner, rows in reviews.groupby("owner"):
        rows.drop(columns="owner").to_csv(tmp_path / f"{owner}.csv", index=False)
    keys = {"federate.method": "rolora", "federate.client_num": 2, "federate.total_round_num": 3, "eval.split": []}
    keys |= {"data.type": str(tmp_path / "all.csv"), "data.splits": [1.0, 0.0, 0.0], "data.splitter": "field"}
    # One batch of all rows, so that their order has no effect.
    keys |= {"data.splitter_args": [{"field": "owner"}], "dataloader.batch_size": 400}
    local = fs_lowrank.run(quick("local", keys))
    own = {
        worker: {**ITS_OWN, "data.type": str(tmp_path / f"{owner}.csv"), "outdir": str(tmp_path / owner)}
        for worker, owner in ((1, "a"), (2, "b"))
    }
    # Clients are numbered in the order in which they join.
    other = cluster.run(2, keys, changed=own, sabotage={2: {"late": 5.0}})[0]
    assert_same(local, other.tensors)
    assert [r["loss"] for r in other.history] == pytest.approx([r["loss"] for r in local.history], abs=1e-5)


def test_clients_with_data_of_their_own_have_the_same_numbers_after_a_restart(cluster, tmp_path):
    """Also where they come back in another order: seeds and personal parts are those of a number."""
    keys = {"federate.method": "pfedlora", "federate.total_round_num": 5, "eval.split": [], **ITS_OWN}
    own = {w: {"distribute.data_idx": -1, "outdir": str(tmp_path / name)} for w, name in ((1, "a"), (2, "b"))}
    started = cluster.launch(2, keys, changed=own, sabotage={2: {"late": 4.0}})
    cluster.wait_for(lambda: len(cluster.records()) > 1)
    for process, _ in started.values():
        process.kill()
        process.join()
    again = {0: {"resume": True}, 1: {"late": 4.0}, 2: None}
    cluster.ended({worker: cluster.again(worker, sabotage) for worker, sabotage in again.items()})
    numbers = {name: {p.name for p in (tmp_path / name).glob("client_0/memory/run_*/client_*")} for name in "ab"}
    assert numbers == {"a": {"client_1"}, "b": {"client_2"}} and len(cluster.records()) == 5


def test_clients_with_data_of_their_own_evaluate_all_of_it(cluster, tmp_path, reviews_csv):
    """The server's rows would give each of the two half as many."""
    pd.read_csv(reviews_csv).head(100).to_csv(tmp_path / "few.csv", index=False)
    keys = {"federate.make_global_eval": False, "eval.split": ["test"], "eval.freq": 1, **ITS_OWN}
    keys |= {"data.type": str(tmp_path / "few.csv"), "data.splits": [0.8, 0.0, 0.2]}
    own = {worker: {"distribute.data_idx": -1, "outdir": str(tmp_path / f"client{worker}")} for worker in (1, 2)}
    for record in cluster.run(2, keys, changed=own)[0].history:
        assert [scores["samples"] for scores in record["client_scores"].values()] == [20, 20]
        assert "unevaluated" not in record


def test_clients_are_scored_on_their_own_shares_of_the_test_set(quick, cluster):
    """Each has the texts of its domain; on every third row of all the personal models would score worse."""
    keys = {"federate.method": "pfedlora", "federate.client_num": 3, "federate.total_round_num": 2}
    keys |= {"data.splitter": "field", "data.splitter_args": [{"field": "domain"}], "train.local_update_steps": 4}
    keys |= {"federate.make_global_eval": False, "eval.split": ["test"], "eval.freq": 1}
    local, other = (fs_lowrank.run(quick(name, keys), name) for name in ("local", "federatedscope"))
    workers = cluster.run(3, keys)
    for wanted, alone, between in zip(local.history, other.history, workers[0].history, strict=True):
        assert len({scores["samples"] for scores in wanted["client_scores"].values()}) == 3
        for record in (alone, between):
            assert {str(client) for client in record["client_scores"]} == {"1", "2", "3"}
            for client, scores in record["client_scores"].items():
                assert scores == pytest.approx(wanted["client_scores"][str(client)], abs=1e-5)
        accuracies = [scores["acc"] for scores in alone["client_scores"].values()]
        assert alone["metrics"]["client_test"]["acc_worst_decile"] == pytest.approx(min(accuracies))
        assert between["metrics"]["client_test"]["acc"] == pytest.approx(
            wanted["metrics"]["client_test"]["acc"], abs=1e-5
        )


@pytest.mark.parametrize("method", ["rolora", "fedloru"])
def test_quantised_messages_between_processes(quick, assert_same, cluster, method):
    keys = {"federate.method": method, "federate.client_num": 3, "federate.sample_client_num": 2}
    keys |= {"quantization.method": "uniform", "quantization.nbits": 8, "federate.total_round_num": 4}
    keys |= {"lowrank.tau": 2} if method in ACCUMULATING else {}
    alone, other = fs_lowrank.run(quick("alone", keys), "federatedscope"), cluster.run(3, keys)[0]
    assert_same(alone, other.tensors)
    for a, b in zip(alone.history, other.history, strict=True):
        for key in ("client_uplink_bytes", "client_downlink_bytes"):
            assert b[key] == a[key]


@pytest.mark.parametrize("keys", [{}, {"federate.make_global_eval": False, "federate.share_local_model": True}])
def test_the_best_round_by_validation_data_is_saved(quick, cluster, tmp_path, keys):
    """Also where clients evaluate; in distributed mode by the server alone."""
    keys = {"federate.client_num": 2, "federate.total_round_num": 3, "train.local_update_steps": 2, **keys}
    keys |= {"train.optimizer.lr": 0.05, "eval.save_best": True}
    results = [fs_lowrank.run(quick("other", keys), "federatedscope")]
    if "federate.make_global_eval" not in keys:
        results.append(fs_lowrank.run(quick("local", keys)))
        cluster.run(2, {"federate.method": "fedlora", **keys, "outdir": str(tmp_path / "distributed")})
        assert not list(tmp_path.glob("distributed/client_*/*_best"))
    folders = [tmp_path / "other", *([tmp_path / "local", tmp_path / "distributed"] if len(results) > 1 else [])]
    rounds = [json.loads((folder / "summary.json").read_text())["best"]["round"] for folder in folders]
    history = results[0].history
    assert set(rounds) == {min(history, key=lambda r: r["metrics"]["val"]["loss"])["round"]} < {1, 2, 3}
    saved = [load_file(folder / "adapter_best" / "adapter_model.safetensors") for folder in folders]
    ended = fs_lowrank.run(quick("ended", {**keys, "federate.total_round_num": rounds[0]}), "federatedscope")
    wanted = load_file(ended.saved["adapter"] / "adapter_model.safetensors")
    for tensors in saved:
        for name in wanted:
            assert np.allclose(tensors[name], wanted[name], atol=1e-5), name


@pytest.mark.parametrize("share", [False, True], ids=["own_models", "one_model"])
def test_scores_of_each_client_and_before_round_1(quick, cluster, share):
    keys = {"federate.method": "rolora", "federate.client_num": 3, "federate.total_round_num": 2, "eval.before": True}
    keys |= {"federate.sample_client_num": 1, "eval.client_scores": True, "federate.share_local_model": share}
    local, other = (fs_lowrank.run(quick(name, keys), name) for name in ("local", "federatedscope"))
    assert other.before == pytest.approx(local.before, abs=1e-5) and "test_acc" in local.before
    assert other.unseen == local.unseen and other.final["unseen_test_acc"] == local.final["unseen_test_acc"]
    for a, b in zip(local.history, other.history, strict=True):
        assert list(a["client_scores"]) == list(b["client_scores"])
        for client in a["client_scores"]:
            assert b["client_scores"][client] == pytest.approx(a["client_scores"][client], abs=1e-5)
    if share:  # clients that evaluate send their scores
        keys = {**keys, "federate.make_global_eval": False, "eval.before": False, "eval.client_scores": False}
        result = fs_lowrank.run(quick("clients", keys), "federatedscope")
        scores = [s for r in result.history for s in r["client_scores"].values()]
        assert len(scores) == 6 and all(0 <= s["acc"] <= 1 and s["samples"] > 0 for s in scores)
        keys |= {"federate.share_local_model": False, "federate.make_global_eval": True, "eval.client_scores": True}
        assert list(cluster.run(3, keys)[0].history[-1]["client_scores"]) == ["1", "2", "3"]
