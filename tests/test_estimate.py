"""``fs-lowrank run --dry-run``: what a run takes, and what to change where it does not fit."""

import contextlib
import time

import pytest
import torch

from fs_lowrank import cli, estimate, load_config, run
from fs_lowrank.engines.local import LocalEngine
from hpo.trial import client_steps


def of(found, what):
    return sum(need.size for need in found.needs if need.label == what)


@pytest.mark.more
def test_the_figures_are_those_of_the_run(causal_settings):
    config = load_config(causal_settings, {"federate.sample_client_num": 3})
    found = estimate.estimate(config)
    engine = LocalEngine(config)
    workspace = engine.workspace
    base = sum(p.nbytes for n, p in engine.model.named_parameters() if "lora_" not in n)
    assert of(found, "base") == base
    trained = workspace.parameters["trainable"]
    assert of(found, "adapters and gradients") == 8 * trained
    # AdamW: two numbers for each, and a count of steps for each tensor.
    assert 8 * trained <= of(found, "optimizer") <= 8 * trained + 8 * 100
    assert of(found, "updates of a round") == 3 * 4 * trained
    engine.run()
    kept = {id(states): states.nbytes for states, _ in workspace.prefix.cached.values()}
    assert of(found, "states of frozen layers") == sum(kept.values())
    assert found.steps == 4 * 3 * 3 and 0 < found.seconds < 60 and not found.lacking and not found.advice


OWN = [
    {"clients": 1, "local_update_steps": 20, "batch_size": 2},
    {"clients": 2, "batch_or_epoch": "epoch", "local_update_steps": 2, "batch_size": 5},
]


@pytest.mark.more
@pytest.mark.parametrize(
    "keys",
    [
        {"lowrank.clients": OWN},
        {"lowrank.clients": OWN, "grad.grad_accum_count": 3},
        {"train.batch_or_epoch": "epoch", "grad.grad_accum_count": 2, "dataloader.drop_last": True},
        {"lowrank.clients": OWN, "federate.method": "pfedloru", "lowrank.personal_steps": 2},
    ],
)
def test_every_client_takes_its_own_steps(causal_settings, keys):
    config = load_config(causal_settings, {"federate.total_round_num": 2, "train.cache_frozen": "off", **keys})
    result = run(config, progress=False)
    assert estimate.estimate(config).steps == client_steps(config, result.history)


@pytest.mark.more
def test_the_largest_batch_is_probed_whole(causal_settings):
    """It may be that of a client with settings of its own."""
    config = load_config(causal_settings, {"train.cache_frozen": "off", "dataloader.batch_size": 2})
    wide = config.replace({"dataloader.batch_size": 8})
    small, all_of_them = (of(estimate.estimate(c), "activations") for c in (config, wide))
    own = config.replace({"lowrank.clients": [{"clients": 2, "batch_size": 8}]})
    assert small < 0.5 * all_of_them and of(estimate.estimate(own), "activations") == pytest.approx(all_of_them)


@pytest.mark.more
def test_every_phase_of_a_round_is_probed(vision_settings, causal_settings, monkeypatch):
    """The second phase of pFedLoRA trains all weights, after as many steps of an adapter."""
    trained: dict[tuple, int] = {}
    train = estimate.train_client

    def noted(model, examples, phases, config, **how):
        trained.update({phase.train: phase.steps for phase in phases})
        return train(model, examples, phases, config, **how)

    monkeypatch.setattr(estimate, "train_client", noted)
    steps = {"train.local_update_steps": 6, "lowrank.personal_steps": 2}
    config = load_config({**vision_settings, "federate.method": "pfedlora", "lowrank.variant": 1, **steps})
    found = estimate.estimate(config)
    weights = sum(p.numel() for p in LocalEngine(config).workspace.model.parameters())
    adapter = weights - of(found, "adapters and gradients") / 8
    assert 0 < adapter < weights / 2 and of(found, "optimizer") >= 4 * (weights - adapter)
    assert trained == {("adapter",): 2, ("base", "head"): 6}
    trained.clear()
    estimate.estimate(load_config(causal_settings, {"federate.method": "rolora"}))
    assert {train[0] for train in trained} == {"lora_A", "lora_B"}


@pytest.mark.parametrize(
    "dtype, double",
    [
        ("bfloat16", False),
        *(
            pytest.param(*given, marks=pytest.mark.quantised)
            for given in (("int8", False), ("nf4", False), ("nf4", True))
        ),
    ],
)
def test_the_base_as_it_is_loaded(causal_settings, dtype, double):
    from fs_lowrank.models.build import build_model, build_skeleton
    from fs_lowrank.models.quantised import beside

    config = load_config(causal_settings, {"lowrank.dtype": dtype, "lowrank.double_quant": double})
    model = build_model(config, None)
    held = sum(t.nbytes for t in [*model.parameters(), *beside(model).values()])
    assert estimate._base(build_skeleton(config), config) == pytest.approx(held, rel=0.02)


@pytest.mark.more
def test_what_does_not_fit_says_what_to_change(causal_settings, monkeypatch, capsys):
    def room(size):
        return lambda config, device: {"memory": size, "disk": 1e12}

    config = load_config(causal_settings)
    monkeypatch.setattr(estimate, "_room", room(1e5))  # less than the base
    few = config.replace({"dataloader.batch_size": 1, "llm.tok_len": 4})
    found = estimate.estimate(few)
    assert found.lacking == ["memory"] and found.seconds is None
    assert found.advice == ["lowrank.dtype nf4, or bfloat16", "model.device_map auto: more GPUs, or memory and disk"]
    monkeypatch.setattr(estimate, "_room", room(of(found, "base") + 1e5))
    found = estimate.estimate(config.replace({"train.cache_frozen": "off"}))
    assert found.lacking == ["memory"] and found.seconds is not None
    assert "train.checkpointing True" in found.advice
    assert "dataloader.batch_size 4 grad.grad_accum_count 2" in found.advice


def test_a_step_that_takes_more_than_a_gpu_has(causal_settings, monkeypatch):
    def full(workspace, *how, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(estimate, "_train", full)
    found = estimate.estimate(load_config(causal_settings))
    assert found.lacking == ["memory"] and found.seconds is None and "train.checkpointing True" in found.advice


@pytest.mark.more
def test_memory_and_time_of_several_processes(causal_settings, monkeypatch):
    """The run's own process has a model, and trains nothing; on a CPU a base in the file's dtype is mapped."""
    config = load_config(causal_settings, {"federate.client_num": 4, "train.cache_frozen": "off"})
    monkeypatch.setattr(estimate, "_train", lambda *workspace, **how: None)
    monkeypatch.setattr(estimate, "_timed", lambda device: contextlib.nullcontext([1.0]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def figures(processes, **keys):
        found = estimate.estimate(config.replace({"federate.process_num": processes, **keys}))
        return *(of(found, what) for what in ("base", "adapters and gradients", "optimizer")), found.seconds

    def times(several, one):
        return [a / b for a, b in zip(several, one, strict=True)]

    one, half = figures(1), {"lowrank.dtype": "bfloat16"}
    assert times(figures(4), one) == [1, 4, 4, 1 / 4]
    assert times(figures(4, **half), figures(1, **half)) == [5, 4, 4, 1 / 4]
    monkeypatch.setattr(estimate, "device_of", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(estimate, "_room", lambda config, device: {"device": 1e12, "memory": 1e12, "disk": 1e12})
    assert times(figures(4), one) == [3, 2, 2, 1 / 4]
    assert times(figures(3), one) == [3, 2, 2, 1 / 3]
    assert times(figures(2), one) == [2, 1, 1, 1 / 2] and figures(1) == one


@pytest.mark.more
def test_a_time_has_what_the_device_still_computes(causal_settings, monkeypatch):
    """As a GPU does, this one works when somebody waits for it."""
    given = [1.0]

    def wait(device):
        while given:
            time.sleep(given.pop())

    monkeypatch.setattr(estimate, "wait", wait)
    with estimate._timed(torch.device("cuda")) as seconds:
        given.append(0.1)
    assert 0.1 <= seconds[0] < 1.0
    train, score = estimate.train_client, estimate.batch_scores
    monkeypatch.setattr(estimate, "train_client", lambda *args, **keys: (train(*args, **keys), given.append(0.2)))
    monkeypatch.setattr(estimate, "batch_scores", lambda *args, **keys: (score(*args, **keys), given.append(0.2)))
    found = estimate.estimate(load_config(causal_settings, {"train.cache_frozen": "off"}))
    assert min(found.scoring.values()) >= 0.2 and found.seconds >= 0.2


def test_scoring_is_probed_with_the_states_that_the_run_stores(causal_settings, monkeypatch):
    stored, score = [], estimate.batch_scores

    def spy(*args, owner, prefix, **keys):
        stored.append(bool(prefix and prefix.budget.get(owner)))
        return score(*args, owner=owner, prefix=prefix, **keys)

    monkeypatch.setattr(estimate, "batch_scores", spy)
    estimate.estimate(load_config(causal_settings, {"train.cache_frozen": "all"}))
    assert stored and all(stored)
    stored.clear()
    estimate.estimate(load_config(causal_settings, {"train.cache_frozen": "off"}))
    assert stored and not any(stored)


@pytest.mark.more
def test_the_command(causal_settings, tmp_path, capsys, monkeypatch):
    config = load_config(causal_settings)
    config.dump(tmp_path / "run.yaml")
    dry = ["run", "--cfg", str(tmp_path / "run.yaml"), "--dry-run"]
    table = ["--table", str(tmp_path / "takes.csv")]
    assert cli.main([*dry, *table]) == 0
    assert (tmp_path / "takes.csv").read_text().startswith("what,where,MB,") and (tmp_path / "takes.tex").exists()
    out = capsys.readouterr().out
    assert "activations" in out and "steps of clients" in out and "will not fit" not in out
    assert not [*(tmp_path / "run").glob("*")], "the probe leaves no trace"
    for wrong, said in (
        (["attack.attack_method", "dlg"], "attack.attack_method = 'dlg'"),
        (["--engine", "locall"], "did you mean 'local'"),
    ):
        assert cli.main([*dry, *wrong]) == 2 and said in capsys.readouterr().err  # as without --dry-run
    monkeypatch.setattr(estimate, "_room", lambda config, device: {"memory": 10.0, "disk": 1e12})
    assert cli.main(dry) == 1
    assert "it will not fit: memory" in capsys.readouterr().out


@pytest.mark.more
@pytest.mark.parametrize(
    "method, keys",
    [
        ("fedavg", {}),
        ("fedloru", {"lowrank.tau": 2}),
        ("fedhm", {"lowrank.rank_factors": [1, 2]}),
        ("fedhm", {"lowrank.rank_factors": [4, 2]}),
        ("mfedloru", {"lowrank.nested_ranks": [0, 1]}),
        ("pfedloru", {}),
        ("pfedlora", {}),
    ],
)
def test_the_probe_trains_what_a_client_trains(vision_settings, method, keys):
    """A client of FedHM has factors of its own rank, or none, where the server has all weights."""
    config = load_config({**vision_settings, "federate.method": method, **keys})
    found = estimate.estimate(config)
    assert found.seconds > 0 and of(found, "adapters and gradients") > 0 and of(found, "optimizer") > 0
