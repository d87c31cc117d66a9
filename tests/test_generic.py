"""The generic suite over every registered method, on a tiny encoder, causal model and vision model.

The checks themselves are shipped (``fs_lowrank.testing``); here they run over every method and more hyperparameters.
"""

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from transformers import AutoModelForSequenceClassification

from fs_lowrank import Averaging, Phase, list_methods, register_method
from fs_lowrank.finished import load_run
from fs_lowrank.methods import get_method_class, requirements
from fs_lowrank.testing import TASKS, checks
from fs_lowrank.testing.bench import logits, state_of

METHODS = list_methods()
RANKED = [n for n in METHODS if "ranks" in get_method_class(n).Params.__dataclass_fields__]
#: every method with its defaults, and again with hyperparameters that change what is sent
CASES = [*((m, {}) for m in METHODS), *((m, {"lowrank.ranks": (1, 3, 2)}) for m in RANKED)]
CASES += [(m, {"lowrank.tau": 2}) for m in ("fedloru", "pfedloru")]
CASES += [
    ("fedloru", {"lowrank.tau": 2, **more})
    for more in (
        {"lowrank.init": "momentum"},
        {"lowrank.merge": False},
        {"lowrank.merge": False, "lowrank.init": "momentum"},
        {"llm.adapter.args.0.adapter_method": "loha"},
        {"llm.adapter.args.0.adapter_method": "lokr"},
    )
]
CASES += [
    (m, {"lowrank.tau": 2, "lowrank.nested_ranks": (1, 0), "llm.adapter.args.0.r": 3})
    for m in ("mfedloru", "pmfedloru")
]
CASES += [("flora", {"lowrank.merge": False, **kept}) for kept in ({}, {"lowrank.max_kept_rank": 4})]
CASES += [("pfedlora", {"lowrank.variant": 2}), ("fedhm", {"lowrank.rank_factors": (2, 8, 4)})]
#: hyperparameters of one-shot methods that change what is sent besides the weights, or compress it
CASES += [
    (m, {"lowrank.fisher": "kfac", "lowrank.steps": 40, "lowrank.compress": c})
    for m in METHODS
    for c in (False, True)
    if "fisher" in get_method_class(m).Params.__dataclass_fields__
]
#: every method with every kind of model that it supports
EACH = [(m, task) for task in TASKS for m in METHODS if TASKS[task] in requirements(m).tasks]
ENCODER = [m for m, task in EACH if task == "encoder"]
#: the same, but what is asked of a method with further kinds of models takes long
FIRST = [
    pytest.param(m, task, marks=() if (task == "encoder") or m not in ENCODER else pytest.mark.slow) for m, task in EACH
]
CHECKS = {check.name: check.function for check in checks.CHECKS}


def fixed_ranks(method):
    """The keys with which no client shrinks."""
    return {"lowrank.prune": 1.0} if "prune" in get_method_class(method).Params.__dataclass_fields__ else {}


@pytest.fixture
def make(bench):
    """``make(task, method, **keys)``: an engine with an outdir of its own."""
    return bench.make


# -- a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, task", EACH)
def test_a_run_and_its_files(bench, method, task):
    checks.check_run(bench, method, task)


@pytest.mark.parametrize("check", ["seed", "resume", "arguments"])
@pytest.mark.parametrize("method, task", FIRST)
def test_every_method_with_every_model(bench, method, task, check):
    CHECKS[check](bench, method, task)


@pytest.mark.parametrize("check", ["dropouts", "one client", "server optimizer"])
@pytest.mark.parametrize("method", ENCODER)
def test_every_method_with_an_encoder(bench, method, check):
    CHECKS[check](bench, method, "encoder")


@pytest.mark.more
@pytest.mark.parametrize("method", ENCODER)
def test_it_learns_and_saves_only_the_files_of_its_configuration(bench, method):
    engine, result = checks.check_learns(bench, method, "encoder")
    own = {"personal"} if engine.workspace.personal.untrained else set()
    assert set(result.saved) == {"model" if result.base_changed else "adapter"} | own
    assert (engine.recorder.outdir / "model").exists() == result.base_changed


@pytest.mark.more
@pytest.mark.parametrize(
    "method, task",
    [
        pytest.param(m, task, marks=() if task == "encoder" and m in ("pfedlora", "rolora") else pytest.mark.slow)
        for m, task in EACH
    ],
)
def test_clients_that_train_together_end_where_they_end_one_by_one(bench, method, task):
    trained = checks.check_cohort(bench, method, task, fixed_ranks(method))
    method = get_method_class(method)
    needs = requirements(method.name)
    adapts = needs.adapts(None) and not needs.alone and "base" not in (*method.shared, *method.personal)
    assert (trained == 3) == (task != "vision" and adapts), "three rounds of three clients, in cohorts of two"


@pytest.mark.parametrize("method", [m for m in ENCODER if requirements(m).adapter == "optional"])
def test_one_shot_methods_on_adapters_train_together_too(bench, method):
    assert checks.check_cohort(bench, method, "encoder", {"llm.adapter.use": True, "data.subsample": 0.5}) == 3


# -- bytes ---------------------------------------------------------------------------------------------


def factors_only(message, rank_factors, client):
    """The part of a message that a FedHM client receives: the factors of its rank, without the full weights."""
    factor = rank_factors[(client - 1) % len(rank_factors)]
    got = {n: t for n, t in message.items() if not n.startswith("svd:")}
    if len(got) == len(message):
        return message  # another method's
    for name in [n.removesuffix(".base_layer.weight") for n in got if n.endswith(".base_layer.weight")]:
        d_out, d_in = got.pop(f"{name}.base_layer.weight").shape
        rank = max(round(d_out / factor), 1)
        got |= {f"{name}.factor_U": torch.empty(d_out, rank), f"{name}.factor_V": torch.empty(rank, d_in)}
    return got


@pytest.mark.parametrize("method, keys", [c for c in CASES if c[0] in ENCODER])
def test_bytes_are_those_of_the_tensors_that_were_sent(bench, method, keys):
    ranks = keys.get("lowrank.ranks")

    def cut(lacks, client):
        """What a client is sent, by the definitions of the methods, without their ``tailor``."""
        rank = ranks[(client - 1) % 3] if ranks else None
        got = {
            n: t if ":" in n else t[:rank] if ".lora_A." in n else t[:, :rank] if ".lora_B." in n else t
            for n, t in lacks.items()
            if not n.startswith("fold:")  # of small matrices between A and B, for the global model
        }
        return factors_only(got, keys.get("lowrank.rank_factors", (4,)), client)

    checks.check_bytes(bench, method, "encoder", keys, cut)


# -- clients of a round --------------------------------------------------------------------------------


@pytest.mark.parametrize("task, ranks", [("encoder", (1, 3, 2)), ("encoder", (4,)), ("causal", (5, 1, 1, 2, 3))])
@pytest.mark.parametrize("method", RANKED)
def test_clients_of_different_ranks(make, monkeypatch, method, task, ranks):
    keys = {"lowrank.ranks": ranks, "federate.client_num": 5, "federate.sample_client_num": 3, **fixed_ranks(method)}
    engine = make(task, method, keys)
    upload = engine.method.upload

    def check(model, round, client):
        tensors = upload(model, round, client)
        rank = ranks[(client.id - 1) % len(ranks)]
        held = {n: p for n, p in model.named_parameters() if n.endswith(".default.weight")}
        for pairs in (held, {n: t for n, t in tensors.items() if ":" not in n}):  # one may send products of a pair
            assert {t.shape[0] for n, t in pairs.items() if "lora_A" in n} <= {rank}
            assert {t.shape[1] for n, t in pairs.items() if "lora_B" in n} <= {rank}
        for module in model.modules():
            if hasattr(module, "lora_A"):
                assert module.scaling["default"] == pytest.approx(6 / rank)
        return tensors

    monkeypatch.setattr(engine.method, "upload", check)
    assert not any(r["failed"] for r in engine.run().history)


# -- weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ENCODER)
def test_weights_by_samples_or_equal(bench, method):
    checks.check_weights(bench, method, "encoder", weighs=True)


@pytest.mark.parametrize("method", ["rolora", "ffa_lora"])
def test_the_frozen_half_keeps_every_bit_in_a_run(make, method):
    decays = {"type": "AdamW", "lr": 0.05, "weight_decay": 0.5}
    engine = make("encoder", method, {"train.optimizer": decays, "federate.total_round_num": 4})
    states = [state_of(engine)]
    engine.on_round = lambda record: states.append(state_of(engine)) and None
    assert not any(r["failed"] for r in engine.run().history)
    for half, before, after in zip(["lora_A", "lora_B" if method == "rolora" else "lora_A"] * 2, states, states[1:]):
        assert all(torch.equal(before[n], after[n]) == (half in n) for n in before if "lora_" in n)


# -- what is saved -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, keys, task",
    [
        (method, keys, task)
        for method, keys in CASES
        for task in TASKS
        # A model from scratch has no base to keep the pairs beside.
        if keys and (method, task) in EACH and (task != "vision" or keys.get("lowrank.merge", True))
    ],
)
def test_what_is_saved_loads_with_the_plain_libraries(bench, task, method, keys):
    engine = bench.make(task, method, {**checks.SAVED, **keys})
    checks.loads_with_the_plain_libraries(bench, engine, task)


@pytest.mark.more
@pytest.mark.parametrize("method", ["pfedloru", "pmfedloru", "pfedlora"])
def test_a_personal_adapter_on_the_saved_model_is_the_clients_model(bench, method):
    engine = bench.make("encoder", method, checks.SAVED)
    result = engine.run()
    engine.workspace.load_client(engine.ledger.state, 1)
    base = AutoModelForSequenceClassification.from_pretrained(str(result.outdir / "model"))
    own = PeftModel.from_pretrained(base, str(result.outdir / "personal" / "client_1")).eval()
    test, wanted = engine.workspace.data.test, logits(engine.model, engine.workspace.data.test)
    torch.testing.assert_close(logits(own, test), wanted, atol=1e-5, rtol=1e-5)
    with own.disable_adapter():
        assert not torch.allclose(logits(own, test), wanted, atol=1e-3), "its pair does something"


@pytest.mark.more
@pytest.mark.parametrize("kept", ["lora_B", "head"])
def test_a_clients_half_of_the_adapter_is_saved_with_the_head_and_loads_by_itself(bench, own_methods, kept):
    """Where the client's own tensors are of the adapter that all train, its folder is loaded as the global one's is."""

    @register_method("own_half")
    class OwnHalf(Averaging):
        """Two of A, B and the head are averaged; every client keeps the third."""

        source, sends = "a test", "A"
        shared = tuple(tag for tag in ("lora_A", "lora_B", "head") if tag != kept)
        personal = (kept,)

        def phases(self, round, client=None):
            return [Phase(train=("lora_A", "lora_B", "head"))]

    engine = bench.make("encoder", "own_half", checks.SAVED)
    result = engine.run()
    engine.workspace.load_client(engine.ledger.state, 1)
    labels, test = {"num_labels": engine.workspace.data.num_labels}, engine.workspace.data.test
    own = AutoPeftModelForSequenceClassification.from_pretrained(result.outdir / "personal" / "client_1", **labels)
    wanted = logits(engine.model, test)
    torch.testing.assert_close(logits(own.eval(), test), wanted, atol=1e-5, rtol=1e-5)
    shared = AutoPeftModelForSequenceClassification.from_pretrained(result.outdir / "adapter", **labels)
    assert not torch.allclose(logits(shared.eval(), test), wanted, atol=1e-3), "what it keeps does something"


@pytest.mark.more
def test_what_a_nested_method_keeps_beside_the_base_can_be_read_again(bench):
    engine = bench.make("encoder", "mfedloru", {**checks.SAVED, "lowrank.merge": False, "lowrank.tau": 1})
    result = engine.run()
    read = load_run(result.outdir).model
    engine.workspace.load_global(engine.ledger.state)
    test = engine.workspace.data.test
    torch.testing.assert_close(logits(read, test), logits(engine.model, test), atol=1e-5, rtol=1e-5)


# -- half precision ------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("method, task", [*((m, "encoder") for m in ENCODER), ("rolora", "causal")])
def test_half_precision(bench, method, task):
    checks.check_half_precision(bench, method, task)
