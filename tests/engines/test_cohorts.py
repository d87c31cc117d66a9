"""``train.cohort``: clients that train in one pass end where they end one by one, and who cannot is trained alone."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

import fs_lowrank
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.errors import UserError, say_once
from fs_lowrank.methods import Phase, get_method_class
from fs_lowrank.models.names import all_tensors
from fs_lowrank.rounds import trainer
from fs_lowrank.rounds.round import Round
from fs_lowrank.rounds.trainer import Trainer
from fs_lowrank.settings import Optimizer
from fs_lowrank.settings.effects import without_effect
from fs_lowrank.training import cohort
from tests.cases import same_end, same_model, save_family

FEW = {"federate.client_num": 5, "federate.total_round_num": 3, "train.cohort": 2, "federate.method": "fedloru"}
SGD = {"federate.total_round_num": 2, "train.optimizer": {"type": "SGD", "lr": 0.05}}


@pytest.fixture
def trained(monkeypatch):
    """The number of clients of each cohort that has trained together."""
    sizes, real = [], trainer.train_cohort

    def train(model, members, *given, **options):
        found = real(model, members, *given, **options)
        sizes.append(len(members))
        return found

    monkeypatch.setattr(trainer, "train_cohort", train)
    say_once.cache_clear()
    return sizes


@pytest.fixture
def both(make_engine, trained):
    """``both(task, keys, size)``: runs of 5 clients in cohorts and one by one, which end alike; the first of them."""

    def run(task, keys, size=3, tolerance=1e-5):
        keys = {**SGD, "federate.client_num": 5, **keys}
        ours, plain = (make_engine(task, {**keys, "train.cohort": n}) for n in (size, "off"))
        start = {n: t.clone() for n, t in ours.ledger.state.items()}
        for engine in (ours, plain):
            engine.run()
        moved = [n for n, t in start.items() if not torch.allclose(ours.ledger.state[n], t, atol=1e-4)]
        assert moved, "the training is too short to tell anything"
        same_end(ours, plain, tolerance)
        return ours

    return run


CASES = {
    "a language model": ("causal", {}),
    "unequal numbers of batches": ("encoder", {"train.batch_or_epoch": "epoch", "train.local_update_steps": 2}),
    "unequal batches": ("encoder", {"dataloader.batch_size": 30}),
    "a last batch left out": (
        "encoder",
        {"train.batch_or_epoch": "epoch", "dataloader.batch_size": 30, "dataloader.drop_last": True},
    ),
    "momentum, decay and clipping": (
        "encoder",
        {
            "train.optimizer": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
            "train.batch_or_epoch": "epoch",
            "grad.grad_clip": 0.3,
        },
    ),
    "accumulated gradients": (
        "encoder",
        {
            "train.optimizer": {"type": "SGD", "lr": 0.05, "momentum": 0.9},
            "train.batch_or_epoch": "epoch",
            "grad.grad_accum_count": 3,
        },
    ),
    "blocks": ("encoder", {"train.blocks": 3}),
    "blocks of a language model": ("causal", {"train.blocks": 3, "dataloader.batch_size": 5}),
    "all positions": ("encoder", {"train.only_read": "off"}),
    "states computed": ("causal", {"train.cache_frozen": "off"}),
    "unequal ranks": ("encoder", {"federate.method": "flexlora", "lowrank.ranks": [1, 3, 2]}),
    "ranks of a language model": ("causal", {"federate.method": "flora", "lowrank.ranks": [3, 1]}),
    "dropout of the adapter": (
        "causal",
        {"llm.adapter.args": [{"r": 2, "alpha": 6, "dropout": 0.3, "modules": ["q_proj", "v_proj"]}]},
    ),
    "no dropout": ("encoder", {"train.frozen_dropout": True}),
}


#: the others are in ``make test-slow``
QUICK = (
    "a language model",
    "unequal numbers of batches",
    "blocks",
    "unequal ranks",
)


@pytest.mark.more
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_the_same_run(both, trained, case):
    both(*CASES[case])
    assert trained == [3, 2] * 2


@pytest.mark.more
def test_states_that_are_kept_of_some_only(both, trained):
    """Those of clients whose samples are not seen often enough are computed in each step."""
    prefix = both("encoder", {"federate.total_round_num": 1}, 4).workspace.prefix
    assert [prefix.budget.get(f"client {i}", False) for i in range(1, 5)] == [True, True, True, False] and prefix.parts
    assert trained == [3, 2] and "client 1" in prefix.cached and "client 4" not in prefix.cached


@pytest.mark.more
def test_one_step_of_adam(both, trained):
    # More steps would enlarge rounding where gradients are almost zero.
    keys = {"train.optimizer": {"type": "AdamW", "lr": 5e-3, "weight_decay": 0.01}}
    both("encoder", {**keys, "federate.total_round_num": 1, "train.local_update_steps": 1})
    assert trained == [3, 2]


@pytest.mark.more
def test_half_precision(both, trained):
    """Rounding is that of bfloat16, in which the base computes."""
    both("encoder", {"lowrank.dtype": "bfloat16"}, tolerance=2e-3)
    assert trained == [3, 2] * 2


@pytest.mark.more
@pytest.mark.parametrize("kind", ["layoutlm", "roberta"])
def test_families_whose_clients_train_together(both, trained, tmp_path, kind):
    """LayoutLM's mask of dropout is that of one query, and RoBERTa's head is a module with two linear layers."""
    model = save_family(tmp_path / "model", kind, AutoModel)
    keys = {"model.type": f"{model}@transformers", "llm.adapter.args": [{"r": 2, "modules": ["query"]}]}
    both("encoder", {**keys, "federate.client_num": 3, "federate.total_round_num": 1})
    assert trained == [3]


# -- the same bits ---------------------------------------------------------------------------------------


def equal(a, b):
    same_model(a, b)
    assert [r["loss"] for r in a.history] == [r["loss"] for r in b.history]


@pytest.mark.slow
def test_resumed_and_by_two_processes(few, trained):
    keys = {"lowrank.tau": 1, "federate.sample_client_num": 4}
    whole = fs_lowrank.run(few("whole", keys))
    assert trained == [2] * 6
    config = few("resumed", keys)
    fs_lowrank.run(config, on_round=lambda record: record["round"] == 1)
    equal(whole, fs_lowrank.run(config, resume=True))
    seen = []
    by_two = few("two", {**keys, "federate.process_num": 2})
    equal(whole, fs_lowrank.run(by_two, on_client=lambda round, done, of: seen.append((round, done, of))))
    assert seen == [(round, done, 4) for round in (1, 2, 3) for done in range(4)]
    seconds = whole.history[0]["client_seconds"]
    assert len(seconds) == 4 and all(s["training"] > 0 and not s["reused"] for s in seconds.values())


@pytest.mark.more
def test_clients_that_are_kept_for_other_runs_train_one_by_one(few, trained, tmp_path):
    keys = {"lowrank.reuse_clients": str(tmp_path / "clients"), "federate.total_round_num": 1}
    first, again = (fs_lowrank.run(few(name, keys)) for name in ("first", "again"))
    equal(first, again)
    assert not trained and all(s["reused"] for s in again.history[0]["client_seconds"].values())


# -- failures --------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_client_that_fails_does_not_take_the_others(make_engine, trained, caplog):
    keys = {**SGD, "federate.client_num": 4}
    ours, plain = (make_engine("encoder", {**keys, "train.cohort": n}) for n in (4, "off"))
    for engine in (ours, plain):
        # Tokens that the model does not have.
        clients = list(engine.workspace.data.clients)
        unknown = {"input_ids": [np.full_like(row, 10**6) for row in clients[1].columns["input_ids"]]}
        clients[1] = dataclasses.replace(clients[1], columns={**clients[1].columns, **unknown})
        engine.workspace.training = clients
        engine.run()
    assert trained == [] and "are trained one by one: IndexError" in caplog.text
    for a, b in zip(ours.recorder.history, plain.recorder.history, strict=True):
        assert a["failed"] == b["failed"] and [f["client"] for f in a["failed"]] == [2] and a["clients"] == [1, 3, 4]
    assert all(torch.equal(t, plain.ledger.state[n]) for n, t in ours.ledger.state.items())


@pytest.mark.more
def test_a_client_that_diverges_does_not_take_the_others(make_engine, trained, monkeypatch):
    keys = {**SGD, "federate.client_num": 3, "grad.grad_clip": 1.0}
    ours, plain = (make_engine("encoder", {**keys, "train.cohort": n}) for n in (3, "off"))
    for engine in (ours, plain):

        def load(view, client, *told, engine=engine, real=engine.workspace.load):
            real(view, client, *told)
            if client == 2:
                with torch.no_grad():
                    next(t for n, t in all_tensors(engine.model).items() if "modules_to_save" in n).fill_(torch.nan)

        monkeypatch.setattr(engine.workspace, "load", load)
        engine.run()
        assert [[f["client"] for f in r["failed"]] for r in engine.recorder.history] == [[2], [2]]
    assert trained == [3, 3]
    for name, value in plain.ledger.state.items():
        torch.testing.assert_close(ours.ledger.state[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("size", [3, "off"])
def test_a_loss_that_is_not_finite_costs_the_update(make_engine, trained, monkeypatch, size):
    """The client's personal tensors are set back when the round ends."""
    keys = {**SGD, "federate.method": "pfedloru", "train.cohort": size}
    ours, plain = make_engine("encoder", keys), make_engine("encoder", keys)
    take = Round.take

    def taking(self, client, parcel):
        if (self.number, client) == (2, 2):
            parcel.facts["loss"] *= math.nan
        return take(self, client, parcel)

    plain.on_round = lambda record: record["round"] == 1
    plain.run()
    with monkeypatch.context() as patch:
        patch.setattr(Round, "take", taking)
        record = ours.run().history[1]
    assert record["clients"] == [1, 3] and math.isfinite(record["loss"])
    reason = "client 2: its loss is nan, expected a finite number"
    assert record["failed"] == [{"client": 2, "kind": "refused", "reason": reason}]
    same = {
        c: all(torch.equal(t, plain.workspace.personal[c][n]) for n, t in ours.workspace.personal[c].items())
        for c in (1, 2)
    }
    assert same == {1: False, 2: True}


# -- who trains alone ------------------------------------------------------------------------------------

ALONE = {
    "the base": ("encoder", {"federate.method": "fedavg"}, r"the method trains the base \(.*embeddings"),
    "a penalty": ("encoder", {"federate.method": "fedhm"}, "a penalty is added to a client's loss"),
    "another adapter": (
        "encoder",
        {"llm.adapter.args": [{"r": 2, "adapter_method": "lokr", "modules": ["query"]}]},
        "differ by",  # PEFT's LoKr draws whether it drops a module
    ),
    "nested pairs": (
        "encoder",
        {"federate.method": "mfedloru", "lowrank.nested_ranks": [1, 1], "llm.adapter.args.0.r": 3},
        "is a tensor of Nested, which",
    ),
    # It is computed for the tokens with a label, whose number is not that of the batch's rows.
    "a language model's head": (
        "causal",
        {"llm.adapter.args": [{"r": 2, "modules": ["q_proj"], "modules_to_save": ["lm_head"]}]},
        "",
    ),
    "virtual tokens": (
        "encoder",
        {"llm.adapter.args": [{"adapter_method": "prompt", "num_virtual_tokens": 3}]},
        "dropout of values of shape",
    ),
    "layers computed again": (
        "encoder",
        {"llm.adapter.args.0.layers": [0, 1, 2], "train.checkpointing": True},
        "train.checkpointing computes layers again",
    ),
    "an optimizer of matrices": (
        "encoder",
        {"train.optimizer": {"type": "Adafactor", "lr": 0.01}},
        "train.optimizer.type = Adafactor does not step each number by itself",
    ),
}


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.more
def test_it_says_once_why_clients_train_alone(make_engine, trained, caplog, case):
    task, keys, reason = ALONE[case]
    ours, plain = (make_engine(task, {**SGD, **keys, "train.cohort": n}) for n in (3, "off"))
    for engine in (ours, plain):
        engine.run()
    said = [r.getMessage() for r in caplog.records if "train.cohort" in r.getMessage()]
    assert trained == [] and len(said) == 1, said
    assert re.search(f"^train.cohort: clients are trained one by one: .*{reason}", said[0])
    assert all(torch.equal(t, plain.ledger.state[n]) for n, t in ours.ledger.state.items())


def asks_for_it(engine):
    return {"needs": dataclasses.replace(engine.method.needs, alone=True)}


def other_phases(engine):
    shared = engine.method.shared
    return {"phases": lambda t, c=None: [Phase(shared, steps=1)] if c == 2 else [Phase(shared)]}


@pytest.mark.more
@pytest.mark.parametrize(
    "changes, cohorts, said",
    [
        (asks_for_it, [], "one by one: federate.method = fedlora asks for it"),
        (other_phases, [2, 2], "the clients train different tensors"),  # clients 3 and 4 train together
    ],
)
def test_what_a_method_says(make_engine, trained, caplog, monkeypatch, changes, cohorts, said):
    engine = make_engine("encoder", {**SGD, "federate.client_num": 4, "train.cohort": 2})
    for name, value in changes(engine).items():
        monkeypatch.setattr(engine.method, name, value)
    engine.run()
    assert trained == cohorts and said in caplog.text


def test_images(vision_settings, trained, caplog):
    keys = {**SGD, "federate.total_round_num": 1, "train.cohort": 3}
    engine = LocalEngine(fs_lowrank.load_config(vision_settings, keys))
    assert Trainer(engine.workspace).cohort == 1 and "one by one: images are not trained together" in caplog.text


def test_a_model_whose_samples_depend_on_their_company(make_engine, tmp_path, trained, caplog):
    """FNet mixes padding into its results."""
    keys = {
        "model.type": f"{save_family(tmp_path / 'fnet', 'fnet', AutoModel)}@transformers",
        "llm.adapter.args": [{"r": 2, "modules": ["intermediate.dense"]}],
    }
    engine = make_engine("encoder", {**SGD, **keys, "train.cohort": 3})
    before = {n: t.clone() for n, t in all_tensors(engine.model).items()}
    asked = {n: p.requires_grad for n, p in engine.model.named_parameters()}
    assert Trainer(engine.workspace).cohort == 1
    assert "one by one: dropout of values of shape (1, 4, 32) is not drawn sample by sample" in caplog.text
    assert all(torch.equal(t, before[n]) for n, t in all_tensors(engine.model).items())
    assert asked == {n: p.requires_grad for n, p in engine.model.named_parameters()}


@pytest.mark.parametrize(
    "kind", sorted(n for n in vars(torch.optim) if n[0].isupper() and n not in ("Optimizer", "LBFGS"))
)
def test_an_optimizer_that_steps_each_number_alone_steps_stacked_tensors_as_each_of_them(kind):
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(3, 2, 4, 5, generator=draw)

    def stepped(*starts):
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
        for gradient in gradients:
            for parameter, own in zip(parameters, gradient if len(parameters) > 1 else [gradient]):
                parameter.grad = own.clone()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in parameters])

    try:
        alone = torch.allclose(stepped(start), stepped(*start), rtol=1e-5, atol=1e-7)
    except (RuntimeError, ValueError):  # of sparse gradients, or for matrices only
        alone = False
    assert cohort.elementwise(Optimizer(type=kind)) == alone


# -- the key ---------------------------------------------------------------------------------------------


def test_the_key(settings):
    def of(value):
        return fs_lowrank.load_config(settings, {"train.cohort": value}).train.cohort

    assert [of(v) for v in ("off", False, 1, "auto", 0, 7)] == [1, 1, 1, 0, 0, 7]
    for value, reported in (("off", False), ("auto", False), (4, True)):
        config = fs_lowrank.load_config(settings, {"train.cohort": value})
        told = without_effect(config, "federatedscope", get_method_class("fedlora"))
        assert [v for name, v, _ in told if name == "train.cohort"] == [value] * reported
    for wrong in (-1, 2.5, "many"):
        with pytest.raises(UserError, match="train.cohort.*off, a whole number or auto"):
            of(wrong)


def test_auto_decides_by_the_sizes(settings, tmp_path):
    def size(tokens, **keys):
        config = fs_lowrank.load_config(settings, {"train.cohort": "auto", **keys})
        return cohort.cohort_size(model, config, np.full(10, tokens), 1)

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_hidden_layers=3))
    assert size(20) == 1, "an unknown device"
    model = model.to_empty(device="cpu")
    # A further pass costs 38 tokens.
    assert [size(20, **{"dataloader.batch_size": n}) for n in (2, 6, 7, 8, 16)] == [16, 10, 8, 1, 1]
    assert size(64, **{"dataloader.batch_size": 8}) == 1 and size(20, **{"train.cohort": 5}) == 5
    # By hand: one layer of 16 · 768 + 4 · 3072 + 3 · 12 · 100 float32 values; no logits of a vocabulary.
    assert cohort.bytes_a_token(model, 1, 100) == 4 * (16 * 768 + 4 * 3072 + 3 * 12 * 100)
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=2))
    assert cohort.bytes_a_token(causal, 0, 100) == 4 * 3 * 50257
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", num_layers=2))
    model = model.to_empty(device="cpu")
    assert size(5, **{"dataloader.batch_size": 2}) == 1, "it has a decoder"


def test_auto_gives_every_core_as_many_cohorts():
    assert [cohort.evenly(8, n, 2) for n in (1, 2, 7, 10, 50, 200)] == [1, 1, 4, 5, 7, 8]
    assert [cohort.evenly(8, n, 1) for n in (7, 10, 200)] == [7, 5, 8] and cohort.evenly(8, 16, 64) == 1
    for size, n, cores in itertools.product((2, 7, 16), (3, 10, 50), (1, 2, 8)):
        number = math.ceil(n / cohort.evenly(size, n, cores))
        assert cohort.evenly(size, n, cores) <= size and (number >= min(cores, n) or cores > n / 2)


@pytest.mark.more
def test_cohorts_are_of_equal_sizes(make_engine):
    workspace = make_engine("text", {**SGD, "federate.client_num": 6, "train.cohort": 4}).workspace

    def cohorts(*clients):
        tasks = [workspace.task(client, 1) for client in clients]
        return [[task.client for task in group] for group in Trainer(workspace).cohorts(tasks)]

    assert cohorts(5, 1, 4, 2, 3, 6) == [[5, 1, 4], [2, 3, 6]] and cohorts(5, 1) == [[5, 1]]
    assert cohorts(5, 1, 4, 2, 3) == [[5, 1, 4], [2, 3]]
