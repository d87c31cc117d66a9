"""Rounds of several exchanges, by a method that does in three what FedLoRA does in one."""

import math
from dataclasses import replace

import pytest
import torch

from fs_lowrank import Averaging, Phase, RunFailed, UserError, register_method
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.names import entries, entries_of, named_tensors, tags
from fs_lowrank.rounds.finite import WrongStep
from fs_lowrank.rounds.ledger import Standing
from fs_lowrank.rounds.node import Node
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import Round
from fs_lowrank.testing.bench import equal, state_of, without_seconds
from tests.servers import ledger_of

FEW = {"federate.total_round_num": 2, "train.local_update_steps": 2}


@pytest.fixture
def thrice(own_methods):
    """The method ``thrice``: clients send how large they are, are told to start with another A, and train; they say how
    far they went, are told by how much to scale, and send what they had trained."""

    @register_method("thrice")
    class Thrice(Averaging):
        source, sends = "a test", "A and B, and what they weigh"

        @classmethod
        def requires(cls, params):
            return replace(super().requires(params), own_upload=False)

        def phases(self, round, client=None):
            return [Phase(train=("lora_A", "lora_B", "head"))]

        def exchanges(self, state, round):
            return ("weigh", "train", "send")

        def upload(self, model, round, client):
            own = super().upload(model, round, client)
            if client.exchange == "weigh":
                assert not client.told
                return {"x:size": torch.tensor([float(client.num_samples)])}
            if client.exchange == "train":
                assert client.told["x:mean"] > 0
                return entries("x", {n: t.norm() for n, t in own.items()})
            assert {*client.told} == {"x:scale"}
            return {n: t * client.told["x:scale"] for n, t in own.items()}

        def expected(self, state, round, client, exchange="train"):
            own = super().expected(state, round, client)
            if exchange == "weigh":
                return {"x:size": torch.empty(1)}
            return own if exchange == "send" else entries("x", {n: torch.empty(()) for n in own})

        def tell(self, updates, state, round, exchange):
            mean = self.mean_of(updates)
            if exchange == "weigh":
                return {"x:mean": mean["x:size"]} | {n: 2 * t for n, t in state.items() if "lora_A" in tags(n)}
            assert entries_of("x", state)["mean"] > 0 and min(mean.values()) > 0
            return {"x:scale": torch.tensor(0.5)}

    return Thrice


def breaks(engine, *when):
    """From now on an upload fails: that of a round, a client and an exchange."""
    upload = engine.method.upload

    def broken(model, round, client):
        if (round, client.id, client.exchange) == when:
            raise RuntimeError("it broke")
        return upload(model, round, client)

    engine.method.upload = broken


def test_the_model_is_what_the_client_left_and_was_told(bench, thrice):
    """Twice the A at the start of every round, and half of what was trained at its end."""
    engine = bench.make("encoder", "thrice", {**FEW, "federate.sample_client_num": 2})
    plain = bench.make("encoder", "fedlora", {**FEW, "federate.sample_client_num": 2})
    start = state_of(plain)

    def begin_with_twice(record=None):
        for name in [n for n in plain.ledger.state if "lora_A" in n]:
            plain.ledger.state[name] = 2 * plain.ledger.state[name]

    def halve(record):
        for name, value in list(plain.ledger.state.items()):
            plain.ledger.state[name] = value / 2
        begin_with_twice()

    begin_with_twice()
    plain.on_round = halve
    history, wanted = engine.run().history, plain.run().history
    assert [r["loss"] for r in history] == [r["loss"] for r in wanted]
    assert not any(r["failed"] for r in history) and {*engine.ledger.state} == {*start}
    for name, value in engine.ledger.state.items():
        factor = 2 if "lora_A" in name else 1
        torch.testing.assert_close(factor * value, plain.ledger.state[name], rtol=0, atol=0)


@pytest.mark.more
def test_the_record_says_what_a_robust_mean_did_in_each_exchange(bench):
    keys = {**FEW, "lowrank.robust": "norm_bound", "lowrank.robust_norm": 1e-6}
    first, second = bench.make("encoder", "fed_sb", keys).run().history
    everyone = first["clients"]
    assert [note["client"] for note in first["robust"]] == sorted(2 * everyone), "its first round has two exchanges"
    assert [note["client"] for note in second["robust"]] == everyone


@pytest.mark.parametrize("fails_in", ["weigh", "train", "send"])
def test_a_client_that_is_lost_on_the_way_is_left_out(bench, thrice, fails_in):
    engine = bench.make("encoder", "thrice", {**FEW, "lowrank.personal": ["head"]})
    breaks(engine, 2, 2, fails_in)
    heads = {}
    engine.on_round = lambda record: heads.update({record["round"]: engine.workspace.personal.of(2)})
    first, second = engine.run().history
    assert first["clients"] == [1, 2, 3] and second["clients"] == [1, 3]
    (failure,) = second["failed"]
    assert failure["client"] == 2 and "it broke" in failure["reason"] and math.isfinite(second["loss"])
    assert equal(heads[1], heads[2]), "its training does not count, so its head is that of the round before"
    assert not [n for n in engine.workspace.personal.of(1) if "lora" in n], "nothing of the round stays with a client"


def test_too_few_clients_between_two_exchanges_stop_the_run_which_resumes_to_the_bit(bench, thrice):
    keys = {**FEW, "lowrank.min_clients": 3, "lowrank.checkpoint_freq": 1}
    whole = bench.make("encoder", "thrice", keys)
    wanted = whole.run().history
    engine = bench.make("encoder", "thrice", keys)
    breaks(engine, 2, 3, "train")
    with pytest.raises(RunFailed, match="round 2: 2 usable updates"):
        engine.run()
    resumed = LocalEngine(engine.config)
    assert without_seconds(resumed.run(resume=True).history) == without_seconds(wanted)
    assert equal(state_of(resumed), state_of(whole))


def test_a_bad_step_between_two_exchanges_leaves_the_round_out(bench, thrice):
    engine = bench.make("encoder", "thrice", {**FEW, "lowrank.on_bad_round": "skip"})
    tell, start = engine.method.tell, state_of(engine)

    def bad(updates, state, round, exchange):
        told = tell(updates, state, round, exchange)
        return {**told, "x:mean": told["x:mean"] / 0} if exchange == "weigh" and round == 1 else told

    engine.method.tell = bad
    states = []
    engine.on_round = lambda record: states.append(state_of(engine))
    first, second = engine.run().history
    assert "x:mean that is not finite" in first["skipped"] and equal(states[0], start)
    assert second["clients"] == [1, 2, 3] and "skipped" not in second


def test_norms_are_bounded_in_every_exchange(bench, thrice):
    engine = bench.make("encoder", "thrice", {**FEW, "lowrank.max_update_norm": 25.0})
    sizes = engine.workspace.sizes
    assert (sizes > 25).any() and not (sizes > 25).all(), "what they send first is their size"
    (first, _) = engine.run().history
    assert [f["client"] for f in first["failed"]] == [i + 1 for i, size in enumerate(sizes) if size > 25]


def test_an_outlier_of_the_last_exchange_has_sent_what_it_sent_before(bench, thrice):
    engine = bench.make("encoder", "thrice", {**FEW, "lowrank.max_update_norm_factor": 50.0})
    upload = engine.method.upload
    engine.method.upload = lambda model, round, client: {
        n: t * (1e4 if (client.id, client.exchange) == (2, "send") else 1)
        for n, t in upload(model, round, client).items()
    }
    first, _ = engine.run().history
    assert [f["client"] for f in first["failed"]] == [2] and first["clients"] == [1, 3]
    assert first["client_uplink_bytes"]["2"] == 4 + 4 * len(engine.ledger.state) < first["client_uplink_bytes"]["1"]


def test_what_a_client_did_between_two_exchanges_is_nothing_to_a_server_that_starts_anew(bench, thrice, tmp_path):
    """The server was killed while the client waited for the next exchange; then it has the client evaluated, or leaves
    it out of the round and has it train in the next."""
    workspace = bench.make("encoder", "thrice", FEW).workspace
    node, start, standing = Node(workspace), workspace.method.view(workspace.initial_state), Standing()
    first, again = (Round(r, ledger_of(workspace.method, workspace.initial_state, 3), (1,)) for r in (1, 2))

    def has_the_start():
        own = named_tensors(workspace.model, workspace.method.shared)
        return equal({n: own[n].detach() for n in start}, start)

    for _ in range(2):
        order = first.ask(1, standing)
        answer = node.obey(order.parcel, 1, tmp_path, "run")
        first.delivered(order)
        assert first.take(1, answer)
        first.go_on()
    assert not has_the_start(), "it has trained"
    for purpose in ("evaluate", "train"):
        node.obey(again.ask(1, standing, purpose).parcel, 1, tmp_path, "run")
        assert has_the_start()


def test_an_answer_to_an_exchange_that_a_client_was_not_asked_for_is_left_out(bench, thrice):
    engine = bench.make("encoder", "thrice", FEW)
    current = Round(1, engine.ledger, (1,))
    order = current.ask(1)
    current.delivered(order)
    answer = Parcel({"x:size": torch.ones(1)}, round=1, samples=int(engine.workspace.sizes[0]), loss=0.0)
    assert current.take(1, answer)
    current.go_on()
    assert not current.take(1, answer) and current.waiting == {1} and not current.failed


def test_a_wrong_tell_is_the_methods_mistake_whatever_is_said_of_bad_rounds(bench, thrice, monkeypatch):
    monkeypatch.setattr(thrice, "tell", lambda self, *given: None)
    with pytest.raises(WrongStep, match="gave None, expected"):
        bench.make("encoder", "thrice", {**FEW, "lowrank.on_bad_round": "skip"}).run()


def test_exchanges_without_tell_are_refused_when_the_method_is_registered(thrice):
    with pytest.raises(UserError, match="method 'mute': .*Mute has rounds of several exchanges; define tell, too"):

        @register_method("mute")
        class Mute(Averaging):
            def exchanges(self, state, round):
                return ("train", "more")
