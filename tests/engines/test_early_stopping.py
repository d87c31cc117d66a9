"""Early stopping on the embedded engine, with FederatedScope's keys."""

import pytest

import fs_lowrank
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.rounds.evaluator import ranked
from fs_lowrank.runs.summary import of_clients

pytestmark = pytest.mark.more


def stalls(settings, values, **keys):
    engine = LocalEngine(fs_lowrank.load_config(settings, keys))
    records = ({"round": i, "metrics": {} if v is None else {"val": {"loss": v}}} for i, v in enumerate(values, 1))
    return engine.evaluator.stalled(records)


def test_an_evaluation_that_only_the_end_of_a_shorter_run_asked_for_does_not_count(settings):
    keys = {"early_stop.patience": 1, "eval.freq": 2, "federate.total_round_num": 5}
    assert not stalls(settings, [None, 1.0, 1.1], **keys), "round 3 was the last"
    assert stalls(settings, [None, 1.0, 0.9, 1.1], **keys)
    assert stalls(settings, [None, 1.0, None, 0.9, 0.95], **keys)
    assert not stalls(settings, [1.0, 1.0, 1.0, 1.0], **{"early_stop.patience": 0}), "it is off"


# mode, patience, delta, key, values, the evaluation at which FederatedScope's EarlyStopper stopped (0: at none)
FRAMEWORKS = [
    ("best", 2, 0.0, "val_acc", [0.7, 0.6, 0.65, 0.6], 3),
    ("best", 2, 0.0, "val_acc", [0.5, 0.6, 0.5, 0.55, 0.56], 4),
    ("best", 2, 0.0, "val_loss", [1.0, 1.0, 1.0, 1.0], 0),
    ("best", 2, 0.125, "val_acc", [0.6, 0.6, 0.7, 0.7, 0.7], 3),
    ("best", 2, 0.125, "val_loss", [1.0, 1.0, 1.0, 1.0], 3),
    ("best", 2, 0.125, "val_loss", [1.0, 0.875, 0.75, 0.75], 0),
    ("mean", 2, 0.0, "val_acc", [0.7, 0.6, 0.65, 0.6], 4),
    ("mean", 2, 0.0, "val_acc", [0.5, 0.6, 0.5, 0.55, 0.56], 3),
    ("mean", 2, 0.0, "val_loss", [1.0, 1.0, 1.0, 1.0], 0),
    ("mean", 2, 0.125, "val_acc", [0.6, 0.6, 0.7, 0.7, 0.7], 3),
    ("mean", 2, 0.125, "val_loss", [1.0, 1.0, 1.0, 1.0], 3),
    ("mean", 2, 0.125, "val_loss", [1.0, 0.875, 0.75, 0.75], 4),
]


@pytest.mark.parametrize("mode, patience, delta, key, values, stops", FRAMEWORKS)
def test_it_stops_where_federatedscope_does(settings, mode, patience, delta, key, values, stops):
    keys = {"early_stop.patience": patience, "early_stop.delta": delta, "early_stop.improve_indicator_mode": mode}
    config = fs_lowrank.load_config(settings, {**keys, "eval.best_res_update_round_wise_key": key})
    evaluator = LocalEngine(config).evaluator
    records = [{"round": i, "metrics": {"val": {key[4:]: v}}} for i, v in enumerate(values, 1)]
    stopped = [n for n in range(1, len(values) + 1) if evaluator.stalled(records[:n])]
    assert (stopped or [0])[0] == stops


def test_keys_that_cannot_be_honoured_are_refused(settings):
    with pytest.raises(fs_lowrank.UserError, match="val_loss, a split that is not evaluated; evaluated are: test"):
        LocalEngine(fs_lowrank.load_config(settings, {"early_stop.patience": 2, "eval.split": ["test"]}))
    # Without a global evaluation there is no test_acc, but only client_test_acc.
    keys = {
        "early_stop.patience": 2,
        "federate.make_global_eval": False,
        "federate.total_round_num": 3,
        "eval.best_res_update_round_wise_key": "test_acc",
    }
    with pytest.raises(fs_lowrank.UserError, match="test_acc, a split that is not evaluated; evaluated are: client_te"):
        LocalEngine(fs_lowrank.load_config(settings, keys))
    keys["eval.best_res_update_round_wise_key"] = "client_test_acc"
    assert LocalEngine(fs_lowrank.load_config(settings, keys))


@pytest.mark.parametrize("key, said", [("test_loss", True), ("client_test_acc", True), ("val_loss", False)])
def test_it_is_said_that_test_data_decide_when_a_run_stops(settings, caplog, key, said):
    keys = {"eval.client_scores": True, "eval.best_res_update_round_wise_key": key}
    LocalEngine(fs_lowrank.load_config(settings, {**keys, "early_stop.patience": 2}))
    assert (f"the run stops by {key}, so the test data choose its length" in caplog.text) is said
    caplog.clear()
    LocalEngine(fs_lowrank.load_config(settings, keys))
    assert "the test data choose" not in caplog.text


@pytest.mark.parametrize(
    "key, said",
    [
        ("val_accuracy", "no metric 'accuracy' is measured; did you mean 'acc'"),
        ("test_acc_mean", "no metric 'acc_mean'"),
        ("client_test_worst", "client_test_ may be followed by: loss, acc, acc_mean, acc_std, acc_worst_decile"),
    ],
)
def test_a_metric_that_is_not_measured_is_named(settings, key, said):
    with pytest.raises(fs_lowrank.UserError, match=f"override: eval.best_res_.* = '{key}': .*{said}"):
        fs_lowrank.load_config(settings, {"eval.best_res_update_round_wise_key": key})


@pytest.mark.parametrize("key, value", [("client_test_acc_mean", -0.7), ("val_avg_loss", 0.5), ("test_acc", -0.9)])
def test_the_watched_key_is_found(settings, key, value):
    config = fs_lowrank.load_config(settings, {"eval.best_res_update_round_wise_key": key})
    metrics = {"client_test": {"acc_mean": 0.7}, "val": {"loss": 0.5}, "test": {"acc": 0.9}}
    assert ranked({"metrics": metrics}, *config.watched) == value


@pytest.mark.parametrize(
    "method, own, words",
    [
        ("fedlora", False, "the global model on every client's share of the test set"),
        ("pfedlora", True, "every client's own model on its share of the test set"),
    ],
)
def test_it_is_said_whose_models_are_scored(settings, tmp_path, method, own, words):
    keys = {"federate.method": method, "federate.make_global_eval": False, "federate.total_round_num": 1}
    config = fs_lowrank.load_config(settings, keys, outdir=str(tmp_path / method))
    result = fs_lowrank.run(config)
    assert result.facts["own_models"] is own and of_clients([result.facts]).startswith(words)
