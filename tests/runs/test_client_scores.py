"""Scores of each client in the records and at the end, of those that never took part, and before round 1."""

import json
from types import SimpleNamespace

import pytest
import yaml

import fs_lowrank
from fs_lowrank import UserError, cli, load_config
from fs_lowrank.data.build import LONGEST
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.engines.members import Members
from fs_lowrank.rounds.evaluator import average
from fs_lowrank.rounds.record import EXTREME, MANY, extremes
from fs_lowrank.runs.summary import of_clients
from fs_lowrank.testing.bench import without_seconds

#: five clients, two of them in a round; some clients never take part
FEW = {"federate.sample_client_num": 2, "train.local_update_steps": 1, "eval.client_scores": True}


def mean(scores, metric, clients):
    return sum(scores[c][metric] * scores[c]["samples"] for c in clients) / sum(scores[c]["samples"] for c in clients)


@pytest.mark.more
def test_every_client_is_scored_on_its_share_of_the_test_set(few):
    engine = LocalEngine(few("run"))
    result = engine.run()
    for record in result.history:
        scores, whole = record["client_scores"], record["metrics"]["client_test"]
        shares = zip(engine.workspace.clients, engine.workspace.data.client_tests)
        tests = {str(client.id): own for client, own in shares if own is not None}
        assert scores.keys() == tests.keys() and all(scores[c]["samples"] == len(own) for c, own in tests.items())
        for metric in ("acc", "loss"):
            # The model is the global one, and the shares together are the test set.
            assert mean(scores, metric, scores) == pytest.approx(record["metrics"]["test"][metric], abs=1e-5)
            assert mean(scores, metric, scores) == pytest.approx(whole[metric])
    for client, of in result.client_scores.items():
        own = engine.evaluator.score(engine.workspace.data.client_tests[client - 1], "")
        assert of["acc"] == own["acc"] and of["loss"] == pytest.approx(own["loss"], abs=1e-6)
    data, right = engine.workspace.data, 0
    for own, tests_of in zip(data.clients, data.client_tests):
        most = max(sorted(set(own.labels)), key=list(own.labels).count)
        right += 0 if tests_of is None else list(tests_of.labels).count(most)
    assert result.facts["client_majority"] == pytest.approx(right / len(data.test.labels))
    assert f"client's own most frequent class: acc {right / len(data.test.labels):.3f}" in of_clients([result.facts])
    assert list(result.clients_frame()["test_acc"].dropna()) == [of["acc"] for of in result.client_scores.values()]
    assert (result.outdir / "client_scores.csv").read_text().startswith("method,acc,")
    assert (result.outdir / "client_scores.tex").exists()
    without = fs_lowrank.run(few("without", {"eval.client_scores": False}))
    assert "client_scores" not in without.history[0] and "client_test_acc" not in without.final
    assert all(a["loss"] == b["loss"] for a, b in zip(result.history, without.history)), "training is the same"


@pytest.mark.more
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_clients_of_a_language_model_count_by_their_tokens(causal_settings, tmp_path, no_curves, processes):
    rows = [("a", "good and happy " * 6) if i % 3 == 0 else ("b", "bad") for i in range(120)]
    lines = [
        {"instruction": f"it was {i % 7}", "category": kind, "output": text.strip()}
        for i, (kind, text) in enumerate(rows)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"data.type": str(tmp_path / "rows.jsonl"), "data.splitter": "field"}
    data |= {"data.splitter_args": [{"field": "category"}], "data.splits": [0.6, 0.1, 0.3]}
    few = {"federate.client_num": 2, "federate.total_round_num": 1, "train.local_update_steps": 1}
    keys = {"federate.process_num": processes, "eval.client_scores": True, "eval.split": ["test"]}
    result = fs_lowrank.run(load_config(causal_settings, {**few, **keys, **data}))
    final, scores = result.final, result.client_scores
    assert final["client_test_loss"] == pytest.approx(final["test_loss"], abs=1e-5)
    by_rows = {c: {n: v for n, v in own.items() if n != "tokens"} for c, own in scores.items()}  # of earlier versions
    assert average(by_rows, "loss") == pytest.approx(mean(scores, "loss", scores))
    assert abs(average(by_rows, "loss") - final["test_loss"]) > 0.001


def test_the_size_of_test_data_that_a_client_reports():
    members = type("Some", (Members,), {"exchange": None})(None, None, "")
    admission = SimpleNamespace(samples={}, max_samples=10)
    members.ledger = SimpleNamespace(tested={}, admission=admission)
    for facts, size in (
        ({"tested": 10, "tested_tokens": 80}, {"samples": 10, "tokens": 80}),
        ({"tested": 1, "tested_tokens": 10 * LONGEST}, {"samples": 1, "tokens": 10 * LONGEST}),
        ({"tested": 3}, {"samples": 3}),
        ({"tested": 3, "tested_tokens": 10 * LONGEST + 1}, {"samples": 3}),
        ({"tested": 0, "tested_tokens": 5}, {}),
        ({"tested": 11, "tested_tokens": 5}, {}),
        ({"tested": "3", "tested_tokens": True}, {}),
    ):
        members.welcome({"client": 1, "samples": 5, "agreed": "", "own_data": True, **facts}, None)
        assert members.ledger.tested == {1: size}


@pytest.mark.slow
def test_clients_that_never_took_part(few, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(few("run").to_dict()))
    result = fs_lowrank.run(few("run"))
    unseen = sorted({1, 2, 3, 4, 5} - {client for record in result.history for client in record["clients"]})
    assert result.unseen == unseen != []
    scores = result.client_scores
    there = [client for client in unseen if client in scores]
    assert result.final["unseen_test_acc"] == pytest.approx(mean(scores, "acc", there))
    assert "unseen_test_acc" in json.loads((result.outdir / "summary.json").read_text())["final"]
    everyone = fs_lowrank.run(few("all", {"federate.sample_client_num": -1, "federate.total_round_num": 1}))
    assert everyone.unseen == [] and "unseen_test_acc" not in everyone.final
    keys = ["outdir", str(tmp_path / "shown"), "eval.before", "True"]
    assert cli.main(["compare", "--cfg", str(tmp_path / "run.yaml"), "--methods", "fedlora,local", *keys]) == 0
    out = " ".join(capsys.readouterr().out.split())
    listed = ", ".join(map(str, unseen))
    assert f"fedlora: {len(unseen)} of 5 clients never took part ({listed}): test acc" in out
    worst = min(scores, key=lambda client: scores[client]["acc"])
    assert "worst client" in out and f"{worst}: {scores[worst]['acc']:.3f}" in out
    assert "fedlora: before round 1: test loss" in out


def test_records_of_many_clients_have_the_worst_and_the_best():
    scores = {client: {"acc": client % 97 / 97, "loss": 0.0, "samples": 1} for client in range(1, MANY + 2)}
    kept = extremes(scores)
    order = sorted(scores, key=lambda client: (scores[client]["acc"], client))
    assert set(kept) == {*order[:EXTREME], *order[-EXTREME:]} and list(kept) == sorted(kept)
    del scores[1]
    assert extremes(scores) == scores


@pytest.mark.more
@pytest.mark.parametrize("stop", ["by on_round", "by patience"])
def test_a_run_that_ends_early_has_the_scores_of_all_clients(few, monkeypatch, stop):
    monkeypatch.setattr("fs_lowrank.rounds.record.MANY", 1)
    monkeypatch.setattr("fs_lowrank.rounds.record.EXTREME", 1)
    patience = {"early_stop.patience": 1, "early_stop.delta": 9.0, "federate.total_round_num": 4}
    config = few("run", {} if stop == "by on_round" else patience)
    result = fs_lowrank.run(config, on_round=lambda record: stop == "by on_round")
    assert len(result.history) == 1 + (stop == "by patience") < config.federate.total_round_num
    assert len(result.client_scores) > 2 and "unseen_test_acc" in result.final
    if stop == "by patience":
        assert len(result.history[0]["client_scores"]) == 2
        last = json.loads((result.outdir / "rounds.jsonl").read_text().splitlines()[-1])
        assert len(last["client_scores"]) == len(result.client_scores)


@pytest.mark.more
def test_before_round_1(few):
    keys = {"eval.client_scores": False, "federate.sample_client_num": -1}
    plain = fs_lowrank.run(few("plain", keys))
    config = few("before", {**keys, "eval.before": True})
    engine = LocalEngine(config)
    expected = {split: engine.evaluator.score(of, split) for split, of in engine.workspace.held_out().items()}
    engine.transport.end()
    stopped = fs_lowrank.run(config, on_round=lambda record: True)
    wanted = {f"{split}_{name}": value for split, of in expected.items() for name, value in of.items()}
    assert stopped.before == pytest.approx(wanted)
    resumed = fs_lowrank.run(config, resume=True)
    assert resumed.before == stopped.before and without_seconds(resumed.history) == without_seconds(plain.history)
    assert json.loads((resumed.outdir / "summary.json").read_text())["before"] == resumed.before
    frame = resumed.history_frame()
    assert list(frame.index) == [0, 1, 2] and frame["test_acc"][0] == resumed.before["test_acc"]


def test_without_a_test_set_it_is_refused(few):
    with pytest.raises(UserError, match="eval.client_scores = True .* but none is held out; give data.splits a share"):
        fs_lowrank.run(few("none", {"data.splits": [0.8, 0.2, 0.0]}))


def test_runs_that_do_not_say_whose_models_they_are():
    assert "its own or the global one" in of_clients([{"own_models": True}, {"own_models": False}])
    assert "its own or the global one" in of_clients([{}])
