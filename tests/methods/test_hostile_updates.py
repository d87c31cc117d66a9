"""Hostile updates, for every method: each is refused by name, or the round is discarded, or the model stays finite."""

import copy
import dataclasses
import functools
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from fs_lowrank.methods import (
    RefusedUpdate,
    RobustMean,
    Update,
    Workbench,
    create_method,
    get_method_class,
    list_methods,
)
from fs_lowrank.rounds.admission import Admission, change_norm, check_loss, check_update
from fs_lowrank.rounds.codec import Uniform
from fs_lowrank.rounds.finite import BadRound
from fs_lowrank.rounds.parcel import Parcel
from fs_lowrank.rounds.round import Round
from fs_lowrank.settings import AdapterSpec
from tests.methods.conftest import Federation
from tests.methods.one_shot.conftest import Bench, Pictures
from tests.servers import ledger_of

METHODS = list_methods()
ONE_SHOT = ("fedfisher", "fisher_merge", "regmean", "otfusion", "pfnm", "dense")
SIZES = {1: 7, 2: 20, 3: 12}
LARGEST = float(torch.finfo(torch.float32).max)
#: hyperparameters that make the server step of a method short
SHORT = {"steps": 3, "epochs": 1, "generator_steps": 1, "images": 4, "channels": 2, "tau": 1, "heads": 2}
EACH = pytest.mark.parametrize("name", METHODS)
#: method, hyperparameters and other arguments of ``create_method`` that lead to another server step
VARIANTS = [
    *(
        ("fedfisher", {"fisher": f, "solver": s}, {})
        for f in ("diag", "kfac", "full")
        for s in ("cg", "adam", "reference")
    ),
    ("fedfisher", {"fisher": "full", "solver": "closed"}, {}),
    ("fedfisher", {"fisher": "kfac", "select": False}, {}),
    ("fedfisher", {"fisher": "kfac", "compress": True}, {}),
    ("fedfisher", {"compress": True}, {}),
    *((name, {}, {"only_sums": True}) for name in ("fedfisher", "fisher_merge", "fedavg", "rolora")),
    *(("fisher_merge", {"rule": rule, "normalize": True}, {}) for rule in ("floor", "target", "mean")),
    ("regmean", {"compress": True}, {}),
    ("regmean", {"scales": (1.0,), "average_by": "samples"}, {}),
    ("otfusion", {"by": "activations"}, {}),
    ("pfnm", {"last_layer": "samples"}, {}),
    *((name, {"ranks": (1, 3, 2)}, {}) for name in ("flexlora", "flora")),
    ("flexlora", {"split": "sqrt"}, {}),
    *((name, {"nested_ranks": (1, 0)}, {}) for name in ("mfedloru", "pmfedloru")),
    *(("fedloru", {"init": "momentum", "merge": merge}, {}) for merge in (True, False)),
    ("fedloru", {"merge": False}, {}),
    ("fedhm", {"rank_factors": (1, 3, 2), "master": True}, {}),
    ("fedhm", {"average_by": "samples"}, {}),
    ("pfedlora", {"variant": 2}, {}),
    *(
        (name, {}, {"server_optimizer": (("type", kind), *more)})
        for name in ("fedavg", "fedloru", "fedhm")
        for kind, more in (("SGD", (("momentum", 0.9),)), ("Adam", ()), ("Adagrad", ()), ("Yogi", ()))
    ),
    *(
        (name, params, {"robust": RobustMean(rule, malicious=1 if rule == "trimmed_mean" else 0)})
        for name, params in (("fedavg", {}), ("fedloru", {}), ("mfedloru", {"nested_ranks": (1, 0)}), ("fedhm", {}))
        for rule in ("median", "trimmed_mean", "norm_bound", "krum", "multi_krum")
    ),
    *(
        (name, {}, {"dtype": dtype})
        for name in ("fedavg", "fedlora", "flora", "flexlora", "fedhm")
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
    ),
]


def few(examples):
    """Settings of Hypothesis; ``HOSTILE_EXAMPLES`` in the environment gives another number of examples."""
    examples = int(os.environ.get("HOSTILE_EXAMPLES", examples))
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


data = functools.partial(Bench.data, kind=Pictures)


def prepared(name, params=None, options=None):
    """A method, its initial model and state, and the updates of three honest clients; tests do not change them."""
    return _prepared(name, tuple((params or {}).items()), tuple((options or {}).items()))


@functools.cache
def _prepared(name, params, options):
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    if "server_optimizer" in options:
        options["server_optimizer"] = dict(options["server_optimizer"])
    fields = get_method_class(name).Params.__dataclass_fields__
    torch.manual_seed(3)
    method = create_method(
        name,
        adapter=AdapterSpec(r=2, lora_alpha=6, target_modules=("conv2", "fc1")),
        rounds=4,
        seed=5,
        **{**{k: v for k, v in SHORT.items() if k in fields}, **dict(params)},
        **options,
    )
    plain, sizes = Pictures().to(dtype), tuple(SIZES.values())
    batches = lambda client: iter(data(SIZES[client], seed=client))  # noqa: E731
    fed = Federation(method, sizes, net=lambda: copy.deepcopy(plain), batches=batches)
    state = method.initial_state(fed.model)
    method.workbench = Workbench(copy.deepcopy(fed.model), lambda: iter(data(10, seed=99)), 7)
    *earlier, updates = fed.play(1)
    return SimpleNamespace(method=method, model=fed.model, state=state, updates=updates, earlier=earlier)


def round_of(made, number=1, clients=(1, 2, 3), **bounds):
    """Round ``number``, whose ``clients`` have been asked for its last exchange."""
    ledger = ledger_of(made.method, dict(made.state), 3, sizes=list(SIZES.values()), **bounds)
    one = Round(number, ledger, clients)
    for updates in made.earlier:
        for client in clients:
            one.delivered(one.ask(client))
            take(one, updates[client])
        one.go_on()
    for client in clients:
        one.delivered(one.ask(client))
    return one


def parcel_of(update, round=1):
    return Parcel(update.tensors, round=round, samples=update.num_samples, loss=1.0)


def take(one, update):
    """Hand in an update; raises if it is refused."""
    if not one.take(update.client, parcel_of(update, one.number)):
        raise RefusedUpdate(one.failed[-1]["reason"])


def finite(tensors):
    return all(
        bool(torch.isfinite(v).all()) if isinstance(v, torch.Tensor) else math.isfinite(v) for v in tensors.values()
    )


# -- large finite values ---------------------------------------------------------------------------------


def enlarged(tensor, scale, how, seed):
    """A tensor like ``tensor`` with values of about ``scale``, at most the largest of the dtype."""
    if not tensor.is_floating_point():
        return tensor
    draw = torch.Generator().manual_seed(seed)
    values = {
        "one value": lambda: torch.cat([torch.ones(1), torch.zeros(max(tensor.numel() - 1, 0))])[: tensor.numel()],
        "constant": lambda: torch.ones(tensor.numel()),
        "signs": lambda: torch.randint(0, 2, (tensor.numel(),), generator=draw) * 2.0 - 1,
        "normal": lambda: torch.randn(tensor.numel(), generator=draw),
        "scaled": lambda: tensor.flatten().float(),
    }[how]()
    top = float(torch.finfo(tensor.dtype).max)
    return (values.double() * scale).clamp(-top, top).to(tensor.dtype).reshape(tensor.shape)


DRAWN = {
    "clients": st.sets(st.sampled_from([1, 2, 3]), min_size=1),
    "how": st.sampled_from(["one value", "constant", "signs", "normal", "scaled"]),
    "only_one": st.booleans(),
    "seed": st.integers(0, 99),
}


@pytest.mark.more
@EACH
@few(6)
@given(exponent=st.floats(0, 38.5) | st.sampled_from([math.log10(LARGEST), 19.0, 18.9, 38.0]), **DRAWN)
def test_finite_values_of_any_size(name, exponent, clients, how, only_one, seed):
    finite_or_bad(prepared(name), exponent, clients, how, only_one, seed)


@pytest.mark.more
@pytest.mark.parametrize("name, params, options", VARIANTS, ids=[f"{i}-{v[0]}" for i, v in enumerate(VARIANTS)])
@few(2)
@given(share=st.floats(0, 1) | st.sampled_from([0.5, 1.0]), **DRAWN)
def test_finite_values_of_any_size_in_variants(name, params, options, share, clients, how, only_one, seed):
    largest = math.log10(torch.finfo(options.get("dtype", torch.float32)).max)
    finite_or_bad(prepared(name, params, options), share * largest, clients, how, only_one, seed)


@EACH
def test_honest_updates_give_a_finite_model(name):
    """For comparison with the tests above: a round of honest clients is not discarded."""
    finite_or_bad(prepared(name), 0.0, set(), "scaled", False, 0)


def finite_or_bad(made, exponent, clients, how, only_one, seed):
    """If ``clients`` send values of about ``10 ** exponent``, they are refused, or the round is, or all is finite."""
    one, model, size = round_of(made), copy.deepcopy(made.model), 10.0 ** min(exponent, 308.25)
    for client, update in made.updates.items():
        tensors = dict(update.tensors)
        if client in clients:
            names = sorted(tensors)
            for n in [names[seed % len(names)]] if only_one else names:
                tensors[n] = enlarged(tensors[n], size, how, seed)
        # A Fisher of random signs is refused by ``Method.check``; an honest client never is.
        assert one.take(client, parcel_of(dataclasses.replace(update, tensors=tensors))) or client in clients
    if len(one.failed) == len(made.updates):
        return
    ledger = one.ledger
    before, outbox, synced = dict(ledger.state), dict(ledger.outbox), dict(ledger.synced)
    try:
        message = one.finish(model).message
    except BadRound as error:
        assert clients
        assert ledger.state.keys() == before.keys() and all(ledger.state[n] is before[n] for n in before)
        assert (ledger.outbox, ledger.synced, ledger.stood) == (outbox, synced, 0)
        own, start = model.state_dict(), made.model.state_dict()
        assert own.keys() == start.keys() and all(torch.equal(own[n], start[n]) for n in own)
        # The discarded round has ended, and the clients can be asked again.
        assert one.leave_out(str(error)).undone == {1, 2, 3}
        again = Round(2, ledger)
        for client in again.waiting:
            assert again.ask(client).parcel.facts["undo"] == 1
    else:
        with torch.no_grad():
            made.method.apply(model, message, 1)
        assert finite(ledger.state) and finite(message) and finite(model.state_dict())


def test_a_server_step_without_a_finite_candidate_is_a_bad_round():
    """It is not an error of the user, which would end the run."""
    made = prepared("fedfisher", {"fisher": "kfac", "solver": "reference"})
    one = round_of(made, clients=(1,))
    huge = {n: torch.full_like(t, LARGEST) for n, t in made.updates[1].tensors.items()}
    take(one, dataclasses.replace(made.updates[1], tensors=huge))
    with pytest.raises(BadRound, match="ArithmeticError: no candidate is finite"):
        one.finish(copy.deepcopy(made.model))


def test_a_merge_beyond_float32_is_found_before_the_model_is_touched():
    """B and A are finite, but the product that FLoRA adds to the weights is not."""
    made = prepared("flora")
    one, model = round_of(made), copy.deepcopy(made.model)
    tensors = {n: torch.full_like(t, 1e25) if "lora_" in n else t for n, t in made.updates[1].tensors.items()}
    for client in (2, 3):
        one.fail(client, "failed", "left out")
    take(one, dataclasses.replace(made.updates[1], tensors=tensors))
    with pytest.raises(BadRound, match="^with the message, .*weight of the model would not be finite"):
        one.finish(model)
    assert all(torch.equal(t, made.model.state_dict()[n]) for n, t in model.state_dict().items())


# -- values that are not tensors -------------------------------------------------------------------------


class Sub(torch.Tensor):
    pass


def without_values(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


JUNK = {
    "list": lambda t: t.tolist(),
    "nested": lambda t: {"a": {"b": t}},
    "numpy": lambda t: t.numpy(),
    "none": lambda t: None,
    "text": lambda t: "1.0",
    "number": lambda t: 1.0,
    "type": lambda t: torch.Tensor,
    "sparse": lambda t: t.to_sparse(),
    "nested tensor": lambda t: torch.nested.nested_tensor([t, t]),
    "csr": lambda t: t.flatten(1).to_sparse_csr() if t.ndim > 1 else t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "subclass": lambda t: t.as_subclass(Sub),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "double": lambda t: t.double() if t.dtype != torch.float64 else t.float(),
    "half": lambda t: t.half(),
    "complex": lambda t: t.to(torch.complex64),
    "integers": lambda t: t.to(torch.int64),
    "no values": without_values,
    "another shape": lambda t: t[None],
    "empty": lambda t: t[:0],
    "nan": lambda t: torch.full_like(t, float("nan")),
    "minus inf": lambda t: torch.full_like(t, -float("inf")),
    "module": lambda t: nn.Linear(2, 3),
}
NAMES = st.one_of(
    st.none(),
    st.integers(),
    st.booleans(),
    st.binary(max_size=3),
    st.tuples(st.text(max_size=2)),
    st.text(max_size=4),
    st.just("\ud800"),
    st.just("x" * 100_000),
)


@EACH
@few(12)
@given(kind=st.sampled_from(sorted(JUNK)), which=st.integers(0, 99), client=st.sampled_from([1, 2, 3]))
def test_values_other_than_plain_tensors_are_refused_by_name(name, kind, which, client):
    made = prepared(name)
    one, update = round_of(made), made.updates[client]
    floats = sorted(n for n, t in update.tensors.items() if t.is_floating_point())
    tensor = floats[which % len(floats)]
    spoilt = {**update.tensors, tensor: JUNK[kind](update.tensors[tensor])}
    with pytest.raises(RefusedUpdate, match=f"^client {client}: ") as refusal:
        take(one, dataclasses.replace(update, tensors=spoilt))
    assert tensor in str(refusal.value) and not one.counted
    assert not one.take(client, parcel_of(update)), "it has had its turn"


@few(60)
@given(name=NAMES, content=st.sampled_from(["more", "instead"]))
def test_unknown_names_are_refused(name, content):
    made = prepared("fedlora")
    update = made.updates[1]
    tensors = {**(update.tensors if content == "more" else {}), name: torch.ones(2)}
    with pytest.raises(RefusedUpdate, match="^client 1: ") as refusal:
        take(round_of(made), dataclasses.replace(update, tensors=tensors))
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("tensors", [None, [], [1, 2], "text", 3, torch.ones(2), {1, 2}], ids=str)
def test_updates_other_than_mappings_are_refused(tensors):
    with pytest.raises(RefusedUpdate, match="client 1: sent .*, expected named tensors"):
        check_update(Update(1, 7, tensors), prepared("fedlora").state)


LAYOUTS = {
    "gradient": lambda t: t.clone().requires_grad_(),
    "parameter": nn.Parameter,
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "transposed": lambda t: t.T.contiguous().T,
    "expanded": lambda t: t[:1, :1].expand_as(t),
    "view": lambda t: torch.cat([torch.zeros(5), t.flatten(), torch.zeros(9)])[5:-9].view_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_layout_of_a_dense_tensor_does_not_matter(layout):
    sent = LAYOUTS[layout](torch.randn(3, 5))
    tensor = check_update(Update(1, 7, {"a": sent}), {"a": torch.zeros(3, 5)}).tensors["a"]
    assert torch.equal(tensor, sent) and not tensor.requires_grad and tensor.is_contiguous()


# -- what is sent beside weights -------------------------------------------------------------------------


def changed(tensor, at, value):
    """``tensor`` with ``value`` at the index ``at``."""
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


def with_opposite_corners(matrix):
    """A matrix of the same diagonal whose opposite corners are too large for it."""
    large = 2 * matrix.diagonal().max()
    return changed(changed(matrix, (0, -1), large), (-1, 0), large)


def with_negative_correlations(matrix):
    """A matrix with sound minors in which each pair is correlated by -0.9, as no data can be."""
    root = matrix.diagonal().clamp_min(0.1 * matrix.diagonal().max()).sqrt()
    return root[:, None] * root * torch.full_like(matrix, -0.9).fill_diagonal_(1.0)


#: method, hyperparameters, further options, how the name of a tensor begins, what is made of it, and what is said
BESIDE = {
    "one class whole": ("pfnm", {}, {}, "counts:", lambda t: changed(t, 0, 2**31 - 1), "adds up to .* it declared 20"),
    "one more": ("pfnm", {}, {}, "counts:", lambda t: changed(t, 1, t[1] + 1), "adds up to 21 samples, it declared 20"),
    "none": ("pfnm", {}, {}, "counts:", torch.zeros_like, "adds up to 0 samples, it declared 20"),
    "below zero": ("pfnm", {}, {}, "counts:", lambda t: torch.tensor([-5, 25, 0, 0]).int(), "holds -5, expected no"),
    "half": ("pfnm", {}, {}, "counts:", lambda t: t / 2, "has dtype torch.float32, expected torch.int32"),
    "fisher": ("fedfisher", {}, {}, "fisher:", lambda t: -t, "expected no value below zero"),
    "one of a fisher": ("fisher_merge", {}, {}, "fisher:", lambda t: changed(t, 0, -1e-30), "holds -1e-30, exp"),
    "fisher of a sum": ("fisher_merge", {}, {"only_sums": True}, "fisher:", lambda t: -t, "no value below zero"),
    "codes": ("fedfisher", {"compress": True}, {}, "codes:fisher:", torch.zeros_like, "fisher:.* no value below zero"),
    "scale": ("fedfisher", {"compress": True}, {}, "scale:", lambda t: -t, "expected no value below zero"),
    "eigenvalues": ("regmean", {"compress": True}, {}, "values:", lambda t: -t, "expected no value below zero"),
    "kfac": ("fedfisher", {"fisher": "kfac"}, {}, "outputs:", lambda t: -t, "on its diagonal, expected a symmetric"),
    "kfac, lopsided": ("fedfisher", {"fisher": "kfac"}, {}, "inputs:", lambda t: 2 * t.triu() - t, "is not symmetric"),
    "full": ("fedfisher", {"fisher": "full"}, {}, "fisher:", with_opposite_corners, "too large for its diagonal"),
    "gram": ("regmean", {}, {}, "gram:", lambda t: changed(t, (0, 0), -1e30), r"holds -1e\+30 on its diagonal"),
    "gram, sound minors": ("regmean", {}, {}, "gram:", with_negative_correlations, "has eigenvalues below zero"),
    **{
        f"kfac, sound minors of {kind}": (
            *("fedfisher", {"fisher": "kfac"}, {}, kind),
            *(with_negative_correlations, "has eigenvalues below zero"),
        )
        for kind in ("inputs:", "outputs:")
    },
    "full, sound minors": ("fedfisher", {"fisher": "full"}, {}, "fisher:", with_negative_correlations, "below zero"),
    "gram, indefinite": ("regmean", {}, {}, "gram:", with_opposite_corners, "too large for its diagonal"),
}


@pytest.mark.parametrize("name, params, options, start, change, said", BESIDE.values(), ids=BESIDE)
def test_what_is_sent_beside_weights_must_be_possible(name, params, options, start, change, said):
    """With less, a client's weights would count below zero, or those of all others would not count."""
    made = prepared(name, params, options)
    one, update = round_of(made), made.updates[2]
    tensor = next(n for n in sorted(update.tensors) if n.startswith(start))
    spoilt = {**update.tensors, tensor: change(update.tensors[tensor])}
    with pytest.raises(RefusedUpdate, match=f"^client 2: .*{said}"):
        take(one, dataclasses.replace(update, tensors=spoilt))
    for client in (1, 3):
        take(one, made.updates[client])
    assert one.finish(copy.deepcopy(made.model)).message


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    "name, params", [("pfnm", {}), *((n, p) for n, p, options in VARIANTS if not options and n in ONE_SHOT)], ids=str
)
def test_what_honest_clients_send_is_possible_after_quantisation(name, params, bits):
    made, codec = prepared(name, params), Uniform(bits)
    ledger = ledger_of(made.method, dict(made.state), 3, sizes=list(SIZES.values()))
    one = Round(1, ledger, SIZES, codec=codec)
    for client, update in made.updates.items():
        one.delivered(one.ask(client))
        take(one, dataclasses.replace(update, tensors=codec.encode(update.tensors)))


def test_running_variances_below_zero_are_refused():
    """The mean could be below zero, whose root is NaN in every model."""
    method, name = create_method("fedavg", rounds=1), "norm.running_var"
    method.check(Update(1, 5, {name: torch.tensor([1.0, 0.0, 2.0])}))
    with pytest.raises(RefusedUpdate, match="client 2: norm.running_var holds -0.5, expected no value below zero"):
        method.check(Update(2, 5, {name: torch.tensor([1.0, -0.5, 2.0])}))


# -- clients and numbers of samples ----------------------------------------------------------------------

COUNTS = st.one_of(
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.none(),
    st.integers().filter(lambda n: n != SIZES[2]),
    st.sampled_from([3.5, 1e18, 20.0, 10**400, -(10**400), float("nan"), float("inf"), [20], "20", 10**18, 2**63]),
)


@pytest.mark.more
@EACH
@few(10)
@given(count=COUNTS)
@example(count=3)
def test_a_count_must_be_whole_and_as_declared(name, count):
    made = prepared(name)
    with pytest.raises(RefusedUpdate, match="^client 2: says it has .* samples") as refusal:
        take(round_of(made), dataclasses.replace(made.updates[2], num_samples=count))
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("count, good", [(50, True), (51, False), (1, True), (0, False), (True, False)])
def test_without_a_declaration_the_bound_applies(count, good):
    made = prepared("fedlora")
    one = round_of(made)
    one.admission = Admission(max_samples=50)
    update = dataclasses.replace(made.updates[1], num_samples=count)
    if good:
        take(one, update)
        assert one.samples == {1: count}
    else:
        with pytest.raises(RefusedUpdate, match="expected a whole number from 1 to 50"):
            take(one, update)


@EACH
def test_a_client_must_be_one_that_was_asked(name):
    made = prepared(name)
    one = round_of(made)
    for client in (True, False, 1.0, "1", None, [1], {}, float("nan"), 0, 4, -1, 10**400, b"1"):
        assert not one.take(client, parcel_of(made.updates[1]))
    assert not one.counted and not one.failed and one.waiting == {1, 2, 3}


@pytest.mark.parametrize(
    "loss",
    [
        *(float("nan"), float("inf"), -float("inf"), 1e39, 10**400, -(10**400), 1j),
        *(True, False, None, "", "1", [], [0, 1]),
    ],
    ids=str,
)
def test_a_loss_is_a_finite_number(loss):
    with pytest.raises(RefusedUpdate, match="client 4: its loss is .*, expected a finite number"):
        check_loss(4, loss)
    assert check_loss(4, 3) == 3.0 and check_loss(4, -1e38) == -1e38


# -- norms -----------------------------------------------------------------------------------------------


def norm_of(made, client, tensors):
    """In float64, by the definition: of the change from what the client was sent, and of other tensors as they are."""
    sent, total = made.method.view(made.state, client), 0.0
    for n, t in tensors.items():
        if t.is_floating_point():
            start = sent[n].numpy().astype(np.float64) if n in sent and sent[n].shape == t.shape else 0.0
            total += float(((t.numpy().astype(np.float64) - start) ** 2).sum())
    return total**0.5


@EACH
def test_a_bound_on_the_norm(name):
    made = prepared(name)
    norms = {c: norm_of(made, c, u.tensors) for c, u in made.updates.items()}
    smallest, middle, largest = sorted(norms, key=norms.get)
    one = round_of(made)
    one.admission.max_norm = (norms[middle] + norms[largest]) / 2
    for client, update in made.updates.items():
        if client == largest:
            with pytest.raises(RefusedUpdate, match=f"client {client}: the norm of its update is .*max_update_norm is"):
                take(one, update)
        else:
            take(one, update)
    for client, norm in norms.items():
        reference = made.method.view(made.state, client)
        assert change_norm(made.updates[client].tensors, reference) == pytest.approx(norm, rel=1e-9)


def test_the_median_is_the_lower_of_two_and_zero_disables_the_factor():
    admission = Admission(norm_factor=10.0)
    assert list(admission.outliers({1: 1.0, 2: 10.5})) == [2]
    assert not admission.outliers({1: 1.0, 2: 10.0})
    assert not admission.outliers({1: 0.0, 2: 0.0, 3: 5.0})
