"""A key is reported as without effect where it has none, and only there: what it does is compared with what is said."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch

from fs_lowrank.config import load_config
from fs_lowrank.data import build_data, load_raw
from fs_lowrank.errors import say_once
from fs_lowrank.methods import create_method, get_method_class, list_methods, requirements
from fs_lowrank.methods.robust import RobustMean
from fs_lowrank.methods.server_optimizer import ServerOptimizer
from fs_lowrank.models.build import build_tokenizer
from fs_lowrank.models.kinds import further
from fs_lowrank.models.vision import VisionOptions, build_vision
from fs_lowrank.rounds.checks import check_splits
from fs_lowrank.settings import VISION_MODELS, keys_of
from fs_lowrank.settings.effects import without_effect
from fs_lowrank.settings.sections import ROBUST
from fs_lowrank.settings.sections import ServerOptimizer as Section
from fs_lowrank.testing import Bench
from fs_lowrank.testing.small import make_reviews
from fs_lowrank.training import schedule
from fs_lowrank.training.schedule import Schedule, lr_at, schedule_of

ROOT = Path(__file__).parents[2]
BASE = {"federate.client_num": 5, "federate.method": "fedlora", "model.type": "x@transformers", "data.type": "x.csv"}
ARGS = "llm.adapter.args.0"


def told(keys, engine="local", base=BASE):
    """By key, what is said of those of ``keys`` that have no effect."""
    config = load_config({**base, **keys})
    method = get_method_class(config.federate.method)
    idle = schedule.without_effect(config) + without_effect(config, engine, method)
    return {name: reason for name, _, reason in idle}


# -- every value of the choice, with every key that depends on it ----------------------------------------


OTHER = {"momentum": 0.5, "betas": [0.5, 0.5], "tau": 0.5, "lr": 0.3, "min_lr": 0.05, "cycle": 2, "warmup_ratio": 0.5}


@pytest.mark.parametrize("name", sorted(keys_of(ServerOptimizer).keys() - {"type"}))
@pytest.mark.parametrize("kind", keys_of(Section)["type"].meta["choices"])
def test_arguments_of_server_optimizers(kind, name):
    def steps(**given):
        optimizer, state = ServerOptimizer.from_config({"type": kind, **given}), {"w": torch.ones(3)}
        for round in (1, 2):
            new, memory = optimizer.step({"w": state["w"] + torch.tensor([0.1, -0.2, round])}, state)
            state = {**state, **new, **memory}
        return state["w"]

    key = f"fedopt.optimizer.{name}"
    said = told({"fedopt.use": True, "fedopt.optimizer.type": kind, key: OTHER[name]})
    assert (key in said) == torch.equal(steps(), steps(**{name: OTHER[name]}))


@pytest.mark.parametrize("name", sorted(keys_of(Schedule).keys() - {"type"}))
@pytest.mark.parametrize("kind", [*keys_of(Schedule)["type"].meta["choices"], "Cosine"])
def test_arguments_of_schedules(kind, name):
    def rates(keys):
        schedule = schedule_of(load_config({**BASE, "train.scheduler.type": kind, **keys}).train.scheduler)
        return [lr_at(round, 6, 1.0, schedule) for round in range(1, 7)]

    keys = {f"train.scheduler.{name}": OTHER[name]}
    assert bool(told({"train.scheduler.type": kind, **keys})) == (rates({}) == rates(keys))


@pytest.mark.parametrize("norm", ["static", "group", "none"])
@pytest.mark.parametrize("kind", VISION_MODELS)
def test_the_norm_of_image_networks(kind, norm):
    plain, other = (build_vision(VisionOptions(kind, 3, (1, 28, 28), 0.1, n)) for n in ("batch", norm))
    said = told({"model.type": kind, "lowrank.norm": norm})
    assert ("lowrank.norm" in said) == (str(plain) == str(other))


@pytest.mark.parametrize("rule", ROBUST)
def test_weights_under_robust_means(rule):
    tensors = {k: {"w": torch.tensor([1.0, k, k * k])} for k in range(1, 6)}

    def mean(weights):
        return RobustMean(rule).mean(tensors, weights, {"w": torch.zeros(3)})[0]["w"] if rule != "none" else weights

    same = rule != "none" and torch.equal(mean([0.2] * 5), mean([0.4, 0.3, 0.1, 0.1, 0.1]))
    assert bool(told({"lowrank.robust": rule, "federate.ignore_weight": True})) == same


@pytest.mark.parametrize("base, weighs", [("fedhm", True), ("fedlora", False)])
def test_weights_of_a_method_that_derives_from_another(base, weighs):
    keys = {"lowrank.robust": "median", "federate.ignore_weight": True}
    own = {"lowrank.average_by": "samples"} if weighs else {}
    config = load_config({**BASE, "federate.method": base, **keys, **own})
    derived = type("Derived", (get_method_class(base),), {})
    idle = [name for name, _, _ in without_effect(config, "local", derived)]
    assert ("federate.ignore_weight" in idle) == (not weighs)


@pytest.mark.more
@pytest.mark.parametrize("method", list_methods())
def test_what_a_method_has_no_use_for(method, tmp_path, keys_of):
    needs = requirements(method)
    task = {"SequenceClassification": "encoder"}.get(needs.tasks[1 if len(needs.tasks) > 3 else 0], "vision")
    engine = Bench(tmp_path).make(task, method, keys_of(method))
    base = engine.config.to_dict()
    idle = told({"lowrank.validation_samples": 3}, base=base)
    assert ("lowrank.validation_samples" in idle) == (engine.method.workbench is None)


@pytest.mark.parametrize("method", list_methods())
def test_defaults_are_never_reported(method, keys_of):
    base = {**BASE, "model.type": "lenet", "federate.method": method, **keys_of(method)}
    for model in ("resnet10", "lenet", "x@transformers", "x@huggingface_llm"):
        keys = {**base, "model.type": model}
        if load_config({"federate.client_num": 2, "model.type": model}).model.task not in requirements(method).tasks:
            continue
        if "@" in model:
            keys = {name: value for name, value in keys.items() if not name.startswith(("model.use", "lowrank.width"))}
        for engine in ("local", "federatedscope", "flower"):
            idle = told({}, engine, keys)
            assert not idle
            # What a run writes into its config.yaml has every key.
            assert not told({}, engine, load_config(keys).to_dict())


# -- single combinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys, idle",
    [
        ({"data.args": [{"max_len": 12}], "llm.tok_len": 50}, "llm.tok_len"),
        ({"eval.freq": 0, "early_stop.patience": 3}, "early_stop.patience"),
        ({"early_stop.delta": 0.3}, "early_stop.delta"),
        ({"model.task": "CausalLM", "eval.generate.prompts": 9}, "eval.generate.prompts"),
        ({"train.cache_frozen_dir": "c", "train.cache_frozen_shared": 0}, "train.cache_frozen_dir"),
        ({"model.max_memory": ["cpu=1GiB"]}, "model.max_memory"),
        ({"model.use_bias": False}, "model.use_bias"),
        ({"model.type": "lenet", "train.frozen_dropout": True}, "train.frozen_dropout"),
        ({"fedopt.optimizer.lr": 0.3}, "fedopt.optimizer.lr"),
        ({"federate.make_global_eval": False, "eval.metrics": ["f1"]}, "eval.metrics"),
        ({"federate.make_global_eval": False, "eval.split": ["test"]}, "eval.split"),
        ({"train.optimizer.dampening": 0.5}, "train.optimizer.dampening"),
        (
            {"dataloader.batch_tokens": 99, "eval.batch_size": 4, "dataloader.batch_size": 3},
            "dataloader.batch_size",
        ),
        ({"federate.method": "fedavg", "train.frozen_dropout": True}, "train.frozen_dropout"),
        ({"federate.method": "fisher_merge", "llm.adapter.args": [{"r": 3}]}, "llm.adapter.args"),
        (
            {"model.type": "lenet", "federate.method": "fedavg", "lowrank.base_init": "zero"},
            "lowrank.base_init",
        ),
        ({"lowrank.width": 0.5}, "lowrank.width"),
        ({"lowrank.robust": "median", "lowrank.robust_malicious": 2}, "lowrank.robust_malicious"),
        ({"lowrank.robust": "krum", "lowrank.robust_norm": 3.0}, "lowrank.robust_norm"),
        ({"lowrank.base_init": "zero"}, "lowrank.base_init"),
        ({"model.type": "lenet", "federate.method": "dense", "llm.adapter.args": [{"r": 3}]}, "llm.adapter.args"),
        ({"federate.method": "fedloru", "lowrank.tau": 3, "lowrank.schedule": [2, 4]}, "lowrank.tau"),
        ({"federate.method": "mfedloru", "lowrank.nested_scale": 0.3}, "lowrank.nested_scale"),
        ({"federate.method": "flora", "lowrank.max_kept_rank": 9}, "lowrank.max_kept_rank"),
        ({"federate.method": "fedhm", "lowrank.rank_factors": [1], "lowrank.decay": 1.0}, "lowrank.decay"),
        ({"federate.method": "fedhm", "lowrank.master": True}, "lowrank.master"),
        ({"federate.method": "fedhm", "lowrank.reuse_clients": "x"}, "lowrank.reuse_clients"),
        (
            {"dataloader.batch_tokens": 99, "lowrank.clients": [{"clients": 2, "batch_size": 4}]},
            "batch_size of lowrank.clients",
        ),
        ({"federate.method": "fedhm", "federate.ignore_weight": True}, "federate.ignore_weight"),
        *(
            (
                {"federate.method": "fedhm", "llm.adapter.args": [{**given, "modules": ["query"]}]},
                f"{ARGS}.{name}",
            )
            for given, name in (
                ({"r": 4}, "r"),
                ({"rank": 4}, "r"),
                ({"alpha": 3}, "lora_alpha"),
                ({"dropout": 0.1}, "lora_dropout"),
                ({"use_rslora": True}, "use_rslora"),
                ({"use_dora": True}, "use_dora"),
                ({"adapter_method": "lokr"}, "adapter_method"),
            )
        ),
        *(
            ({"federate.method": name, "lowrank.ranks": [2, 4], "llm.adapter.args": [{"r": 4}]}, f"{ARGS}.r")
            for name in ("flexlora", "flora")
        ),
        ({"federate.method": "fedfisher", "lowrank.lr": 0.5}, "lowrank.lr"),
        ({"federate.method": "fedfisher", "lowrank.solver": "cg", "lowrank.lr": 0.5}, "lowrank.lr"),
        (
            {"federate.method": "fedfisher", "lowrank.solver": "adam", "lowrank.tolerance": 0.5},
            "lowrank.tolerance",
        ),
        (
            {"federate.method": "regmean", "lowrank.scales": [0.9], "lowrank.validation_samples": 3},
            "lowrank.validation_samples",
        ),
    ],
)
def test_single_combinations(keys, idle):
    assert list(told(keys)) == [idle]


@pytest.mark.parametrize(
    "keys, idle, fewest",
    [
        ({"federate.method": "fedloru"}, "lowrank.tau", 21),
        ({"federate.method": "fedloru", "lowrank.init": "momentum"}, "lowrank.tau", 20),
        ({"federate.method": "pmfedloru", "lowrank.schedule": [7, 3]}, "lowrank.schedule", 4),
        ({"federate.method": "rolora"}, "lowrank.mix", 2),
        ({"federate.method": "rolora", "lowrank.mix": 0.3}, "lowrank.mix", 4),
        ({"early_stop.patience": 3}, "early_stop.patience", 4),
        ({"early_stop.patience": 3, "eval.freq": 2}, "early_stop.patience", 7),
        ({"train.scheduler.type": "linear"}, "train.scheduler.type", 2),
        ({"train.scheduler.warmup_ratio": 0.2}, "train.scheduler.warmup_ratio", 6),
        ({"train.scheduler.type": "cosine", "train.scheduler.cycle": 4}, "train.scheduler.cycle", 5),
    ],
)
def test_keys_that_few_rounds_make_idle(keys, idle, fewest):
    assert idle in told({**keys, "federate.total_round_num": fewest - 1})
    assert idle not in told({**keys, "federate.total_round_num": fewest})


@pytest.mark.parametrize(
    "keys",
    [
        {"eval.freq": 0},
        {"use_gpu": True, "device": 0, "fedopt.use": True, "fedopt.optimizer.lr": 0.3},
        {"model.type": "lenet", "model.use_bias": False},
        {"train.cache_frozen_shared": 0, "train.cache_frozen_bytes": 1e6},
        {"dataloader.batch_tokens": 200, "dataloader.batch_size": 3},  # of which evaluations still take the number
        {"data.args": [{"max_len": 12}]},
        {"data.max_dropped": 0.5},
        {"lowrank.clients": [{"clients": 2, "batch_size": 4}], "eval.batch_size": 4},
        {"dataloader.batch_tokens": 99, "lowrank.clients": [{"clients": 2, "lr": 0.4}]},
        *(
            {"dataloader.batch_tokens": 99, "eval.batch_size": 4, "dataloader.batch_size": 3, "federate.method": name}
            for name in ("regmean", "fisher_merge")
        ),
        {"federate.method": "fedlora", "lowrank.reuse_clients": "x"},
        {"federate.method": "fedhm", "lowrank.reuse_clients": "x", "lowrank.decay": 0.0},
        {"federate.method": "fedhm", "lowrank.reuse_clients": "x", "lowrank.rank_factors": [1, 4]},
        {"federate.method": "mfedloru", "lowrank.nested_ranks": [1], "lowrank.nested_scale": 0.3},
        {"federate.method": "fedhm", "lowrank.rank_factors": [2, 4], "lowrank.master": True},
        {
            "federate.method": "fedhm",
            "llm.adapter.args": [{"modules": ["query"], "layers": [1], "exclude_modules": ["x"]}],
        },
        {"federate.method": "flora", "lowrank.ranks": [2, 4], "llm.adapter.args": [{"r": 5, "alpha": 3}]},
        {"federate.method": "flora", "llm.adapter.args": [{"r": 5, "alpha": 3}]},
        {"federate.method": "fedhm", "lowrank.average_by": "samples", "federate.ignore_weight": True},
        {"federate.method": "flora", "lowrank.merge": False, "lowrank.max_kept_rank": 9, "lowrank.save_merged": True},
        {"federate.method": "fedfisher", "lowrank.solver": "adam", "lowrank.steps": 5, "lowrank.lr": 0.5},
        {"federate.method": "fisher_merge", "llm.adapter.use": True, "llm.adapter.args": [{"r": 3}]},
        {"train.optimizer.momentum": 0.5, "train.optimizer.dampening": 0.5},
        {"llm.adapter.args": [{"inference_mode": False, "base_model_name_or_path": None, "loftq_config": {}}]},
    ],
)
def test_what_has_an_effect_is_not_reported(keys):
    assert not told(keys)


def test_of_an_adapter_that_is_not_used_no_argument_is_reported_by_itself():
    keys = {"federate.method": "fedavg", "llm.adapter.args": [{"r": 4, "inference_mode": True}]}
    assert list(told(keys)) == ["llm.adapter.args"]


def test_a_method_says_which_of_its_keys_are_idle():
    """``Requires.idle`` and ``begins`` name keys that a configuration may have."""
    for method in list_methods():
        cls = get_method_class(method)
        known = {f"lowrank.{f.name}" for f in dataclasses.fields(cls.Params)}
        known |= {"llm.adapter.args", "federate.ignore_weight", "lowrank.validation_samples"}
        known.add("lowrank.reuse_clients")
        assert requirements(method).idle.keys() | requirements(method).begins.keys() <= known
        assert create_method(method, rounds=4).needs.idle == requirements(method).idle


@pytest.mark.parametrize("engine", ["local", "federatedscope", "flower"])
@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("examples/*.yaml"), *ROOT.glob("tests/runs/first_edition/*/config.yaml")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_shipped_files_have_no_idle_keys(path, engine):
    config = load_config(path)
    assert not without_effect(config, engine, get_method_class(config.federate.method))


# -- what only the data decide ---------------------------------------------------------------------------


@pytest.mark.more
def test_splits_of_data_with_sets_of_their_own(settings, reviews_csv, caplog):
    def said(**args):
        config = load_config(settings, {"data.args": [args], "data.splits": [0.5, 0.2, 0.3]})
        say_once.cache_clear()
        caplog.clear()
        check_splits(config, build_data(config, build_tokenizer(config)))
        return "data.splits = [0.5, 0.2, 0.3] has no effect" in caplog.text

    for name in ("test", "validation"):
        make_reviews(60, seed=1).to_csv(reviews_csv.with_name(f"{name}.csv"), index=False)
    own = {"test": "test.csv", "validation": "validation.csv"}
    assert said(**own) and not said(test=own["test"]) and not said()


@pytest.mark.more
@pytest.mark.parametrize("own", ["test", "validation"])
def test_the_share_and_the_seed_of_rows_that_the_data_have(settings, reviews_csv, caplog, own):
    make_reviews(60, seed=1).to_csv(reviews_csv.with_name("others.csv"), index=False)

    def built(seed=-1, splits=(0.5, 0.2, 0.3), subsample=1.0):
        keys = {"data.args": [{own: "others.csv"}], "data.splits": list(splits), "lowrank.test_seed": seed}
        config = load_config(settings, {**keys, "data.test_subsample": subsample})
        say_once.cache_clear()
        caplog.clear()
        data = build_data(config, build_tokenizer(config))
        of_seed = "lowrank.test_seed = 5 has no effect: the data have test rows" in caplog.text
        return data.fingerprint, of_seed, "data.splits = " in caplog.text and f"for {own} rows" in caplog.text

    plain, _, said = built()
    assert said, "of a share that is not the default"
    other = (0.8, 0.2, 0.0) if own == "test" else (0.7, 0.0, 0.3)
    same, _, said = built(splits=other)
    assert (same == plain) and not said, "0 says what is so"
    for subsample in (1.0, 0.5):
        (before, *_), (after, said, _) = built(subsample=subsample), built(5, subsample=subsample)
        assert said == (before == after)


def test_clients_with_a_penalty_are_not_kept():
    """``Reuse.key`` gives None for those of fedhm that have one; what is said goes by the hyperparameters."""
    for params in ({}, {"decay": 0.0}, {"rank_factors": (1.0,)}, {"rank_factors": (1.0, 4.0)}):
        method = create_method("fedhm", **params)
        kept = [all(p.penalty is None for p in method.phases(1, client)) for client in (1, 2)]
        assert ("lowrank.reuse_clients" in method.needs.idle) == (not any(kept))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_quotes_of_files_without_any(suffix, tmp_path, caplog):
    rows, place = [("a good day", 1), ("a bad day", 0)] * 5, tmp_path / f"rows.{suffix}"
    frame = pd.DataFrame(rows, columns=["text", "label"])
    if suffix == "jsonl":
        frame.to_json(place, orient="records", lines=True)
    else:
        frame.to_csv(place, index=False, sep="\t" if suffix == "tsv" else ",")
    say_once.cache_clear()
    assert len(load_raw(load_config({**BASE, "data.type": str(place), "data.args": [{"quoting": True}]}).data).train)
    assert ("data.args.0.quoting = True has no effect" in caplog.text) == (suffix == "jsonl")


def test_arguments_of_pefts_first_versions_say_nothing_at_their_defaults():
    old = {"r": 2, "enable_lora": None, "merge_weights": False, "target_modules": ["query"]}
    config = load_config({**BASE, "llm.adapter.args": [old]})
    assert not further(config.adapter)  # PEFT, which refuses them now, is not told
    config = load_config({**BASE, "llm.adapter.args": [{**old, "enable_lora": [True]}]})
    assert further(config.adapter) == {"enable_lora": [True]}  # which PEFT refuses
