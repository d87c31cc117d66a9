"""Bases that bitsandbytes quantises: every method that leaves them as they are, on the processor's kernels."""

import logging
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import fs_lowrank
from fs_lowrank import UserError, list_methods
from fs_lowrank.errors import say_once
from fs_lowrank.finished import load_run
from fs_lowrank.methods import get_method_class, requirements
from fs_lowrank.models import quantised
from fs_lowrank.models.build import build_model
from fs_lowrank.models.fingerprints import model_fingerprint
from fs_lowrank.testing import Bench, checks, quietly, small
from fs_lowrank.testing.bench import equal, logits, state_of

pytestmark = pytest.mark.quantised


def keys_of(method):
    """Keys with which ``method`` leaves the base as it is; None if there are none."""
    own = get_method_class(method).Params.__dataclass_fields__
    params = {"merge": False, **({"tau": 2} if "tau" in own else {})} if "merge" in own else {}
    needs = requirements(method, params)
    if needs.adapter == "none" or needs.float_base or needs.changes_base and needs.adapter != "optional":
        return None
    use = {"llm.adapter.use": True} if needs.adapter == "optional" else {}
    return {**use, **{f"lowrank.{name}": value for name, value in params.items()}}


#: nf4 on the Llama, int8 on the BERT, which has biases and a head
CASES = [
    (method, task, dtype)
    for method in list_methods()
    for task, model, dtype in (("causal", "CausalLM", "nf4"), ("encoder", "SequenceClassification", "int8"))
    if keys_of(method) is not None and model in requirements(method).tasks
]
#: run by ``make test``; ``make test-more`` runs the others
FEW = {("flora", "causal"), ("rolora", "causal"), ("fedloru", "encoder"), ("fisher_merge", "encoder")}
MARKED = [pytest.param(*case, marks=() if case[:2] in FEW else pytest.mark.more) for case in CASES]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    with quietly(folder):
        yield Bench(folder, lambda method: keys_of(method) or {})


@pytest.fixture
def build(bench, tmp_path):
    """``build(dtype, **keys)``: the plain tiny Llama with this ``lowrank.dtype``."""

    def build(dtype, task="causal", **keys):
        keys = {"lowrank__dtype": dtype, "federate__method": "fedlora", **keys}
        return build_model(fs_lowrank.load_config(bench.settings(task, tmp_path), **keys), 2)

    return build


def test_the_methods_that_run_on_a_quantised_base():
    kept = {"fedlora", "ffa_lora", "flexlora", "flora", "rolora", "fedloru", "mfedloru", "pfedloru", "pmfedloru"}
    assert {method for method, task, _ in CASES if task == "causal"} >= kept
    assert not {method for method, _, _ in CASES} & {"fedavg", "pfedlora", "fedhm"}


@pytest.mark.parametrize("method, task, dtype", MARKED)
def test_a_run_learns_resumes_to_the_bit_and_leaves_the_base(bench, method, task, dtype):
    plain = Bench(bench.folder / f"{method}-{task}", {**keys_of(method), "lowrank.dtype": dtype})
    engine = plain.make(task, method)
    assert set(map(quantised.is_quantised, quantised.layers(engine.model).values())) == {True}
    base = {n: p.clone() for n, p in engine.model.named_parameters() if p.dtype in (torch.uint8, torch.int8)}
    base |= {n: t.clone() for n, t in quantised.beside(engine.model).items()}
    before = state_of(engine)
    history = engine.run().history
    assert all(not r["failed"] and r["loss"] > 0 for r in history)
    now = dict(engine.model.named_parameters()) | quantised.beside(engine.model)
    assert base and all(torch.equal(now[n], t) for n, t in base.items())
    assert not equal(before, state_of(engine))
    checks.check_resume(plain, method, task)


def test_flora_keeps_what_it_would_merge(bench, caplog):
    """With rank enough it ends where merging ends; with less, the round in which that is reached is named."""
    few = {"federate.total_round_num": 3, "lowrank.ranks": [2, 1, 3], "train.optimizer": {"type": "SGD", "lr": 0.05}}
    merged = bench.make("causal", "flora", {**few, "lowrank.merge": True})
    kept = bench.make("causal", "flora", {**few, "lowrank.max_kept_rank": 18})
    merged.run()
    result = kept.run()
    held_out = kept.workspace.data.test
    torch.testing.assert_close(logits(kept.model, held_out), logits(merged.model, held_out), atol=1e-5, rtol=1e-5)
    assert not result.base_changed and "max_kept_rank" not in caplog.text
    ranks = {n: p.shape[0] for n, p in kept.model.named_parameters() if ".lora_A.accumulated" in n}
    # 2 + 1 + 3 in each of three rounds, and never more than the layer's width.
    assert {r for n, r in ranks.items() if "q_proj" in n} == {18} and max(ranks.values()) == 18
    assert {r for n, r in ranks.items() if "v_proj" in n} == {16}
    say_once.cache_clear()
    cut = bench.make("causal", "flora", {**few, "lowrank.max_kept_rank": 7})
    cut.run()
    assert caplog.text.count("lowrank.max_kept_rank = 7 is reached in round 2") == 1
    assert {p.shape[0] for n, p in cut.model.named_parameters() if ".lora_A.accumulated" in n} == {7}
    difference = (logits(cut.model, held_out) - logits(merged.model, held_out)).abs().max()
    assert 1e-6 < difference < 1e-2


@pytest.mark.parametrize("keys", [{}, {"lowrank.max_kept_rank": 4}])
def test_flora_with_a_kept_rank_resumes_and_saves_one_adapter(bench, keys):
    plain = Bench(bench.folder / f"kept{len(keys)}", {"lowrank.merge": False, **keys})
    checks.check_resume(plain, "flora", "causal")
    checks.check_run(plain, "flora", "causal")


def test_the_example_runs_on_a_processor(bench, tmp_path):
    """``examples/qlora.yaml`` with the keys that its comment has for a processor, and small data."""
    example = Path(__file__).parents[2] / "examples" / "qlora.yaml"
    keys = {
        "use_gpu": False,
        "lowrank.compute_dtype": "float32",
        "outdir": str(tmp_path),
        "data.type": bench.data["causal"],
    }
    keys |= {"model.type": f"{bench.bases['causal']}@huggingface_llm", "federate.total_round_num": 2}
    keys["data.splitter_args"] = [{"alpha": 2.0, "min_size": 2}]
    result = fs_lowrank.run(fs_lowrank.load_config(example, keys), progress=False)
    assert len(result.history) == 2 and quantised.layers(result.model) and math.isfinite(result.final["test_loss"])


# -- what is known by its hash ---------------------------------------------------------------------------


def test_fingerprints_tell_quantised_bases_apart(build, bench, tmp_path):
    found = {dtype: model_fingerprint(build(dtype)) for dtype in ("float32", "bfloat16", "int8", "nf4")}
    found["double"] = model_fingerprint(build("nf4", lowrank__double_quant=True))
    found["half"] = model_fingerprint(build("nf4", lowrank__compute_dtype="bfloat16"))
    assert len(set(found.values())) == len(found)
    assert model_fingerprint(build("nf4")) == found["nf4"] and model_fingerprint(build("int8")) == found["int8"]


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_the_scales_are_part_of_a_fingerprint(build, dtype):
    """Twice the weights have the same codes; only the scales differ. A pass over the model changes neither."""
    model = build(dtype)
    before, codes = model_fingerprint(model), {n: p.clone() for n, p in model.named_parameters()}
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        model.train()(input_ids=ids)
        first = model.eval()(input_ids=ids).logits
        assert torch.equal(first, model(input_ids=ids).logits)
    assert model_fingerprint(model) == before
    for scale in quantised.beside(model).values():
        scale.mul_(2)
    assert all(torch.equal(p, codes[n]) for n, p in model.named_parameters())
    assert model_fingerprint(model) != before


def test_kept_states_of_frozen_layers_are_those_of_this_base(bench, monkeypatch):
    """The cache gives what is computed without it; another quantisation, or other scales, have entries of their own."""
    keys = {"lowrank.dtype": "nf4", "train.optimizer": {"type": "SGD", "lr": 0.05}}
    engine, other = (bench.make("causal", "rolora", {**keys, "train.cache_frozen": c}) for c in ("auto", "off"))
    engine.run(), other.run()
    assert engine.workspace.prefix.cached and not other.workspace.prefix.cached
    for name, value in state_of(engine).items():
        torch.testing.assert_close(value, other.ledger.state[name], atol=1e-6, rtol=1e-5)
    examples, prefix, found = engine.workspace.data.clients[0], engine.workspace.prefix, set()

    def key():
        prefix._below = None
        return prefix._key(examples)

    first = key()
    below = {n: t for n, t in quantised.beside(engine.model).items() if ".layers.0." in n}
    next(iter(below.values())).mul_(2)
    second = bench.make("causal", "rolora", {**keys, "lowrank.dtype": "int8"}).workspace.prefix
    found = {first, key(), second._key(examples) if second else "none"}
    assert len(found) == 3


@pytest.mark.parametrize("dtype, task", [("nf4", "causal"), ("int8", "encoder")])
def test_clients_together_end_where_they_end_one_by_one(bench, dtype, task):
    trained = checks.check_cohort(Bench(bench.folder / f"cohort-{dtype}", {"lowrank.dtype": dtype}), "rolora", task)
    assert trained == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_processes_give_the_result_of_one(bench, dtype):
    keys = {"lowrank.dtype": dtype, "federate.total_round_num": 2}
    one = bench.make("causal", "fedlora", keys)
    one.run()
    two = bench.make("causal", "fedlora", {**keys, "federate.process_num": 2})
    two.run()
    assert equal(state_of(one), state_of(two))


# -- what is saved ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, task", [("nf4", "causal"), ("int8", "encoder")])
def test_the_saved_model_is_not_quantised_and_says_so(bench, dtype, task, caplog):
    keys = {
        **checks.SAVED,
        "lowrank.dtype": dtype,
        "lowrank.double_quant": dtype == "nf4",
        "lowrank.checkpoint_freq": 1,
    }
    engine = bench.make(task, "fedlora", keys)
    result = engine.run()
    assert "saved without quantisation" in caplog.text
    wanted, names = logits(result.model, engine.workspace.data.test), [n for n, _ in result.model.named_parameters()]
    from fs_lowrank.testing.bench import plain_model

    alone = plain_model(task, result.outdir / "model")
    assert {p.dtype for p in alone.parameters()} == {torch.float32} and not hasattr(alone.config, "quantization_config")
    # Of 8 bits, activations are quantised as well.
    off = {"nf4": 1e-4, "int8": 0.05}[dtype]
    torch.testing.assert_close(logits(alone, engine.workspace.data.test), wanted, atol=off, rtol=off)
    assert [n for n, _ in result.model.named_parameters()] == names and quantised.layers(result.model)
    # The adapter over the same quantised base.
    torch.testing.assert_close(logits(load_run(result.outdir).model, engine.workspace.data.test), wanted)


def test_gpt2_whose_matrices_are_the_other_way_round(bench, tmp_path):
    small.save_tokenizer(tmp_path / "gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=2, eos_token_id=3)
    ).save_pretrained(tmp_path / "gpt2")
    keys = {"model.type": f"{tmp_path / 'gpt2'}@huggingface_llm", "llm.adapter.args.0.modules": ["c_attn", "c_fc"]}
    keys |= {**checks.SAVED, "lowrank.dtype": "nf4", "llm.adapter.args.0.layers": [1]}
    engine = bench.make("causal", "fedlora", keys)
    result = engine.run()
    assert len(quantised.layers(result.model)) == 8
    alone = AutoModelForCausalLM.from_pretrained(str(result.outdir / "model"))
    assert alone.transformer.h[0].mlp.c_fc.weight.shape == (32, 128)
    examples = engine.workspace.data.test
    torch.testing.assert_close(logits(alone, examples), logits(result.model, examples), atol=1e-4, rtol=1e-4)


# -- what is refused, and what is said -------------------------------------------------------------------


def test_what_stays_as_it_is_is_named(build, caplog):
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, "fs_lowrank"):
        build("nf4")
    (line,) = [r.getMessage() for r in caplog.records if "matrices are quantised" in r.getMessage()]
    assert "21 matrices" in line and "lm_head" in line and "embed_tokens" in line
    head = build("int8", "encoder")
    assert not {"classifier", "bert.pooler.dense"} & set(quantised.layers(head)) and len(quantised.layers(head)) == 18


@pytest.mark.parametrize(
    "task, keys, words",
    [
        ("encoder", {"federate.method": "fedavg"}, ("fedavg changes the weights of the base", "fedlora")),
        ("encoder", {"federate.method": "pfedlora"}, ("pfedlora changes", "fedlora")),
        ("encoder", {"federate.method": "fedfisher"}, ("fedfisher changes", "leave the key out")),
        ("causal", {"federate.method": "fedloru"}, ("fedloru changes", "lowrank.merge False")),
        ("causal", {"federate.method": "flora"}, ("flora changes", "lowrank.merge False")),
        ("causal", {"federate.method": "fed_sb"}, ("fed_sb needs float weights", "bfloat16")),
        ("encoder", {"federate.method": "fedpara"}, ("fedpara needs float weights", "bfloat16")),
        ("causal", {"llm.adapter.args.0.adapter_method": "loha"}, ("adapter_method = 'loha'", "take lora")),
        ("vision", {"federate.method": "fedlora"}, ("it is for models of transformers",)),
    ],
)
def test_what_cannot_be_quantised_is_refused_in_one_line(bench, tmp_path, task, keys, words):
    with pytest.raises(UserError) as caught:
        fs_lowrank.load_config(bench.settings(task, tmp_path), {"lowrank.dtype": "nf4", **keys})
    said = str(caught.value)
    assert "lowrank.dtype" in said and "nf4" in said and all(w in said for w in words) and "\n" not in said


def test_a_model_of_which_nothing_can_be_quantised_is_refused(build):
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    args = [{"r": 2, "modules": ["embed_tokens"], "modules_to_save": every}]
    with pytest.raises(
        UserError, match="LlamaForCausalLM has no matrix that bitsandbytes quantises.*bfloat16"
    ) as caught:
        build("nf4", llm__adapter__args=args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["prefix", "prompt", "p-tuning"])
def test_virtual_tokens_before_a_quantised_base(bench, kind):
    adapter = [{"adapter_method": kind, "num_virtual_tokens": 3}]
    keys = {"lowrank.dtype": "nf4", "llm.adapter.args": adapter, "train.optimizer": {"type": "SGD", "lr": 0.5}}
    engine = bench.make("causal", "fedlora", {**keys, "eval.before": True})
    result = engine.run()
    assert quantised.layers(result.model) and result.final["test_loss"] < result.before["test_loss"]
    examples = engine.workspace.data.test
    torch.testing.assert_close(logits(load_run(result.outdir).model, examples), logits(result.model, examples))


def test_without_bitsandbytes_the_command_to_install_it_is_named(bench, monkeypatch):
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lowrank.dtype = int8 needs bitsandbytes.*pip install 'fs-lowrank\[quant\]'"):
        bench.make("causal", "fedlora", {"lowrank.dtype": "int8"})


def test_a_checkpoint_that_is_quantised_already(build, bench, tmp_path):
    build("nf4").save_pretrained(tmp_path / "four")
    small.save_tokenizer(tmp_path / "four")
    keys = {"model__type": f"{tmp_path / 'four'}@huggingface_llm"}
    assert model_fingerprint(build("nf4", **keys)) == model_fingerprint(build("nf4"))
    for dtype in ("float32", "int8"):
        with pytest.raises(
            UserError, match=rf"quantised already \(nf4\).*lowrank.dtype is {dtype}; set lowrank.dtype nf4"
        ):
            build(dtype, **keys)
