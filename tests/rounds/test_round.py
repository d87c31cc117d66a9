"""One round at the server, without an engine: which clients are asked, which answers count, and how it ends."""

import itertools
import math

import pytest
import torch

from fs_lowrank.errors import UserError
from fs_lowrank.methods import RefusedUpdate, Update, create_method
from fs_lowrank.rounds.codec import Uniform
from fs_lowrank.rounds.finite import BadRound
from fs_lowrank.rounds.intake import RunningMean, TooFewClients
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import Round
from fs_lowrank.settings import AdapterSpec
from tests.servers import ledger_of

A, B, HEAD = "m.lora_A.default.weight", "m.lora_B.default.weight", "classifier.weight"


def ledger(method="fedlora", clients=4, params=None, **options):
    made = create_method(method, adapter=AdapterSpec(r=2, lora_alpha=4), rounds=9, **(params or {}))
    drawn = torch.Generator().manual_seed(0)
    state = {A: torch.randn(2, 7, generator=drawn), B: torch.zeros(5, 2), HEAD: torch.zeros(3, 5)}
    return ledger_of(made, state, clients, **options)


def deliver(current, *clients):
    for client in clients:
        current.delivered(current.ask(client))


def sent(current, client, samples=None, **changed):
    expected = current.method.expected(current.ledger.state, current.number, client)
    drawn = torch.Generator().manual_seed(100 * current.number + client)
    tensors = {n: t + torch.randn(t.shape, generator=drawn) for n, t in expected.items()}
    return Parcel(
        current.codec.encode({**tensors, **changed}),
        round=current.number,
        samples=client if samples is None else samples,
        loss=float(client),
    )


def test_answers_come_in_any_order():
    ends = []
    for order in itertools.permutations((1, 2, 3)):
        current = Round(1, ledger(), (3, 1, 2))
        deliver(current, 1, 2, 3)
        assert current.selected == [1, 2, 3] and current.waiting == {1, 2, 3}
        for client in order:
            assert current.take(client, sent(current, client))
        assert not current.waiting
        message = current.finish().message
        ends.append((message, current.record({}, {"training": 1.0})))
    for message, record in ends[1:]:
        assert all(torch.equal(message[n], ends[0][0][n]) for n in message)
        assert record == ends[0][1]
    assert ends[0][1]["clients"] == [1, 2, 3] and ends[0][1]["loss"] == pytest.approx((1 + 4 + 9) / 6)


def test_the_norm_of_a_client_without_a_finite_loss_does_not_count_for_the_bound():
    current = Round(1, ledger(max_update_norm_factor=5.0), (1, 2, 3, 4))
    deliver(current, 1, 2, 3, 4)
    for client, size in ((1, 1.0), (2, 1.0), (3, 10.0), (4, 12.0)):
        expected = current.method.expected(current.ledger.state, 1, client)
        tensors = {n: t + size for n, t in expected.items()}
        loss = math.nan if client == 2 else client / 3
        assert current.take(client, Parcel(tensors, round=1, samples=client, loss=loss)) == (client != 2)
    assert current.finish().undone == {2} and current.losses == {1: 1 / 3, 3: 1.0, 4: 4 / 3}
    record = current.record({}, {"training": 1.0})
    reason = "client 2: its loss is nan, expected a finite number"
    assert record["failed"] == [{"client": 2, "kind": "refused", "reason": reason}] and record["clients"] == [1, 3, 4]


def test_late_repeated_and_unrequested_answers_are_left_out():
    current = Round(2, ledger(), (1, 2, 3))
    deliver(current, 1, 2)
    late = Parcel(sent(current, 1).tensors, round=1, samples=1, loss=1.0)
    assert not current.take(1, late), "an answer of another round"
    assert current.take(1, sent(current, 1)) and not current.take(1, sent(current, 1)), "one that comes twice"
    assert not current.take(3, sent(current, 3)) and not current.take(4, sent(current, 4)), "one that was not asked"
    current.fail(2, "failed", "no answer within lowrank.timeout")
    assert not current.take(2, sent(current, 2)), "one that was given up"
    current.fail(2, "failed", "once more")
    current.fail(1, "failed", "its process ended after its answer")
    assert current.waiting == {3} and [f["client"] for f in current.failed] == [2]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda p: p.tensors.update({HEAD: p.tensors[HEAD] * float("nan")}), "NaN or Inf"),
        (lambda p: p.facts.pop("loss"), "loss"),
        (lambda p: p.facts.pop("samples"), "samples"),
    ],
    ids=["nan", "loss", "samples"],
)
def test_a_refusal_is_a_failure_of_one_client(change, reason):
    current = Round(1, ledger(), (1, 2))
    deliver(current, 1, 2)
    parcel = sent(current, 2)
    change(parcel)
    assert not current.take(2, parcel) and current.take(1, sent(current, 1))
    (failure,) = current.failed
    assert (failure["client"], failure["kind"]) == (2, "refused") and reason in failure["reason"]
    finished = current.finish()
    assert finished.undone == {2} and current.ledger.undone == {2: 1}, "what it has trained does not count"
    after = Round(2, current.ledger, (1, 2))
    assert after.ask(2).parcel.facts["undo"] == 1 and "undo" not in after.ask(1).parcel.facts
    for client in (1, 2):
        after.fail(client, "failed", "no answer")
    after.leave_out("it failed")
    assert current.ledger.undone == {1: 2, 2: 1}, "the earlier round stays until the client has been told"
    deliver(Round(3, current.ledger, (1, 2)), 2)
    assert current.ledger.undone == {1: 2}, "it has been told"


def answer(method, a, b, **params):
    current = Round(1, ledger(method, params=params), (1,))
    deliver(current, 1)
    return current, current.take(1, sent(current, 1, **{A: a, B: b}))


def test_a_client_may_send_a_pair_at_a_smaller_rank_where_the_method_says_so():
    a, b = torch.ones(1, 7), torch.ones(5, 1)
    current, admitted = answer("hetlora", a, b)
    assert admitted and current.uplink[1] == (4 * (7 + 5 + 15), 4 * (7 + 5))
    down = current.ledger.state[A][:1]
    assert current.drift[1]["lora_A"] == pytest.approx(float((a - down).norm())) and current.drift[1]["lora_B"] > 0
    current, admitted = answer("flora", a, b)
    assert not admitted and "has shape (1, 7), expected (2, 7)" in current.failed[0]["reason"]


@pytest.mark.parametrize(
    "a, b", [((1, 7), (5, 2)), ((2, 7), (5, 1)), ((3, 7), (5, 3)), ((1, 6), (5, 1)), ((0, 7), (5, 0))]
)
def test_halves_of_a_smaller_rank_fit_together(a, b):
    current, admitted = answer("hetlora", torch.ones(a), torch.ones(b))
    assert not admitted and "has shape" in current.failed[0]["reason"]


def test_no_scalar_is_a_half_of_a_pair():
    current, admitted = answer("hetlora", torch.tensor(1.0), torch.ones(5, 1))
    assert not admitted and f"{A} has shape (), expected (2, 7)" in current.failed[0]["reason"]


def test_no_nested_tensor_is_a_half_of_a_pair():
    nested = torch.nested.as_nested_tensor([torch.ones(7), torch.ones(6)])
    current, admitted = answer("hetlora", nested, torch.ones(5, 2))
    assert not admitted and "expected a plain dense tensor" in current.failed[0]["reason"]


def test_a_client_that_never_shrinks_sends_its_whole_rank():
    current, admitted = answer("hetlora", torch.ones(1, 7), torch.ones(5, 1), prune=1.0)
    assert not admitted and "has shape (1, 7), expected (2, 7)" in current.failed[0]["reason"]


def test_a_client_of_hetlora_has_one_rank():
    halves = {A: torch.ones(2, 7), B: torch.ones(5, 2), A.replace("m.", "n."): torch.ones(1, 7)}
    with pytest.raises(RefusedUpdate, match="client 3: its pairs have the ranks \\[1, 2\\], expected one rank"):
        ledger("hetlora").method.check(Update(3, 1, halves))


def test_a_round_with_too_few_updates_changes_nothing():
    server = ledger(min_clients=2)
    first = Round(1, server, (1, 2, 3))
    deliver(first, 1, 2, 3)
    for client in (1, 2):
        first.take(client, sent(first, client))
    first.fail(3, "failed", "no answer")
    first.finish()
    before = server.state, dict(server.synced), dict(server.undone), dict(server.outbox), server.stood
    for intake in (None, RunningMean()):
        current = Round(2, server, (1, 3, 4), intake=lambda kept=intake: kept)
        deliver(current, 1, 3, 4)
        assert server.synced != before[1] and not server.undone
        current.take(1, sent(current, 1))
        current.fail(3, "failed", "out of memory")
        current.fail(4, "absent", "it has not joined")
        with pytest.raises(TooFewClients, match="^1 usable updates, lowrank.min_clients is 2$"):
            current.finish()
        current.roll_back()
        assert (server.state, server.synced, server.undone, server.outbox, server.stood) == before


@pytest.mark.parametrize(
    "error, raised",
    [
        (UserError("the server's step came to nothing finite"), BadRound),
        (ZeroDivisionError("by zero"), BadRound),
        (OSError(28, "No space left on device"), OSError),
    ],
)
def test_an_error_in_the_server_step_is_a_bad_round_unless_the_machine_caused_it(monkeypatch, error, raised):
    """Any error due to values from clients makes a bad round, which can be skipped; a full disk does not."""

    def aggregate(updates, state, round):
        raise error

    server = ledger()
    current = Round(1, server, (1, 2))
    deliver(current, 1, 2)
    for client in (1, 2):
        assert current.take(client, sent(current, client))
    monkeypatch.setattr(server.method, "aggregate", aggregate)
    with pytest.raises(raised, match=str(error.args[-1])):
        current.finish()
    assert server.stood == 0
    if raised is BadRound:
        assert current.leave_out("it failed").undone == {1, 2}


def test_a_client_drawn_to_drop_out_receives_messages():
    server = ledger(drop_rate=0.5)
    number = next(r for r in range(1, 50) if {server.drops_out(c, r) for c in (1, 2)} == {True, False})
    current = Round(number, server, (1, 2))
    orders = {c: current.ask(c) for c in (1, 2)}
    for order in orders.values():
        current.delivered(order)
    (gone,) = (c for c in (1, 2) if server.drops_out(c, number))
    assert {o.purpose for c, o in orders.items() if c == gone} == {"follow"} and orders[3 - gone].purpose == "train"
    assert current.failed == [{"client": gone, "kind": "dropped", "reason": "drawn by lowrank.drop_rate"}]
    assert current.waiting == {3 - gone} and not current.take(gone, sent(current, gone))
    current.take(3 - gone, sent(current, 3 - gone))
    assert not current.finish().undone, "a client that has only received messages has nothing to undo"
    assert set(server.synced) == {1, 2}


def test_bytes_of_evaluation_are_in_the_same_record():
    server = ledger()
    current = Round(1, server, (1, 2))
    deliver(current, 1, 2)
    for client in (1, 2):
        current.take(client, sent(current, client))
    current.finish()
    whole = 4 * (2 * 7 + 5 * 2 + 3 * 5)
    for client in (1, 2, 3):
        order = current.ask(client, purpose="evaluate")
        assert order.parcel.facts["stands"] == 1 and order.sizes[0] == whole
        current.delivered(order)
    record = current.record({"test": {"acc": 0.5}}, {"training": 0.0})
    assert record["client_downlink_bytes"] == {1: whole, 2: whole, 3: whole}
    assert record["evaluation_downlink_bytes"] == record["downlink_bytes"] == 3 * whole
    assert not Round(2, server, (3,)).ask(3).parcel.tensors, "it received the message for the evaluation"


def test_quantised_messages_are_smaller_and_the_server_uses_the_values_that_clients_get():
    server = ledger()
    current = Round(1, server, (1, 2), codec=Uniform(8))
    deliver(current, 1, 2)
    for client in (1, 2):
        assert current.take(client, sent(current, client))
    numbers = 2 * 7 + 5 * 2 + 3 * 5
    assert current.uplink[1] == (numbers + 3 * 4, 2 * 7 + 5 * 2 + 2 * 4)
    message = current.finish().message
    assert all(torch.equal(server.state[n], message[n]) for n in message)
    order = Round(2, server, (1,), codec=Uniform(8)).ask(1)
    assert order.parcel.facts["encoded"] and order.sizes == current.uplink[1]
    assert order.sizes[0] == order.parcel.nbytes
    got = Uniform(8).decode(order.parcel.tensors, message)
    assert all(torch.allclose(got[n], message[n], rtol=1e-6, atol=0) for n in message)
    server.forget([2])
    whole = Round(2, server, (2,), codec=Uniform(8), base=lambda: {"m.weight": torch.ones(5, 7)}).ask(2)
    assert whole.parcel.tensors.keys() == {A, B, HEAD, "m.weight"} and "encoded" not in whole.parcel.facts


def test_a_running_mean_keeps_float64():
    mean = RunningMean()
    for client, value in ((1, 1 + 1e-12), (2, 1 + 3e-12)):
        mean.add(Update(client, 1, {"x": torch.tensor([value], dtype=torch.float64)}))
    (gathered,) = mean.close()
    assert gathered.tensors["x"].item() == pytest.approx(1 + 2e-12, abs=1e-15)
