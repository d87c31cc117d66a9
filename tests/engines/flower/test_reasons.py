"""What the run says of clients that are not evaluated and of nodes that are refused."""

import re

import pytest

import fs_lowrank
from tests.engines.flower.test_server import serve

pytestmark = pytest.mark.flower


def test_a_client_that_is_not_evaluated_is_named_with_the_reason(quick, federation, monkeypatch, caplog):
    """One fails, one is silent, one sends no metrics and one is gone; the means are those of the fifth."""
    from fs_lowrank.rounds.evaluator import Evaluator

    score = Evaluator.score

    def broken(self, examples, owner, metrics=()):
        if owner == "client 1 test":
            raise RuntimeError("no memory")
        return {"loss": float("nan"), "acc": 1.0} if owner == "client 3 test" else score(self, examples, owner, metrics)

    def behave(number, message, answer):
        if message.metadata.message_type == "train" and number == 3:
            one.leave(number)
            return None
        return None if message.metadata.message_type == "evaluate" and number == 1 else answer()

    monkeypatch.setattr(Evaluator, "score", broken)
    keys = {"federate.method": "fedlora", "federate.make_global_eval": False, "federate.total_round_num": 1}
    keys |= {"federate.client_num": 5, "federate.sample_client_num": 5, "lowrank.timeout": 2.0}
    one = federation(5, behave)
    (record,) = serve(quick("run", keys), one.grid).history
    unevaluated = {u["client"]: u["reason"] for u in record["unevaluated"]}
    assert re.fullmatch(r"RuntimeError: no memory \(test_reasons.py, line \d+\)", unevaluated.pop(1))
    assert unevaluated == {
        2: "no answer within lowrank.timeout, 2 s",
        3: "its answer has no loss and acc that it can be",
        4: "its node is not connected",
    }
    assert list(record["client_scores"]) == ["5"] and "round 1: no evaluation of client 2: no answer" in caplog.text
    assert record["metrics"]["client_test"]["acc"] == record["client_scores"]["5"]["acc"]


@pytest.mark.parametrize("simulated", [False, True], ids=["deployed", "simulated"])
def test_nodes_that_are_all_refused_end_the_run_with_their_reason(quick, federation, tmp_path, simulated):
    """More clients or another lowrank.min_clients would not help, so that nothing of it is said."""
    config = quick("refused", {"federate.method": "rolora", "lowrank.timeout": 3.0})
    config.replace({"train.optimizer.lr": 0.123}).dump(tmp_path / "other.yaml")
    own = {number: {"cfg": str(tmp_path / "other.yaml")} for number in range(3)}
    with pytest.raises(fs_lowrank.RunFailed) as caught:
        serve(config, federation(own=own).grid, simulated=simulated)
    said = str(caught.value)
    assert said.startswith("no node can take part; refused were 3: ") and "min_clients" not in said
    assert said.count("they differ in train.optimizer.lr") == 1
