"""The server's side: who takes part, what travels, what is forgotten."""

from collections import Counter

import pytest
import torch

from fs_lowrank.engines.server import Server, without_head
from fs_lowrank.methods import Update, create_method
from fs_lowrank.settings import AdapterSpec

A, B, HEAD = "m.lora_A.default.weight", "m.lora_B.default.weight", "classifier.weight"


def state():
    return {A: torch.ones(2, 7), B: torch.zeros(5, 2), HEAD: torch.zeros(3, 5)}


def server(method="rolora", clients=4, per_round=4, min_clients=1, seed=0, **options):
    made = create_method(method, adapter=AdapterSpec(r=2, lora_alpha=4), rounds=9)
    return Server(made, state(), clients, per_round, min_clients, seed, **options)


def step(server, round, clients):
    for client in clients:
        expected = server.method.expected(server.state, round, client)
        server.ask(client, round)
        server.receive(Update(client, client, {n: torch.full_like(t, client) for n, t in expected.items()}), round)
    return server.finish(round)


# -- who -----------------------------------------------------------------------------------------------


def test_the_seed_and_the_round_decide_who_takes_part():
    one, again, other = (server(clients=50, per_round=5, seed=s) for s in (1, 1, 2))
    rounds = [one.select(r) for r in range(1, 30)]
    # Asked in any order, or after a resume at any round, the answer is the same.
    assert [again.select(r) for r in range(29, 0, -1)] == rounds[::-1]
    assert [other.select(r) for r in range(1, 30)] != rounds
    assert all(len(set(s)) == 5 and s == sorted(s) and 1 <= s[0] and s[-1] <= 50 for s in rounds)
    assert server(clients=3, per_round=3).select(7) == [1, 2, 3]


def test_everyone_takes_part_about_as_often():
    one = server(clients=10, per_round=3)
    counts = Counter(client for r in range(1, 1001) for client in one.select(r))
    assert set(counts) == set(range(1, 11)) and all(240 < n < 360 for n in counts.values())


def test_drop_outs_come_from_the_seed():
    one, again = (server(drop_rate=0.3, seed=5) for _ in range(2))
    drawn = [[one.drops_out(c, r) for c in range(1, 21)] for r in range(1, 51)]
    assert drawn == [[again.drops_out(c, r) for c in range(1, 21)] for r in range(1, 51)]
    assert 0.25 < sum(map(sum, drawn)) / 1000 < 0.35
    assert not any(server().drops_out(c, r) for c in range(20) for r in range(20))


# -- what travels --------------------------------------------------------------------------------------


def test_nothing_is_sent_twice():
    one = server(keep_messages=True)
    assert not one.downlink(1, 1)
    step(one, 1, (1, 2))
    assert set(one.downlink(1, 2)) == {B, HEAD} and not one.downlink(1, 2)
    step(one, 2, (1, 2))
    assert set(one.downlink(1, 3)) == {A, HEAD}
    # One that was never there gets both halves, each as it stands now.
    late = one.downlink(3, 3)
    assert set(late) == {A, B, HEAD} and all(torch.equal(late[n], one.state[n]) for n in late)


def test_only_sizes_are_kept_where_the_values_are_not_needed():
    one = server()
    step(one, 1, (1, 2))
    message = one.downlink(1, 2)
    assert all(t.is_meta for t in message.values())
    assert one.sizes(message) == (4 * (5 * 2 + 3 * 5), 4 * 5 * 2)
    assert set(without_head(message)) == {B}


def test_what_everyone_has_is_forgotten():
    one = server("flora", keep_messages=True)
    held = []
    for round in range(1, 8):
        for client in (1, 2, 3, 4):
            one.downlink(client, round)
        step(one, round, (1, 2, 3, 4))
        held.append(len([n for n in one.outbox if n.startswith("merge:")]))
    assert held == [2] * 7, "the stacks of one round, not of all"


def test_what_someone_lacks_is_kept():
    one = server("flora", keep_messages=True)
    for round in range(1, 5):
        for client in (1, 2, 3):
            one.downlink(client, round)
        step(one, round, (1, 2, 3))
    assert {n for n in one.downlink(4, 5) if n.startswith("merge:")} == {
        f"merge:{r}:{n}" for r in (1, 2, 3, 4) for n in (A, B)
    }


def test_messages_are_cut_to_the_clients_rank():
    made = create_method("flexlora", adapter=AdapterSpec(r=2, lora_alpha=4), ranks=(1, 2))
    one = Server(made, state(), 2, 2, 1, 0)
    step(one, 1, (1, 2))
    assert one.sizes(one.downlink(1, 2)) == (4 * (7 + 5 + 15), 4 * (7 + 5))
    assert one.sizes(one.downlink(2, 2)) == (4 * (14 + 10 + 15), 4 * (14 + 10))


def test_the_sum_does_not_depend_on_who_came_first():
    states = []
    for order in ((1, 2, 3), (3, 1, 2), (2, 3, 1)):
        one = server()
        step(one, 1, order)
        states.append(one.state)
    assert all(torch.equal(states[0][n], other[n]) for other in states[1:] for n in states[0])
    assert states[0][B][0, 0] == pytest.approx((1 + 4 + 9) / 6)
