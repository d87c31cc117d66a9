"""Pruning: not by trials at the majority class, not before both halves were trained, not by trials of other methods.

The simulations report curves to the real pruners as a trial reports its rounds; nothing is trained.
"""

from __future__ import annotations

import json
import random

import optuna
import pytest

from fs_lowrank import UserError
from fs_lowrank.runs.chance import Chance
from hpo.settings import Settings, first_passes, make_pruner
from hpo.settings import settings_of as settings_of_study
from hpo.storage import load_study, open_storage, quiet
from hpo.trial import Job

pytestmark = pytest.mark.more

ROUNDS, LABELS = 16, {"positive": 535, "negative": 465}
CHANCE = Chance.of_counts(list(LABELS.values()))
PRUNERS = ("median", "halving", "hyperband")


def settings_of(config, pruner, objective, **keys):
    base = config.replace({"federate.total_round_num": ROUNDS, "eval.freq": 1, **keys})
    return Settings(base.to_dict(), {}, objectives=(objective,), pruner=pruner)


def play(settings, study, curve, tmp_path, labels):
    """Report a curve of ``(accuracy, loss)`` as a trial does; returns the round in which it is pruned, or None."""
    trial = study.ask()
    job = Job(settings, tmp_path, trial)
    validation = {"from": "train", "rows": [], **({"labels": LABELS} if labels else {})}
    (tmp_path / "data.json").write_text(json.dumps({"validation": validation}))
    for round, (acc, loss) in enumerate(curve, 1):
        f1 = 0.7 if acc == 0.535 else acc if CHANCE.reached(acc) else 0.3  # 0.7: of naming always the second class
        record = {"round": round, "metrics": {"val": {"acc": acc, "loss": loss, "f1": f1}}}
        if job.prunes(record, tmp_path):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return round
    study.tell(trial, curve[-1][settings.objectives == ("val_loss",)])
    return None


def constant(draw):
    """Always predicts the majority class; its loss is close to that of the best constant prediction."""
    return [(0.535, CHANCE.loss + abs(draw.gauss(0, 0.002)))] * ROUNDS


def slow_starter(draw):
    """Predicts the minority class, or classes at random, and learns from the middle on: 0.79 at the end."""
    half = ROUNDS // 2
    start = [(draw.choice([0.465, 0.5]), 0.70 + 0.02 * draw.random()) for _ in range(half)]
    return start + [(0.535 + 0.255 * t / half, 0.69 - 0.2 * t / half) for t in range(1, half + 1)]


def learner(draw):
    return [(0.56 + 0.015 * t + 0.01 * draw.random(), 0.66 - 0.015 * t) for t in range(1, ROUNDS + 1)]


def simulate(settings, curves, tmp_path, labels=True):
    """Report the curves in one study; returns the round in which each was pruned."""
    with quiet():
        direction = "minimize" if settings.objectives == ("val_loss",) else "maximize"
        study = optuna.create_study(direction=direction, pruner=make_pruner(settings), study_name="s")
        return [play(settings, study, curve, tmp_path, labels) for curve in curves]


@pytest.mark.parametrize("objective", ["val_acc", "val_loss", "val_f1"])
@pytest.mark.parametrize("pruner", PRUNERS)
def test_a_slow_starter_is_never_pruned_by_trials_at_the_majority_class(config, tmp_path, pruner, objective):
    settings = settings_of(config, pruner, objective, **{"federate.method": "rolora"})
    with_chance = without = 0
    for seed in range(10):
        draw = random.Random(seed)
        curves = [*(constant(draw) for _ in range(4)), slow_starter(draw)]
        with_chance += simulate(settings, curves, tmp_path)[-1] is not None
        if seed < 5:
            without += simulate(settings, curves, tmp_path, labels=False)[-1] is not None
    assert with_chance == 0
    assert without == 5, "the simulation must be one in which the same curves, unadjusted, do prune it"


@pytest.mark.parametrize("objective", ["val_acc", "val_loss", "val_f1"])
@pytest.mark.parametrize("pruner", PRUNERS)
def test_trials_that_learn_nothing_are_pruned_after_the_warm_up_by_those_that_learn(
    config, tmp_path, pruner, objective
):
    settings = settings_of(config, pruner, objective, **{"federate.method": "rolora"})
    draw = random.Random(0)
    ended = simulate(settings, [*(learner(draw) for _ in range(9)), *(constant(draw) for _ in range(9))], tmp_path)
    assert sum(round is not None for round in ended[9:]) >= 6
    assert all(round is None or round >= 2 for round in ended)


@pytest.mark.parametrize(
    "method, keys, rounds",
    [
        ("fedlora", {}, 1),
        ("rolora", {}, 2),
        ("ffa_lora", {}, 1),
        ("rolora", {"lowrank.mix": 0.0}, 1),
        ("pfedlora", {}, 1),
    ],
)
def test_the_round_by_which_everything_has_been_trained_once(config, method, keys, rounds):
    changed = config.replace({"federate.method": method, "federate.total_round_num": 6, **keys})
    assert first_passes(changed) == rounds


@pytest.mark.parametrize("pruner", PRUNERS)
def test_no_pruner_acts_before_everything_has_been_trained_once(config, tmp_path, pruner, monkeypatch):
    monkeypatch.setattr("hpo.settings.first_passes", lambda base: 7)
    settings = settings_of(config, pruner, "val_acc")
    draw = random.Random(1)
    ended = simulate(settings, [*(learner(draw) for _ in range(9)), *(constant(draw) for _ in range(9))], tmp_path)
    pruned = [round for round in ended if round is not None]
    assert pruned and min(pruned) >= 7


def test_a_method_is_not_pruned_by_the_curves_of_another(search, config):
    both = {"federate.method": {"choice": ["fedlora", "rolora"]}, "train.optimizer.lr": {"uniform": [1e-3, 1e-2]}}
    with pytest.raises(UserError, match="a method is not pruned by the curves of another"):
        search(both, timeout=1e-6, pruner="median")
    options, _, _ = search(both, timeout=1e-6)
    assert settings_of_study(load_study(open_storage(options.where), "s")).pruner == "none"
