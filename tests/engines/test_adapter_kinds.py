"""Adapters beyond LoRA's pair under a plain average, each through the generic suite: DoRA, VeRA, OFT, IA3, rsLoRA, and
virtual tokens before the text."""

import pytest
import torch

import fs_lowrank
from fs_lowrank import UserError, load_config
from fs_lowrank.finished import load_run
from fs_lowrank.models.names import tags
from fs_lowrank.testing import CHECKS, Bench, quietly
from fs_lowrank.testing.bench import logits, state_of

pytestmark = pytest.mark.more

#: what stands in ``llm.adapter.args`` for each kind, and a part of the names of what it trains
KINDS = {
    "dora": ({"r": 2, "alpha": 6, "use_dora": True}, "lora_magnitude_vector"),
    "rslora": ({"r": 2, "alpha": 6, "use_rslora": True}, "lora_A"),
    "vera": ({"adapter_method": "vera", "r": 5}, "vera_lambda_b"),
    "oft": ({"adapter_method": "oft", "r": 4}, "oft_R"),
    "ia3": ({"adapter_method": "ia3", "feedforward_modules": []}, "ia3_l"),
    "prefix": ({"adapter_method": "prefix", "num_virtual_tokens": 3}, "prompt_encoder.default.embedding"),
    "prompt": ({"adapter_method": "prompt", "num_virtual_tokens": 3}, "prompt_encoder.default.embedding"),
    "p-tuning": ({"adapter_method": "p-tuning", "num_virtual_tokens": 3, "encoder_hidden_size": 24}, "mlp_head"),
}
PROMPTS = ("prefix", "prompt", "p-tuning")
MODULES = {"encoder": ["query", "value"], "causal": ["q_proj", "v_proj"]}
RATES = {"train.optimizer": {"type": "SGD", "lr": 0.5}}
#: of the suite, what is asked in ``make test-more``; the rest takes long
MORE = ("run", "bytes", "resume")
CASES = [
    pytest.param(task, check, id=f"{check.name}-{task}", marks=() if check.name in MORE else pytest.mark.slow)
    for task in MODULES
    for check in CHECKS
    if task == "encoder" or check.every_task
]


def keys(kind, task):
    where = {} if kind in PROMPTS else {"modules": MODULES[task], "layers": [1, 2]}
    return {"llm.adapter.args": [{**KINDS[kind][0], **where}], **RATES}


@pytest.mark.parametrize(
    "kind, task, check",
    [
        pytest.param(kind, *case.values, id=f"{kind}-{case.id}", marks=case.marks)
        for kind in KINDS
        for case in CASES
        # Without a head, all that these train starts as constants, with every seed.
        if kind not in ("vera", "oft", "ia3") or case.id != "seed-causal"
    ],
)
def test_the_generic_suite(tmp_path, kind, task, check):
    # A BERT of random weights reads the class at its first token, a virtual one that a network gives.
    more = {"below": 0.996} if (kind, check.name) == ("p-tuning", "learns") else {}
    with quietly(tmp_path / "home"):
        check.function(Bench(tmp_path / "bench", keys(kind, task)), "fedlora", task, **more)


@pytest.mark.parametrize("task", MODULES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_sent_and_saved(tmp_path, kind, task):
    """All that trains is shared, that of the kind included, and the run's folder has what it ended with."""
    engine = Bench(tmp_path, keys(kind, task)).make(task, "fedlora", {"federate.total_round_num": 1})
    start = state_of(engine)
    engine.run()
    state, part = engine.ledger.state, KINDS[kind][1]
    assert any(part in n for n in state) and all(tags(n) & {"adapter", "head"} for n in state)
    assert {n for n, p in engine.model.named_parameters() if p.requires_grad} <= state.keys()
    moved = [n for n in state if part in n and not torch.equal(state[n], start[n])]
    assert moved, f"nothing of {part} was trained"
    again = load_run(engine.recorder.outdir)
    examples = engine.workspace.data.test
    torch.testing.assert_close(logits(again.model, examples), logits(engine.model, examples), atol=1e-6, rtol=1e-6)
    for name, tensor in () if kind in PROMPTS else engine.model.state_dict().items():  # PEFT saves what is given
        torch.testing.assert_close(again.model.state_dict()[name], tensor, msg=lambda m, name=name: f"{name}: {m}")


def test_seeds_of_the_matrices_that_vera_does_not_send(tmp_path):
    """They follow from the run's seed, and every copy of the model has the same."""
    bench = Bench(tmp_path, keys("vera", "encoder"))

    def shared(**more):
        return bench.make("encoder", "fedlora", more).model.base_model.vera_A["default"]

    one, same, other = shared(seed=1), shared(seed=1), shared(seed=2)
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(
    "args, method, said",
    [
        ({"use_dora": True}, "rolora", "use_dora = True: it does not add to a weight, as rolora takes it to do"),
        ({"use_dora": True}, "fedloru", "choose lora or lokr or loha without use_dora, or federate.method = fedlora"),
        ({"adapter_method": "ia3"}, "fedloru", "adapter_method = 'ia3': it does not add"),
        ({"adapter_method": "oft"}, "flora", "adapter_method = 'oft': it has no halves A and B"),
        ({"adapter_method": "ia3", "r": 4}, "fedlora", "r is no argument of adapter_method ia3"),
        ({"adapter_method": "vera", "alpha": 4}, "fedlora", "alpha is no argument of adapter_method vera"),
        ({"adapter_method": "verra"}, "fedlora", "adapter_method.*verra"),
        ({"use_dora": True, "num_virtual_token": 4}, "fedlora", "unknown key 'llm.adapter.args.0.num_virtual_token'"),
        ({"adapter_method": "ia3", "feedforward_modules": ["value"]}, "fedlora", "llm.adapter.args: PEFT raises"),
    ],
)
def test_what_does_not_fit_is_refused(settings, args, method, said):
    adapter = [{"modules": ["query"], "layers": [1], **args}]
    with pytest.raises(UserError, match=said):
        fs_lowrank.run(load_config(settings, {"llm.adapter.args": adapter, "federate.method": method}), progress=False)


def test_an_adapter_that_does_not_fit_is_refused_with_its_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("federate: {client_num: 2}\nllm:\n  adapter:\n    args:\n    - adapter_method: oft\n")
    said = "run.yaml, line 5: llm.adapter.args.0.adapter_method = 'oft': it has no halves A and B, which rolora"
    with pytest.raises(UserError, match=said):
        load_config(file, federate__method="rolora")
