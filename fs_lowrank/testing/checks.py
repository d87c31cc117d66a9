"""The checks of the generic suite: what must hold for every method, whatever it computes.

Each is a function of a ``Bench``, the name of a method, and a task (``bench.TASKS``); an ``AssertionError`` says what
does not hold. ``CHECKS`` says of which kind of method each is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import load_config
from ..engines.local import LocalEngine
from ..errors import UserError
from ..jobs.files import from_json, read_json
from ..methods import Averaging, Method, create_method, get_method_class
from ..models.adapters import ACCUMULATED, load_tensors
from ..models.names import all_tensors, tags
from ..models.saved import load_adapter
from ..rounds import trainer
from ..rounds.copies import load_told
from ..seeds import derive
from ..training import train_client
from ..training.cohort import train_cohort
from ..versions import SCHEMA
from .bench import Bench, equal, logits, plain_model, state_of, without_dropout, without_seconds

#: keys of a run whose model differs measurably from the untrained one
SAVED = {"lowrank.save_merged": True, "federate.total_round_num": 2, "train.optimizer": {"type": "AdamW", "lr": 0.02}}
FILES = ("config.yaml", "environment.json", "data.json", "summary.json", "rounds.jsonl")
WIDTHS = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.int64: 8, torch.uint8: 1}


def _named(name: str) -> Callable[[str], str]:
    """Puts the name of a tensor before the message of ``assert_close``."""
    return lambda message: f"{name}: {message}"


def _double(value: Tensor | float | int) -> Tensor:
    return torch.as_tensor(value).double().cpu()


def averages_head(method: Method | type[Method]) -> bool:
    """Whether the server takes the weighted mean of the classifiers' heads."""
    kind = method if isinstance(method, type) else type(method)
    return issubclass(kind, Averaging) or "head" in getattr(method, "averaged", ())


def loads_with_the_plain_libraries(bench: Bench, engine: LocalEngine, task: str) -> Any:
    """Run the engine; the saved model gives its logits without this package. Returns the run's result."""
    untrained, names = logits(engine.model, engine.workspace.data.test), [n for n, _ in engine.model.named_parameters()]
    result, folder = engine.run(), engine.recorder.outdir
    wanted = logits(result.model, engine.workspace.data.test)
    answers, state = wanted, engine.ledger.state
    if engine.workspace.personal.of_model and torch.allclose(untrained, wanted, atol=1e-3):
        # All that is learned may stay with the clients.
        engine.workspace.load_client(state, result.history[-1]["clients"][0])
        answers = logits(engine.model, engine.workspace.data.test)
        engine.workspace.load_global(state)
    assert not torch.allclose(untrained, answers, atol=1e-3), "the trained model answers as the untrained one did"
    if engine.config.adapter.virtual_tokens:
        _refuses(partial(result.save_model, folder / "model"), "save_adapter", "a model without its virtual tokens")
    else:
        saved = logits(plain_model(task, folder / "model"), engine.workspace.data.test)
        torch.testing.assert_close(saved, wanted, atol=1e-5, rtol=1e-5, msg=lambda m: f"model/ loaded alone: {m}")
        assert (folder / "model" / "tokenizer.json").exists() == (task != "vision"), "model/ lacks its tokenizer"
    assert [n for n, _ in result.model.named_parameters()] == names, "saving has changed the model's parameters"
    if result.base_changed:
        assert not (folder / "adapter").exists(), "base weights have changed, which adapter/ does not hold"
        save = partial(result.save_adapter, folder / "adapter")
        _refuses(save, "save_model", "an adapter that does not hold the changed base weights")
    else:
        base = bench.bases.get(task, folder / "adapter" / "base")
        loaded = load_adapter(plain_model(task, base), folder / "adapter")
        saved = logits(loaded, engine.workspace.data.test)
        torch.testing.assert_close(saved, wanted, atol=1e-6, rtol=1e-6, msg=lambda m: f"adapter/ over its base: {m}")
    return result


def _refuses(save: Callable[[], object], instead: str, subject: str) -> None:
    try:
        save()
    except UserError as error:
        assert instead in str(error), f"it does not say what to do: {error}"
    else:
        raise AssertionError(f"{subject} was saved")


def check_run(bench: Bench, method: str, task: str) -> None:
    """A run ends; its files are whole and load with plain PEFT or transformers; frozen weights keep every bit."""
    seen: list[int] = []
    keys = {
        **SAVED,
        "lowrank.save_merged": not bench.config(task, method).adapter.virtual_tokens,
        "federate.sample_client_num": 2,
        "eval.freq": 1,
        "lowrank.checkpoint_freq": 1,
        "train.local_update_steps": 2,
    }

    def on_round(record: Mapping[str, Any]) -> None:
        view, tensors = engine.method.view(engine.ledger.state), all_tensors(engine.model)
        wrong = [n for n in view if not torch.equal(tensors[n], view[n])]
        assert not wrong, f"after round {record['round']} the global model differs from the state in {wrong[:3]}"
        seen.append(record["round"])

    engine = bench.make(task, method, keys, on_round=on_round)
    start = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    result = loads_with_the_plain_libraries(bench, engine, task)
    assert seen == [1, 2] and len(result.history) == 2, f"2 rounds were asked for, {seen} were run"
    for record in result.history:
        assert not record["failed"], f"round {record['round']}: {record['failed']}"
        assert math.isfinite(record["loss"]), f"round {record['round']}: the training loss is {record['loss']}"
        assert record["selected"] == record["clients"] and len(record["clients"]) == 2, f"clients: {record['clients']}"
        extra = {"client_test"} if engine.workspace.personal.of_model else set()
        assert record["metrics"].keys() == {"test", "val"} | extra, f"evaluated: {sorted(record['metrics'])}"
        values = [v for m in record["metrics"].values() for v in m.values()]
        assert all(math.isfinite(v) for v in values), f"metrics: {record['metrics']}"
    allowed = set(engine.method.view(engine.ledger.state)) | set(engine.method.changed_base(engine.model))
    moved = {n for n, p in engine.model.named_parameters() if not torch.equal(p, start[n])}
    assert moved, "no parameter of the global model has changed"
    stray = sorted(moved - allowed)
    assert not stray, f"changed, though neither in the method's view nor in its changed_base: {stray[:3]}"
    on_disk = [from_json(line) for line in (engine.recorder.outdir / "rounds.jsonl").read_bytes().splitlines()]
    assert without_seconds(on_disk) == without_seconds(result.history), "rounds.jsonl differs from the history"
    for name in FILES:
        assert (engine.recorder.outdir / name).stat().st_size, f"{name} is empty"
    for name in ("environment.json", "data.json", "summary.json"):
        assert read_json(engine.recorder.outdir / name)["schema"] == SCHEMA, name
    assert load_config(engine.recorder.outdir / "config.yaml") == engine.config, "config.yaml loads as another config"


def check_seed(bench: Bench, method: str, task: str) -> None:
    """Another seed gives another split and, if something is drawn, another start."""
    one, other = (bench.make(task, method, {"seed": seed}) for seed in (1, 2))
    start, differs = state_of(one), not equal(state_of(one), state_of(other))
    # A pre-trained model that is trained in full starts as it is; a pair without a half of zeros may come from it.
    halves = [tensor for name, tensor in start.items() if "adapter" in tags(name)]
    computed = task == "causal" and bool(halves) and all(bool(half.any()) for half in halves)
    if task == "causal" and "base" in get_method_class(method).shared:
        assert not differs, "the start of a pre-trained model depends on the seed"
    else:
        assert differs or computed, "the start does not depend on the seed"
    assert one.workspace.data.fingerprint != other.workspace.data.fingerprint, "the split does not depend on the seed"


def check_learns(
    bench: Bench, method: str, task: str, rates: Sequence[float] = (3e-2, 1e-2, 1e-1, 3e-3), below: float = 0.99
) -> tuple[LocalEngine, Any]:
    """At one of four learning rates, five rounds over clients with like data lower the test loss by 1 % or more.

    Args:
        below: what part of the loss at the start may be left.
    """
    ratios = []
    for rate in rates:
        keys: dict[str, Any] = {"federate.total_round_num": 5, "train.local_update_steps": 6}
        # Of skewed clients a median, say, need not learn, and their training loss falls even if the server does not.
        keys |= {"data.splitter": "iid", "data.splitter_args": [], "train.optimizer": {"type": "AdamW", "lr": rate}}
        engine = bench.make(task, method, keys)
        start = engine.evaluator.score(engine.workspace.held_out()["test"], "test")["loss"]
        result = engine.run()
        ratio = result.final["test_loss"] / start
        if ratio < below:
            return engine, result
        ratios.append(f"{ratio:.3f} at {rate:g}")
    raise AssertionError(f"the test loss divided by that at the start is {', '.join(ratios)}; expected below {below}")


def size(tensors: Mapping[str, Tensor], head: bool = True) -> int:
    """``numel × itemsize``, counted from shapes."""
    # What a method sends about a tensor of the head, as x:name, counts as the head's.
    counted = [t for n, t in tensors.items() if head or "head" not in tags(n.rpartition(":")[2])]
    return sum(math.prod(t.shape) * WIDTHS[t.dtype] for t in counted)


def check_bytes(
    bench: Bench,
    method: str,
    task: str,
    keys: Mapping[str, Any] | None = None,
    cut: Callable[[dict[str, Tensor], int], Mapping[str, Tensor]] | None = None,
) -> None:
    """The bytes in the records are those of the tensors sent, in both directions, also for clients that missed
    rounds; these are sent the whole model if that is smaller.

    Args:
        cut: the part of a message that is meant for a client; None: the method's own ``tailor``.
    """
    defaults = {"federate.client_num": 5, "federate.sample_client_rate": 0.45, "federate.total_round_num": 6}
    engine = bench.make(task, method, {**defaults, **(keys or {})})
    states = {0: engine.ledger.state}
    sent: dict[tuple[int, int], dict[str, Tensor]] = {}
    messages: dict[int, dict[str, Tensor]] = {}
    full_states: dict[tuple[int, int], dict[str, Tensor]] = {}
    told: dict[int, dict[int, dict[str, Tensor]]] = {}
    upload, commit, add, tell = engine.method.upload, engine.ledger.commit, engine.recorder.add, engine.method.tell

    def spy_upload(model, round, client):
        tensors = upload(model, round, client)
        uploads = sent.setdefault((round, client.id), {})
        uploads.update({f"{client.exchange}:{n}": t.detach().clone() for n, t in tensors.items()})
        return tensors

    def spy_tell(updates, state, round, exchange):
        message = tell(updates, state, round, exchange)
        for client in range(1, 6):
            part = cut(message, client) if cut else engine.method.tailor(message, client, {**state, **message})
            told.setdefault(round, {}).setdefault(client, {}).update({f"{exchange}:{n}": t for n, t in part.items()})
        return message

    def spy_commit(round, state, message, *further):
        messages[round] = {n: t.clone() for n, t in message.items()}
        commit(round, state, message, *further)

    def spy_add(record):
        states[record["round"]] = engine.ledger.state
        tensors = dict(engine.model.named_parameters())
        changed = {n: torch.empty_like(tensors[n]) for n in engine.method.changed_base(engine.model)}
        for client in range(1, 6):
            full_states[record["round"], client] = {**engine.method.view(engine.ledger.state, client), **changed}
        add(record)

    with (
        mock.patch.object(engine.method, "upload", spy_upload),
        mock.patch.object(engine.method, "tell", spy_tell),
        mock.patch.object(engine.ledger, "commit", spy_commit),
        mock.patch.object(engine.recorder, "add", spy_add),
    ):
        result = engine.run()
    standing: dict[int, int] = {}
    for record in result.history:
        round = record["round"]
        assert record["selected"] == sorted({*record["selected"]} & {1, 2, 3, 4, 5}) and len(record["selected"]) == 2
        up = {c: sent[round, c] for c in record["selected"]}
        counted = {str(c): size(t) for c, t in up.items()}
        text = f"round {round}: uplink {record['client_uplink_bytes']}, counted by hand {counted}"
        assert record["client_uplink_bytes"] == counted and record["uplink_bytes"] == sum(counted.values()), text
        assert record["uplink_bytes_without_head"] == sum(size(t, head=False) for t in up.values()), text
        down, bare = {}, 0
        for client in record["selected"]:
            pending: dict[str, Tensor] = {}
            for missed in range(standing.get(client, 0) + 1, round):
                for merged in [n.split(":", 2)[2] for n in messages[missed] if n.startswith("merge:")]:
                    pending.pop(merged, None)  # the merge replaces the pair of an earlier round
                pending.update(messages[missed])
            received = cut(pending, client) if cut else engine.method.tailor(pending, client, states[round - 1])
            if received and size(full_states[round - 1, client]) < size(received):
                received = full_states[round - 1, client]
            received = {**received, **told.get(round, {}).get(client, {})}
            down[str(client)], bare = size(received), bare + size(received, head=False)
            standing[client] = round - 1
        text = f"round {round}: downlink {record['client_downlink_bytes']}, counted by hand {down}"
        assert record["client_downlink_bytes"] == down and record["downlink_bytes"] == sum(down.values()), text
        assert record["downlink_bytes_without_head"] == bare, text
        assert round > 1 or told or not record["downlink_bytes"], "round 1 sends down what comes from the seed"
    assert len({tuple(r["selected"]) for r in result.history}) > 1
    assert all(t == sum(r[k] for r in result.history) for k, t in result.bytes.items()), f"totals: {result.bytes}"


def check_dropouts(bench: Bench, method: str, task: str) -> None:
    """Clients that drop out of a round are left out of it, and the others' round goes on."""
    history = bench.make(task, method, {"federate.client_num": 5, "lowrank.drop_rate": 0.4}).run().history
    lost = [f for r in history for f in r["failed"]]
    assert lost and all(f["kind"] == "dropped" for f in lost), f"failed: {lost}"
    for record in history:
        dropped = {f["client"] for f in record["failed"]}
        assert set(record["clients"]) == set(record["selected"]) - dropped and record["clients"], f"record: {record}"


def check_weights(bench: Bench, method: str, task: str, weighs: bool | None = None) -> None:
    """``federate.ignore_weight``: means are weighted by numbers of samples, or equally. A method without a mean only
    has to run with both.

    Args:
        weighs: whether the two results must differ; None: if the method takes a mean.
    """
    states = []
    for uniform in (False, True):
        fields = get_method_class(method).Params.__dataclass_fields__
        params = {"lowrank.average_by": "samples"} if "average_by" in fields else {}
        engine = bench.make(task, method, {"federate.ignore_weight": uniform, "federate.total_round_num": 1, **params})
        sent = _run_and_keep_uploads(engine)[1]
        sizes = [1 if uniform else len(e) for e in engine.workspace.data.clients]
        assert uniform or len(set(sizes)) > 1
        heads = [n for n in engine.ledger.state if "head" in tags(n) and n.endswith("weight")]
        for head in heads if averages_head(engine.method) else ():
            mean = sum(n / sum(sizes) * _double(sent[i][head]) for i, n in enumerate(sizes, start=1))
            torch.testing.assert_close(_double(engine.ledger.state[head]), mean, atol=1e-7, rtol=1e-6, msg=_named(head))
        states.append(state_of(engine))
    weighs = averages_head(engine.method) if weighs is None else weighs
    assert not (weighs and equal(*states)), "the numbers of samples have no effect on the mean; use self.weights"


def _run_and_keep_uploads(engine: LocalEngine) -> tuple[Any, dict[int, dict[str, Tensor]]]:
    """Run the engine; returns its result, and copies of the clients' updates of round 1."""
    sent: dict[int, dict[str, Tensor]] = {}
    upload = engine.method.upload

    def spy(model, round, client):
        tensors = upload(model, round, client)
        if round == 1:
            sent[client.id] = {n: t.detach().clone() for n, t in tensors.items()}
        return tensors

    with mock.patch.object(engine.method, "upload", spy):
        return engine.run(), sent


def check_one_client(bench: Bench, method: str, task: str) -> None:
    """One client and one round are local training: the server gives back the model that the client trained."""
    keys = {
        "federate.client_num": 1,
        "federate.total_round_num": 1,
        "data.splitter": "iid",
        "data.splitter_args": [],
        "train.local_update_steps": 3,
    }
    alone, engine = (bench.make(task, method, keys) for _ in range(2))
    load_tensors(alone.model, alone.method.view(alone.ledger.state, 1))
    tell = engine.method.tell

    def spy(updates, state, round, exchange):
        told = tell(updates, state, round, exchange)
        load_told(alone.model, told)
        return told

    with mock.patch.object(engine.method, "tell", spy):
        engine.run()
    before = logits(alone.model, alone.workspace.data.test)
    train_client(
        alone.model,
        alone.workspace.data.clients[0],
        alone.method.phases(1),
        alone.config,
        lr=alone.config.train.optimizer.lr,
        seed=derive(alone.config.seed, "train", 1, 1),
        owner="client 1",
        prefix=alone.workspace.prefix,
    )
    load_tensors(alone.model, alone.workspace.personal.untrained)
    trained = logits(alone.model, alone.workspace.data.test)
    assert not torch.allclose(before, trained, atol=1e-4), "three steps changed nothing"
    torch.testing.assert_close(logits(engine.model, engine.workspace.data.test), trained, atol=1e-5, rtol=1e-4)


def check_resume(bench: Bench, method: str, task: str) -> None:
    """The same seed gives the same result to the bit, also in a run that is stopped after round 1 and resumed."""
    keys = {"federate.sample_client_num": 2, "lowrank.checkpoint_freq": 1, "eval.freq": 1}
    uninterrupted = bench.make(task, method, keys)
    expected = without_seconds(uninterrupted.run().history)
    first = bench.make(task, method, keys, on_round=lambda record: record["round"] == 1)
    torch.rand(7)  # earlier draws of the process must have no effect
    assert without_seconds(first.run().history) == expected[:1], (
        "the same configuration and seed gave another result; draw from setting.seed (draw_down, seeds.derive) only"
    )
    second = LocalEngine(first.config)
    history = without_seconds(second.run(resume=True).history)
    wanted, state = state_of(uninterrupted), second.ledger.state
    different = sorted(n for n, v in wanted.items() if n not in state or not equal({n: v}, {n: state[n]}))
    assert not different, f"after resuming, the state differs in {different[:3]}; keep what lasts in the state"
    assert history == expected, "after resuming, the records differ"


def check_cohort(bench: Bench, method: str, task: str, further: Mapping[str, Any] | None = None) -> int:
    """Clients that train together (``train.cohort``) end at the same tensors as one by one.

    On a GPU, where a cohort draws other masks, without dropout.

    Args:
        further: keys of both runs.
    Returns:
        how many cohorts have trained together.
    """
    keys: dict[str, Any] = {"train.optimizer": {"type": "SGD", "lr": 0.01}, "train.batch_or_epoch": "epoch"}
    keys |= further or {}
    together, alone = (bench.make(task, method, {**keys, "train.cohort": size}) for size in (2, "off"))
    trained: list[int] = []
    for engine in (together, alone):
        if engine.workspace.device.type != "cpu":
            without_dropout(engine)

    def train(model, members, *arguments, **options):
        result = train_cohort(model, members, *arguments, **options)
        trained.append(len(members))
        return result

    with mock.patch.object(trainer, "train_cohort", train):
        history = together.run().history
    if not trained:
        return 0
    for a, b in zip(alone.run().history, history, strict=True):
        message = f"round {a['round']}: losses {a['loss']} and {b['loss']}, {b['failed']}; does it require alone=True?"
        assert not b["failed"] and abs(a["loss"] - b["loss"]) < 1e-5, message
    state = state_of(together)
    for name, value in state_of(alone).items():
        torch.testing.assert_close(_double(state[name]), _double(value), atol=1e-5, rtol=1e-5, msg=_named(name))
    return len(trained)


def check_arguments(bench: Bench, method: str, task: str) -> None:
    """The server's step leaves the updates and the state unchanged, and gives the same result twice."""
    engine = bench.make(task, method, {"federate.total_round_num": 2})
    aggregate = engine.method.aggregate

    def spy(updates, state, round):
        copies = [{n: t.clone() for n, t in u.tensors.items()} for u in updates]
        before = {n: v.clone() if isinstance(v, Tensor) else v for n, v in state.items()}
        new, message = aggregate(updates, state, round)
        unchanged = all(equal(u.tensors, tensors) for u, tensors in zip(updates, copies))
        assert unchanged, f"round {round}: aggregate changed an update in place"
        assert equal(state, before), f"round {round}: aggregate changed the state in place; return a new one"
        new2, message2 = aggregate(updates, state, round)
        assert equal(new, new2) and equal(message, message2), f"round {round}: aggregate gave two results for one input"
        return new, message

    with mock.patch.object(engine.method, "aggregate", spy):
        history = engine.run().history
    assert not any(r["failed"] or r.get("skipped") for r in history), f"failed: {[r['failed'] for r in history]}"


def check_half_precision(bench: Bench, method: str, task: str) -> None:
    """In bfloat16 the losses stay finite and the shared tensors move; a mean of sums is still each client's own."""
    engine = bench.make(task, method, {"lowrank.dtype": "bfloat16", "federate.total_round_num": 2})
    before, states = state_of(engine), []
    engine.on_round = lambda record: states.append(state_of(engine))
    result, sent = _run_and_keep_uploads(engine)
    losses = [(r["loss"], r["failed"]) for r in result.history]
    assert all(math.isfinite(r["loss"]) and not r["failed"] for r in result.history), f"losses and failures: {losses}"
    assert any(p.dtype == torch.bfloat16 for p in engine.model.parameters()), "no parameter is bfloat16"
    kinds = {"adapter", "nested", "personal", ACCUMULATED}
    half = [n for n, p in engine.model.named_parameters() if tags(n) & kinds and p.dtype != torch.float32]
    assert not half, f"of the adapters, {half} are not float32"
    kind = get_method_class(method)
    if averages_head(engine.method) and engine.method.needs.sums and issubclass(kind, Averaging):
        sizes = [len(e) for e in engine.workspace.data.clients]
        settles = kind.settle is not Averaging.settle  # and may go on from the mean
        for name in (n for n in sent[1] if not settles or "head" in tags(n)):  # tensors of both widths travel together
            mean = sum(n / sum(sizes) * _double(sent[i][name]) for i, n in enumerate(sizes, start=1))
            torch.testing.assert_close(_double(states[0][name]), mean, atol=1e-6, rtol=2**-7)
    moved = [n for n in before if not equal({n: before[n]}, {n: engine.ledger.state[n]})]
    heads = [n for n in before if "head" in tags(n)]
    assert moved and (not heads or set(heads) & set(moved)), f"of the state only {moved} changed"
    assert result.saved["model" if result.base_changed else "adapter"].exists()


def check_server_optimizer(bench: Bench, method: str, task: str) -> None:
    """An averaging method takes FedAdam's step on its mean; any other refuses a server optimizer."""
    keys = {"federate.total_round_num": 1}
    adam = {**keys, "fedopt.use": True, "fedopt.optimizer": {"type": "Adam", "lr": 0.01}}
    kind = get_method_class(method)
    if not issubclass(kind, Averaging) or kind.aggregate is not Averaging.aggregate:
        try:
            create_method(method, server_optimizer={"type": "Adam"}, rounds=3)
        except UserError:
            return
        raise AssertionError("a server optimizer is accepted, and would have no effect")
    plain, engine = bench.make(task, method, keys), bench.make(task, method, adam)
    start, means = state_of(engine), []
    for runner in (plain, engine):

        def spy(mean, state, round, settle=runner.method.settle):
            means.append(mean)
            return settle(mean, state, round)

        def spy_tell(*arguments, tell=runner.method.tell):
            start.update(message := tell(*arguments))  # from which clients went on
            return message

        with mock.patch.object(runner.method, "settle", spy), mock.patch.object(runner.method, "tell", spy_tell):
            runner.run()
    # The same change, another step: FedAdam's first is lr · 0.1 Δ / (√(0.01 Δ² + 0.99 τ²) + τ).
    names = sorted(means[0].keys() & start.keys())
    assert names, "the mean has no tensor of the state"
    for name in names:
        delta = _double(means[0][name]) - _double(start[name])
        wanted = _double(start[name]) + 0.01 * 0.1 * delta / ((0.01 * delta**2 + 0.99e-6).sqrt() + 1e-3)
        torch.testing.assert_close(_double(means[1][name]), wanted, atol=1e-6, rtol=1e-4, msg=_named(name))


@dataclass(frozen=True)
class Check:
    """A check, and of which methods it is asked.

    Attributes:
        name: as it is shown.
        function: called with a ``Bench``, the name of the method, and the task.
        every_task: run with every kind of model that the method takes; else with the first of them.
    """

    name: str
    function: Callable[[Bench, str, str], object]
    every_task: bool = False

    @property
    def asks(self) -> str:
        """What must hold, in one sentence."""
        text = (self.function.__doc__ or "").split("\n\n")[0]
        return " ".join(text.split())


CHECKS = (
    Check("run", check_run, every_task=True),
    Check("seed", check_seed, every_task=True),
    Check("learns", check_learns),
    Check("bytes", check_bytes),
    Check("dropouts", check_dropouts),
    Check("weights", check_weights),
    Check("one client", check_one_client),
    Check("resume", check_resume, every_task=True),
    Check("cohort", check_cohort),
    Check("arguments", check_arguments),
    Check("half precision", check_half_precision),
    Check("server optimizer", check_server_optimizer),
)
