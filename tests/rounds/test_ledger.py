"""The ledger: which clients take part, which messages they lack, and which messages are kept."""

import json
from collections import Counter

import pytest
import torch

from fs_lowrank.methods import create_method
from fs_lowrank.rounds.codec import Codec
from fs_lowrank.rounds.ledger import Standing
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import Round
from fs_lowrank.settings import AdapterSpec
from tests.servers import ledger_of

A, B, HEAD = "m.lora_A.default.weight", "m.lora_B.default.weight", "classifier.weight"


def state():
    return {A: torch.ones(2, 7), B: torch.zeros(5, 2), HEAD: torch.zeros(3, 5)}


def make_ledger(method="rolora", clients=4, per_round=-1, **options):
    made = create_method(method, adapter=AdapterSpec(r=2, lora_alpha=4), rounds=9)
    return ledger_of(made, state(), clients, per_round, **{"keep_messages": False, **options})


def step(ledger, number, clients, base=None):
    """Run a round of ``clients``, each of which sends its own number in every entry; returns what each was sent."""
    current, sent = Round(number, ledger, clients, base=base), {}
    for client in clients:
        sent[client] = current.ask(client)
        current.delivered(sent[client])
    for client in clients:
        expected = ledger.method.expected(ledger.state, number, client)
        tensors = {n: torch.full_like(t, client) for n, t in expected.items()}
        assert current.take(client, Parcel(tensors, round=number, samples=client, loss=1.0))
    current.finish()
    if base is not None:
        ledger.bound(sum(t.nbytes for t in base().values()))
    return {client: order.parcel.tensors for client, order in sent.items()}


# -- which clients -------------------------------------------------------------------------------------


def test_the_seed_and_the_round_decide_who_takes_part():
    ledger, again, other = (make_ledger(clients=50, per_round=5, seed=s) for s in (1, 1, 2))
    rounds = [ledger.select(r) for r in range(1, 30)]
    # The result does not depend on the order of the calls, nor on rounds at which a run was resumed.
    assert [again.select(r) for r in range(29, 0, -1)] == rounds[::-1]
    assert [other.select(r) for r in range(1, 30)] != rounds
    assert all(len(set(s)) == 5 and s == sorted(s) and 1 <= s[0] and s[-1] <= 50 for s in rounds)
    assert make_ledger(clients=3, per_round=3).select(7) == [1, 2, 3]


def test_all_clients_take_part_about_equally_often():
    ledger = make_ledger(clients=10, per_round=3)
    counts = Counter(client for r in range(1, 1001) for client in ledger.select(r))
    assert set(counts) == set(range(1, 11)) and all(240 < n < 360 for n in counts.values())


def test_drop_outs_come_from_the_seed():
    ledger, again = (make_ledger(drop_rate=0.3, seed=5) for _ in range(2))
    drawn = [[ledger.drops_out(c, r) for c in range(1, 21)] for r in range(1, 51)]
    assert drawn == [[again.drops_out(c, r) for c in range(1, 21)] for r in range(1, 51)]
    assert 0.25 < sum(map(sum, drawn)) / 1000 < 0.35
    assert not any(make_ledger().drops_out(c, r) for c in range(20) for r in range(20))


# -- what is sent --------------------------------------------------------------------------------------


def test_what_was_not_delivered_is_sent_again():
    ledger = make_ledger(keep_messages=True)
    step(ledger, 1, (1, 2))
    second = Round(2, ledger, (1, 2))
    assert set(second.ask(1).parcel.tensors) == set(second.ask(1).parcel.tensors) == {B, HEAD}
    assert not second.downlink and not ledger.synced.get(1)


def test_only_sizes_are_kept_where_the_values_are_not_needed():
    ledger = make_ledger()
    step(ledger, 1, (1, 2))
    order = Round(2, ledger).ask(1)
    assert all(t.is_meta for t in order.parcel.tensors.values())
    assert order.sizes == Codec().sizes(order.parcel.tensors) == (4 * (5 * 2 + 3 * 5), 4 * 5 * 2)


def test_a_message_that_all_clients_have_is_removed():
    ledger = make_ledger("flora", keep_messages=True)
    held = []
    for round in range(1, 8):
        step(ledger, round, (1, 2, 3, 4))
        held.append(len([n for n in ledger.outbox if n.startswith("merge:")]))
    assert held == [2] * 7, "the stacks of one round only"


# -- the state that copies report ------------------------------------------------------------------------


def asked(ledger, number, standing):
    return Round(number, ledger, (1,)).ask(1, standing)


@pytest.mark.parametrize("said", [Standing(1, "another"), Standing(2, ""), Standing(9, ""), Standing(-1, "")])
def test_a_copy_of_unknown_state_is_sent_everything(said):
    ledger = make_ledger(keep_messages=True)
    step(ledger, 1, (1, 2))
    asked(ledger, 2, Standing())  # its facts include the stamp of round 1
    step(ledger, 2, (1, 2))
    order = asked(ledger, 3, said)
    assert order.parcel.facts["since"] is None and order.parcel.facts["whole"]
    assert order.parcel.tensors.keys() == {A, B, HEAD}


def test_a_stamp_is_of_this_run_and_this_history():
    stamps = set()
    for seed, clients in ((1, (1, 2)), (2, (1, 2)), (1, (1, 3))):
        ledger = make_ledger(keep_messages=True, seed=seed)
        step(ledger, 1, clients)
        stamps.add(ledger.stamp(1))
    assert len(stamps) == 3


def test_a_late_client_is_sent_the_whole_model_if_that_is_less_also_after_a_restart():
    ledger = make_ledger("flora", clients=3, keep_messages=True)
    for number in range(1, 9):
        step(ledger, number, (1, 2), base=lambda: {"m.weight": torch.zeros(5, 7)})
    whole = 4 * (2 * 7 + 5 * 2 + 3 * 5 + 5 * 7)
    assert 0 < ledger.horizon < 8 and sum(t.nbytes for _, t in ledger.outbox.values()) <= whole
    again = make_ledger("flora", clients=3, keep_messages=True)
    parts, data = ledger.saved(8)
    again.restore(8, parts, json.loads(json.dumps(data)))
    for each in (ledger, again):
        assert each.since(3) is None and each.since(1) == 7


def test_a_message_larger_than_the_whole_model_is_not_sent():
    ledger, base = make_ledger("flora", clients=9, keep_messages=True), {"m.weight": torch.zeros(5, 7)}
    step(ledger, 1, range(1, 10), base=lambda: base)
    message, whole = 4 * (9 * (2 * 7 + 5 * 2) + 3 * 5), 4 * (2 * 7 + 5 * 2 + 3 * 5 + 5 * 7)
    assert whole < message
    for known, sent in ((lambda: base, whole), (None, message)):
        order = Round(2, ledger, (1,), base=known).ask(1)
        assert order.sizes[0] == sent and bool(order.parcel.facts.get("whole")) == (known is not None)


def test_messages_that_were_saved_without_their_values_bring_no_copy_up_to_date():
    """No copy had been given a stamp; ``test_copies`` has ledgers of copies that go on."""
    ledger, again = (make_ledger("fedloru", keep_messages=True) for _ in range(2))
    for number in (1, 2, 3):
        step(ledger, number, (1, 2, 3))
    parts, data = ledger.saved(3)
    again.restore(3, parts, json.loads(json.dumps(data)))
    assert again.synced == ledger.synced and again.since(4, Standing()) is None
    assert again.since(1, Standing(3, ledger.stamp(3))) == 3 and again.since(1, Standing(3, "x")) is None


def test_a_ledger_continues_from_what_schema_1_saved():
    ledger = make_ledger("fedloru", keep_messages=True)
    for number in (1, 2, 3):
        step(ledger, number, (1, number + 1))
    parts, data = ledger.saved(3)
    assert "synced" not in data and sorted(parts["synced"]["clients"].tolist()) == [1, 2, 3, 4]
    again = make_ledger("fedloru", keep_messages=True)
    again.restore(3, {"state": parts["state"]}, json.loads(json.dumps({**data, "synced": ledger.synced})))
    assert again.synced == ledger.synced == {1: 2, 2: 0, 3: 1, 4: 2} and again.everyone_has() == 0


def test_the_tensors_of_the_state_are_contiguous_as_a_checkpoint_restores_them():
    ledger = make_ledger()
    transposed = {name: tensor.T.contiguous().T for name, tensor in ledger.state.items()}
    assert not all(tensor.is_contiguous() for tensor in transposed.values())
    ledger.commit(1, transposed, {})
    assert all(tensor.is_contiguous() for tensor in ledger.state.values())
    assert all(torch.equal(tensor, transposed[name]) for name, tensor in ledger.state.items())
