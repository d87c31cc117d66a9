"""Features of the framework with our methods: evaluation, early stopping, saving, secret sharing, quantisation."""

import json
import pickle

import pytest
import torch

import fs_lowrank
from fs_lowrank.errors import UserError
from fs_lowrank.methods import Averaging, get_method_class, requirements
from tests.cases import break_step

pytestmark = pytest.mark.federatedscope
METHODS = [m for m in fs_lowrank.list_methods() if "SequenceClassification" in requirements(m).tasks]
SUMS = [m for m in METHODS if requirements(m).sums]
OTHERS = [m for m in METHODS if m not in SUMS]
#: AdamW would enlarge a difference in the last bit of a gradient
STEADY = {"train.optimizer.type": "SGD", "train.optimizer.lr": 0.05}
SHARE = pytest.mark.parametrize("share", [False, True], ids=["own_models", "one_model"])


@pytest.mark.parametrize("method", SUMS)
def test_secret_sharing_gives_the_same_mean(quick, assert_same, method):
    keys = {"federate.method": method, **STEADY}
    # A method may send other tensors if the server sees only sums; both keys have this effect.
    local = fs_lowrank.run(quick("local", {**keys, "federate.online_aggr": True}))
    shared = fs_lowrank.run(quick("shared", {**keys, "federate.use_ss": True}), "federatedscope")
    # A ratio of two sums enlarges the rounding of the fixed-point numbers.
    assert_same(local, shared, atol=1e-5 if issubclass(get_method_class(method), Averaging) else 1e-4)
    assert shared.history[0]["uplink_bytes"] == local.history[0]["uplink_bytes"], "nothing is hidden in one process"


@pytest.mark.parametrize(
    "own", [{"federate.method": "rolora"}, {"federate.method": "fedask", "lowrank.ranks": [1, 3, 2]}]
)
def test_secret_sharing_between_processes(quick, assert_same, cluster, own):
    keys = {**own, "federate.client_num": 3, "federate.total_round_num": 2}
    assert_same(fs_lowrank.run(quick("local", keys)), cluster.run(3, {**keys, "federate.use_ss": True})[0].tensors)


@pytest.mark.parametrize("key", ["federate.use_ss", "federate.online_aggr"])
@pytest.mark.parametrize("method", OTHERS)
def test_features_that_need_a_weighted_sum_are_refused_for_other_methods(quick, method, key):
    with pytest.raises(UserError, match="only the sum of the updates|only their sum"):
        fs_lowrank.run(quick("run", {"federate.method": method, key: True}), "federatedscope")


@SHARE
@pytest.mark.parametrize("method", SUMS)
def test_online_aggregation(quick, assert_same, method, share):
    keys = {"federate.method": method, "federate.sample_client_num": 3, "federate.online_aggr": True, **STEADY}
    local = fs_lowrank.run(quick("local", keys))
    keys["federate.share_local_model"] = share
    online = fs_lowrank.run(quick("online", keys), "federatedscope")
    assert_same(local, online)


@pytest.mark.parametrize("method", METHODS)
def test_quantised_messages_keep_all_copies_equal(quick, assert_same, method):
    keys = {
        "federate.method": method,
        "federate.sample_client_num": 2,
        "quantization.method": "uniform",
        "quantization.nbits": 8,
    }
    if "prune" in get_method_class(method).Params.__dataclass_fields__:
        keys["lowrank.prune"] = 1.0  # the part that a client of a smaller rank gets is rounded by its own range
    own = fs_lowrank.run(quick("own", keys), "federatedscope")
    one = fs_lowrank.run(quick("one", {**keys, "federate.share_local_model": True}), "federatedscope")
    assert_same(own, one, atol=1e-4)
    plain = fs_lowrank.run(quick("plain", {"federate.method": method, "federate.sample_client_num": 2}))
    assert own.history[0]["uplink_bytes"] < 0.35 * plain.history[0]["uplink_bytes"]
    if issubclass(get_method_class(method), Averaging):  # the server step does not enlarge the rounding
        assert own.history[-1]["metrics"]["test"]["loss"] == pytest.approx(
            plain.history[-1]["metrics"]["test"]["loss"], rel=0.1
        )


@pytest.mark.parametrize("by_clients", [False, True], ids=["global", "clients"])
def test_early_stopping(quick, by_clients):
    keys = {
        "federate.method": "rolora",
        "early_stop.patience": 1,
        "federate.total_round_num": 12,
        "train.optimizer.lr": 0.5,
        "early_stop.improve_indicator_mode": "best",
    }
    local = fs_lowrank.run(quick("local", keys))
    other = fs_lowrank.run(quick("other", {**keys, "federate.make_global_eval": not by_clients}), "federatedscope")
    assert len(other.history) == len(local.history) < 12


def test_clients_evaluate_their_shares(quick):
    keys = {"federate.method": "rolora", "federate.sample_client_num": 2, "eval.freq": 2}
    local = fs_lowrank.run(quick("local", keys))
    other = fs_lowrank.run(quick("other", {**keys, "federate.make_global_eval": False}), "federatedscope")
    for a, b in zip(local.history, other.history, strict=True):
        assert a["metrics"].keys() == b["metrics"].keys()
        for split in a["metrics"]:
            assert b["metrics"][split] == pytest.approx(a["metrics"][split], abs=1e-4)
    assert (other.outdir / "eval_results.log").read_text().count("Results_weighted_avg") == 2


@SHARE
@pytest.mark.parametrize(
    "method, keys",
    [
        ("rolora", {}),
        ("flora", {}),
        ("fedloru", {"lowrank.tau": 1}),
        ("fedlora", {"fedopt.use": True, "fedopt.optimizer.type": "Adam"}),
    ],
)
def test_saving_and_restoring_with_the_round(quick, assert_same, tmp_path, method, keys, share):
    keys = {"federate.method": method, "federate.sample_client_num": 3, "federate.share_local_model": share, **keys}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")
    saved = tmp_path / "saved" / "model.ckpt"
    fs_lowrank.run(
        quick("half", {**keys, "federate.save_to": str(saved), "federate.total_round_num": 2}), "federatedscope"
    )
    final = saved.with_name("final_model.ckpt")
    assert torch.load(final, weights_only=True)["cur_round"] == 2
    assert saved.exists(), "the best round is saved under the plain name"
    rest = fs_lowrank.run(quick("rest", {**keys, "federate.restore_from": str(final)}), "federatedscope")
    assert [r["round"] for r in rest.history] == [3, 4]
    assert_same(whole, rest)


def test_resuming_a_run_that_began_at_a_later_round(quick, assert_same, tmp_path):
    saved = tmp_path / "model.ckpt"
    keys = {"federate.method": "fedlora"}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")
    fs_lowrank.run(
        quick("half", {**keys, "federate.save_to": str(saved), "federate.total_round_num": 2}), "federatedscope"
    )
    restored = {**keys, "federate.restore_from": str(saved.with_name("final_model.ckpt"))}
    fs_lowrank.run(quick("rest", restored), "federatedscope", on_round=lambda record: record["round"] == 3)
    for _ in range(2):  # in the middle, and at its end
        rest = fs_lowrank.run(quick("rest", restored), "federatedscope", resume=True)
        assert [r["round"] for r in rest.history] == [3, 4]
        assert_same(whole, rest)


def test_resuming_after_a_round_that_was_left_out(quick, assert_same, monkeypatch):
    break_step(monkeypatch, "fedlora", 2)
    keys = {"federate.method": "fedlora", "lowrank.on_bad_round": "skip"}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")
    fs_lowrank.run(quick("cut", keys), "federatedscope", on_round=lambda record: record["round"] == 2)
    for _ in range(2):
        rest = fs_lowrank.run(quick("cut", keys), "federatedscope", resume=True)
        assert [r["round"] for r in rest.history] == [1, 2, 3, 4]
        assert_same(whole, rest)


@pytest.mark.parametrize("sampler", ["group", "responsiveness"])
def test_resuming_with_a_sampler_of_the_framework(quick, assert_same, tmp_path, sampler):
    """It draws from NumPy's generator, which starts anew with the process."""
    info = tmp_path / "resources.pkl"
    info.write_bytes(pickle.dumps({i: {"computation": 10.0 * i, "communication": 100.0} for i in range(11)}))
    keys = {"federate.method": "fedlora", "federate.client_num": 10, "federate.sample_client_num": 3}
    keys |= {"federate.sampler": sampler, "federate.resource_info_file": str(info), "data.splitter": "iid"}
    keys |= {"data.splitter_args": [], "federate.total_round_num": 6}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")
    fs_lowrank.run(quick("cut", keys), "federatedscope", on_round=lambda record: record["round"] == 3)
    rest = fs_lowrank.run(quick("cut", keys), "federatedscope", resume=True)
    assert [r["selected"] for r in rest.history] == [r["selected"] for r in whole.history]
    assert_same(whole, rest)


@SHARE
@pytest.mark.parametrize(
    "method, keys",
    [
        ("rolora", {}),
        ("flora", {"lowrank.ranks": [1, 2]}),
        ("pfedloru", {"lowrank.tau": 2, "federate.make_global_eval": False}),
    ],
)
def test_resuming(quick, assert_same, method, keys, share):
    keys = {"federate.method": method, "federate.sample_client_num": 3, "federate.share_local_model": share, **keys}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")
    fs_lowrank.run(quick("cut", keys), "federatedscope", on_round=lambda record: record["round"] == 2)
    rest = fs_lowrank.run(quick("cut", keys), "federatedscope", resume=True)
    assert [r["round"] for r in rest.history] == [1, 2, 3, 4]
    assert [r["metrics"] for r in rest.history] == [r["metrics"] for r in whole.history]
    assert_same(whole, rest, atol=0)


@SHARE
def test_resuming_a_run_that_was_killed_before_its_end(quick, assert_same, monkeypatch, share):
    """All rounds are done, but the files that are written at the end of a run are missing."""
    from fs_lowrank.rounds.recorder import Recorder

    def killed(self):
        raise KeyboardInterrupt

    keys = {"federate.method": "rolora", "federate.share_local_model": share}
    whole = fs_lowrank.run(quick("whole", keys), "federatedscope")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recorder, "finish", killed)
        fs_lowrank.run(quick("cut", keys), "federatedscope")
    rest = fs_lowrank.run(quick("cut", keys), "federatedscope", resume=True)
    assert [r["metrics"] for r in rest.history] == [r["metrics"] for r in whole.history]
    assert (rest.outdir / "summary.json").exists()
    assert_same(whole, rest, atol=0)


def test_resuming_between_processes(quick, assert_same, cluster):
    """The run stops when too few clients remain, says so to the others, and goes on when all are started again."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 2, "federate.client_num": 2, "federate.total_round_num": 4}
    whole = fs_lowrank.run(quick("whole", keys))
    keys["lowrank.min_clients"] = 2
    dies = {"dies_at": ("rounds.trainer.Trainer.fit", 4)}
    workers = cluster.run(2, keys, sabotage={1: dies}, codes={0: 1, 1: 9, 2: 1})
    assert workers[0].kind == "RunFailed" and "the server stopped" in workers[2].said
    assert "1 usable updates" in workers[0].said and "last good round, 3," in workers[0].said
    assert_same(whole, cluster.run(2, keys, sabotage={0: {"resume": True}})[0].tensors)


def test_the_frameworks_log_and_metrics_have_the_bytes_that_were_sent(quick):
    result = fs_lowrank.run(quick("run", {"federate.method": "rolora"}), "federatedscope")
    log = (result.outdir / "exp_print.log").read_text()
    assert "np.float" not in log + (result.outdir / "eval_results.log").read_text(), "numbers are plain"
    first = result.history[0]
    assert f"round 1: 5 of 5 clients, {first['uplink_bytes']} bytes up, 0 bytes down" in log
    system = [json.loads(line) for line in (result.outdir / "system_metrics.log").read_text().splitlines()]
    server = next(line for line in system if line["id"] == 0)
    down = sum(r["downlink_bytes"] for r in result.history)
    up = sum(r["uplink_bytes"] for r in result.history)
    assert server["total_upload_bytes"] == down
    clients = [line for line in system if line["id"] in range(1, 6)]
    assert sum(line["total_upload_bytes"] for line in clients) == up


@pytest.mark.parametrize("by_clients", [False, True])
def test_the_key_of_the_best_result_names_a_split_that_is_evaluated(quick, by_clients):
    """The framework's default key is val_loss; it ends a run in which that split is not evaluated."""
    keys = {"federate.method": "rolora", "eval.split": ["test"], "federate.total_round_num": 2}
    result = fs_lowrank.run(quick("run", {**keys, "federate.make_global_eval": not by_clients}), "federatedscope")
    assert [set(r["metrics"]) for r in result.history] == [{"test"}] * 2


#: of 300 rows two for validation and three for the test: client 3 has no validation row, clients 4 and 5 have none
FEW = {"data.splits": [0.983, 0.007, 0.01], "federate.make_global_eval": False, "eval.split": ["val", "test"]}


@pytest.mark.parametrize("key", ["val_loss", "test_loss"])
def test_clients_without_held_out_rows(quick, key):
    """The framework's split of few rows leaves clients without validation rows; the others evaluate."""
    keys = {"federate.method": "rolora", "eval.best_res_update_round_wise_key": key, **FEW}
    result = fs_lowrank.run(quick("run", keys), "federatedscope")
    assert [set(r["metrics"]) for r in result.history] == [{"val", "test"}] * len(result.history)
    assert (result.outdir / "eval_results.log").read_text().count("Results_weighted_avg") == len(result.history)


def test_clients_without_held_out_rows_between_processes(quick, cluster):
    keys = {"federate.method": "rolora", "federate.client_num": 4, "federate.total_round_num": 2, **FEW}
    keys |= {"data.splitter": "iid", "data.splitter_args": []}
    alone, other = fs_lowrank.run(quick("alone", keys), "federatedscope"), cluster.run(4, keys)[0]
    for a, b in zip(alone.history, other.history, strict=True):
        means = {name: b["metrics"]["client_test"][name] for name in a["metrics"]["test"]}
        assert means == pytest.approx(a["metrics"]["test"], abs=1e-5)
        assert b["client_uplink_bytes"] == a["client_uplink_bytes"]  # one without rows is not asked to evaluate


def test_the_downlink_counts_what_clients_receive(quick, cluster, tmp_path):
    """It is the bytes of the tensors in all messages that a client has read, those for evaluation included."""
    keys = {"federate.method": "fedlora", "federate.make_global_eval": False, "federate.sample_client_num": 2}
    keys |= {"federate.client_num": 3, "federate.total_round_num": 3}
    counts = {client: {"counts_in": str(tmp_path / f"received_{client}")} for client in (1, 2, 3)}
    history = cluster.run(3, keys, sabotage=counts)[0].history
    received = {client: int((tmp_path / f"received_{client}").read_text()) for client in (1, 2, 3)}
    sent = {c: sum(r["client_downlink_bytes"].get(str(c), 0) for r in history) for c in received}
    assert sent == received and all(received.values())
    alone = fs_lowrank.run(quick("alone", keys), "federatedscope")
    assert [r["downlink_bytes"] for r in alone.history] == [r["downlink_bytes"] for r in history]
