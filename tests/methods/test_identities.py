"""Every method compared with dense float64 sums, on layers that are not square, with unequal clients."""

import itertools

import numpy as np
import pytest
import torch

from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method
from fs_lowrank.models.names import named_tensors, tags
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.training.local import set_trainable
from tests.methods.conftest import LAYERS, best, close, equal

SIZES = (3, 10, 27)
#: compared with their papers' formulas in ``test_field``
FIELD = ("fedex_lora", "fedsvd", "raflora", "hetlora", "fedrot_lora", "frlora", "lora_fair", "la_lora", "florist")
PAIRS = ("fedlora", "ffa_lora", "rolora", "flexlora", "flora", *FIELD)
RANKED = ("flexlora", "flora", "raflora", "florist", "hetlora")
BUILT_IN = ("fedavg", *PAIRS)


# -- the averaging methods -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedlora", "ffa_lora", "rolora", "fedsa_lora"])
@pytest.mark.parametrize("uniform", [False, True])
def test_each_tensor_is_the_mean_of_what_was_sent(toy, federation, name, uniform):
    fed = federation(toy.method(name, uniform=uniform), SIZES)
    p = np.full(3, 1 / 3) if uniform else toy.weights(SIZES)
    for round in (1, 2, 3):
        before = dict(fed.ledger.state)
        message = fed.round(round)
        assert message.keys() == fed.received[0].tensors.keys()
        for tensor in message:
            expected = sum(w * u.tensors[tensor].double().numpy() for w, u in zip(p, fed.received))
            close(fed.ledger.state[tensor].double().numpy(), expected, 2e-6)
        for tensor in before.keys() - message.keys():
            assert torch.equal(before[tensor], fed.ledger.state[tensor])


@pytest.mark.parametrize("name", ["ffa_lora", "rolora"])
@pytest.mark.parametrize("rsLoRA", [False, True])
def test_the_exact_methods_average_the_products(toy, federation, name, rsLoRA):
    fed = federation(toy.method(name, rsLoRA=rsLoRA), SIZES)
    p = toy.weights(SIZES)
    for round in (1, 2, 3, 4):
        fed.round(round)
        for layer in toy.layers:
            # The product of a client is that of its copy: the half that it trained and the frozen one.
            expected = sum(
                w * toy.change(fed_copy, layer, rsLoRA=rsLoRA)
                for w, fed_copy in zip(p, map(fed.everything, fed.copies))
            )
            close(toy.change(fed.ledger.state, layer, rsLoRA=rsLoRA), expected, 1e-5)


# -- which half is sent in a round ---------------------------------------------------------------------


def halves_sent(method, fed, round):
    names = method.sent(fed.ledger.state, round)
    return {half for half in ("lora_A", "lora_B", "classifier") if any(half in n for n in names)}


@pytest.mark.parametrize(
    "mix, rounds, alternating",
    [
        *((mix, 8, last) for mix, last in ((1.0, 8), (0.5, 4), (0.3, 3), (0.2, 2), (0.01, 1), (0.0, 0))),
        *((0.55, 100, 55), (0.2, 10, 2)),  # in floating point, 0.55 · 100 is above 55
    ],
)
def test_rolora_alternates_and_starts_with_b(toy, federation, mix, rounds, alternating):
    # mix q: the first ⌈q·T⌉ of T rounds alternate; A remains frozen in the others.
    method = toy.method("rolora", mix=mix, rounds=rounds)
    fed = federation(method, (1,))
    for round in range(1, rounds + 1):
        half = "lora_A" if round <= alternating and round % 2 == 0 else "lora_B"
        assert halves_sent(method, fed, round) == {half, "classifier"}, round


# -- every method --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, params",
    [
        *((n, {}) for n in (*BUILT_IN, "fedask", "pfedlora", "fedsa_lora", "ravan", "fed_sb")),
        *((n, {"ranks": (1, 3, 2)}) for n in (*RANKED, "fedask")),
        *(("fedloru", {"tau": 2, "merge": m, "init": init}) for m in (True, False) for init in ("random", "momentum")),
        *(
            ("fedloru", {"tau": 2, "adapter": AdapterSpec(kind, r=2, target_modules=LAYERS)})
            for kind in ("loha", "lokr")
        ),
        *(("mfedloru", {"tau": 2, "nested_ranks": ranks}) for ranks in ((1, 0), (1,))),
        *(("fedhm", {"rank_factors": factors}) for factors in ((2, 5), (3,))),
    ],
)
def test_clients_that_missed_rounds_catch_up_to_the_bit(toy, federation, name, params):
    fed = federation(toy.method(name, r=3, **params), SIZES * 2)
    own = {n for n in fed.everything() if tags(n) & set(fed.method.personal)}
    # 1 always takes part, 3 and 4 late, 5 once, and 6 not before the end.
    for round, clients in enumerate([(1, 2), (1, 2, 3), (1, 3, 4), (1, 2), (1, 5), (1, 2, 3)], start=1):
        fed.round(round, clients)
    for client in fed.copies:
        fed.catch_up(client, 7)
    twin = 4 if "ranks" in params else 3  # of the rank of client 1
    equal(*({n: t for n, t in fed.everything(client).items() if n not in own} for client in (1, twin)))
    for client, copy in fed.copies.items():
        now = {**fed.everything(client), **named_tensors(copy, fed.method.shared)}
        view, whole = fed.method.view(fed.ledger.state, client), fed.everything()
        sent = own | fed.method.view(fed.ledger.state).keys()
        kept = (now.keys() & whole.keys()) - sent  # frozen, or merged by each copy itself
        equal({n: now[n] for n in (*view, *kept)}, {**{n: whole[n] for n in kept}, **view})


# -- clients of different ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["b", "sqrt"])
@pytest.mark.parametrize("rsLoRA", [False, True])
def test_flexlora_cuts_to_the_best_rank(toy, federation, split, rsLoRA):
    ranks, server_rank = (1, 3, 2), 3
    fed = federation(toy.method("flexlora", 1, ranks=ranks, split=split, rsLoRA=rsLoRA), SIZES)
    for round in (1, 2):
        fed.round(round, (1, 2, 3))
        for layer in toy.layers:
            product = toy.mean_product(fed.received, layer, rsLoRA=rsLoRA)
            s = np.linalg.svd(product, compute_uv=False)
            close(toy.change(fed.ledger.state, layer, rsLoRA=rsLoRA), best(product, server_rank), 2e-5)
            for client, rank in enumerate(ranks, start=1):
                view = fed.method.view(fed.ledger.state, client)
                up, down = toy.pair(view, layer)
                assert down.shape[0] == up.shape[1] == rank
                # The client multiplies by its own s_k = alpha / r_k (or alpha / √r_k).
                close(toy.change(view, layer, rsLoRA=rsLoRA), best(product, rank), 2e-5)
                if split == "b":  # all of Σ in B: A's rows are orthonormal
                    close(down @ down.T, np.eye(rank), 1e-5)
                    close(toy.alpha / (rank**0.5 if rsLoRA else rank) * np.linalg.norm(up, axis=0), s[:rank], 2e-5)
                else:
                    gram = down @ down.T
                    close(gram, np.diag(np.diag(gram)), 1e-5)
                    assert (np.diff(np.diag(gram)) <= 1e-6).all()


def test_flexlora_fills_missing_components_with_trainable_directions(toy, federation):
    # One client of rank 1 and a server of rank 3: the additional rows must be trainable.
    fed = federation(toy.method("flexlora", ranks=(1, 3, 2)), SIZES)
    fed.round(1, (1,))
    for layer in toy.layers:
        up, down = toy.pair(fed.ledger.state, layer)
        close(down @ down.T, np.eye(3), 1e-5)
        assert not up[:, 1:].any()
        close(toy.change(fed.ledger.state, layer), toy.mean_product(fed.received, layer), 2e-5)


@pytest.mark.parametrize("trained", [1, 2])
def test_flexloras_missing_components_train_where_the_values_are_shared(toy, federation, trained):
    """One client of rank 2 takes part, of whose pair ``trained`` components are not zero: the others can be trained."""
    fed = federation(toy.method("flexlora", ranks=(2, 3), split="sqrt"), SIZES[:2])
    jump = fed.jump

    def some(client, round):
        jump(client, round)
        for name, parameter in fed.copies[client].named_parameters():
            if ".lora_B." in name:
                parameter.data[:, trained:] = 0

    fed.jump = some
    fed.round(1, (1,))
    for layer in toy.layers:
        product = toy.mean_product(fed.received, layer)
        values = np.linalg.svd(product, compute_uv=False)[:trained]
        up, down = toy.pair(fed.ledger.state, layer)
        close(toy.change(fed.ledger.state, layer), product, 2e-5)
        shared = [*(values / (toy.alpha / 3)), *(3 - trained) * [1.0]]
        close(down @ down.T, np.diag(shared), 2e-5)
        close(up[:, trained:], 0, 2e-6)
    # A client of the largest rank has a gradient in every component.
    fed.catch_up(2, 2)
    model = fed.copies[2].train()
    set_trainable(model, ("adapter",))
    model.get_base_model()(toy.inputs()).square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if ".lora_B." in n}
    assert len(gradients) == 3 and all(g.flatten(1).norm(dim=0).min() > 1e-4 for g in gradients.values())


@pytest.mark.parametrize("name", RANKED)
def test_a_client_that_did_not_train_changes_nothing(toy, federation, name):
    fed = federation(toy.method(name, ranks=(1, 3, 2)), SIZES)
    fed.jump = lambda client, round: None
    before = toy.outputs(fed.model)
    for round in (1, 2):
        fed.round(round)
        close(toy.outputs(fed.model), before, 1e-5)
        assert all(t.isfinite().all() for t in fed.ledger.state.values())


@pytest.mark.parametrize("name", ["flexlora", "flora"])
@pytest.mark.parametrize("ranks, r", [((1,), 1), ((3, 1), 2), ((1, 2, 3, 4), 1), ((1, 2, 2), 5), ((2, 5), 3), ((), 4)])
@pytest.mark.parametrize("clients, rsLoRA", [((2,), False), ((1, 3), True), ((1, 2, 3), False)])
def test_any_list_of_ranks_and_any_subset(toy, federation, name, ranks, r, clients, rsLoRA):
    fed = federation(toy.method(name, r, ranks=ranks, rsLoRA=rsLoRA), SIZES)
    of = [(ranks or (r,))[i % len(ranks or (r,))] for i in range(3)]
    total = {layer: 0.0 for layer in toy.layers}
    for round, present in enumerate((clients, (1, 2, 3)), start=1):
        fed.round(round, present)
        assert [toy.pair(u.tensors, "up")[1].shape[0] for u in fed.received] == [of[k - 1] for k in present]
        for layer in toy.layers:
            mean = toy.mean_product(fed.received, layer, rsLoRA=rsLoRA)
            # FlexLoRA's rank is the largest in the list, whether or not such a client takes part
            total[layer] = total[layer] + mean if name == "flora" else best(mean, max(r, *ranks, 1))
        head = {
            n: sum(
                w * toy.head(u.tensors)[n]
                for w, u in zip(toy.weights(u.num_samples for u in fed.received), fed.received)
            )
            for n in ("weight", "bias")
        }
        close(toy.outputs(fed.model), toy.dense_outputs(total, head), 5e-5)


# -- FLoRA's merge -------------------------------------------------------------------------------------


def test_floras_pair_is_a_new_one_of_zeros_in_every_round(toy, federation):
    # If A and B were kept after merging, the output would change by one more update.
    fed, earlier = federation(toy.method("flora", ranks=(1, 3, 2)), SIZES), []
    for round in (1, 2, 3):
        fed.round(round)
        pairs = [toy.pair(fed.ledger.state, layer) for layer in toy.layers]
        assert not any(up.any() for up, _ in pairs)
        earlier.append(np.concatenate([down.ravel() for _, down in pairs]))
    assert not any(np.isclose(a, b).any() for a, b in itertools.combinations(earlier, 2))


def test_floras_fresh_a_is_drawn_like_pefts(toy, federation):
    # Kaiming-uniform with a = √5: uniform within ±1/√fan_in.
    method = toy.method("flora")
    drawn = method.draw_down("some.lora_A.default.weight", (200, 16), 3)
    assert drawn.abs().max() <= 0.25 and drawn.abs().max() > 0.249
    assert abs(float(drawn.var()) - 0.25**2 / 3) < 2e-3 and abs(float(drawn.mean())) < 0.01
    assert torch.equal(drawn[:7], method.draw_down("some.lora_A.default.weight", (7, 16), 3))
    assert not torch.equal(drawn, method.draw_down("some.lora_A.default.weight", (200, 16), 4))
    assert not torch.equal(drawn, method.draw_down("other.lora_A.default.weight", (200, 16), 3))
    other = toy.method("flora", seed=5).draw_down("some.lora_A.default.weight", (200, 16), 3)
    assert not torch.equal(drawn, other)
    assert method.draw_down("conv.lora_A.default.weight", (50, 4, 2, 2), 1).abs().max() <= 0.25


def test_floras_downlink_grows_with_the_ranks_of_those_present(toy, federation):
    fed = federation(toy.method("flora", ranks=(1, 3, 2)), SIZES)
    for round, (clients, total) in enumerate((((1, 2, 3), 6), ((2, 3), 5), ((1,), 1)), start=1):
        message = fed.round(round, clients)
        stacks = [t for n, t in message.items() if n.startswith("merge:") and ".up.lora_A." in n]
        assert [t.shape[0] for t in stacks] == [total]


# -- adapters that a method refuses --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rolora", "ffa_lora", "flexlora", "flora", "mfedloru"])
def test_methods_on_the_halves_of_a_pair_need_lora(name):
    with pytest.raises(UserError, match=f"adapter_method = 'loha': it has no halves A and B, which {name} works on"):
        create_method(name, adapter=AdapterSpec(method="loha"), rounds=3)


@pytest.mark.parametrize("name, params", [("flexlora", {}), ("flora", {}), ("fedloru", {"merge": False})])
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "lora_bias"])
def test_methods_of_one_scale_refuse_another_by_layer(name, params, key):
    with pytest.raises(
        UserError, match=f"llm.adapter.args.0.{key} = .*: {name}.* (one (rank|alpha) for all layers|hold no bias)"
    ):
        create_method(name, adapter=AdapterSpec(extra={key: {"query": 4}}), rounds=3, **params)
    create_method("fedlora", adapter=AdapterSpec(extra={key: {"query": 4}}))
