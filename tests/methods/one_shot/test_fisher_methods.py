"""FedFisher, FisherMerge and RegMean on nets small enough for brute force."""

import numpy as np
import pytest
import torch

from fs_lowrank.algebra import nbytes
from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method
from fs_lowrank.methods.one_shot import fedfisher
from fs_lowrank.methods.one_shot.base import accuracy
from fs_lowrank.models.curvature import diagonal_fisher, full_fisher, input_grams, kronecker_fisher


def clients(bench, kind=None, count=3, **options):
    return [bench.net(kind or bench.small, seed=k, **options) for k in range(count)]


def exact(model, data):
    """The diagonal Fisher, which ``tests/models/test_curvature.py`` compares with its definition."""
    found = diagonal_fisher(model, data, sorted(dict(model.named_parameters())), draws=0)
    return {name: fisher.double() for name, fisher in found.items()}


def flat(tensors, names):
    return torch.cat([tensors[n].double().flatten() for n in names])


def close(a, b, **tolerances):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name].double(),
            b[name].double(),
            **{"atol": 1e-6, "rtol": 1e-5, **tolerances},
            msg=lambda m, n=name: f"{n}: {m}",
        )


# -- the diagonal --------------------------------------------------------------------------------------


def test_the_diagonal_closed_form(bench):
    ran = bench.one_round("fedfisher", clients(bench), fisher="diag")
    for name, found in ran.message.items():
        above = below = 0
        for p, update in zip(ran.weights, ran.updates):
            f, w = (np.asarray(update.tensors[n], dtype=np.float64) for n in (f"fisher:{name}", name))
            above, below = above + p * f * w, below + p * f
        wanted = np.where(
            below > 0,
            above / np.where(below > 0, below, 1),
            sum(p * np.asarray(u.tensors[name]) for p, u in zip(ran.weights, ran.updates)),
        )
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6, rtol=1e-5)


def test_parameters_without_information_take_the_mean(bench):
    models = clients(bench)
    for model in models:
        model.two.weight.data[3] = -5  # a neuron that is never active, so its weights have no gradient
        model.one.weight.data.abs_()
    ran = bench.one_round("fedfisher", models, fisher="diag")
    mean = sum(p * m.two.weight[3].double() for p, m in zip(ran.weights, models))
    assert all(not u.tensors["fisher:two.weight"][3].any() for u in ran.updates)
    torch.testing.assert_close(ran.message["two.weight"][3].double(), mean.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("fisher", ["diag", "full"])
def test_cg_agrees_with_the_closed_form(bench, fisher):
    closed, cg = (
        bench.one_round(
            "fedfisher", clients(bench), fisher=fisher, solver=s, draws=5, tolerance=1e-7, steps=20000, select=False
        )
        for s in ("closed", "cg")
    )
    if fisher == "diag":
        return close(closed.message, cg.message, atol=1e-4)
    # In directions in which F is almost zero, the two end at different values.
    names = sorted(closed.message)
    total = sum(p * u.tensors["fisher:"].double() for p, u in zip(closed.weights, closed.updates))
    apart, size = (flat(closed.message, names) - flat(t, names) for t in (cg.message, bench.tensors(bench.net())))
    assert apart @ total @ apart < 1e-6 * (size @ total @ size)


def test_draws_follow_seed_round_and_client(bench):
    same = clients(bench, count=1) * 2
    data = [bench.data(21)] * 2
    name = "fisher:two.weight"
    first, again, later = (
        bench.one_round("fedfisher", same, data=data, sizes=[21, 21], round=r, draws=1) for r in (1, 1, 2)
    )
    one, two = (u.tensors[name] for u in first.updates)
    assert not torch.equal(one, two), "each client has draws of its own"
    assert torch.equal(one, again.updates[0].tensors[name]) and not torch.equal(one, later.updates[0].tensors[name])


@pytest.mark.parametrize("name, params", [("fedfisher", {"fisher": "diag"}), ("fisher_merge", {"floor": 0.0})])
def test_the_fisher_is_of_the_clients_own_model_and_data_and_exact_unless_asked_otherwise(bench, name, params):
    models = clients(bench)
    ran, drawn = (bench.one_round(name, models, **params, **draws) for draws in ({}, {"draws": 1}))
    for update, model, data in zip(ran.updates, models, ran.data):
        assert all(torch.equal(update.tensors[f"fisher:{n}"].double(), f) for n, f in exact(model, data).items())
        assert all(torch.equal(update.tensors[n], p) for n, p in model.named_parameters())
    assert any(not torch.equal(drawn.message[n], t) for n, t in ran.message.items())


def test_beyond_a_hundred_classes_one_label_is_drawn_with_one_warning(bench, caplog):
    class Many(bench.small):
        def __init__(self):
            super().__init__()
            self.classifier = torch.nn.Linear(9, 101, bias=False)

    torch.manual_seed(0)
    models = [Many().eval() for _ in range(2)]
    data = [bench.data(14, seed=k) for k in range(2)]
    options = {"data": data, "sizes": [14, 14], "kind": Many, "validation": data[0]}
    with caplog.at_level("WARNING", "fs_lowrank"):
        auto, drawn = (bench.one_round("fedfisher", models, **options, **d) for d in ({}, {"draws": 1}))
    assert caplog.text.count("101 classes") == 1 and "lowrank.draws 0" in caplog.text
    assert all(torch.equal(auto.message[n], t) for n, t in drawn.message.items())


# -- Kronecker factors ---------------------------------------------------------------------------------


def explicit(ran, layer, bias=False):
    """``(Σ p F_k, Σ p F_k w_k, w̄)`` of a layer in full, ``F_k = A ⊗ G`` over the columns of ``[W b]``."""
    total = target = mean = 0
    for p, update in zip(ran.weights, ran.updates):
        t = {n: v.double() for n, v in update.tensors.items()}
        matrix = t[f"{layer}.weight"].flatten(1)
        if bias:
            matrix = torch.cat([matrix, t[f"{layer}.bias"][:, None]], 1)
        f = torch.kron(t[f"inputs:{layer}"], t[f"outputs:{layer}"])
        total, target, mean = total + p * f, target + p * f @ matrix.T.flatten(), mean + p * matrix
    return total, target, mean


@pytest.mark.parametrize("bias", [False, True])
def test_kfac_finds_the_minimiser_nearest_to_the_mean(bench, bias):
    models = clients(bench, bench.pictures, bias=bias)
    params = {"fisher": "kfac", "draws": 0, "steps": 100000, "tolerance": 1e-7, "select": False}
    ran = bench.one_round("fedfisher", models, kind=bench.pictures, net={"bias": bias}, **params)
    for layer in ("conv1", "classifier"):
        total, target, mean = explicit(ran, layer, bias)
        found = ran.message[f"{layer}.weight"].double().flatten(1)
        if bias:
            found = torch.cat([found, ran.message[f"{layer}.bias"].double()[:, None]], 1)
        assert (total @ found.T.flatten() - target).norm() < 1e-5 * target.norm()
        values, vectors = torch.linalg.eigh(total)
        null = vectors[:, values < 1e-9 * values[-1]]
        moved = (found - mean).T.flatten()
        assert (null.T @ moved).norm() < 1e-3 * (1 + moved.norm()), "weights about which nothing is known do not change"


def test_kfac_sends_the_factors_of_the_exact_expectation_unless_asked_otherwise(bench):
    model = bench.net()
    ran = bench.one_round("fedfisher", [model], fisher="kfac")
    wanted = kronecker_fisher(model, ran.data[0], dict.fromkeys(("one", "two", "classifier"), False), draws=0)
    for layer, (a, g) in wanted.items():
        assert torch.equal(ran.updates[0].tensors[f"inputs:{layer}"], a)
        assert torch.equal(ran.updates[0].tensors[f"outputs:{layer}"], g)


def test_one_client_gets_its_model_back(bench):
    """With hyperparameters that are not the defaults, which the generic suite has."""
    model = bench.net(bench.pictures)
    for name, params in (
        ("fedfisher", {"fisher": "kfac"}),
        ("fedfisher", {"fisher": "full"}),
        ("fedfisher", {"fisher": "kfac", "solver": "adam", "steps": 100}),
        ("fisher_merge", {"rule": "mean"}),
        ("fisher_merge", {"rule": "target", "normalize": True}),
    ):
        ran = bench.one_round(name, [model], kind=bench.pictures, **params)
        close(ran.message, bench.tensors(model))


# -- the full Fisher -------------------------------------------------------------------------------------


def test_full_agrees_with_brute_force(bench):
    models = clients(bench)
    ran = bench.one_round("fedfisher", models, fisher="full", solver="closed")
    names = sorted(dict(models[0].named_parameters()))
    total = target = mean = 0
    for p, model, data in zip(ran.weights, models, ran.data):
        f, w = full_fisher(model, data, names).double(), flat(bench.tensors(model), names)
        total, target, mean = total + p * f, target + p * f @ w, mean + p * w
    found = flat(ran.message, names)
    assert (total @ found - target).norm() < 1e-4 * target.norm()
    wanted = mean + torch.linalg.pinv(total, rcond=1e-12, hermitian=True) @ (target - total @ mean)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)

    def objective(w):
        return sum(
            p
            * (w - flat(bench.tensors(m), names))
            @ full_fisher(m, d, names).double()
            @ (w - flat(bench.tensors(m), names))
            for p, m, d in zip(ran.weights, models, ran.data)
        )

    assert objective(found) < 1e-8 * objective(mean), "with fewer samples than parameters, all can be fitted"


# -- the paper's solver, and the authors' ---------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """The candidates, of which the last is taken."""
    candidates = []

    def best(workbench, given):
        candidates.extend({n: t.clone() for n, t in c.items()} for c in given)
        return dict(candidates[-1])

    monkeypatch.setattr(fedfisher, "best", best)
    return candidates


@pytest.mark.parametrize("fisher", ["diag", "kfac"])
@pytest.mark.parametrize("solver", ["adam", "reference"])
def test_scored_iterates(bench, fisher, solver, seen):
    ran = bench.one_round("fedfisher", clients(bench), fisher=fisher, solver=solver, steps=250)
    # adam: the start, 100, 200 and the last iterate; the authors' code: those after steps 1, 101, 201
    assert len(seen) == {"adam": 4, "reference": 3}[solver]
    mean = {n: sum(p * u.tensors[n] for p, u in zip(ran.weights, ran.updates)) for n in ran.message}
    distance = [max(float((s[n] - mean[n]).abs().max()) for n in mean) for s in seen]
    assert (distance[0] < 1e-6) == (solver == "adam") and distance[-1] > distance[0]


@pytest.mark.parametrize("solver", ["cg", "adam"])
def test_the_iterate_that_is_best_on_validation_data_is_taken(bench, solver):
    models = clients(bench)
    ran, last = (
        bench.one_round("fedfisher", models, fisher="kfac", solver=solver, steps=200, select=select)
        for select in (True, False)
    )
    mean = {n: sum(p * u.tensors[n] for p, u in zip(ran.weights, ran.updates)) for n in ran.message}
    assert ran.method.needs.validation and not last.method.needs.validation
    scores = [accuracy(ran.method.workbench, t) for t in (ran.message, last.message, mean)]
    assert scores[0] == max(scores)


def test_the_path_of_cg_ends_at_the_tolerance(bench, seen):
    whole = bench.one_round("fedfisher", clients(bench), fisher="kfac", tolerance=1e-3)
    last = bench.one_round("fedfisher", clients(bench), fisher="kfac", tolerance=1e-3, select=False)
    assert len(seen) == 7, "the mean, 10^-0.5, 10^-1, …, 10^-2.5, 10^-3"
    assert all(torch.equal(whole.message[n], t) for n, t in last.message.items())
    mean = {n: sum(p * u.tensors[n] for p, u in zip(whole.weights, whole.updates)) for n in whole.message}
    close(seen[0], mean, atol=1e-6)


@pytest.mark.parametrize("solver", ["adam", "reference"])
def test_without_scores_the_last_iterate_is_taken(bench, solver):
    models = clients(bench)
    runs = [
        bench.one_round("fedfisher", models, fisher="diag", solver=solver, steps=steps, select=False).message
        for steps in (101, 150, 151)
    ]
    assert all(any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(runs, runs[1:])), "each has steps of its own"


# -- sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedfisher", "fisher_merge"])
def test_the_result_follows_from_the_sum_of_the_updates(bench, name):
    from fs_lowrank.algebra import weighted_mean
    from fs_lowrank.methods import Update

    models = clients(bench)
    plain = bench.one_round(name, models)
    ran = bench.one_round(name, models, options={"only_sums": True})
    mean = weighted_mean([dict(u.tensors) for u in ran.updates], ran.weights)
    state = ran.method.initial_state(ran.model)
    _, message = ran.method.aggregate([Update(1, 69, mean)], state, 1)
    close(message, plain.message, atol=1e-5, rtol=1e-4)
    assert ran.method.needs.sums


# -- FisherMerge and RegMean ---------------------------------------------------------------------------


def test_fisher_merge_takes_the_mean_where_the_information_is_below_the_floor(bench):
    models, floor, both = clients(bench), 1e-3, 0
    ran = bench.one_round("fisher_merge", models, rule="mean", floor=floor, draws=0)
    for name, found in ran.message.items():
        fs = [exact(m, d)[name] for m, d in zip(models, ran.data)]
        ws = [dict(m.named_parameters())[name].detach().double() for m in models]
        total = sum(p * f for p, f in zip(ran.weights, fs))
        merged = sum(p * f * w for p, f, w in zip(ran.weights, fs, ws)) / total
        wanted = torch.where(total < floor, sum(p * w for p, w in zip(ran.weights, ws)), merged)
        both += int((total < floor).any()) + int((total >= floor).any())
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    assert both > 3


@pytest.mark.parametrize("rule", ["floor", "target"])
@pytest.mark.parametrize("normalize", [False, True])
def test_fisher_merge_agrees_with_the_authors_code(bench, rule, normalize):
    """The authors' ``_merge_with_coeffs``, for each parameter in float64, with ``p_k`` as the coefficients."""
    models, floor = clients(bench), 1e-3
    ran = bench.one_round("fisher_merge", models, rule=rule, normalize=normalize, floor=floor)
    fishers = [exact(m, d) for m, d in zip(models, ran.data)]
    norms = [sum(float((f**2).sum()) for f in fisher.values()) ** 0.5 if normalize else 1.0 for fisher in fishers]
    for name, found in ran.message.items():
        above = below = 0
        for k, (p, model, fisher, norm) in enumerate(zip(ran.weights, models, fishers, norms)):
            f = fisher[name].clamp_min(floor) if rule == "floor" or k == 0 else fisher[name]
            w = dict(model.named_parameters())[name].detach().double()
            above, below = above + p / norm * f * w, below + p / norm * f
        torch.testing.assert_close(found.double(), above / below, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("average_by", [None, "uniform", "samples"])
@pytest.mark.parametrize("compress", [False, True])
def test_regmean_s_other_parameters(bench, average_by, compress):
    """They are the plain mean, as in both codes, unless ``average_by: samples`` is given."""

    models = clients(bench, bench.pictures, bias=True)
    given = {"compress": compress, **({"average_by": average_by} if average_by else {})}
    ran = bench.one_round("regmean", models, kind=bench.pictures, net={"bias": True}, sizes=[20, 29, 38], **given)
    p = np.array([20, 29, 38]) / 87 if average_by == "samples" else np.full(3, 1 / 3)
    for name in ("conv1.weight", "conv2.weight", "conv1.bias", "fc1.bias", "classifier.bias"):
        wanted = sum(w * dict(m.named_parameters())[name].detach().double() for w, m in zip(p, models))
        torch.testing.assert_close(ran.message[name].double(), wanted, atol=1e-4 if compress else 1e-6, rtol=1e-5)


def test_regmean_by_its_formula(bench):
    models = clients(bench)
    ran = bench.one_round("regmean", models, scales=(0.9,))
    for layer in ("one", "two", "classifier"):
        above = below = 0
        for p, m, d in zip(ran.weights, models, ran.data):
            g = input_grams(m, d, [layer])[layer].double().numpy()
            g = 0.9 * g + 0.1 * np.diag(np.diag(g))
            above, below = above + p * m.get_submodule(layer).weight.detach().double().numpy() @ g, below + p * g
        found = ran.message[f"{layer}.weight"].double().numpy()
        np.testing.assert_allclose(found @ below, above, atol=1e-5)


def test_a_singular_gram_leaves_unknown_directions_at_the_mean(bench):
    models = clients(bench)
    for model in models:
        model.one.weight.data[:4] = 0  # four neurons that are never active
    ran = bench.one_round("regmean", models, scales=(1.0,))
    assert all(bool(torch.isfinite(t).all()) for t in ran.message.values())
    mean = sum(p * m.two.weight[:, :4].double() for p, m in zip(ran.weights, models))
    torch.testing.assert_close(ran.message["two.weight"][:, :4].double(), mean.detach(), atol=1e-6, rtol=1e-6)


def test_regmean_chooses_on_validation_data(bench):
    models = clients(bench)
    ran = bench.one_round("regmean", models)
    alone = [bench.one_round("regmean", models, scales=(s,)).message for s in (0.1, 0.9)]
    scores = [accuracy(ran.method.workbench, m) for m in alone]
    close(ran.message, alone[scores.index(max(scores))])


# -- compression ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, params", [("fedfisher", {"fisher": "diag"}), ("fedfisher", {"fisher": "kfac"}), ("regmean", {})]
)
def test_compression_to_the_bytes_of_averaging(bench, name, params):
    models = clients(bench, bench.pictures)
    plain, small = (bench.one_round(name, models, kind=bench.pictures, compress=c, **params) for c in (False, True))
    size = sum(p.numel() for p in models[0].parameters())
    scales = sum(t.element_size() * t.numel() for n, t in small.updates[0].tensors.items() if n.startswith("scale:"))
    codes = {n: t for n, t in small.updates[0].tensors.items() if n.startswith("codes:")}
    assert codes and all(t.dtype == torch.uint8 for t in codes.values())
    # The factors of this net are large compared with its weights, and each keeps at least one vector.
    assert nbytes(small.updates[0].tensors) <= 4 * size * (1.25 if params or name == "fedfisher" else 1.05) + scales
    assert nbytes(small.updates[0].tensors) < nbytes(plain.updates[0].tensors)
    assert all(bool(torch.isfinite(t).all()) for t in small.message.values())
    if params.get("fisher") == "diag":
        # 16 bits lose 2^-16 of the largest value; little changes where the Fisher is not rounded to zero.
        total = sum(p * u.tensors["fisher:classifier.weight"] for p, u in zip(plain.weights, plain.updates))
        known = total > 1e-2 * total.max()
        torch.testing.assert_close(
            small.message["classifier.weight"][known], plain.message["classifier.weight"][known], atol=1e-2, rtol=1e-2
        )


@pytest.mark.parametrize(
    "name, params",
    [("fedfisher", {"fisher": "diag"}), ("fedfisher", {"fisher": "kfac"}), ("regmean", {}), ("fisher_merge", {})],
)
def test_an_all_zero_layer(bench, name, params):
    models = clients(bench)
    for model in models:
        model.two.weight.data.zero_()
    for compress in (False, True) if name != "fisher_merge" else (None,):
        options = {} if compress is None else {"compress": compress}
        ran = bench.one_round(name, models, **params, **options)
        assert all(bool(torch.isfinite(t).all()) for t in ran.message.values())
        assert not ran.message["two.weight"].any()


# -- wrong input ------------------------------------------------------------------------------------


def test_clients_without_some_classes(bench):
    models = clients(bench)
    data = [[{**b, "labels": torch.full_like(b["labels"], k)} for b in bench.data(21, seed=k)] for k in range(3)]
    for name, params in (("fedfisher", {}), ("fedfisher", {"fisher": "kfac"}), ("fisher_merge", {}), ("regmean", {})):
        ran = bench.one_round(name, models, data=data, sizes=[21] * 3, **params)
        assert all(bool(torch.isfinite(t).all()) for t in ran.message.values())


def test_wrong_hyperparameters():
    for params, said in (
        ({"fisher": "kfac", "solver": "closed"}, "no closed-form"),
        ({"fisher": "full", "compress": True}, "tiny networks"),
        ({"fisher": "kfa"}, "diag, kfac, full"),
        ({"steps": 0}, "at least 1"),
    ):
        with pytest.raises(UserError, match=said):
            create_method("fedfisher", **params)
    with pytest.raises(UserError, match="scales is empty"):
        create_method("regmean", scales=())


def test_a_net_too_large_for_the_full_fisher():
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = torch.nn.Linear(200, 100)

    with pytest.raises(UserError, match="choose kfac or diag"):
        create_method("fedfisher", fisher="full").adapt(Wide())
