"""Small real models and small data for all tests, built once per session in seconds."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from functools import cache
from importlib.util import find_spec

import pytest

os.environ.pop("COLUMNS", None)  # processes of pytest-xdist have it; consoles look at it when they are made

#: with what the generic suite and the failures are run by ``make test``; ``make test-more`` has the others
FEW = {"method": "rolora", "run": "rolora under FedAdam"}
#: with what ``make test-more`` runs the failures; ``make test-slow`` has the others
MORE_RUNS = ("rolora under FedAdam", "flora of three ranks")
#: checks of the generic suite that ``make test-more`` runs for these methods; ``make test-slow`` has the others
MORE_CHECKS = {
    "test_it_learns_and_saves_only_the_files_of_its_configuration",
    "test_weights_by_samples_or_equal",
    "test_half_precision",
    "test_every_method_with_every_model",
    "test_every_method_with_an_encoder",
    "test_what_is_saved_loads_with_the_plain_libraries",
    "test_bytes_are_those_of_the_tensors_that_were_sent",
}
MORE_METHODS = {"rolora", "flexlora", "fedloru", "regmean"}
#: tests of which ``make test-more`` runs so many variants, the first ones; ``make test-slow`` has the others
FIRST_VARIANTS = {
    "test_a_loss_that_is_not_finite_costs_the_update": 1,
    "test_the_scores_on_the_test_set_are_those_of_the_run": 2,
    "test_metrics_before_round_1_that_are_lost": 1,
    "test_a_command_imports_no_more_than_it_needs": 5,
    "test_a_claim_with_many_conditions_is_refuted_by_chance_as_rarely_as_one": 1,
    "test_a_bad_round_is_skipped_with_on_bad_round_skip": 1,
    "test_a_process_that_is_killed": 2,
    "test_curves_are_drawn_from_whatever_there_is": 1,
    "test_what_stays_with_a_client_is_resumed_scored_and_saved": 1,
    "test_equal_methods_are_told_apart_in_5_percent_at_most_over_seeds_and_rows": 1,
    "test_a_server_step_of_the_wrong_form_is_the_method_s_mistake_and_not_the_clients": 5,
    "test_samples_and_steps_are_counted_as_they_are_taken": 12,
    "test_what_a_method_has_no_use_for": 10,
    "test_it_learns_and_saves_only_the_files_of_its_configuration": 3,
    "test_clients_of_different_ranks": 5,
    "test_bytes_are_those_of_the_tensors_that_were_sent": 7,
    "test_what_is_saved_loads_with_the_plain_libraries": 8,
    "test_the_head_keeps_every_bit_and_is_not_sent": 4,
    "test_results_with_and_without_the_cache_are_equal": 1,
    "test_the_same_run": 2,
    "test_the_result_is_that_of_one_device": 1,
    "test_the_generic_suite": 4,
    "test_results_depend_on_the_number_of_threads_in_their_last_digits_only": 1,
    "test_runs_in_one_process_are_those_of_fresh_ones": 1,
    "test_a_run_with_batches_by_tokens": 1,
    "test_autocast_computes_in_bfloat16_and_keeps_float32": 1,
    "test_recomputed_activations_give_the_same_to_the_bit": 1,
    "test_workers_see_one_gpu_each_of_those_that_the_command_sees": 1,
    "test_samplers_search_two_ranges": 1,
    "test_one_shot_methods_on_adapters_train_together_too": 1,
    "test_the_command_writes_json_and_png": 0,
    "test_another_configuration_is_named": 1,
    "test_own_objects_run": 0,
    "test_methods_whose_clients_train_alike_share_them": 0,
    "test_finite_values_of_any_size": 6,
    "test_finite_values_of_any_size_in_variants": 12,
    "test_every_averaging_method_against_the_definition": 12,
    "test_what_is_trained_sent_and_saved": 6,
    "test_a_damaged_adapter_is_refused_and_not_used_without_what_it_lacks": 4,
    "test_settings_that_change_the_training_change_the_key": 1,
    "test_a_damaged_entry_is_computed_again": 1,
    "test_a_defective_method_fails_the_check_for_its_defect": 3,
    "test_a_slow_starter_is_never_pruned_by_trials_at_the_majority_class": 1,
    "test_equal_methods_are_told_apart_in_5_percent_at_most": 4,
    "test_every_argument": 6,
    "test_it_stops_where_federatedscope_does": 8,
    "test_it_says_once_why_clients_train_alone": 1,
    "test_a_bad_round_stops_the_run_and_leaves_the_last_good_one": 1,
    "test_too_few_clients_stop_the_run_and_leave_the_last_good_round": 1,
    "test_cohorts_and_processes_have_the_same_result": 1,
    "test_the_best_round_is_that_of_the_metric": 1,
    "test_a_row_whose_summary_is_damaged_is_trained_again": 1,
    "test_files_of_the_base_that_changed_are_named_on_resume": 1,
    "test_a_disk_that_is_full_at_the_end_of_a_run": 1,
    "test_messages_for_a_client_that_is_never_asked_are_bounded": 2,
    "test_numbers_and_sets_of_classes": 2,
    "test_equal_to_the_plain_forward": 6,
    "test_a_personal_adapter_on_the_saved_model_is_the_clients_model": 2,
    "test_in_memory_and_in_files": 1,
    "test_these_methods_keep_the_mean_of_the_products": 3,
    "test_one_client_agrees_with_the_global_update": 1,
    "test_trials_that_learn_nothing_are_pruned_after_the_warm_up_by_those_that_learn": 3,
}
#: the same for ``make test``; ``make test-more`` has the others
FIRST_OF_ALL = {
    "test_any_list_of_ranks_and_any_subset": 12,
    "test_clients_are_drawn_by_class": 1,
    "test_clients_that_missed_rounds_catch_up_to_the_bit": 6,
    "test_defaults_are_never_reported": 6,
    "test_fedprox_with_mu_0_is_the_method_to_the_bit": 2,
    "test_its_error_is_the_users_with_file_and_line_and_the_run_goes_on": 0,
    "test_processes_evaluate_the_same_batches_as_one_process": 1,
    "test_rounds_are_those_of_the_algorithm_box": 6,
    "test_several_rounds_against_the_reference": 6,
    "test_sites_in_a_column_are_clients": 2,
    "test_the_frozen_half_does_not_change": 4,
    "test_the_frozen_half_keeps_every_bit_in_a_run": 1,
    "test_trained_parameters_against_the_papers_ratios": 4,
    "test_wrong_usage_is_one_line_and_exit_code_2": 14,
}
#: what ``make test`` runs with every method, on the first kind of model that it takes
EVERY_METHOD = "test_a_run_and_its_files"


def _no_federatedscope() -> str:
    if "FEDERATEDSCOPE_ROOT" not in os.environ and find_spec("federatedscope") is None:
        return "FEDERATEDSCOPE_ROOT names no checkout"
    from fs_lowrank.errors import UserError

    try:
        import fs_lowrank.engines.federatedscope  # noqa: F401
    except UserError as error:
        return str(error)
    return ""


def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch finds none"


#: the marker of tests that not every environment can run → why this one cannot; then they are not collected
LACKS = {
    "federatedscope": cache(_no_federatedscope),
    "commonsense": lambda: "" if os.environ.get("FS_LOWRANK_EVAL_DATA") else "FS_LOWRANK_EVAL_DATA names no folder",
    "flower": lambda: "" if find_spec("flwr") else "make flower",
    **{name: lambda name=name: "" if find_spec(name) else "it is not installed" for name in ("nvflare", "appfl")},
    "gpu": cache(_no_gpu),
    "quantised": lambda: "" if find_spec("bitsandbytes") else "make test-quant",
}


def pytest_ignore_collect(collection_path, config):
    """A file whose ``pytestmark`` leaves all of its tests out is not even imported."""
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        line = re.search("^pytestmark = .*", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
        for marker in re.findall(r"pytest\.mark\.(\w+)", line[0]) if line else ():
            if marker in LACKS and LACKS[marker]() or f"not {marker}" in config.option.markexpr:
                return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config):
    possible, impossible = [], []
    for item in items:
        lacks = any(LACKS[mark.name]() for mark in item.iter_markers() if mark.name in LACKS)
        (impossible if lacks else possible).append(item)
    if impossible:
        items[:] = possible
        config.hook.pytest_deselected(items=impossible)
    had, variants = set(), Counter()
    for item in possible:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.name in ("test_generic.py", "test_faults.py"):
            others = any(given[name] != few for name, few in FEW.items() if name in given)
            if item.originalname == EVERY_METHOD:
                others = given["method"] in had
                had.add(given["method"])
                if others and given["method"] not in MORE_METHODS:
                    item.add_marker(pytest.mark.slow)
            if others:
                item.add_marker(pytest.mark.more)
            if given.get("run", MORE_RUNS[0]) not in MORE_RUNS:
                item.add_marker(pytest.mark.slow)
        if item.path.name == "test_hostile_updates.py" and given.get("name") not in {None, *MORE_METHODS}:
            item.add_marker(pytest.mark.more)
        if item.originalname in MORE_CHECKS and given.get("method") not in MORE_METHODS:
            item.add_marker(pytest.mark.slow)
        for mark, first in (("slow", FIRST_VARIANTS), ("more", FIRST_OF_ALL)):
            if item.originalname in first:
                variants[item.path, item.originalname] += 1
                if variants[item.path, item.originalname] > first[item.originalname]:
                    item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """One thread, because multithreading slows down such small models."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_said_yet():
    """What is said once in a process is said once in each test, in whatever order they run."""
    from fs_lowrank.errors import say_once

    say_once.cache_clear()


@pytest.fixture(autouse=True)
def logging_as_before():
    """A command sets what its process logs, and here that is the process of all tests."""
    loggers = [logging.getLogger(name) for name in (None, "fs_lowrank", "fs_lowrank.rows")]
    levels, raises = [logger.level for logger in loggers], logging.raiseExceptions
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.raiseExceptions = raises


@pytest.fixture(scope="session", autouse=True)
def apart_from_the_user(tmp_path_factory):
    """Tests have a folder of their own for cached states of frozen layers, instead of that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FS_LOWRANK_FROZEN", str(tmp_path_factory.mktemp("frozen")))
        yield


@pytest.fixture(scope="session")
def small():
    """The small models and data; imported here, because a process that only hands tests out needs no torch."""
    from fs_lowrank.testing import small

    return small


@pytest.fixture(scope="session")
def keys_of():
    """``keys_of(method)``: keys with which a method supports the small models, or takes less time."""
    from fs_lowrank.methods import get_method_class

    def keys(method):
        chains = method in ("otfusion", "pfnm")  # they support only plain chains of layers
        plain = {"model.type": "lenet", "model.use_bias": False, "lowrank.width": 0.5} if chains else {}
        fields = get_method_class(method).Params.__dataclass_fields__
        if "server_steps" in fields:
            plain |= {"lowrank.server_steps": 20}
        if "generator_steps" in fields:
            plain |= {"lowrank.epochs": 2, "lowrank.generator_steps": 2, "lowrank.images": 8, "lowrank.channels": 4}
        return plain

    return keys


@pytest.fixture(scope="module")
def bench(tmp_path_factory, keys_of):
    """Runs of any method on the small models, without what they say."""
    from fs_lowrank.testing import Bench, quietly

    folder = tmp_path_factory.mktemp("bench")
    with quietly(folder):
        yield Bench(folder, keys_of)


@pytest.fixture
def own_methods(monkeypatch):
    """Methods that the test registers are there in this test alone."""
    from fs_lowrank.methods import list_methods, registry

    list_methods()  # the built-in ones are registered once, not in the copy
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


#: what a run calls to draw its pictures, beside ``save``
DRAWING = ("client_panel", "curves", "figure", "predictions")


@pytest.fixture(scope="session", autouse=True)
def no_curves():
    """Runs draw no pictures, which takes ten times as long as a small run; see ``curves``."""
    from fs_lowrank.callbacks import pictures

    with pytest.MonkeyPatch.context() as patch:
        for name in DRAWING:
            patch.setattr(pictures, name, lambda *given, **more: None)
        patch.setattr(pictures, "save", lambda made, path: path)
        yield


@pytest.fixture
def curves(monkeypatch):
    """The runs of this test draw their pictures."""
    from fs_lowrank.callbacks import pictures
    from fs_lowrank.draw import figures, runs

    for name in DRAWING:
        monkeypatch.setattr(pictures, name, getattr(runs, name))
    monkeypatch.setattr(pictures, "save", figures.save)


@pytest.fixture(scope="session")
def tiny_encoder(small, tmp_path_factory):
    """A folder with a BERT of 3 layers, width 32; its ``intermediate.dense`` is 48 × 32, not square."""
    return small.save_encoder(tmp_path_factory.mktemp("tiny_encoder"))


@pytest.fixture(scope="session")
def tiny_causal(small, tmp_path_factory):
    """A folder with a Llama of 3 layers, width 32; with two key-value heads its ``v_proj`` is 16 × 32."""
    return small.save_causal(tmp_path_factory.mktemp("tiny_causal"))


@pytest.fixture(scope="session")
def reviews_csv(small, tmp_path_factory):
    """300 labelled reviews in a CSV file."""
    return small.save_reviews(tmp_path_factory.mktemp("reviews"))


@pytest.fixture(scope="session")
def instructions_jsonl(small, tmp_path_factory):
    """120 instructions with answers, in Alpaca's form."""
    return small.save_instructions(tmp_path_factory.mktemp("instructions"))


@pytest.fixture(scope="session")
def task_files(small, tmp_path_factory):
    """A folder with reviews and a score of each (``scores.csv``), or a set of classes as a list (``sets.jsonl``) and as
    columns of 0 and 1 (``flags.csv``); and with a small T5."""
    import numpy as np

    from tests.cases import save_t5

    folder, draw = tmp_path_factory.mktemp("tasks"), np.random.default_rng(2)
    frame = small.make_reviews(300, seed=3)
    scored = frame.assign(score=2.0 * frame["label"] + 0.3 * draw.standard_normal(300))
    scored.drop(columns="label").to_csv(folder / "scores.csv", index=False)
    sets = [["good"] * label + ["tea"] * (d == "tea") for label, d in zip(frame["label"], frame["domain"])]
    frame.assign(label=sets).to_json(folder / "sets.jsonl", orient="records", lines=True)
    flags = {name: [int(name in own) for own in sets] for name in ("good", "tea")}
    frame[["text", "domain"]].assign(**flags).to_csv(folder / "flags.csv", index=False)
    return save_t5(folder)


@pytest.fixture
def settings(small, tiny_encoder, reviews_csv, tmp_path):
    """A small classification run as a mapping for ``load_config``: 5 unequal clients, 4 rounds."""
    return small.encoder_settings(tiny_encoder, reviews_csv, tmp_path / "run")


@pytest.fixture
def causal_settings(small, tiny_causal, instructions_jsonl, tmp_path):
    """Like ``settings``, for the instruction tuning of a causal language model."""
    return small.causal_settings(tiny_causal, instructions_jsonl, tmp_path / "run")


@pytest.fixture(scope="session")
def tiny_images(small, tmp_path_factory):
    """A folder of class folders: 210 gray images of 16 × 16 with stripes, checks or no pattern, with noise."""
    return small.save_images(tmp_path_factory.mktemp("tiny_images"))


@pytest.fixture
def vision_settings(small, tiny_images, tmp_path, monkeypatch):
    """Like ``settings``, for a narrow ResNet-10 with batch-norm, trained from scratch."""
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tiny_images.parent / "home"))
    return small.vision_settings(tiny_images, tmp_path / "run")


@pytest.fixture
def few(request, settings, tmp_path, no_curves):
    """``few(name, keys)``: two rounds of two steps under an outdir of their own, with ``FEW`` of the tests' module;
    ``of`` takes the place of the settings."""
    from fs_lowrank import load_config

    own = {"federate.total_round_num": 2, "train.local_update_steps": 2, **getattr(request.module, "FEW", {})}
    return lambda name, keys=None, of=None: load_config(
        of or settings, {**own, "outdir": str(tmp_path / name), **(keys or {})}
    )


@pytest.fixture(scope="session")
def other():
    """``other(value)``: a value of the same type that differs from it."""

    def changed(value):
        if isinstance(value, bool):
            return not value
        if isinstance(value, (int, float)):
            return value + 1
        return [*value, "x"] if isinstance(value, list) else value + "x"

    return changed


def pytest_terminal_summary(terminalreporter):
    """The reasons of skipped tests, one line per reason instead of one per test."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    for marker, lacks in LACKS.items():
        if marker != "gpu" and (reason := lacks()):  # asking for a GPU loads torch
            terminalreporter.write_line(f"not collected: tests of {marker} ({reason})")
