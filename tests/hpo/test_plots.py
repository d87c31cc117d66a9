"""Pictures of studies, as the data of their panels."""

import optuna
import pytest

from fs_lowrank import load_config
from fs_lowrank.draw.panels import Line
from hpo import cli, plots
from hpo.best import points_of
from hpo.storage import load_study, open_storage


def test_values_that_are_no_numbers_have_places_with_their_names():
    place, ticks = plots._places({True, "$a_$", 2})
    assert {ticks[place(value)] for value in (True, "$a_$", 2)} == {"True", "$a_$", "2"} and sorted(ticks) == [0, 1, 2]
    place, ticks = plots._places({1e-3, 0.1})
    assert place(0.1) == 0.1 and ticks == {0.001: "0.001", 0.1: "0.1"}


@pytest.mark.more
def test_each_study_has_its_own_majority_class(search):
    """Two studies of other data: a line for each, and one for both where they agree."""
    options, _, _ = search({"train.optimizer.lr": {"grid": [1e-2]}})
    store = open_storage(options.where)
    other = optuna.create_study(storage=store, study_name="t", direction="maximize")
    first = load_study(store, "s")
    for name, value in first.user_attrs.items():
        other.set_user_attr(name, value)
    for share in (first.trials[0].user_attrs["chance"]["share"], 0.25):
        trial = optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL)
        trial.set_user_attr("chance", {"share": share})
        other.add_trial(trial)
        shares = {s: {"s": first, "t": load_study(store, "t")}[s] for s in ("s", "t")}
        if share != 0.25:
            (line,) = plots._majority_lines(shares, [Line("", [1, 2], [0, 0])])
            assert (line.name, line.x, line.y) == ("majority class", [1, 2], [share] * 2)
    only = optuna.create_study(storage=store, study_name="u", direction="maximize")
    for name, value in first.user_attrs.items():
        only.set_user_attr(name, value)
    only.add_trial(trial)
    lines = plots._majority_lines({"s": first, "u": load_study(store, "u")}, [Line("", [1, 2], [0, 0])])
    assert [(line.name, line.means, line.y[0]) for line in lines] == [
        ("s", "majority class", first.trials[0].user_attrs["chance"]["share"]),
        ("u", "majority class", 0.25),
    ]


@pytest.mark.more
def test_accuracy_is_that_of_the_next_token_for_a_language_model(search, causal_settings, tmp_path, capsys):
    base = load_config(causal_settings, {"federate.total_round_num": 1})
    search({"train.optimizer.lr": {"grid": [1e-2]}}, base, confirm=1)
    where = ["--dir", str(tmp_path / "hpo")]
    assert cli.main(["status", *where, "--table", str(tmp_path / "status.csv")]) == 0
    assert "token_acc" in (table := (tmp_path / "status.csv").read_text()) and "val_acc" not in table
    cli.main(["best", *where, "--study", "s", "--out", str(tmp_path / "best.yaml"), "--unlearned"])
    first = (tmp_path / "best.yaml").read_text().splitlines()[0]
    assert "val_token_acc" in first and "val_acc" not in first
    study = load_study(open_storage(tmp_path / "hpo" / "study.db"), "s")
    panel = plots.history_panel({"s": study})
    assert panel.title == "val_token_acc by trial" == f"{panel.y} by trial"


@pytest.mark.more
def test_the_table_has_what_was_measured_in_a_pruned_trial(search, monkeypatch):
    """What it reports is the level of chance."""

    class Always(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return True

    monkeypatch.setattr("hpo.worker.make_pruner", lambda settings: Always())
    options, _, _ = search({"train.optimizer.lr": {"choice": [1e-9]}}, sampler="random", pruner="median", trials=1)
    storage = open_storage(options.where)
    pruned = [t for t in load_study(storage, "s").trials if t.state.name == "PRUNED"]
    measured = [t.user_attrs["metrics"]["val_acc"] for t in pruned]
    assert measured and measured != [t.value for t in pruned]
    header, *rows = plots.trials_table(storage, ["s"])
    shown = {row[1]: row[header.index("val_acc")] for row in rows}
    assert [shown[t.number] for t in pruned] == measured
    assert {p.number: p.value for p in points_of(load_study(storage, "s"))}.items() <= shown.items()
