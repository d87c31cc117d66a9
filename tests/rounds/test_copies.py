"""Copies of clients that follow the server, with processes that end after every message, losses and missed rounds."""

import json

import pytest
import torch

from fs_lowrank.methods import Client, Update, create_method
from fs_lowrank.models.names import named_tensors
from fs_lowrank.rounds.codec import Codec, Uniform
from fs_lowrank.rounds.copies import LostCopy, OwnCopy, apology, changed_base, own_tensors, personal_in, standing_in
from fs_lowrank.rounds.ledger import Standing
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.personal import PersonalParts
from fs_lowrank.rounds.round import Round
from fs_lowrank.rounds.trainer import Fitted
from fs_lowrank.runs.checkpoint import _meta_sum
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training.local import LocalResult, set_trainable
from fs_lowrank.versions import NewerSchema
from tests.methods.conftest import Toy
from tests.servers import ledger_of

METHODS = {
    "rolora": {},
    "flora": {},
    "fedloru": {"tau": 2},
    "fedloru, momentum": {"tau": 2, "init": "momentum"},
    "pfedlora": {},
    "fedavg": {},
}
EACH = pytest.mark.parametrize("name", METHODS)


def method_of(name):
    adapter = AdapterSpec(r=2, lora_alpha=4, target_modules=("up", "down"))
    return create_method(name.partition(",")[0], adapter=adapter, rounds=9, seed=4, **METHODS[name])


class Run:
    """A server with its model, and three clients whose processes end after every message; messages are bytes."""

    def __init__(self, name, folder, codec=None, min_clients=1):
        self.name, self.folder, self.codec = name, folder, codec or Codec()
        self.method = method_of(name)
        self.model = self.method.adapt(Toy.net())
        self.ledger = ledger_of(self.method, self.method.initial_state(self.model), 3, min_clients=min_clients)
        self.standings = dict.fromkeys((1, 2, 3), Standing())

    def base(self):
        return changed_base(self.method, self.model)

    def copy(self, client, identity="run"):
        method = method_of(self.name)
        model = method.adapt(Toy.net())
        personal = PersonalParts({n: p.detach().clone() for n, p in named_tensors(model, method.personal).items()})
        copy = OwnCopy(method, model, client, personal, self.codec, identity)
        copy.restore(self.folder / str(client))
        return copy

    def follow(self, client, data):
        """A process of ``client``, which handles one message and stores its state on disk; returns its reply."""
        copy, parcel = self.copy(client), Parcel.of(data)
        round = parcel.facts["round"]
        try:
            copy.catch_up(parcel)
        except LostCopy as error:
            return apology(round, error).to_bytes()
        reply = None
        if parcel.facts["purpose"] == "train":
            drawn = torch.Generator().manual_seed(100 * round + client)
            for phase in copy.method.phases(round, client):
                for parameter in set_trainable(copy.model, phase.train):
                    with torch.no_grad():
                        parameter.add_(0.1 * torch.randn(parameter.shape, generator=drawn))
            task = self.ledger.task(client, round)
            copy.personal.keep(client, round, own_tensors(copy.method, copy.model, task))
            sent = copy.method.upload(copy.model, round, Client(client, client))
            fitted = Fitted(Update(client, client, sent), LocalResult(1.0, 1, client), {})
            reply = fitted.answer(round, self.codec).to_bytes()
        copy.save(self.folder / str(client))
        self.standings[client] = copy.standing
        return reply

    def round(self, number, clients=(1, 2, 3), spoil=lambda client, parcel: parcel, absent=()):
        current = Round(number, self.ledger, (*clients, *absent), codec=self.codec, base=self.base)
        sizes = {}
        for client in absent:
            current.fail(client, "absent", "its process is gone")
        for client in clients:
            order = current.ask(client, self.standings[client])
            reply = self.follow(client, order.parcel.to_bytes())
            current.delivered(order)
            sizes[client] = order.sizes[0]
            current.take(client, spoil(client, Parcel.of(reply)))
        message = current.finish().message
        with torch.no_grad():
            self.method.apply(self.model, message, number)
        self.ledger.bound(sum(t.nbytes for t in self.base().values()))
        return sizes

    def evaluated(self, number, client):
        """The model of ``client`` when it has followed up to now."""
        current = Round(number, self.ledger, (), codec=self.codec, base=self.base)
        order = current.ask(client, self.standings[client], purpose="evaluate")
        self.follow(client, order.parcel.to_bytes())
        current.delivered(order)
        copy = self.copy(client)
        assert copy.standing.round == self.ledger.stood
        return copy, order


def check_same(copy, run, **tolerance):
    """All weights of the copy but its personal ones are those of the server's own copy."""
    own, theirs = dict(copy.model.named_parameters()), dict(run.model.named_parameters())
    personal = set(named_tensors(copy.model, copy.method.personal))
    for name in own.keys() - personal:
        if tolerance:
            torch.testing.assert_close(own[name], theirs[name], **tolerance)
        else:
            assert torch.equal(own[name], theirs[name]), name


@pytest.mark.more
@EACH
def test_processes_that_end_after_every_message(name, tmp_path):
    run, seen = Run(name, tmp_path), []
    for number, clients in enumerate([(1, 2), (1, 2, 3), (1,), (1, 3), (1, 2, 3)], 1):
        seen.append(run.round(number, clients))
    for client in (1, 2, 3):
        copy, order = run.evaluated(5, client)
        assert order.parcel.facts["since"] == 4, "it is sent only what it lacks"
        check_same(copy, run)
    assert not seen[0][1] and seen[1][3] == seen[1][1], "the state before round 1 follows from the seed"
    assert seen[3][3] >= seen[3][1], "who was away lacks more"


@pytest.mark.more
@EACH
def test_a_copy_that_was_lost_gets_everything(name, tmp_path):
    run = Run(name, tmp_path)
    for number in (1, 2, 3, 4):
        run.round(number)
    for path in (tmp_path / "2").rglob("*"):
        if path.name == "shared.safetensors":
            path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    run.standings[2] = run.copy(2).standing
    assert run.standings[2] == Standing(), "damaged files are not used"
    copy, order = run.evaluated(4, 2)
    assert order.parcel.facts["since"] is None and order.parcel.facts["whole"]
    check_same(copy, run)
    assert run.evaluated(4, 2)[1].parcel.facts["since"] == 4


def test_what_another_run_has_saved_is_not_used(tmp_path, caplog):
    run = Run("fedloru", tmp_path)
    run.round(1)
    assert run.copy(1).standing.round == 0 and run.evaluated(1, 1)[0].standing.round == 1
    assert run.copy(1, identity="another").standing == Standing()
    assert "of another run; it starts anew" in caplog.text
    # The same can be read without a model.
    assert standing_in(tmp_path / "1", 1, "run") == run.copy(1).standing != Standing()
    assert standing_in(tmp_path / "1", 1, "another") == standing_in(tmp_path / "none", 1, "run") == Standing()


def test_what_a_newer_version_has_saved_is_not_taken_as_damaged(tmp_path):
    run = Run("fedloru", tmp_path)
    run.round(1)
    (path,) = (tmp_path / "1").glob("*/meta.json")
    meta = json.loads(path.read_text())
    del meta["sha256"]
    meta["schema"] += 1
    path.write_text(json.dumps({"sha256": _meta_sum(meta), **meta}))
    with pytest.raises(NewerSchema):
        standing_in(tmp_path / "1", 1, "run")
    with pytest.raises(NewerSchema):
        run.copy(1)


@pytest.mark.more
@EACH
def test_messages_for_a_client_that_is_never_asked_are_bounded(name, tmp_path):
    """At most the whole model and one message are kept for it; after it has been asked, it is up to date."""
    run, kept = Run(name, tmp_path), []
    for number in range(1, 25):
        run.round(number, (1, 2))
        newest = [t for came, t in run.ledger.outbox.values() if came == number]
        older = [t for came, t in run.ledger.outbox.values() if came < number]
        kept.append((sum(t.nbytes for t in newest), sum(t.nbytes for t in older)))
    whole = sum(t.nbytes for t in (*run.method.view(run.ledger.state).values(), *run.base().values()))
    assert all(newest + older <= max(whole, newest) for newest, older in kept)
    dropped = name in ("flora", "fedloru", "fedloru, momentum")
    assert bool(run.ledger.horizon) == dropped, "messages of the other methods replace earlier ones"
    copy, order = run.evaluated(24, 3)
    assert bool(order.parcel.facts.get("whole")) == dropped and (not dropped or order.sizes[0] == whole)
    check_same(copy, run)
    assert run.evaluated(24, 1)[1].parcel.facts["since"] == 23


@pytest.mark.more
@EACH
def test_an_order_that_arrives_twice_is_carried_out_once(name, tmp_path):
    run = Run(name, tmp_path)
    run.round(1)
    run.round(2)
    current = Round(3, run.ledger, (1,))
    data = current.ask(1, run.standings[1]).parcel.to_bytes()
    first = Parcel.of(run.follow(1, data))
    again = Parcel.of(run.follow(1, data))
    assert first.facts == again.facts and all(torch.equal(first.tensors[n], again.tensors[n]) for n in first.tensors)
    # An order that continues from another round than that of this copy is not carried out.
    run.round(3)
    run.round(4)
    behind = Parcel.of(data)
    behind.facts.update(since=1, stands=4)
    reply = Parcel.of(run.follow(1, behind.to_bytes()))
    assert reply.facts["lost"] and "is at round 3, and the message goes on from round 1" in reply.facts["error"]
    current = Round(5, run.ledger, (1,))
    order = current.ask(1)
    current.delivered(order)
    assert not current.take(1, Parcel({}, **{**reply.facts, "round": 5})) and run.ledger.since(1) is None


@pytest.mark.more
@pytest.mark.parametrize("how", ["refused", "the server is resumed"])
def test_training_that_did_not_count_does_not_change_the_personal_tensors(tmp_path, how):
    """The update of client 2 in round 2 does not count: its personal adapter is then as if it had not been asked."""
    run, other = Run("pfedlora", tmp_path / "run"), Run("pfedlora", tmp_path / "other")
    run.round(1)
    other.round(1)
    other.round(2, (1, 3))
    if how == "refused":

        def spoil(client, parcel):
            bad = {n: t * float("nan") for n, t in parcel.tensors.items()}
            return Parcel(bad, **parcel.facts) if client == 2 else parcel

        run.round(2, spoil=spoil)
    else:
        current = Round(2, run.ledger, (1, 2, 3))
        for client in (1, 2, 3):
            assert run.follow(client, current.ask(client, run.standings[client]).parcel.to_bytes())
        run.round(2, (1, 3), absent=(2,))  # the server process that asked before has ended
        saved, before = (
            personal_in(tmp_path / name / "2", 2, "run", run.ledger.undone.get(2)) for name in ("run", "other")
        )
        assert saved.keys() == before.keys() and all(torch.equal(saved[n], before[n]) for n in saved)
    run.round(3)
    other.round(3)
    for client in (1, 2, 3):
        ours, theirs = run.copy(client).personal[client], other.copy(client).personal[client]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours), client


@pytest.mark.more
@pytest.mark.parametrize("bits", [8, 16])
@EACH
def test_the_state_after_a_quantised_message_is_what_copies_hold(name, bits, tmp_path):
    """Also where a pair is merged and goes on as it is, so that the message has it under another name."""
    run = Run(name, tmp_path, Uniform(bits))
    for number, clients in enumerate([(1, 2, 3), (1, 2), (1, 2, 3)], 1):
        run.round(number, clients)
        held = dict(run.evaluated(number, 1)[0].model.named_parameters())
        state = run.method.view(run.ledger.state)
        assert state and all(torch.equal(state[n], held[n]) for n in state), number
    for client in (1, 2, 3):
        check_same(run.evaluated(3, client)[0], run, atol=1e-6, rtol=1e-5)


@pytest.mark.more
@EACH
def test_a_server_that_ends_after_every_round(name, tmp_path):
    """Its ledger continues from what was saved: copies are sent only what they lack, as by a server that runs on."""
    run, resumed = Run(name, tmp_path / "a"), Run(name, tmp_path / "b")
    for number, clients in enumerate([(1, 2), (1, 3), (1, 2), (1, 2, 3)], 1):
        assert run.round(number, clients) == resumed.round(number, clients)
        parts, data = resumed.ledger.saved(number)
        before = resumed.ledger
        resumed.ledger = ledger_of(before.method, {}, 3)
        resumed.ledger.restore(number, parts, json.loads(json.dumps(data)))
    for client in (1, 2, 3):
        check_same(resumed.evaluated(4, client)[0], run)
