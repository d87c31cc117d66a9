"""One round at the server: who is asked, what counts, how it ends; answers in any order, no engine."""

import itertools

import pytest
import torch

from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method
from fs_lowrank.rounds.codec import Uniform
from fs_lowrank.rounds.intake import RunningMean, TooFewClients
from fs_lowrank.rounds.ledger import Ledger
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import BadRound, Round
from fs_lowrank.settings import AdapterSpec

A, B, HEAD = "m.lora_A.default.weight", "m.lora_B.default.weight", "classifier.weight"


def ledger(method="fedlora", clients=4, min_clients=1, **options):
    made = create_method(method, adapter=AdapterSpec(r=2, lora_alpha=4), rounds=9)
    drawn = torch.Generator().manual_seed(0)
    state = {A: torch.randn(2, 7, generator=drawn), B: torch.zeros(5, 2), HEAD: torch.zeros(3, 5)}
    return Ledger(made, state, clients, clients, min_clients, 0, **{"keep_messages": True, **options})


def deliver(one, *clients):
    for client in clients:
        one.delivered(one.ask(client))


def sent(one, client, samples=None, **changed):
    expected = one.method.expected(one.ledger.state, one.number, client)
    drawn = torch.Generator().manual_seed(100 * one.number + client)
    tensors = {n: t + torch.randn(t.shape, generator=drawn) for n, t in expected.items()}
    return Parcel(
        one.codec.encode({**tensors, **changed}),
        round=one.number,
        samples=client if samples is None else samples,
        loss=float(client),
    )


def test_answers_come_in_any_order():
    ends = []
    for order in itertools.permutations((1, 2, 3)):
        one = Round(1, ledger(), (3, 1, 2))
        deliver(one, 1, 2, 3)
        assert one.selected == [1, 2, 3] and one.waiting == {1, 2, 3}
        for client in order:
            assert one.take(client, sent(one, client))
        assert not one.waiting
        message = one.finish().message
        ends.append((message, one.record({}, {"training": 1.0}, {})))
    for message, record in ends[1:]:
        assert all(torch.equal(message[n], ends[0][0][n]) for n in message)
        assert record == ends[0][1]
    assert ends[0][1]["clients"] == [1, 2, 3] and ends[0][1]["loss"] == pytest.approx((1 + 4 + 9) / 6)


def test_the_mean_is_that_of_a_dense_sum():
    for intake in (None, RunningMean()):
        one = Round(1, ledger(), (1, 2, 4), intake=intake)
        deliver(one, 1, 2, 4)
        parcels = {c: sent(one, c) for c in (4, 1, 2)}
        for client, parcel in parcels.items():
            one.take(client, parcel)
        message = one.finish().message
        for name in (A, B, HEAD):
            dense = sum(c * p.tensors[name].double() for c, p in parcels.items()) / 7
            torch.testing.assert_close(message[name].double(), dense, atol=1e-6, rtol=1e-6)


def test_late_twice_and_uninvited_are_left_out():
    one = Round(2, ledger(), (1, 2, 3))
    deliver(one, 1, 2)
    late = Parcel(sent(one, 1).tensors, round=1, samples=1, loss=1.0)
    assert not one.take(1, late), "an answer of another round"
    assert one.take(1, sent(one, 1)) and not one.take(1, sent(one, 1)), "one that comes twice"
    assert not one.take(3, sent(one, 3)) and not one.take(4, sent(one, 4)), "one that was not asked"
    one.fail(2, "failed", "no answer within lowrank.timeout")
    assert not one.take(2, sent(one, 2)), "one that was given up"
    one.fail(2, "failed", "once more")
    one.fail(1, "failed", "its process ended after its answer")
    assert one.waiting == {3} and [f["client"] for f in one.failed] == [2]
    with pytest.raises(ValueError, match="round 2 does not wait for client 4"):
        one.ask(4)
    with pytest.raises(RuntimeError, match=r"waits for clients \[3\]"):
        one.finish()


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda p: p.tensors.update({HEAD: p.tensors[HEAD] * float("nan")}), "NaN or Inf"),
        (lambda p: p.tensors.pop(HEAD), "'classifier.weight' is missing"),
        (lambda p: p.facts.pop("loss"), "loss"),
        (lambda p: p.facts.update(samples="many"), "samples"),
        (lambda p: p.facts.update(samples=0), "samples"),
    ],
    ids=["nan", "missing", "loss", "text", "none"],
)
def test_a_refusal_is_a_failure_of_one_client(change, reason):
    one = Round(1, ledger(), (1, 2))
    deliver(one, 1, 2)
    parcel = sent(one, 2)
    change(parcel)
    assert not one.take(2, parcel) and one.take(1, sent(one, 1))
    (failure,) = one.failed
    assert (failure["client"], failure["kind"]) == (2, "refused") and reason in failure["reason"]
    finished = one.finish()
    assert finished.undone == {2} and one.ledger.undone == {2: 1}, "what it has learnt counts for nothing"
    after = Round(2, one.ledger, (1, 2))
    assert after.ask(2).parcel.facts["undo"] == 1 and "undo" not in after.ask(1).parcel.facts
    deliver(after, 2)
    assert not one.ledger.undone, "it has been told"


def test_an_error_at_a_client():
    one = Round(1, ledger(), (1, 2))
    deliver(one, 1, 2)
    assert not one.take(1, Parcel({}, round=1, error="RuntimeError: out of memory"))
    assert not one.take(2, Parcel({}, round=1, error="its copy stands elsewhere", lost=True))
    assert [f["reason"] for f in one.failed] == ["RuntimeError: out of memory", "its copy stands elsewhere"]
    assert one.ledger.unknown == {2}


def test_too_few_leave_all_as_it_was():
    kept = ledger(min_clients=2)
    first = Round(1, kept, (1, 2, 3))
    deliver(first, 1, 2, 3)
    for client in (1, 2):
        first.take(client, sent(first, client))
    first.fail(3, "failed", "no answer")
    first.finish()
    before = kept.state, dict(kept.synced), dict(kept.undone), dict(kept.outbox), kept.stood
    for intake in (None, RunningMean()):
        one = Round(2, kept, (1, 3, 4), intake=intake)
        deliver(one, 1, 3, 4)
        assert kept.synced != before[1] and not kept.undone
        one.take(1, sent(one, 1))
        one.fail(3, "failed", "out of memory")
        one.fail(4, "absent", "it has not joined")
        with pytest.raises(TooFewClients, match="round 2: 1 usable updates, lowrank.min_clients is 2$"):
            one.finish()
        assert (kept.state, kept.synced, kept.undone, kept.outbox, kept.stood) == before


@pytest.mark.parametrize(
    "error, raised",
    [
        (UserError("the server's step came to nothing finite"), BadRound),
        (ZeroDivisionError("by zero"), BadRound),
        (OSError(28, "No space left on device"), OSError),
    ],
)
def test_an_error_of_the_servers_step_is_a_bad_round_unless_it_is_of_the_machine(monkeypatch, error, raised):
    """Whatever class of error clients' values lead to, the round can be left out; a full disk is no bad round."""

    def aggregate(updates, state, round):
        raise error

    kept = ledger()
    one = Round(1, kept, (1, 2))
    deliver(one, 1, 2)
    for client in (1, 2):
        assert one.take(client, sent(one, client))
    monkeypatch.setattr(kept.method, "aggregate", aggregate)
    with pytest.raises(raised, match=str(error.args[-1])):
        one.finish()
    assert kept.stood == 0
    if raised is BadRound:
        assert one.leave_out("it failed").undone == {1, 2}


def test_a_client_drawn_to_drop_out_follows():
    kept = ledger(drop_rate=0.5)
    number = next(r for r in range(1, 50) if {kept.drops_out(c, r) for c in (1, 2)} == {True, False})
    one = Round(number, kept, (1, 2))
    orders = {c: one.ask(c) for c in (1, 2)}
    for order in orders.values():
        one.delivered(order)
    (gone,) = (c for c in (1, 2) if kept.drops_out(c, number))
    assert {o.purpose for c, o in orders.items() if c == gone} == {"follow"} and orders[3 - gone].purpose == "train"
    assert one.failed == [{"client": gone, "kind": "dropped", "reason": "drawn by lowrank.drop_rate"}]
    assert one.waiting == {3 - gone} and not one.take(gone, sent(one, gone))
    one.take(3 - gone, sent(one, 3 - gone))
    assert not one.finish().undone, "a client that only followed has nothing to undo"
    assert set(kept.synced) == {1, 2}


def test_evaluation_counts_in_the_same_record():
    kept = ledger()
    one = Round(1, kept, (1, 2))
    deliver(one, 1, 2)
    for client in (1, 2):
        one.take(client, sent(one, client))
    one.finish()
    whole = 4 * (2 * 7 + 5 * 2 + 3 * 5)
    for client in (1, 2, 3):
        order = one.ask(client, purpose="evaluate")
        assert order.parcel.facts["stands"] == 1 and order.sizes[0] == whole
        one.delivered(order)
    record = one.record({"test": {"acc": 0.5}}, {"training": 0.0}, {})
    assert record["client_downlink_bytes"] == {1: whole, 2: whole, 3: whole}
    assert record["evaluation_downlink_bytes"] == record["downlink_bytes"] == 3 * whole
    assert not Round(2, kept, (3,)).ask(3).parcel.tensors, "it has it from the evaluation"


def test_quantised_messages_weigh_less_and_the_server_reads_what_clients_read():
    kept = ledger()
    one = Round(1, kept, (1, 2), codec=Uniform(8))
    deliver(one, 1, 2)
    for client in (1, 2):
        assert one.take(client, sent(one, client))
    numbers = 2 * 7 + 5 * 2 + 3 * 5
    assert one.uplink[1] == (numbers + 3 * 4, 2 * 7 + 5 * 2 + 2 * 4)
    message = one.finish().message
    assert all(torch.equal(kept.state[n], message[n]) for n in message)
    order = Round(2, kept, (1,), codec=Uniform(8)).ask(1)
    assert order.parcel.facts["encoded"] and order.sizes == one.uplink[1]
    assert order.sizes[0] == order.parcel.nbytes
    got = Uniform(8).decode(order.parcel.tensors, message)
    assert all(torch.allclose(got[n], message[n], rtol=1e-6, atol=0) for n in message)
    kept.forget([2])
    whole = Round(2, kept, (2,), codec=Uniform(8), base=lambda: {"m.weight": torch.ones(5, 7)}).ask(2)
    assert whole.parcel.tensors.keys() == {A, B, HEAD, "m.weight"} and "encoded" not in whole.parcel.facts


def test_a_running_mean_cannot_be_sifted():
    mean = RunningMean()
    with pytest.raises(ValueError, match="cannot leave out clients"):
        mean.close(without=[1])
