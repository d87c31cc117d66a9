"""FedLoRU, its variants and baselines, compared with dense float64 computations on layers that are not square."""

import pytest
import torch

from fs_lowrank.algebra import factorise, product_norm_squared
from fs_lowrank.algebra.factorise import to_matrix
from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method
from fs_lowrank.methods.fedhm import FedHM
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.factorised import Factorised, factorise_layers, frobenius
from fs_lowrank.models.layers import Layer
from fs_lowrank.models.names import named_tensors, tags
from fs_lowrank.settings import AdapterSpec
from tests.methods.conftest import best, close

SIZES = (3, 10, 27)


def multiply(left, right):
    """The weight that two factors stand for, by the definition of the two thin convolutions."""
    return left @ right if left.ndim == 2 else torch.einsum("orax,riyb->oiab", left, right)


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
    adapter = AdapterSpec(method=kind, r=2, lora_alpha=toy.alpha, target_modules=toy.layers)
    method = toy.method("fedloru", adapter=adapter, tau=1)
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


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"from_scratch": True}, "model.type gives a model from scratch, and fedloru with lowrank.merge = False keeps"),
        ({"adapter": AdapterSpec(method="loha")}, "loha"),
    ],
)
def test_unmerged_pairs_need_lora_and_a_pretrained_base(toy, keys, said):
    with pytest.raises(UserError, match=said):
        toy.method("fedloru", merge=False, **keys)


# -- personal pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options",
    [
        ("pfedloru", {"personal_rank": 1}),
        ("pmfedloru", {"nested_ranks": (1, 0, 1)}),
        ("pfedlora", {"variant": 1}),
        ("pfedlora", {"variant": 2}),
        ("fedsa_lora", {}),
        *((name, {"personal": ("head",)}) for name in ("fedlora", "rolora", "flexlora", "fedsvd", "fedsa_lora")),
    ],
)
def test_what_is_a_clients_own_is_never_sent(toy, federation, name, options):
    fed = federation(toy.method(name, **options), SIZES)
    own = {n for n in fed.everything() if tags(n) & set(fed.method.personal)}
    assert own and not [n for n in fed.method.view(fed.ledger.state) if tags(n) & {*type(fed.method).personal}]
    for round in (1, 2):
        message = fed.round(round)
        assert message and not own & {n.split(":")[-1] for n in message}
        for update in fed.received:
            assert not own & update.tensors.keys()
            assert not own & fed.method.expected(fed.ledger.state, round, update.client).keys()
    one, other = fed.everything(1), fed.everything(2)
    assert all(not torch.equal(one[n], other[n]) for n in own), "each has trained what is its own"


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


@pytest.mark.parametrize("stride, padding, kernel", [(1, 1, (3, 3)), (2, 1, (3, 3)), ((1, 2), (0, 1), (2, 3))])
def test_two_thin_convolutions_equal_the_full_one(stride, padding, kernel):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 5, kernel, stride, padding)
    x, layer = torch.randn(2, 3, 9, 8), Factorised(conv, "conv")
    close(layer(x).detach(), conv(x).detach(), 0)
    left, right = factorise(conv.weight.detach(), 9)  # of full rank
    layer.factor_U, layer.factor_V = torch.nn.Parameter(left), torch.nn.Parameter(right)
    close(layer(x).detach(), conv(x).detach(), 1e-5)


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


def held(tensors, layer):
    """The weight of a layer that a client sends, in full or as factors."""
    own = {n.removeprefix(f"{layer}."): t.double() for n, t in tensors.items() if n.startswith(f"{layer}.")}
    assert ("base_layer.weight" in own) != ("factor_U" in own) == ("factor_V" in own)
    full = own.get("base_layer.weight")
    return (multiply(own["factor_U"], own["factor_V"]) if full is None else full).numpy()


@pytest.mark.parametrize("average_by", ["uniform", "samples"])
@pytest.mark.parametrize(
    "factors, master", [((2, 4), False), ((1, 3, 2), False), ((1,), False), ((1, 3, 2), True), ((2, 4, 4), True)]
)
def test_fedhm_averages_the_weights_of_its_clients_and_its_own_where_no_client_has_the_smallest_factor(
    toy, federation, factors, master, average_by
):
    fed = federation(toy.method("fedhm", rank_factors=factors, master=master, average_by=average_by), SIZES)
    of = [factors[k % len(factors)] for k in range(len(SIZES))]
    for number, clients in enumerate(((1, 2, 3), (2, 3), (1, 2)), start=1):
        before = {n: t for n, t in fed.ledger.state.items() if ".factor_" not in n}
        message = fed.round(number, clients)
        sizes, tensors = [SIZES[k - 1] for k in clients], [u.tensors for u in fed.received]
        if master and min(of[k - 1] for k in clients) > min(factors):
            sizes, tensors = [*sizes, sum(sizes) // len(sizes)], [*tensors, before]
        p = toy.weights(sizes if average_by == "samples" else [1] * len(sizes))
        for layer in toy.layers:
            wanted = sum(
                w * held({n: t for n, t in part.items() if ":" not in n}, layer) for w, part in zip(p, tensors)
            )
            close(fed.ledger.state[f"{layer}.base_layer.weight"], wanted)
        for name in ("classifier.weight", "up.base_layer.bias"):
            close(fed.ledger.state[name], sum(w * part[name].double() for w, part in zip(p, tensors)), 2e-6)
        for client, part in zip(clients, tensors):
            factor = of[client - 1]
            ranks = [part[f"{layer}.factor_V"].shape[0] for layer in toy.layers] if factor > 1 else []
            assert ranks == [max(round(d_out / factor), 1) for d_out in (12, 5, 6)][: len(ranks)]
        assert any(n.startswith("svd:") for n in message) == (max(factors) > 1)


@pytest.mark.parametrize("clients", [3, 7])
def test_fedhm_in_half_precision_does_not_scale_weights_that_nobody_trains(clients):
    """A third in bfloat16 is 1.002 times a third, in every round."""
    draw = torch.Generator().manual_seed(0)
    u, v = torch.randn(96, 8, generator=draw).bfloat16(), torch.randn(8, 80, generator=draw).bfloat16()
    template = torch.empty(96, 80, dtype=torch.bfloat16)
    mean = FedHM.mean_weight([1 / clients] * clients, [Layer("net", U=u, V=v)] * clients, template)
    product = u.double() @ v.double()
    assert mean.dtype == torch.bfloat16
    assert (mean.double() * product).sum().item() == pytest.approx(product.square().sum().item(), rel=2e-4)


def test_a_fedhm_clients_factors_are_the_best_approximation_of_the_mean(toy, federation):
    fed = federation(toy.method("fedhm", rank_factors=(2, 3)), SIZES)
    fed.round(1)
    fed.catch_up(2, 2)
    now = fed.everything(2)
    for layer in toy.layers:
        weight = to_matrix(fed.ledger.state[f"{layer}.base_layer.weight"])
        left, right = now[f"{layer}.factor_U"], now[f"{layer}.factor_V"]
        close(to_matrix(multiply(left, right)), best(weight, len(right)))


def test_fedhm_of_rank_factor_one_is_the_full_layer(toy, federation):
    fed = federation(toy.method("fedhm", rank_factors=(1, 3, 2), decay=0.1), SIZES)
    assert torch.equal(toy.outputs(fed.copies[1]), toy.outputs(toy.net())), "nothing is cut, in the convolution either"
    assert fed.method.phases(1, 1)[0].penalty is None, "without factors there is no Frobenius decay"
    assert fed.method.phases(1, 2)[0].penalty is not None
    fed.round(1)
    size = sum(t.numel() for t in toy.net().parameters())
    for tensors in (fed.catch_up(1, 2), fed.received[0].tensors):
        assert sum(t.numel() for t in tensors.values()) == size, "the full weights and nothing else"
    for layer in toy.layers:
        name = f"{layer}.base_layer.weight"
        assert torch.equal(fed.everything(1)[name], fed.ledger.state[name])


def test_fedhm_refuses_layers_without_factors(toy):
    with pytest.raises(UserError, match="grouped|no factorised form"):
        Factorised(torch.nn.Conv2d(4, 4, 3, groups=2), "conv")
    adapter = AdapterSpec(target_modules=None)
    with pytest.raises(UserError, match="no usual choice"):
        create_method("fedhm", adapter=adapter).adapt(toy.net())
