"""What only a GPU can show; where torch finds none, ``device_cases.py`` imitates one."""

import pytest
import torch
from torch import nn

import fs_lowrank
from fs_lowrank.finished import load_run
from fs_lowrank.testing import check_method
from fs_lowrank.testing.bench import without_dropout
from fs_lowrank.training.generate import continue_prompts

pytestmark = pytest.mark.gpu
#: the keys of a run on a GPU
ON = {"use_gpu": True}
RUN = {"federate.total_round_num": 2, "train.optimizer": {"type": "SGD", "lr": 0.05}}


@pytest.fixture
def run(make_engine):
    """``run(task, keys)``: the engine of a run that has ended, without dropout, whose masks differ between devices."""

    def run(task, keys):
        engine = without_dropout(make_engine(task, {**RUN, **keys}))
        engine.run()
        return engine

    return run


@pytest.mark.parametrize("method", fs_lowrank.list_methods())
def test_the_generic_suite(method, keys_of):
    check_method(method, keys={**ON, **keys_of(method)})


@pytest.mark.parametrize("task", ["encoder", "causal"])
@pytest.mark.parametrize(
    "keys",
    [
        {"train.cohort": "off"},
        {"train.cohort": 3},
        {"train.cohort": "auto"},
        {"train.blocks": 3},
        {"train.only_read": "off", "train.cache_frozen": "off"},
        {"lowrank.dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_run_ends_as_on_the_processor(run, task, keys):
    # a head that is drawn in another dtype may be another one
    dtype = {name: value for name, value in keys.items() if name == "lowrank.dtype"}
    ours, plain = run(task, {**keys, **ON}), run(task, {"train.cohort": "off", **dtype})
    close = 0.05 if dtype else 1e-3
    for name, value in plain.ledger.state.items():
        torch.testing.assert_close(ours.ledger.state[name].cpu(), value, atol=close, rtol=close, check_dtype=False)


def test_processes_end_as_one(settings, tmp_path, no_curves):
    one, two = (
        fs_lowrank.run(
            fs_lowrank.load_config(settings, {**RUN, **ON, "federate.process_num": n, "outdir": str(tmp_path / str(n))})
        )
        for n in (1, 2)
    )
    for (name, a), (_, b) in zip(two.model.named_parameters(), one.model.named_parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds one GPU")
def test_a_base_over_two_gpus_ends_as_on_the_processor(run):
    spread = {"model.device_map": "sequential", "model.max_memory": ["0=60KB", "1=1GB"], "federate.method": "flexlora"}
    for cohort in ("off", 3):
        ours = run("causal", {**spread, **ON, "train.cohort": cohort})
        assert len({p.device for p in ours.model.parameters()}) > 1
        plain = run("causal", {"federate.method": "flexlora", "train.cohort": "off"})
        for name, value in plain.ledger.state.items():
            torch.testing.assert_close(ours.ledger.state[name].cpu(), value, atol=1e-3, rtol=1e-3)


def test_a_finished_run_is_used_on_the_gpu_and_generates_in_bfloat16(run):
    engine = run("causal", {**ON, "train.autocast": "bfloat16"})
    loaded, seen = load_run(engine.recorder.outdir), set()
    assert {p.device.type for p in loaded.model.parameters()} == {"cuda"}
    linear = next(module for module in loaded.model.modules() if type(module) is nn.Linear)
    linear.register_forward_hook(lambda _, args, output: seen.add(output.dtype))
    continue_prompts(loaded.model, loaded.tokenizer, [[1, 2, 3]], batch_size=1, max_new_tokens=2)
    assert seen == {torch.bfloat16}
