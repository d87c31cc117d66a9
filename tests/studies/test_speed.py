"""The speed benchmarks run at a small size, and fast and slow forms give the same results. No time is tested."""

import itertools
import json

import pytest
import torch

import benchmark.cli
import hpo.cli
from benchmark.suite import load_suite
from fs_lowrank import UserError, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.adapters import layer_stack
from studies.speed import __main__ as runner
from studies.speed import (
    clients,
    cohort,
    frozen_cache,
    gpu,
    memory,
    only_read,
    overhead,
    race,
    server_step,
    vision,
    whole,
)

pytestmark = pytest.mark.more

#: layers that are not square, and an odd number of modules
TOY = dict(clients=6, modules=3, d_out=40, d_in=24, rank=2, repeats=1)


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("measure", [server_step.averaging, server_step.flexlora, server_step.flora])
def test_fast_and_slow_server_steps_agree(measure, dtype, close):
    assert measure(**TOY, dtype=dtype)["difference"] < close


@pytest.mark.parametrize("measure", [server_step.averaging, server_step.flexlora, server_step.flora])
def test_fast_and_slow_server_steps_agree_on_wide_layers(measure):
    assert measure(**{**TOY, "d_out": 24, "d_in": 40}, dtype=torch.float64)["difference"] < 1e-12


def test_flexlora_agrees_where_the_ranks_fill_the_layer():
    assert server_step.flexlora(**{**TOY, "clients": 20}, dtype=torch.float64)["difference"] < 1e-12


def test_race_runs_each_variant_the_given_number_of_times():
    ran = {"fast": 0, "slow": 0}

    def run(name):
        ran[name] += 1

    race({name: lambda name=name: run(name) for name in ran}, repeats=4, fewer={"slow": 2})
    assert ran == {"fast": 4, "slow": 2}


@pytest.mark.parametrize("kind", ["settings", "causal_settings"])
def test_cached_states_give_the_same_losses_and_tensors(kind, request):
    config = load_config(request.getfixturevalue(kind), train__optimizer__type="SGD")
    found = frozen_cache.measure(config, samples=12, repeats=1)
    assert found["loss_difference"] < 1e-5 and found["difference"] < 1e-5
    assert found["bytes_kept"] > 0


@pytest.mark.parametrize("kind", ["settings", "causal_settings"])
def test_what_is_not_read_changes_nothing(kind, request):
    found = only_read.measure(load_config(request.getfixturevalue(kind), train__optimizer__type="SGD"), 12, 1)
    assert found["used"] and found["difference"] < 1e-5


def test_a_cohort_trains_as_its_clients_alone(settings):
    found = cohort.measure(load_config(settings, train__optimizer__type="SGD"), 1, clients=3)
    assert found["clients"] == 3 and found["difference"] < 1e-5


def test_the_part_for_a_gpu(settings, capsys):
    """Without one it is measured on the CPU here, with cohorts of two of three clients."""
    keys = {"train.optimizer.type": "SGD", "train.cohort": 2}
    found = gpu.measure(load_config(settings, keys), 1, clients=3)
    assert found["size"] == 2 and found["difference"] < 1e-5 and found["operations"] > 0
    assert all(0 < reached < 1 for reached in found["utilisation"].values())
    if not torch.cuda.is_available():
        assert runner.main(["gpu"]) == 2 and "gpu: torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("causal", [False, True])
def test_the_models_and_data_of_the_part_for_a_gpu(tmp_path, causal):
    """Samples are as long as the case says, but for the end of a text, and a step is measured."""
    shape = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"intermediate_size": 48} if causal else {"intermediate_size": 48, "num_labels": 2}
    case = gpu.Case(shape, (1, 2), 4, 96, 1, "float32")
    keys = gpu.prepare(case, tmp_path, "cpu")
    found = gpu.measure(load_config(keys, use_gpu=False), 1, clients=3)
    assert found["lengths"] == ([95, 95] if causal else [96, 96]) and found["difference"] < 1e-5


def test_the_weights_of_a_case_are_counted_before_it_is_built():
    """Of Llama 3.2 1B 1,235,814,400 and of Llama 2 7B 6,738,415,616, of two bytes each."""
    assert [gpu.bytes_of(case) for case in gpu.CASES.values()][2:] == [2 * 1_235_814_400, 2 * 6_738_415_616]


def test_memory_of_a_base_and_of_a_step(tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    settings = memory.prepare(tmp_path, shape, 40)
    keys = ({}, {"train.checkpointing": True}, {"lowrank.dtype": "bfloat16"})
    plain, again, half = (memory.measure({**settings, **more}) for more in keys)
    assert again["kept_bytes"] < 0.7 * plain["kept_bytes"] and again["base_bytes"] == plain["base_bytes"]
    assert half["base_bytes"] == plain["base_bytes"] / 2


def test_overhead_adds_up_and_removes_its_timers(settings):
    backward = torch.autograd.backward
    found = overhead.measure(load_config(settings, train__cohort=2), rounds=2, profile=True)
    assert torch.autograd.backward is backward
    assert len(found["rounds"]) == 2 and found["cohort"] == 2
    for round in found["rounds"]:
        assert all(seconds > 0 for seconds in round.values())
        parts = round["forward"] + round["backward"] + round["optimizer"] + round["overhead"]
        assert parts == pytest.approx(round["wall"])
    assert all(seconds > 0 for seconds in found["parts_seconds"].values())


def test_a_backward_pass_counts_once_where_torch_calls_it_twice(monkeypatch):
    """Under a mode of torch's functions ``Tensor.backward`` calls itself again."""
    ticks = itertools.count()
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: next(ticks))
    model = torch.nn.Linear(3, 2)
    with overhead.timers(model) as spent, torch.overrides.BaseTorchFunctionMode():
        model(torch.ones(1, 3)).sum().backward()
    assert spent == {"forward": 1, "backward": 1, "optimizer": 0}, "each from one tick of the clock to the next"


@pytest.mark.slow
def test_clients_are_measured_in_a_process_of_their_own(settings):
    small = clients.with_federate(settings, client_num=3, total_round_num=1)
    found = clients.in_fresh_process(small, train=True)
    assert found["clients"] == 3 and found["updates_a_round"] == [3]
    assert found["base_bytes"] > 0 and found["adapter_bytes"] > 0
    assert found["peak_bytes"] >= found["setup_peak_bytes"] >= found["imported_peak_bytes"]


def test_both_forms_of_convolutions_take_the_same_steps():
    from fs_lowrank.models.vision import VisionOptions

    kinds = (("lora", 2), ("loha", 2), ("lokr", 2))
    found = vision.steps(VisionOptions("resnet10", 3, (1, 8, 8), width=1 / 16), kinds, size=4, repeats=2)
    assert found["seconds"].keys() == {"full", *(f"{k} 2 {form}" for k, _ in kinds for form in ("ours", "peft"))}
    assert all(apart < 1e-4 for apart in found["apart"].values())


def test_matrix_products_are_counted_as_by_hand(settings):
    """Of a BERT with layers of width h, f between: 2 (4 h² + 2 h f) a token, 4 h a pair of tokens, twice backward."""
    model = LocalEngine(load_config(settings, federate__method="ffa_lora")).model.to("meta").train()
    config, layers, n = model.config, layer_stack(model)[1], 7
    h, f = config.hidden_size, config.intermediate_size
    layer = n * 2 * (4 * h * h + 2 * h * f) + 4 * h * n * n
    first, last = whole.products(model, [], n), whole.products(model, layers[:1], n)
    assert first[1] == 0 and last[1] == pytest.approx(layer, rel=0.2) and last[1] >= layer
    assert len(layers) == 3 and sum(last) == first[0], "layers 1 and 2 are adapted: to the inputs of layer 1 and back"
    assert 4.5 * layer < first[0] < 5.2 * layer
    double = whole.products(model, layers[:1], 2 * n)[1]
    assert double - 2 * last[1] == 4 * h * 2 * n * n, "what grows with the square is attention"


def test_commands_of_whole_jobs_are_understood(tmp_path):
    for kind, cli in (("search", hpo.cli), ("suite", benchmark.cli)):
        _, *given = whole.command(kind, whole.PLAIN, tmp_path)
        assert cli._parser()[0].parse_args(given).workers == 2
    suite = load_suite(str(tmp_path / "suite.yaml"), "")
    (experiment,) = suite.experiments.values()
    assert len(experiment.methods) * len(experiment.seeds) == 12 and len(whole.RATES) == 16
    for settings in whole.SETTINGS.values():
        load_config(whole.DEMO, settings)


def test_the_table_has_a_line_for_each_figure(tmp_path):
    line = {
        "case": "a case",
        "figure": "slow ÷ fast",
        "value": 7.25,
        "target": "≥ 5",
        "holds": True,
        "note": "29 ÷ 4",
        "agreement": 1e-7,
    }
    (tmp_path / "server_step.json").write_text(
        json.dumps(
            {
                "rows": [line, {**line, "case": "another", "holds": False}],
                "seconds": 3.0,
                "machine": {"cpus": 2, "threads": 1, "versions": {"torch": "2"}},
            }
        )
    )
    text = runner.table(tmp_path)
    assert "| a case | slow ÷ fast | 7.25 | ≥ 5 | yes | 29 ÷ 4 | 1e-07 |" in text
    assert "| another | slow ÷ fast | 7.25 | ≥ 5 | **no** |" in text


@pytest.mark.parametrize(
    "error, code, said",
    [
        (UserError("minilm is not there"), 2, "error: minilm is not there"),
        (
            ZeroDivisionError("by nothing"),
            1,
            "error: ZeroDivisionError: by nothing (in test_speed.py, line ",
        ),
    ],
)
def test_an_error_is_one_line(monkeypatch, tmp_path, capsys, error, code, said):
    def run():
        raise error

    monkeypatch.setattr(vision, "run", run)
    assert runner.main(["vision", "--out", str(tmp_path)]) == code
    err = capsys.readouterr().err
    assert err.startswith(said) and err.count("\n") == 1 and "Traceback" not in err
