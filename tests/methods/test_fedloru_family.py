"""FedLoRU, its variants and baselines, compared with dense float64 computations on layers that are not square."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel

from fs_lowrank.algebra import factorise, product_norm_squared
from fs_lowrank.algebra.factorise import to_matrix
from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method
from fs_lowrank.models.accumulated import one_adapter
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.factorised import Factorised, factorise_layers, frobenius
from fs_lowrank.models.names import named_tensors, tags
from fs_lowrank.models.saved import save_adapter
from fs_lowrank.settings import AdapterSpec
from tests.methods.conftest import best, close, equal

SIZES = (3, 10, 27)


def multiply(left, right):
    """The weight that two factors stand for, by the definition of the two thin convolutions."""
    return left @ right if left.ndim == 2 else torch.einsum("orax,riyb->oiab", left, right)


def other_adapter(toy, name, kind, **options):
    adapter = AdapterSpec(method=kind, r=2, lora_alpha=toy.alpha, target_modules=toy.layers)
    return create_method(name, adapter=adapter, rounds=8, seed=4, **options)


# -- FedLoRU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("init", ["random", "momentum"])
def test_accumulation_is_the_sum_of_the_pairs(toy, federation, init, merge):
    fed = federation(toy.method("fedloru", r=3, tau=2, init=init, merge=merge), SIZES)
    total = {layer: 0.0 for layer in toy.layers}
    for round in range(1, 6):
        fed.round(round)
        for layer in toy.layers if round % 2 == 0 else ():
            b, a = toy.mean_pair(fed.received, layer)
            total[layer] = total[layer] + toy.alpha / 3 * b @ a
    state = fed.ledger.state
    open_pair = {layer: toy.change(state, layer) for layer in toy.layers}
    wanted = toy.dense_outputs({la: total[la] + open_pair[la] for la in toy.layers}, toy.head(state))
    close(toy.outputs(fed.model), wanted, 1e-5)
    start = toy.method("fedloru", r=3).adapt(toy.net())
    untouched = {n: p for n, p in start.named_parameters() if n.endswith("base_layer.weight")}
    now = dict(fed.model.named_parameters())
    assert all(torch.equal(now[n], t) for n, t in untouched.items()) == (not merge)


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
def test_a_random_restart_does_not_change_the_function(toy, federation, kind):
    method = other_adapter(toy, "fedloru", kind, tau=1)
    fed = federation(method, SIZES)
    for round in (1, 2):
        fed.received = []
        for client in fed.copies:
            fed.catch_up(client, round)
            fed.jump(client, round)
            fed.received.append(fed.update(client, round))
            fed.receive(fed.received[-1], round)
        view = method.view(fed.ledger.state)
        mean = method.mean(fed.received, fed.ledger.state)
        load_tensors(fed.model, {**view, **mean})
        before = toy.outputs(fed.model)
        load_tensors(fed.model, view)
        fed.method.apply(fed.model, fed.finish(round), round)
        close(toy.outputs(fed.model), before, 1e-6)
        adapter = named_tensors(fed.model, ("adapter",))
        assert any(not t.any() for t in adapter.values()) and any(t.any() for t in adapter.values())


def test_a_momentum_restart_changes_the_function_by_one_product(toy, federation):
    fed = federation(toy.method("fedloru", tau=1, init="momentum"), SIZES)
    fed.round(1)
    change = {la: 2 * toy.change(fed.ledger.state, la) for la in toy.layers}
    close(toy.outputs(fed.model), toy.dense_outputs(change, toy.head(fed.ledger.state)), 1e-5)


@pytest.mark.parametrize("schedule, rounds", [((), (3, 6)), ((1, 4, 5), (1, 4, 5))])
def test_accumulation_rounds(toy, federation, schedule, rounds):
    fed = federation(toy.method("fedloru", tau=3, schedule=schedule), SIZES)
    merged = [r for r in range(1, 7) if any(n.startswith("merge:") for n in fed.round(r))]
    assert tuple(merged) == rounds


def test_the_accumulated_pairs_are_one_adapter_for_plain_peft(toy, federation, tmp_path):
    fed = federation(toy.method("fedloru", r=2, tau=2, merge=False, rsLoRA=True), SIZES)
    for round in range(1, 5):
        fed.round(round)
    save_adapter(tmp_path, *one_adapter(fed.model))
    assert LoraConfig.from_pretrained(str(tmp_path)).r == 4, "two accumulations of rank 2, and an open pair of zeros"
    net = toy.net()
    with torch.no_grad():
        for name, value in toy.head(fed.ledger.state).items():
            getattr(net.classifier, name).copy_(torch.from_numpy(value))
    close(toy.outputs(PeftModel.from_pretrained(net, str(tmp_path))), toy.outputs(fed.model), 1e-5)
    fed.round(5)
    save_adapter(tmp_path / "open", *one_adapter(fed.model))
    assert LoraConfig.from_pretrained(str(tmp_path / "open")).r == 6


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"merge": False, "from_scratch": True}, "trained from scratch"),
        ({"merge": False, "kind": "loha"}, "loha"),
    ],
)
def test_unmerged_pairs_need_lora_and_a_pretrained_base(toy, keys, said):
    with pytest.raises(UserError, match=said):
        other_adapter(toy, "fedloru", keys.pop("kind", "lora"), **keys)


@pytest.mark.parametrize("kind", ["loha", "lokr"])
@pytest.mark.parametrize("name", ["fedlora", "fedloru"])
def test_other_adapters_average_and_accumulate(toy, federation, name, kind):
    options = {"tau": 2} if name == "fedloru" else {}
    fed = federation(other_adapter(toy, name, kind, **options), SIZES)
    p = toy.weights(SIZES)
    for round in (1, 2, 3):
        fed.round(round)
        merged = name == "fedloru" and round == 2
        for tensor in () if merged else fed.received[0].tensors:
            mean = sum(w * u.tensors[tensor].double() for w, u in zip(p, fed.received))
            close(fed.ledger.state[tensor].double(), mean)
    fed.catch_up(3, 4)
    equal(fed.everything(3), fed.everything())


# -- personal pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options",
    [
        ("pfedloru", {"personal_rank": 1}),
        ("pmfedloru", {"nested_ranks": (1, 0, 1)}),
        ("pfedlora", {"variant": 1}),
        ("pfedlora", {"variant": 2}),
    ],
)
def test_personal_parts_are_never_sent(toy, federation, name, options):
    fed = federation(toy.method(name, **options), SIZES)
    own = {n for n in fed.everything() if tags(n) & set(fed.method.personal)}
    assert own and not own & set(fed.method.view(fed.ledger.state))
    for round in (1, 2):
        message = fed.round(round)
        assert not own & {n.split(":")[-1] for n in message}
        for update in fed.received:
            assert not own & update.tensors.keys()
            assert not own & fed.method.expected(fed.ledger.state, round, update.client).keys()
    ups = [n for n in own if "lora_B" in n]
    assert ups and all(fed.everything(k)[n].any() for k in fed.copies for n in ups)
    assert all(not torch.equal(fed.everything(1)[n], fed.everything(2)[n]) for n in ups)


def test_a_personal_pair_adds_its_product(toy, federation):
    fed = federation(toy.method("pfedloru", r=3, personal_rank=1), SIZES)
    fed.jump(1, 1)
    now = fed.everything(1)

    def product(layer, adapter):
        halves = [
            t.double().flatten(1).numpy()
            for n, t in sorted(now.items())
            if f".{layer}.lora_" in n and f".{adapter}." in n
        ]
        return halves[1] @ halves[0]

    change = {la: toy.alpha / 3 * product(la, "default") + toy.alpha * product(la, "personal") for la in toy.layers}
    close(toy.outputs(fed.copies[1]), toy.dense_outputs(change, toy.head(now)), 1e-5)


@pytest.mark.parametrize(
    "name, options, wanted",
    [
        ("pfedloru", {"personal_steps": 2}, [(("personal",), 2), (("adapter", "head"), None)]),
        ("pmfedloru", {"nested_ranks": (1,), "personal_steps": 2}, [(("personal",), 2), (("nested", "head"), None)]),
        ("pfedlora", {"personal_steps": 2, "global_steps": 3}, [(("adapter",), 2), (("base", "head"), 3)]),
        (
            "pfedlora",
            {"variant": 2, "personal_steps": 2, "global_steps": 3},
            [(("adapter", "base", "head"), 5)],
        ),
        ("pfedlora", {"variant": 2, "local_steps": 4}, [(("adapter", "base", "head"), 8)]),
        ("pfedlora", {"variant": 2, "local_steps": 4, "global_steps": 3}, [(("adapter", "base", "head"), 7)]),
    ],
)
def test_phases(toy, name, options, wanted):
    assert [(p.train, p.steps) for p in toy.method(name, **options).phases(1, 1)] == wanted


# -- mFedLoRU ------------------------------------------------------------------------------------------


def nested(tensors, layer):
    """``B_d B_u`` and ``A_d A_u`` of a layer as float64 matrices."""

    def part(name):
        (key,) = (n for n in tensors if f".{layer}.nested.{name}" in n)
        return tensors[key].detach().double().flatten(1).numpy()

    return part("B_d") @ part("B_u"), part("A_d") @ part("A_u")


def test_a_nested_client_computes_the_nested_product(toy, federation):
    fed = federation(toy.method("mfedloru", r=3, nested_ranks=(2, 1), nested_ranks_b=(1, 2), nested_scale=0.7), SIZES)
    close(toy.outputs(fed.copies[1]), toy.outputs(toy.method("fedlora", r=3).adapt(toy.net())), 1e-7)
    fed.round(1)
    for client in (1, 2):
        fed.catch_up(client, 2)
        before = {n: t.clone() for n, t in fed.everything(client).items()}
        fed.jump(client, 2)
        now, change = fed.everything(client), {}
        for layer in toy.layers:
            b, a = toy.pair(now, layer)
            more_b, more_a = nested(now, layer)
            change[layer] = toy.alpha / 3 * (b + 0.7 * more_b) @ (a + 0.7 * more_a)
        close(toy.outputs(fed.copies[client]), toy.dense_outputs(change, toy.head(now)), 1e-5)
        assert all(torch.equal(now[n], before[n]) for n in now if ".lora_" in n), "the pair itself is frozen"


def test_the_server_recovers_the_pair_and_averages(toy, federation):
    fed = federation(toy.method("mfedloru", r=3, nested_ranks=(2, 0, 1), tau=9), SIZES)
    p = toy.weights(SIZES)
    for round in (1, 2):
        before = {n: t.clone() for n, t in fed.ledger.state.items()}
        fed.round(round)
        for layer in toy.layers:
            old, halves = toy.pair(before, layer), []
            for update in fed.received:
                if update.client == 2:  # has opted out
                    halves.append(toy.pair(update.tensors, layer))
                else:
                    halves.append([x + 0.5 * y for x, y in zip(old, nested(update.tensors, layer))])
            for half in (0, 1):
                wanted = sum(w * h[half] for w, h in zip(p, halves))
                close(toy.pair(fed.ledger.state, layer)[half], wanted, 1e-5)


def test_uplink_is_the_papers_formula(toy, federation):
    r, ranks_a, ranks_b = 3, (2, 1), (1, 2)
    fed = federation(toy.method("mfedloru", r=r, nested_ranks=ranks_a, nested_ranks_b=ranks_b), SIZES)
    fed.round(1)
    shapes = {"up": (12, 7), "conv": (5, 6), "down": (6, 15)}
    for update in fed.received:
        r_a, r_b = ranks_a[(update.client - 1) % 2], ranks_b[(update.client - 1) % 2]
        sent = sum(t.numel() for n, t in update.tensors.items() if "classifier" not in n)
        assert sent == sum(r_b * (d_out + r) + r_a * (d_in + r) for d_out, d_in in shapes.values())
        assert not any("lora" in n for n in update.tensors)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"nested_ranks": (3,)}, "not below the adapter's rank, 3"),
        ({"nested_ranks": (1, 0), "nested_ranks_b": (1,)}, "one of each"),
        ({"nested_ranks": (1, 0), "nested_ranks_b": (0, 1)}, "opts out"),
        ({"nested_ranks": (-1,)}, "nested_ranks"),
    ],
)
def test_impossible_nested_ranks(toy, options, said):
    with pytest.raises(UserError, match=said):
        toy.method("mfedloru", r=3, **options)


# -- FedHM ---------------------------------------------------------------------------------------------

WEIGHTS = {"linear": (12, 7), "convolution": (5, 3, 2, 3), "wide": (4, 16)}


@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
def test_factorising_is_the_best_approximation_and_at_full_rank_the_identity(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = to_matrix(weight).numpy()
    for rank in range(1, min(matrix.shape) + 1):
        again = multiply(*factorise(weight, rank))
        assert again.shape == weight.shape
        close(to_matrix(again), best(matrix, rank), 1e-12)
    close(again, weight, 1e-12)


def test_the_matrix_of_a_convolution_is_by_rows_and_columns_of_the_kernel():
    weight = torch.randn(5, 3, 2, 4)
    matrix = to_matrix(weight)
    assert matrix.shape == (10, 12)
    assert all(
        matrix[2 * o + a, 4 * i + b] == weight[o, i, a, b]
        for o in range(5)
        for i in range(3)
        for a in range(2)
        for b in range(4)
    )


@pytest.mark.parametrize("stride, padding, kernel", [(1, 1, (3, 3)), (2, 1, (3, 3)), ((1, 2), (0, 1), (2, 3))])
def test_two_thin_convolutions_equal_the_full_one(stride, padding, kernel):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 5, kernel, stride, padding)
    x, layer = torch.randn(2, 3, 9, 8), Factorised(conv, "conv")
    close(layer(x).detach(), conv(x).detach(), 0)
    left, right = factorise(conv.weight.detach(), 4)
    layer.factor_U, layer.factor_V = torch.nn.Parameter(left), torch.nn.Parameter(right)
    wanted = torch.nn.functional.conv2d(x, multiply(left, right), conv.bias, stride, padding)
    close(layer(x).detach(), wanted.detach(), 1e-5)


def test_frobenius_decay_adds_its_gradient(toy):
    net = factorise_layers(toy.net().double(), ["up", "conv"])
    for layer in (net.up, net.conv):
        left, right = factorise(layer.base_layer.weight.detach(), 3)
        layer.factor_U, layer.factor_V = torch.nn.Parameter(left), torch.nn.Parameter(right)
    frobenius(net).backward()
    u, v = net.up.factor_U.detach(), net.up.factor_V.detach()
    close(net.up.factor_U.grad, u @ v @ v.T, 1e-10)
    close(net.up.factor_V.grad, u.T @ u @ v, 1e-10)
    dense = to_matrix(multiply(net.conv.factor_U, net.conv.factor_V)).norm() ** 2
    close(product_norm_squared(net.conv.factor_U, net.conv.factor_V).item(), dense.item(), 1e-10)


@pytest.mark.parametrize("average_by", ["uniform", "samples"])
def test_fedhm_averages_the_products(toy, federation, average_by):
    fed = federation(toy.method("fedhm", rank_factors=(2, 4), average_by=average_by), SIZES)
    p = toy.weights(SIZES) if average_by == "samples" else np.full(3, 1 / 3)
    for round in (1, 2):
        fed.round(round)
        for layer in toy.layers:
            products = []
            for update in fed.received:
                u, v = (update.tensors[f"{layer}.factor_{half}"].double() for half in "UV")
                products.append(multiply(u, v).numpy())
                d_out = {"up": 12, "conv": 5, "down": 6}[layer]
                assert v.shape[0] == max(round_half_even(d_out / (2, 4)[(update.client - 1) % 2]), 1)
            wanted = sum(w * x for w, x in zip(p, products))
            close(fed.ledger.state[f"{layer}.base_layer.weight"].double(), wanted, 1e-5)
        for name in ("classifier.weight", "up.base_layer.bias"):
            close(fed.ledger.state[name].double(), sum(w * u.tensors[name].double() for w, u in zip(p, fed.received)))
    # The client's next factors are the best approximation of the mean at its rank.
    fed.catch_up(2, 3)
    weight = fed.ledger.state["down.base_layer.weight"].double().numpy()
    now = fed.everything(2)
    got = now["down.factor_U"].double().numpy() @ now["down.factor_V"].double().numpy()
    close(got, best(weight, 2))


FULL = (".base_layer.weight", ".factor_U", ".factor_V")


@pytest.mark.parametrize("average_by", ["uniform", "samples"])
@pytest.mark.parametrize("factors", [(1, 3, 2), (1,)])
def test_fedhm_of_rank_factor_one_is_the_full_layer(toy, federation, factors, average_by):
    fed = federation(toy.method("fedhm", rank_factors=factors, average_by=average_by, decay=0.1), SIZES)
    whole = [k for k in (1, 2, 3) if factors[(k - 1) % len(factors)] == 1]
    p = toy.weights(SIZES) if average_by == "samples" else np.full(3, 1 / 3)
    for k in whole:
        assert torch.equal(toy.outputs(fed.copies[k]), toy.outputs(toy.net())), (
            "nothing is truncated, in the convolution either"
        )
        assert all(phase.penalty is None for phase in fed.method.phases(1, k)), (
            "without factors there is no Frobenius decay"
        )
    assert len(whole) == 3 or fed.method.phases(1, 2)[0].penalty is not None
    size = sum(t.numel() for t in toy.net().parameters())
    for round in (1, 2):
        message = fed.round(round)
        for layer in toy.layers:
            total = 0
            for w, update in zip(p, fed.received):
                t = {n.removeprefix(layer): v.double() for n, v in update.tensors.items() if n.startswith(layer)}
                full = update.client in whole
                assert full == (FULL[0] in t) and full != (FULL[1] in t) and full != (FULL[2] in t)
                total = total + w * (t[FULL[0]] if full else multiply(t[FULL[1]], t[FULL[2]]))
            close(fed.ledger.state[layer + FULL[0]].double(), total, 1e-5)
        for name in ("classifier.weight", "up.base_layer.bias"):
            close(fed.ledger.state[name].double(), sum(w * u.tensors[name].double() for w, u in zip(p, fed.received)))
        assert any(n.startswith("svd:") for n in message) == (len(whole) < 3)
    for k in whole:
        received = fed.catch_up(k, 3)
        assert sum(t.numel() for t in received.values()) == size, "it is sent the full weights and nothing else"
        assert sum(t.numel() for t in fed.received[k - 1].tensors.values()) == size
        for layer in toy.layers:
            assert torch.equal(fed.everything(k)[layer + FULL[0]], fed.ledger.state[layer + FULL[0]])


def test_fedhm_averages_its_master_if_no_client_has_the_smallest_factor(toy, federation):
    for master, clients, joins in ((True, (2, 3), True), (True, (1, 2), False), (False, (2, 3), False)):
        fed = federation(toy.method("fedhm", rank_factors=(1, 3, 2), master=master), SIZES)
        fed.round(1)
        before = {n: t.double() for n, t in fed.ledger.state.items()}
        fed.round(2, clients=clients)
        for layer in toy.layers:
            name, held = layer + FULL[0], []
            for update in fed.received:
                t = {n.removeprefix(layer): v.double() for n, v in update.tensors.items() if n.startswith(layer)}
                held.append(t[FULL[0]] if FULL[0] in t else multiply(t[FULL[1]], t[FULL[2]]))
            held += [before[name]] * joins
            close(fed.ledger.state[name].double(), sum(held) / len(held), 1e-5)
        heads = [u.tensors["classifier.weight"].double() for u in fed.received] + [before["classifier.weight"]] * joins
        close(fed.ledger.state["classifier.weight"].double(), sum(heads) / len(heads))


def round_half_even(x):
    return int(np.rint(x))


def test_fedhm_refuses_layers_without_factors(toy):
    with pytest.raises(UserError, match="grouped|no factorised form"):
        Factorised(torch.nn.Conv2d(4, 4, 3, groups=2), "conv")
    adapter = AdapterSpec(target_modules=None)
    with pytest.raises(UserError, match="no usual choice"):
        create_method("fedhm", adapter=adapter).adapt(toy.net())
