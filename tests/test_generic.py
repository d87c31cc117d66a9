"""Tests for every registered method, on a tiny encoder, causal model and vision model."""

import json
import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fs_lowrank import list_methods, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.methods import Averaging, get_method_class, requirements
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.names import all_tensors
from fs_lowrank.models.vision import load_vision
from fs_lowrank.training import train_client
from fs_lowrank.versions import SCHEMA

METHODS = list_methods()
RANKED = [n for n in METHODS if "ranks" in get_method_class(n).Params.__dataclass_fields__]
AVERAGING = [n for n in METHODS if issubclass(get_method_class(n), Averaging)]
#: those that take only plain chains of layers
CHAINS = ("otfusion", "pfnm")
#: every method as it is, and again where a hyperparameter changes what travels
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
CASES += [("pfedlora", {"lowrank.variant": 2}), ("fedhm", {"lowrank.rank_factors": (2, 8, 4)})]
#: of the methods that can work on little: what they send beside the weights, and within the bytes of averaging
CASES += [
    (m, {"lowrank.fisher": "kfac", "lowrank.steps": 40, "lowrank.compress": c})
    for m in METHODS
    for c in (False, True)
    if "fisher" in get_method_class(m).Params.__dataclass_fields__
]
TASKS = {"encoder": "SequenceClassification", "causal": "CausalLM", "vision": "ImageClassification"}
#: every method with every kind of model that it takes
EACH = [(m, task) for task in TASKS for m in METHODS if TASKS[task] in requirements(m).tasks]
ENCODER = [m for m, task in EACH if task == "encoder"]


@pytest.fixture
def make(settings, causal_settings, vision_settings, tmp_path, no_curves):
    """``make(task, method, **keys)``: an engine with an outdir of its own; curves are not drawn.

    Unless the keys ask for it nothing is scored before the last round, and nothing kept to resume from.
    """
    made, of = [], {"encoder": settings, "causal": causal_settings, "vision": vision_settings}

    def make(task, method, keys=None, **callbacks):
        made.append(method)
        plain = {"model.type": "lenet", "model.use_bias": False, "lowrank.width": 0.5} if method in CHAINS else {}
        if "generator_steps" in get_method_class(method).Params.__dataclass_fields__:
            plain |= {"lowrank.epochs": 2, "lowrank.generator_steps": 2, "lowrank.images": 8, "lowrank.channels": 4}
        config = load_config(
            of[task],
            {
                **plain,
                "federate.method": method,
                "federate.client_num": 3,
                "federate.total_round_num": 3,
                "train.local_update_steps": 1,
                "eval.freq": -1,
                "lowrank.checkpoint_freq": 0,
                "outdir": str(tmp_path / str(len(made))),
                **(keys or {}),
            },
        )
        return LocalEngine(config, **callbacks)

    return make


def averages_head(method):
    return isinstance(method, Averaging) or "head" in method.averaged


def state_of(engine):
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in engine.ledger.state.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n] for n in a
    )


def logits(model, examples, count=6):
    batch = examples.batch(range(min(count, len(examples))))
    batch.pop("labels")
    model.eval()
    with torch.no_grad():
        out = model(**batch).logits
    return out[batch["attention_mask"].bool()] if out.ndim == 3 else out


def without_seconds(history):
    return [
        {k: v for k, v in json.loads(json.dumps(r)).items() if k not in ("seconds", "client_seconds")} for r in history
    ]


def plain_model(task, place):
    if task == "vision":
        return load_vision(place)
    if task == "causal":
        return AutoModelForCausalLM.from_pretrained(str(place))
    return AutoModelForSequenceClassification.from_pretrained(str(place), num_labels=2)


#: keys of a run whose model has moved far enough to be told from the untrained one
SAVED = {"lowrank.save_merged": True, "federate.total_round_num": 2, "train.optimizer": {"type": "AdamW", "lr": 0.02}}


@pytest.fixture
def bases(tiny_encoder, tiny_causal):
    """Folders of the models below the adapters; a network for images is saved beside its own."""
    return {"encoder": tiny_encoder, "causal": tiny_causal}


def loads_with_the_plain_libraries(engine, task, bases):
    """Runs the engine; what it has saved gives its logits without this package. Returns the run's result."""
    untrained, names = logits(engine.model, engine.site.data.test), [n for n, _ in engine.model.named_parameters()]
    result = engine.run()
    wanted = logits(result.model, engine.site.data.test)
    assert not torch.allclose(untrained, wanted, atol=1e-3)
    torch.testing.assert_close(
        logits(plain_model(task, engine.keeper.outdir / "model"), engine.site.data.test), wanted, atol=1e-5, rtol=1e-5
    )
    assert (engine.keeper.outdir / "model" / "tokenizer.json").exists() == (task != "vision")
    # Saving has changed nothing: the pairs are beside the weights as before.
    assert [n for n, _ in result.model.named_parameters()] == names
    if result.base_changed:
        assert not (engine.keeper.outdir / "adapter").exists()
        with pytest.raises(ValueError, match="save_model"):
            result.save_adapter(engine.keeper.outdir / "adapter")
    else:
        base = bases.get(task, engine.keeper.outdir / "adapter" / "base")
        loaded = PeftModel.from_pretrained(plain_model(task, base), str(engine.keeper.outdir / "adapter"))
        torch.testing.assert_close(logits(loaded, engine.site.data.test), wanted, atol=1e-6, rtol=1e-6)
    return result


# -- a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, task", EACH)
def test_a_run_what_it_saves_and_the_same_again(make, bases, method, task):
    seen, keys = (
        [],
        {
            **SAVED,
            "federate.sample_client_num": 2,
            "eval.freq": 1,
            "lowrank.checkpoint_freq": 1,
            "train.local_update_steps": 2,
        },
    )

    def on_round(record):
        view = engine.method.view(engine.ledger.state)
        own = all_tensors(engine.model)
        assert all(torch.equal(own[n], view[n]) for n in view), "the model stands where the state does"
        seen.append(record["round"])

    engine = make(task, method, keys, on_round=on_round)
    start = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    result = loads_with_the_plain_libraries(engine, task, bases)
    assert seen == [1, 2] and len(result.history) == 2
    for record in result.history:
        assert math.isfinite(record["loss"]) and record["selected"] == record["clients"] and len(record["clients"]) == 2
        own = {"client_test"} if engine.site.personal.untrained else set()
        assert record["metrics"].keys() == {"test", "val"} | own and not record["failed"]
        assert all(math.isfinite(v) for m in record["metrics"].values() for v in m.values())
    allowed = set(engine.method.view(engine.ledger.state)) | set(engine.method.changed_base(engine.model))
    moved = {n for n, p in engine.model.named_parameters() if not torch.equal(p, start[n])}
    assert moved and moved <= allowed, "nothing frozen has moved"
    on_disk = [json.loads(line) for line in (engine.keeper.outdir / "rounds.jsonl").read_text().splitlines()]
    assert without_seconds(on_disk) == without_seconds(result.history)
    for name in ("config.yaml", "environment.json", "data.json", "summary.json", "rounds.jsonl"):
        assert (engine.keeper.outdir / name).stat().st_size
    for name in ("environment.json", "data.json", "summary.json"):
        assert json.loads((engine.keeper.outdir / name).read_text())["schema"] == SCHEMA
    assert load_config(engine.keeper.outdir / "config.yaml") == engine.config
    again = make(task, method, {**keys, "lowrank.save_merged": False})
    torch.manual_seed(int(torch.rand(()) * 1e6))  # what the process drew before has no say
    assert without_seconds(again.run().history) == without_seconds(result.history)
    assert equal(state_of(again), state_of(engine)), "one seed, one result"


@pytest.mark.parametrize("method, task", EACH)
def test_another_seed_is_another_split_and_start(make, method, task):
    one, other = (make(task, method, {"seed": seed}) for seed in (1, 2))
    drawn = task != "causal" or "base" not in get_method_class(method).shared  # a pre-trained model starts as it is
    assert equal(state_of(one), state_of(other)) != drawn
    assert one.site.data.fingerprint != other.site.data.fingerprint


@pytest.mark.parametrize("method", ENCODER)
def test_it_learns_and_saves_no_more_than_was_asked(make, method):
    # At 0.03 whole weights overshoot, and whether FedHM's loss falls far enough depends on the processor's rounding.
    lr = 1e-2 if "base" in get_method_class(method).shared else 3e-2
    engine = make(
        "encoder",
        method,
        {"federate.total_round_num": 5, "train.local_update_steps": 6, "train.optimizer": {"type": "AdamW", "lr": lr}},
    )
    result = engine.run()
    assert result.history[-1]["loss"] < 0.93 * result.history[0]["loss"]
    own = {"personal"} if engine.site.personal.untrained else set()
    assert set(result.saved) == {"model" if result.base_changed else "adapter", "curves"} | own
    assert (engine.keeper.outdir / "model").exists() == result.base_changed
    assert result.base_changed == (method in ("fedavg", "flora")) or method not in (
        "fedavg",
        "fedlora",
        "ffa_lora",
        "rolora",
        "flexlora",
        "flora",
    )


# -- bytes ---------------------------------------------------------------------------------------------


def size(tensors, head=True):
    """``numel × itemsize``, counted here by hand from shapes."""
    kept = [t for n, t in tensors.items() if head or not ("classifier" in n or "score" in n)]
    return sum(math.prod(t.shape) * {torch.float32: 4, torch.bfloat16: 2, torch.uint8: 1}[t.dtype] for t in kept)


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
def test_bytes_are_what_was_handed_over(make, monkeypatch, method, keys):
    ranks = keys.get("lowrank.ranks")
    engine = make(
        "encoder",
        method,
        {"federate.client_num": 5, "federate.sample_client_rate": 0.45, "federate.total_round_num": 6, **keys},
    )
    sent, messages = {}, {}
    upload, commit = engine.method.upload, engine.ledger.commit

    def spy_upload(model, round, client):
        tensors = upload(model, round, client)
        sent[round, client.id] = {n: t.detach().clone() for n, t in tensors.items()}
        return tensors

    def spy_commit(round, state, message):
        messages[round] = {n: t.clone() for n, t in message.items()}
        commit(round, state, message)

    monkeypatch.setattr(engine.method, "upload", spy_upload)
    monkeypatch.setattr(engine.ledger, "commit", spy_commit)
    result = engine.run()
    stands_at = {}
    for record in result.history:
        round = record["round"]
        assert record["selected"] == sorted({*record["selected"]} & {1, 2, 3, 4, 5}) and len(record["selected"]) == 2
        up = {c: sent[round, c] for c in record["selected"]}
        assert record["client_uplink_bytes"] == {str(c): size(t) for c, t in up.items()}
        assert record["uplink_bytes"] == sum(map(size, up.values()))
        assert record["uplink_bytes_without_head"] == sum(size(t, head=False) for t in up.values())
        down, bare = {}, 0
        for client in record["selected"]:
            lacks = {}
            for missed in range(stands_at.get(client, 0) + 1, round):
                lacks.update(messages[missed])
                for merged in [n.split(":", 2)[2] for n in messages[missed] if n.startswith("merge:")]:
                    lacks.pop(merged, None)  # the merge says all that there is to say of the pair
            rank = ranks[(client - 1) % 3] if ranks else None
            cut = {
                n: t[:rank] if ".lora_A." in n else t[:, :rank] if ".lora_B." in n else t
                for n, t in lacks.items()
                if not n.startswith("merge:")
            }
            cut |= {n: t for n, t in lacks.items() if n.startswith("merge:")}
            cut = factors_only(cut, keys.get("lowrank.rank_factors", (4,)), client)
            down[str(client)], bare = size(cut), bare + size(cut, head=False)
            stands_at[client] = round - 1
        assert record["client_downlink_bytes"] == down and record["downlink_bytes"] == sum(down.values())
        assert record["downlink_bytes_without_head"] == bare
        assert round > 1 or not record["downlink_bytes"], "the start comes from the seed"
    assert len({tuple(r["selected"]) for r in result.history}) > 1
    totals = result.bytes
    assert all(totals[k] == sum(r[k] for r in result.history) for k in totals)


@pytest.mark.parametrize("task", ("encoder", "causal"))
def test_rolora_sends_half_of_fedlora(make, task):
    def uplink(method):
        history = make(task, method, {"federate.total_round_num": 2}).run().history
        return [r["uplink_bytes_without_head"] for r in history]

    both, halves = uplink("fedlora"), uplink("rolora")
    assert both[0] == both[1] == sum(halves) and all(0.3 < h / both[0] < 0.7 for h in halves)
    assert uplink("ffa_lora") == [halves[0]] * 2


# -- who takes part ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task, ranks", [("encoder", (1, 3, 2)), ("encoder", (4,)), ("causal", (5, 1, 1, 2, 3))])
@pytest.mark.parametrize("method", RANKED)
def test_clients_of_different_ranks(make, monkeypatch, method, task, ranks):
    engine = make(task, method, {"lowrank.ranks": ranks, "federate.client_num": 5, "federate.sample_client_num": 3})
    upload = engine.method.upload

    def check(model, round, client):
        tensors = upload(model, round, client)
        rank = ranks[(client.id - 1) % len(ranks)]
        assert {t.shape[0] for n, t in tensors.items() if "lora_A" in n} == {rank}
        assert {t.shape[1] for n, t in tensors.items() if "lora_B" in n} == {rank}
        for module in model.modules():
            if hasattr(module, "lora_A"):
                assert module.scaling["default"] == pytest.approx(6 / rank)
        return tensors

    monkeypatch.setattr(engine.method, "upload", check)
    assert not any(r["failed"] for r in engine.run().history)


@pytest.mark.parametrize("method", ENCODER)
def test_clients_that_drop_out(make, method):
    engine = make("encoder", method, {"federate.client_num": 5, "lowrank.drop_rate": 0.4})
    history = engine.run().history
    lost = [f for r in history for f in r["failed"]]
    assert lost and all(f["kind"] == "dropped" for f in lost)
    for record in history:
        gone = {f["client"] for f in record["failed"]}
        assert set(record["clients"]) == set(record["selected"]) - gone and record["clients"]


# -- weights, and one client -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ENCODER)
def test_weights_by_samples_or_equal(make, monkeypatch, method):
    states = []
    for uniform in (False, True):
        fields = get_method_class(method).Params.__dataclass_fields__
        own = {"lowrank.average_by": "samples"} if "average_by" in fields else {}
        engine = make("encoder", method, {"federate.ignore_weight": uniform, "federate.total_round_num": 1, **own})
        sent = {}
        upload = engine.method.upload
        monkeypatch.setattr(
            engine.method,
            "upload",
            lambda m, r, c, upload=upload, sent=sent: sent.setdefault(
                c.id, {n: t.detach().clone() for n, t in upload(m, r, c).items()}
            ),
        )
        engine.run()
        sizes = [1 if uniform else len(e) for e in engine.site.data.clients]
        assert uniform or len(set(sizes)) > 1
        if averages_head(engine.method):
            head = next(n for n in engine.ledger.state if "classifier" in n and "weight" in n)
            mean = sum(n / sum(sizes) * sent[i][head].double() for i, n in enumerate(sizes, start=1))
            torch.testing.assert_close(engine.ledger.state[head].double(), mean, atol=1e-7, rtol=1e-6)
        states.append(state_of(engine))
    assert not equal(*states)


@pytest.mark.parametrize("method", ENCODER)
def test_one_client_one_round_is_local_training(make, method):
    keys = {
        "federate.client_num": 1,
        "federate.total_round_num": 1,
        "data.splitter": "iid",
        "data.splitter_args": [],
        "train.local_update_steps": 3,
    }
    alone, engine = (make("encoder", method, keys) for _ in range(2))
    engine.run()
    load_tensors(alone.model, alone.method.view(alone.ledger.state, 1))
    from fs_lowrank.seeds import derive

    before = logits(alone.model, alone.site.data.test)
    train_client(
        alone.model,
        alone.site.data.clients[0],
        alone.method.phases(1),
        alone.config,
        lr=5e-3,
        seed=derive(alone.config.seed, "train", 1, 1),
        owner="client 1",
        prefix=alone.site.prefix,
    )
    load_tensors(alone.model, alone.site.personal.untrained)
    trained = logits(alone.model, alone.site.data.test)
    assert not torch.allclose(before, trained, atol=1e-4)
    torch.testing.assert_close(logits(engine.model, engine.site.data.test), trained, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "optimizer", [{"type": "SGD", "momentum": 0.9, "weight_decay": 0.1}, {"type": "AdamW", "weight_decay": 0.5}]
)
@pytest.mark.parametrize("method", ["rolora", "ffa_lora"])
def test_the_frozen_half_keeps_every_bit_in_a_run(make, monkeypatch, method, optimizer):
    import fs_lowrank.rounds.site as site

    engine = make("encoder", method, {"train.optimizer": {"lr": 0.05, **optimizer}, "federate.total_round_num": 4})
    rounds = []

    def spy(model, examples, phases, config, **options):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        result = train_client(model, examples, phases, config, **options)
        frozen = [n for n in before if not any(half in n for half in (*phases[0].train, "modules_to_save"))]
        own = dict(model.named_parameters())
        assert all(torch.equal(before[n], own[n]) for n in frozen)
        assert any(not torch.equal(before[n], own[n]) for n in before if phases[0].train[0] in n)
        rounds.append(phases[0].train[0])
        return result

    monkeypatch.setattr(site, "train_client", spy)
    states = [state_of(engine)]
    engine.on_round = lambda record: states.append(state_of(engine)) and None
    assert not any(r["failed"] for r in engine.run().history)
    trained = ["lora_B", "lora_A" if method == "rolora" else "lora_B"] * 2
    assert rounds == [half for half in trained for _ in range(3)]
    for half, before, after in zip(trained, states, states[1:]):
        still = "lora_B" if half == "lora_A" else "lora_A"
        assert all(torch.equal(before[n], after[n]) == (still in n) for n in before if "lora_" in n)


# -- what is saved -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, keys, task", [(m, k, t) for m, k in CASES if k for t in TASKS if (m, t) in EACH])
def test_what_is_saved_loads_with_the_plain_libraries(make, bases, task, method, keys):
    if task == "vision" and not keys.get("lowrank.merge", True):
        pytest.skip("a model from scratch has no base to keep the pairs beside")
    loads_with_the_plain_libraries(make(task, method, {**SAVED, **keys}), task, bases)


# -- half precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, task", [*((m, "encoder") for m in ENCODER), ("rolora", "causal")])
def test_half_precision(make, monkeypatch, method, task):
    engine = make(task, method, {"lowrank.dtype": "bfloat16", "federate.total_round_num": 2})
    before, sent = state_of(engine), {}
    upload = engine.method.upload
    monkeypatch.setattr(
        engine.method,
        "upload",
        lambda m, r, c: (
            sent.setdefault((r, c.id), {n: t.detach().clone() for n, t in upload(m, r, c).items()}) and upload(m, r, c)
        ),
    )
    states = []
    engine.on_round = lambda record: states.append(state_of(engine)) and None
    result = engine.run()
    assert all(math.isfinite(r["loss"]) and not r["failed"] for r in result.history)
    assert next(p for n, p in engine.model.named_parameters() if "embed" in n).dtype == torch.bfloat16
    if averages_head(engine.method) and engine.method.needs.sums:
        # Tensors of both widths travel together, and still each client's own is averaged.
        sizes = [len(e) for e in engine.site.data.clients]
        for name in sent[1, 1]:
            mean = sum(n / sum(sizes) * sent[1, i][name].double() for i, n in enumerate(sizes, start=1))
            torch.testing.assert_close(states[0][name].double(), mean, atol=1e-6, rtol=2**-7)
    moved = [n for n in before if not torch.equal(before[n], engine.ledger.state[n])]
    assert moved and (task == "causal" or any("classifier" in n for n in moved))
    assert result.saved["model" if result.base_changed else "adapter"].exists()


# -- server optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", AVERAGING)
def test_a_server_optimizer_over_every_averaging_method(make, method):
    keys = {"federate.total_round_num": 1}
    plain = make("encoder", method, keys)
    engine = make("encoder", method, {**keys, "fedopt.use": True, "fedopt.optimizer": {"type": "Adam", "lr": 0.01}})
    start = state_of(engine)
    for each in (plain, engine):
        each.run()
    # The same change, another step: FedAdam's first is lr · 0.1 Δ / (√(0.01 Δ² + 0.99 τ²) + τ).
    for name in engine.method.sent(start, 1):
        delta = (plain.ledger.state[name] - start[name]).double()
        wanted = start[name] + 0.01 * 0.1 * delta / ((0.01 * delta**2 + 0.99e-6).sqrt() + 1e-3)
        torch.testing.assert_close(engine.ledger.state[name].double(), wanted, atol=1e-6, rtol=1e-4)
