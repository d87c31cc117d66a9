"""Small real models and small data for all tests, built once per session in seconds."""

from __future__ import annotations

import pytest

from fs_lowrank.testing import small

#: with what the generic suite and the failures are run by ``make test``; ``make test-more`` has the others
FEW = {
    "method": ("fedfisher", "fedloru", "flexlora", "pfedlora", "rolora"),
    "run": ("rolora under FedAdam", "with personal parts"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        given = getattr(item, "callspec", None)
        if given and item.path.name in ("test_generic.py", "test_faults.py"):
            if any(given.params[name] not in few for name, few in FEW.items() if name in given.params):
                item.add_marker(pytest.mark.more)


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


@pytest.fixture(scope="session", autouse=True)
def frozen_states_apart(tmp_path_factory):
    """Tests have a folder of their own for cached states of frozen layers, instead of that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FS_LOWRANK_FROZEN", str(tmp_path_factory.mktemp("frozen")))
        yield


@pytest.fixture(scope="session")
def keys_of():
    """``keys_of(method)``: keys with which a method supports the small models, or takes less time."""
    from fs_lowrank.methods import get_method_class

    def keys(method):
        chains = method in ("otfusion", "pfnm")  # they support only plain chains of layers
        plain = {"model.type": "lenet", "model.use_bias": False, "lowrank.width": 0.5} if chains else {}
        if "generator_steps" in get_method_class(method).Params.__dataclass_fields__:
            plain |= {"lowrank.epochs": 2, "lowrank.generator_steps": 2, "lowrank.images": 8, "lowrank.channels": 4}
        return plain

    return keys


@pytest.fixture
def no_curves(monkeypatch):
    """Runs draw no pictures, which takes longer than the runs."""
    import fs_lowrank.rounds.keeper as keeper

    for name in ("plot_clients", "plot_curves", "plot_test"):
        monkeypatch.setattr(keeper, name, lambda shown, path, *given, **more: path)


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory):
    """A folder with a BERT of 3 layers, width 32; its ``intermediate.dense`` is 48 × 32, not square."""
    return small.save_encoder(tmp_path_factory.mktemp("tiny_encoder"))


@pytest.fixture(scope="session")
def tiny_causal(tmp_path_factory):
    """A folder with a Llama of 3 layers, width 32; with two key-value heads its ``v_proj`` is 16 × 32."""
    return small.save_causal(tmp_path_factory.mktemp("tiny_causal"))


@pytest.fixture(scope="session")
def reviews_csv(tmp_path_factory):
    """300 labelled reviews in a CSV file."""
    return small.save_reviews(tmp_path_factory.mktemp("reviews"))


@pytest.fixture(scope="session")
def instructions_jsonl(tmp_path_factory):
    """120 instructions with answers, in Alpaca's form."""
    return small.save_instructions(tmp_path_factory.mktemp("instructions"))


@pytest.fixture
def settings(tiny_encoder, reviews_csv, tmp_path):
    """A small classification run as a mapping for ``load_config``: 5 unequal clients, 4 rounds."""
    return small.encoder_settings(tiny_encoder, reviews_csv, tmp_path / "run")


@pytest.fixture
def causal_settings(tiny_causal, instructions_jsonl, tmp_path):
    """Like ``settings``, for the instruction tuning of a causal language model."""
    return small.causal_settings(tiny_causal, instructions_jsonl, tmp_path / "run")


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory):
    """A folder of class folders: 210 gray images of 16 × 16 with stripes, checks or no pattern, with noise."""
    return small.save_images(tmp_path_factory.mktemp("tiny_images"))


@pytest.fixture
def vision_settings(tiny_images, tmp_path, monkeypatch):
    """Like ``settings``, for a narrow ResNet-10 with batch-norm, trained from scratch."""
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tiny_images.parent / "home"))
    return small.vision_settings(tiny_images, tmp_path / "run")


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
