import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_lowrank.data.partition import (
    PARTITIONERS,
    Rows,
    client_record,
    matching_shares,
    partition,
    register_partitioner,
)
from fs_lowrank.errors import UserError


def rng(seed=0):
    return np.random.default_rng(seed)


def rows(size=200, classes=4, seed=0):
    labels = rng(seed).integers(classes, size=size)
    domain = rng(seed + 1).choice(["x", "y", "z"], size=size, p=[0.6, 0.3, 0.1])
    return Rows(size, labels, {"domain": domain})


CASES = [
    ("iid", {}),
    ("lda", {"alpha": 0.1}),
    ("mixture", {"alpha": 0.1}),
    ("mixture", {"alpha": 0.1, "mixture_seed": 3}),
    ("dirichlet", {"alpha": 100.0, "min_size": 5}),
    ("lda", {"field": "domain"}),
    ("shards", {"shards_per_client": 3}),
    ("field", {"field": "domain"}),
    ("meta", {"size_alpha": 0.3, "min_size": 2}),
    ("quantity", {"alpha": 0.2, "min_size": 3}),
]


@pytest.mark.parametrize("name, args", CASES)
def test_every_row_goes_to_one_client_determined_by_the_seed(name, args):
    first = partition(name, rows(), 8, rng(3), args)
    assert np.sort(np.concatenate(first.indices)).tolist() == list(range(200))
    assert len(first) == 8 and first.sizes().min() >= args.get("min_size", 1)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in first.indices)
    again, other = partition(name, rows(), 8, rng(3), args), partition(name, rows(), 8, rng(4), args)
    same, differ = ([np.array_equal(*pair) for pair in zip(first.indices, by.indices)] for by in (again, other))
    assert all(same) and not all(differ)


@pytest.mark.parametrize(
    "name, args, wanted",
    [
        ("iid", {}, "4794485e8bda6999"),
        ("lda", {"alpha": 0.1}, "97ec03d48f43465c"),
        ("lda", {"alpha": 0.02, "min_size": 5}, "81fea4960f68dbd5"),
        ("mixture", {"alpha": 0.1}, "162abdfa45dcd9fd"),
        ("mixture", {"alpha": 0.05, "mixture_seed": 3, "min_size": 4}, "8be962eb75c4aa93"),
        ("dirichlet", {"alpha": 100.0, "min_size": 5}, "4ca07de8038b2937"),
        ("lda", {"field": "domain"}, "0d5f67574ced9945"),
        ("shards", {"shards_per_client": 3}, "ff1c02a816a7acf3"),
        ("field", {"field": "domain"}, "9a830a0636603858"),
        ("meta", {"size_alpha": 0.05, "min_size": 4}, "c8d708397c9a0e6e"),
        ("quantity", {"alpha": 0.05, "min_size": 3}, "cf2f03a9bdb71618"),
        ("quantity", {"alpha": 1e-300, "min_size": 2}, "538e43e781b1f69f"),
    ],
)
def test_a_seed_divides_rows_as_it_always_did(name, args, wanted):
    """Hashes of rows, shares and the generator's state, recorded before all rows lay in one array."""
    labels, domain = rng(0).integers(4, size=400), rng(1).choice(["x", "y", "z"], size=400, p=[0.6, 0.3, 0.1])
    train, held, draw = Rows(400, labels, {"domain": domain}), rows(90, 5, 7), rng(3)
    made = partition(name, train, 31, draw, args)
    digest = hashlib.sha256()
    for part in (*made.indices, *matching_shares(made, train, held, draw)):
        digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    digest.update(str(draw.bit_generator.state).encode())
    assert digest.hexdigest()[:16] == wanted


def test_every_registered_partitioner_is_covered():
    assert {name for name, _ in CASES} | {"file"} == set(PARTITIONERS)  # that of files: test_stored.py


@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_floor_holds_for_any_sizes(data, seed):
    clients = data.draw(st.integers(1, 12))
    floor = data.draw(st.integers(1, 5))
    size = clients * floor + data.draw(st.integers(0, 60))
    alpha = data.draw(st.sampled_from([1e-300, 1e-6, 0.01, 0.5, 1e6, 1e308]))
    name = data.draw(st.sampled_from(["lda", "quantity"]))
    made = partition(name, rows(size, 3, seed % 1000), clients, rng(seed), {"alpha": alpha, "min_size": floor})
    assert made.sizes().min() >= floor and made.sizes().sum() == size


def summary(made):
    """What ``read_split`` says of each client."""
    labels = [None if made.labels is None else made.labels[rows] for rows in made.indices]
    return [client_record(i, len(rows), labels[i], made.classes()) for i, rows in enumerate(made.indices)]


def share_of_main_class(made, labels):
    return np.mean([np.bincount(labels[part]).max() / len(part) for part in made.indices])


def test_small_alpha_skews_the_classes_and_large_does_not():
    data = rows(2000)
    skewed = share_of_main_class(partition("lda", data, 10, rng(), {"alpha": 0.05, "min_size": 10}), data.labels)
    even = share_of_main_class(partition("lda", data, 10, rng(), {"alpha": 1000.0}), data.labels)
    assert skewed > 0.7 and even < 0.4


def test_mixture_seed_fixes_the_proportions_but_not_the_rows():
    data = rows(5000)
    args = {"alpha": 0.2, "mixture_seed": 3}
    one, other = partition("mixture", data, 5, rng(0), args), partition("mixture", data, 5, rng(1), args)
    assert [r["labels"] for r in summary(one)] == [r["labels"] for r in summary(other)]
    assert any(not np.array_equal(a, b) for a, b in zip(one.indices, other.indices))
    draw = np.random.RandomState(3)
    kinds, counts = np.unique(data.labels, return_counts=True)
    shares = np.stack([draw.dirichlet([0.2] * len(kinds)) for _ in range(5)])
    for client, record in enumerate(summary(one)):
        for kind, count in zip(kinds, counts):
            assert abs(record["labels"][str(kind)] - count * shares[client, kind] / shares[:, kind].sum()) <= 1
    free = summary(partition("mixture", data, 5, rng(0), {"alpha": 0.2}))
    assert [r["labels"] for r in free] != [r["labels"] for r in summary(one)]


def test_the_largest_alpha_is_even():
    assert set(partition("quantity", Rows(100), 4, rng(), {"alpha": 1e308}).sizes()) == {25}


def test_iid_sizes_are_equal_within_one():
    sizes = partition("iid", rows(203), 8, rng()).sizes()
    assert sizes.max() - sizes.min() == 1


def test_shards_limit_the_classes_of_a_client():
    data = Rows(400, np.repeat(np.arange(10), 40))
    made = partition("shards", data, 20, rng(), {"shards_per_client": 2})
    assert set(made.sizes()) == {20}
    assert max(len(set(data.labels[part])) for part in made.indices) <= 2


def test_field_gives_one_value_a_client_in_proportion():
    domain = np.repeat(["movies", "nyt", "tweets"], [600, 300, 100])
    data = Rows(1000, None, {"domain": domain})
    made = partition("field", data, 10, rng(), {"field": "domain"})
    held = [set(domain[part]) for part in made.indices]
    assert all(len(values) == 1 for values in held)
    assert [value for values in held for value in values] == ["movies"] * 6 + ["nyt"] * 3 + ["tweets"]
    assert set(made.sizes()) == {100}
    assert len(partition("meta", data, 10, rng())) == 10  # the only column needs no name
    unequal = partition("field", data, 10, rng(), {"field": "domain", "size_alpha": 0.5}).sizes()
    assert unequal[:6].sum() == 600 and len(set(unequal[:6])) > 1


@pytest.mark.parametrize("name", ["field", "meta"])
def test_fewer_clients_than_values_hold_several(name):
    """As with FederatedScope's ``rosetta_3_clients``: nine languages, three clients."""
    language = np.repeat([f"language {i}" for i in range(9)], 10)
    held = [set(language[part]) for part in partition(name, Rows(90, None, {"l": language}), 3, rng()).indices]
    assert [len(values) for values in held] == [3, 3, 3] and set.union(*held) == {*language}


def test_fewer_clients_than_values_are_said(caplog):
    """Sites that are put together are another experiment."""
    data = Rows(12, None, {"site": np.repeat(["a", "b", "c"], 4)})
    assert len(partition("field", data, 3, rng())) == 3 and not caplog.records
    assert len(partition("field", data, 2, rng())) == 2
    assert "column 'site' has 3 values, so some of 2 clients hold the rows of several" in caplog.text


def test_field_never_splits_a_value_into_more_clients_than_rows():
    data = Rows(12, None, {"f": np.array(["a"] * 10 + ["b", "c"])})
    assert sorted(partition("field", data, 12, rng()).sizes()) == [1] * 12


def test_quantity_skews_sizes_not_classes():
    data = rows(5000)
    made = partition("quantity", data, 5, rng(1), {"alpha": 0.5, "min_size": 50})
    assert made.sizes().max() > 3 * made.sizes().min()
    big = np.bincount(data.labels[max(made.indices, key=len)]) / made.sizes().max()
    assert np.abs(big - np.bincount(data.labels) / 5000).max() < 0.05


def test_without_classes_lda_takes_the_category():
    data = Rows(90, None, {"category": np.repeat(["qa", "chat", "code"], 30)})
    made = partition("lda", data, 3, rng(), {"alpha": 0.01})
    assert made.sizes().sum() == 90


def test_summary():
    made = partition("iid", Rows(4, np.array([0, 1, 1, 1])), 1, rng())
    made.label_names = ["neg", "pos"]
    assert summary(made) == [{"client": 1, "size": 4, "labels": {"neg": 1, "pos": 3}}]
    assert summary(partition("iid", Rows(3), 1, rng())) == [{"client": 1, "size": 3}]


@pytest.mark.parametrize(
    "name, clients, args, message",
    [
        ("iid", 201, {}, "201 clients cannot share 200"),
        ("ldaa", 2, {}, "data.splitter = 'ldaa': there is no such splitter; did you mean 'lda'"),
        ("lda", 2, {"alfa": 1}, "unknown key 'data.splitter_args.0.alfa'; did you mean 'alpha'"),
        ("lda", 2, {"alpha": 0}, "splitter_args.0.alpha = 0: expected a number, above 0"),
        ("lda", 2, {"alpha": float("nan")}, "alpha = nan: expected a number"),
        ("field", 3, {"field": "domain", "size_alpha": 0}, "size_alpha = 0: expected a number or nothing, above 0"),
        ("lda", 30, {"min_size": 10}, "30 clients cannot share 200 training rows: every client needs at least 10"),
        (
            "mixture",
            3,
            {"mixture_seed": -1},
            "mixture_seed = -1: expected a whole number or nothing, at least 0 and at most 4294967295",
        ),
        ("lda", 3, {"field": "domian"}, "no column 'domian'.*did you mean 'domain'"),
        ("lda", 3, {"field": ["domain"]}, "data.splitter_args.0.field = .'domain'.: expected the name of a column"),
        ("field", 3, {"field": "topic"}, "no column 'topic'.*there are: domain"),
        ("field", 3, {"field": "domain", "min_size": 60}, "fewer than min_size 60"),
        ("field", 11, {"field": "domain", "min_size": 18}, "no more than .* clients"),
        ("shards", 60, {"shards_per_client": 4}, "need 240 rows; there are 200"),
    ],
)
def test_errors(name, clients, args, message):
    with pytest.raises(UserError, match=message):
        partition(name, rows(), clients, rng(), args)


def test_a_partitioner_that_loses_rows_is_refused():
    @register_partitioner("lossy")
    def lossy(rows, num_clients, rng):
        return [np.arange(1)] * num_clients

    try:
        with pytest.raises(RuntimeError, match="lossy"):
            partition("lossy", rows(), 2, rng())
    finally:
        del PARTITIONERS["lossy"]


# -- shares of held-out rows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, args, by",
    [
        ("lda", {"alpha": 0.1}, "labels"),
        ("lda", {"field": "domain"}, "domain"),
        ("field", {"field": "domain"}, "domain"),
        ("meta", {}, "domain"),
        ("shards", {}, "labels"),
    ],
)
def test_shares_are_distributed_as_the_training_rows(name, args, by):
    train, held = rows(), rows(120, seed=7)
    parts = partition(name, train, 6, rng(3), args)
    shares = matching_shares(parts, train, held, rng(1))
    of_train, of_held = ((r.labels if by == "labels" else r.fields["domain"]) for r in (train, held))
    for kind in np.unique(of_train):
        counts = np.array([(of_train[part] == kind).sum() for part in parts.indices])
        quota = counts / counts.sum() * (of_held == kind).sum()
        got = np.array([(of_held[share] == kind).sum() for share in shares])
        assert (np.abs(got - quota) < 1).all()


def test_shares_without_classes_are_by_size():
    train, held = Rows(100), Rows(50)
    parts = partition("quantity", train, 4, rng(3), {"alpha": 0.5})
    sizes = [len(share) for share in matching_shares(parts, train, held, rng(1))]
    assert all(abs(got - size / 2) < 1 for got, size in zip(sizes, parts.sizes(), strict=True))


def test_a_class_without_training_rows_is_shared_by_size():
    train, held = Rows(40, np.zeros(40, np.int64)), Rows(8, np.ones(8, np.int64))
    parts = partition("iid", train, 4, rng(3))
    assert [len(share) for share in matching_shares(parts, train, held, rng(1))] == [2, 2, 2, 2]
