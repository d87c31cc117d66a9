"""Robust means with every averaging method, and clients that send any finite values."""

import dataclasses

import numpy as np
import pytest
import torch

from fs_lowrank.config import load_config
from fs_lowrank.errors import UserError
from fs_lowrank.methods import (
    Averaging,
    RobustMean,
    create_method,
    get_method_class,
    list_methods,
    register_method,
)
from fs_lowrank.settings.sections import ROBUST
from tests.methods.conftest import close

SIZES = (3, 10, 27, 8, 5, 40, 12)
RULES = [rule for rule in ROBUST if rule != "none"]
AVERAGING = {
    **{n: {} for n in ("fedavg", "fedlora", "ffa_lora", "rolora", "fedloru", "pfedlora", "pfedloru")},
    "fedsvd": {"period": 2},  # the first round ends with the mean
    "fedrot_lora": {},
    "fedsa_lora": {},
    "la_lora": {},
    "fedpara": {},
    "ravan": {"heads": 2},
    "mfedloru": {"nested_ranks": (1, 0)},
    "pmfedloru": {"nested_ranks": (1,)},
    "fedhm": {"rank_factors": (1, 3, 2)},
}


def dense(method, state, update, name):
    """The tensor ``name`` of the state that follows from ``update``, in float64 by the definitions of the methods."""
    sent = {n: t.detach().double().numpy() for n, t in update.tensors.items()}
    if name in sent:
        return sent[name]
    old = state[name].double().numpy()
    if name.endswith(".base_layer.weight"):  # FedHM's factors, of a matrix or as two thin convolutions
        u, v = (sent[name.replace(".base_layer.weight", f".factor_{half}")] for half in "UV")
        return u @ v if u.ndim == 2 else np.einsum("orax,riyb->oiab", u, v)
    layer, half = name.split(".lora_")
    down, up = (sent[f"{layer}.nested.{half[0]}_{part}"] for part in "du")
    product = down.reshape(len(down), -1) @ up.reshape(len(up), -1)
    return old + method.params.nested_scale * product.reshape(old.shape)


def poisoned(fed, update):
    """Seven times the change of an honest client, in the other direction."""
    view = fed.method.view(fed.ledger.state, update.client)
    tensors = {n: view[n] - 7 * (t - view[n]) for n, t in update.tensors.items()}
    return dataclasses.replace(update, tensors=tensors)


def played(fed, round=1, bad=(2, 5)):
    """The updates of a round in which the clients ``bad`` are poisoned, handed in; the state before it."""
    state = dict(fed.ledger.state)
    updates = []
    for client in fed.copies:
        fed.catch_up(client, round)
        fed.jump(client, round)
        update = fed.update(client, round)
        updates.append(poisoned(fed, update) if client in bad else update)
        fed.receive(updates[-1], round)
    return state, updates


def expected(rule, rows, weights, start):
    """The robust mean of ``rows`` (clients × coordinates) for two malicious clients, from its definition in float64."""
    if rule == "median":
        return np.median(rows, axis=0)
    if rule == "trimmed_mean":
        return np.sort(rows, axis=0)[2:-2].mean(axis=0)
    if rule == "norm_bound":
        changes = rows - start
        norms = np.linalg.norm(changes, axis=1)
        factors = np.minimum(1, np.sort(norms)[(len(norms) - 1) // 2] / norms)
        return start + (weights * factors) @ changes
    distances = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    scores = np.sort(distances, axis=1)[:, 1 : len(rows) - 3].sum(1)
    kept = np.argsort(scores, kind="stable")[: 1 if rule == "krum" else len(rows) - 2]
    return (weights[kept] / weights[kept].sum()) @ rows[kept]


@pytest.mark.more
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", AVERAGING)
def test_every_averaging_method_against_the_definition(toy, federation, name, rule):
    method = toy.method(name, r=3, robust=RobustMean(rule, malicious=2), **AVERAGING[name])
    fed = federation(method, SIZES)
    state, updates = played(fed)
    weights = np.full(7, 1 / 7) if name == "fedhm" else toy.weights(SIZES)
    message = fed.finish(1)
    names = sorted(n for n in message if ":" not in n)
    rows = np.stack([np.concatenate([dense(method, state, u, n).ravel() for n in names]) for u in updates])
    start = np.concatenate([state[n].double().numpy().ravel() for n in names])
    found = np.concatenate([fed.ledger.state[n].double().numpy().ravel() for n in names])
    close(found, expected(rule, rows, weights, start))


@pytest.mark.parametrize("rule", RULES)
def test_the_record_names_clients_that_were_left_out_or_scaled(toy, federation, rule):
    fed = federation(toy.method("fedlora", robust=RobustMean(rule, malicious=2)), SIZES)
    played(fed)
    one = fed.at(1)
    fed.finish(1)
    record = one.record({}, {"training": 0.0})
    noted = {note["client"]: note["reason"] for note in record.get("robust", [])}
    assert record["clients"] == [1, 2, 3, 4, 5, 6, 7] and not record["failed"]
    if rule in ("median", "trimmed_mean"):
        assert not noted and "robust" not in record
    elif rule == "norm_bound":
        assert {2, 5} <= noted.keys() and all("was scaled down to" in reason for reason in noted.values())
    else:
        assert {2, 5} <= noted.keys() and len(noted) == (6 if rule == "krum" else 2)
        assert all(f"left out by {rule}: its score" in reason for reason in noted.values())


def test_the_record_of_the_next_round_starts_again(toy, federation):
    fed = federation(toy.method("fedlora", robust=RobustMean("norm_bound", norm=1e9)), SIZES)
    fed.method.notes = {3: "of a round before"}
    played(fed)
    one = fed.at(1)
    fed.finish(1)
    assert not one.notes and not fed.method.notes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by", ["uniform", "samples"])
def test_the_master_of_fedhm_is_averaged_with_what_the_rule_gives_for_the_clients(toy, federation, rule, by):
    robust, sizes = RobustMean(rule), SIZES[:6]
    given = {"rank_factors": (3, 3, 3, 3, 3, 3, 2), "average_by": by}  # the client of the smallest factor is absent
    fed = federation(toy.method("fedhm", **given, master=True, robust=robust), sizes)
    state, updates = played(fed)
    fed.finish(1)
    own = fed.method.recovered(updates, state)
    alone, notes = robust.mean({u.client: u.tensors for u in own}, fed.method.weights(own), state)
    counts = [u.num_samples for u in own]
    mean = max(sum(counts) // len(counts), 1)
    share = 1 / (len(own) + 1) if by == "uniform" else mean / (sum(counts) + mean)
    for name, tensor in alone.items():
        close(fed.ledger.state[name], (1 - share) * tensor.double() + share * state[name].double())
    assert fed.method.notes == notes and 0 not in notes


def test_a_server_optimizer_steps_from_the_robust_mean(toy, federation):
    optimizer = {"type": "SGD", "lr": 0.5, "momentum": 0.9}
    fed = federation(toy.method("fedlora", robust=RobustMean("median"), server_optimizer=optimizer), SIZES)
    state, updates = played(fed)
    fed.finish(1)
    for n in updates[0].tensors:
        middle = np.median(np.stack([u.tensors[n].double().numpy() for u in updates]), axis=0)
        before = state[n].double().numpy()
        close(fed.ledger.state[n].double().numpy(), before + 0.5 * (middle - before))


# -- what is refused ----------------------------------------------------------------------------------------


def test_methods_that_do_not_average_are_refused():
    for name in list_methods():
        if not issubclass(get_method_class(name), Averaging):
            with pytest.raises(
                UserError, match=f"robust = median: {name}'s server step is not a weighted mean.*fedlora"
            ):
                create_method(name, robust=RobustMean("median"))
    built_in = {n for n in list_methods() if get_method_class(n).__module__.startswith("fs_lowrank")}
    averaging = {n for n in built_in if issubclass(get_method_class(n), Averaging)}
    assert set(AVERAGING) == averaging - {"frlora", "fed_sb"}, "its pair is that of the start after a round; test_field"


@pytest.mark.usefixtures("own_methods")
def test_a_mean_of_its_own_is_refused():
    class OwnMean(Averaging):
        def mean(self, updates, state):
            return super().mean(updates, state)

    class OwnStep(Averaging):
        def aggregate(self, updates, state, round):
            return super().aggregate(updates, state, round)

    for cls, said in ((OwnMean, "a mean"), (OwnStep, "an aggregate")):
        register_method(cls.__name__.lower())(cls)
        create_method(cls.__name__.lower())
        with pytest.raises(UserError, match=f"{cls.__name__.lower()} has {said} of its own, which would ignore"):
            create_method(cls.__name__.lower(), robust=RobustMean("median"))


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"robust": "medain"}, "did you mean 'median'"),
        ({"robust": "krum", "robust_malicious": 3}, "needs 9 clients per round; there are 8"),
        ({"robust": "trimmed_mean", "robust_malicious": 4}, "needs 9 clients per round; there are 8"),
        ({"robust": "krum", "robust_malicious": 0}, "at least 1"),
        ({"robust": "norm_bound", "robust_norm": -1.0}, "at least 0"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys, said):
    content = {"federate": {"method": "fedlora", "client_num": 20, "sample_client_num": 8}, "lowrank": keys}
    with pytest.raises(UserError, match=said):
        load_config(content)


@pytest.mark.more
def test_nothing_read_from_a_client_is_changed(toy, federation):
    for rule in RULES:
        fed = federation(toy.method("fedlora", robust=RobustMean(rule, malicious=2)), SIZES)
        _, updates = played(fed)
        before = [{n: t.clone() for n, t in u.tensors.items()} for u in updates]
        with torch.no_grad():
            fed.method.aggregate(updates, fed.ledger.state, 1)
        assert all(torch.equal(u.tensors[n], b[n]) for u, b in zip(updates, before) for n in b)
