"""Methods of the field against their papers' formulas, dense and in float64, on layers that are not square."""

import dataclasses

import numpy as np
import pytest
import torch

from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.errors import CannotContinue, UserError
from fs_lowrank.methods import RobustMean, Update, create_method
from fs_lowrank.models.names import named_tensors, pairs
from fs_lowrank.rounds.intake import RunningMean
from fs_lowrank.rounds.round import Round
from fs_lowrank.seeds import derive
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.testing import Bench, quietly
from tests.methods.conftest import best, close

SIZES = (3, 10, 27)


def weight(model, layer):
    """The base weight of a layer as a float64 matrix."""
    base = model.get_base_model().get_submodule(layer).get_base_layer().weight
    return base.detach().double().numpy().reshape(base.shape[0], -1)


def cosine(a, b):
    return (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)


# -- fedex_lora ------------------------------------------------------------------------------------------


def test_fedex_loras_model_is_the_mean_of_the_products(toy, federation):
    fed = federation(toy.method("fedex_lora"), SIZES)
    for round in (1, 2, 3):
        before = {layer: weight(fed.model, layer) for layer in toy.layers}
        fed.round(round)
        for layer in toy.layers:
            whole = weight(fed.model, layer) + toy.change(fed.ledger.state, layer)
            close(whole, before[layer] + toy.mean_product(fed.received, layer))


def test_fedex_loras_residual_is_zero_with_one_client_and_is_cut_to_its_best_approximation(toy, federation):
    alone = federation(toy.method("fedex_lora"), (7,))
    assert all(not t.any() for n, t in alone.round(1).items() if n.startswith("merge:") and "lora_B" in n)
    fed = federation(toy.method("fedex_lora", residual_rank=1), SIZES)
    before = {layer: weight(fed.model, layer) for layer in toy.layers}
    message = fed.round(1)
    assert {t.shape[1] for n, t in message.items() if n.startswith("merge:") and "lora_B" in n} == {1}
    for layer in toy.layers:
        residual = toy.mean_product(fed.received, layer) - toy.change(fed.ledger.state, layer)
        close(weight(fed.model, layer) - before[layer], best(residual, 1))


# -- fedsvd ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2])
def test_fedsvd_averages_b_and_decomposes_the_product(toy, federation, period):
    fed = federation(toy.method("fedsvd", period=period), SIZES)
    for round in (1, 2, 3, 4):
        downs = {layer: toy.pair(fed.ledger.state, layer)[1] for layer in toy.layers}
        message = fed.round(round)
        decomposes = round % period == 0
        assert {half for half in "AB" if any(f"lora_{half}" in n for n in message)} == set("AB" if decomposes else "B")
        for layer in toy.layers:
            p = toy.weights(SIZES)
            ups = [u.tensors[n] for u in fed.received for n in u.tensors if f".{layer}.lora_B." in n]
            mean = sum(w * u.double().numpy().reshape(u.shape[0], -1) for w, u in zip(p, ups))
            up, down = toy.pair(fed.ledger.state, layer)
            close(up @ down, mean @ downs[layer])
            if decomposes:
                close(down @ down.T, np.eye(len(down)))
                close(up.T @ up, np.diag(np.diag(up.T @ up)))
            else:
                close(down, downs[layer])


# -- raflora ---------------------------------------------------------------------------------------------


def test_raflora_averages_each_rank_over_the_clients_that_have_it(toy, federation):
    ranks = (1, 3, 2)
    fed = federation(toy.method("raflora", 6, ranks=ranks), SIZES)
    fed.round(1)
    for layer in toy.layers:
        expected = 0
        for j in range(max(ranks)):
            have = [k for k, r in enumerate(ranks) if r > j]
            p = toy.weights(SIZES[k] for k in have)
            for w, k in zip(p, have):
                up, down = toy.pair(fed.received[k].tensors, layer)
                expected = expected + w * toy.alpha / ranks[k] * np.outer(up[:, j], down[j])
        close(toy.change(fed.ledger.state, layer), expected, 2e-5)


def test_raflora_with_equal_ranks_is_flexlora(toy, federation):
    states = []
    for name in ("raflora", "flexlora"):
        fed = federation(toy.method(name, 2), SIZES)
        fed.round(1)
        states.append(fed.ledger.state)
    assert all((states[0][n] - t).abs().max() < 1e-6 for n, t in states[1].items())


# -- florist ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_florist_merges_the_fewest_components_that_hold_the_threshold(toy, federation, threshold):
    fed = federation(toy.method("florist", ranks=(1, 3, 2), threshold=threshold), SIZES)
    for round in (1, 2):
        before = {layer: weight(fed.model, layer) for layer in toy.layers}
        message = fed.round(round)
        for layer in toy.layers:
            mean = toy.mean_product(fed.received, layer)
            s = np.linalg.svd(mean, compute_uv=False)
            held = np.cumsum(s**2) / np.sum(s**2)
            count = int(np.argmax(held >= threshold - 1e-12)) + 1
            close(weight(fed.model, layer) - before[layer], best(mean, count), 2e-5)
            if threshold < 1:
                (sent,) = (t for n, t in message.items() if n.startswith(f"merge:{round}:") and f"{layer}.lora_A" in n)
                assert len(sent) == count


def test_florist_sends_one_component_of_a_layer_that_nobody_trained(toy):
    method = toy.method("florist")
    up, down = method.combined([torch.zeros(5, 2)], [torch.ones(2, 7)], [1.0])
    assert up.shape == (5, 1) and down.shape == (1, 7) and not up.any()


# -- fedask ----------------------------------------------------------------------------------------------


def trained(fed, toy, layer):
    """``Σ p_k s_k B_k A_k`` of what the clients' copies hold."""
    p = toy.weights(fed.sizes)
    return sum(w * toy.change(dict(copy.named_parameters()), layer) for w, copy in zip(p, fed.copies.values()))


@pytest.mark.parametrize("ranks, split", [((), "sqrt"), ((1, 3, 2), "sqrt"), ((1, 3, 2), "b")])
def test_fedask_takes_the_mean_of_the_products(toy, federation, ranks, split):
    """With as many columns as the ranks add up to; the server, as large as that, loses nothing."""
    fed = federation(toy.method("fedask", 6, ranks=ranks, split=split, sketch=18), SIZES)
    for round in (1, 2):
        message = fed.round(round)
        assert not [n for n in (*message, *fed.ledger.state) if ":" in n], "sketches stay in their round"
        for layer in toy.layers:
            wanted = trained(fed, toy, layer)
            close(toy.change(fed.ledger.state, layer), best(wanted, 6), 2e-5)
            if ranks:
                close(toy.change(fed.ledger.state, layer), wanted, 2e-5)


def test_fedask_with_a_narrow_sketch_takes_the_part_in_its_span(toy, federation):
    method = toy.method("fedask", 2, sketch=2)
    fed = federation(method, SIZES)
    fed.round(1)
    misses = []
    for layer in toy.layers:
        wanted = trained(fed, toy, layer)
        (name,) = (n for n in fed.ledger.state if f".{layer}.lora_B." in n)
        q, _ = np.linalg.qr(wanted @ method.omega(name, wanted.shape[1], 2).double().numpy())
        close(toy.change(fed.ledger.state, layer), q @ q.T @ wanted, 2e-5)
        misses.append(np.linalg.norm(q @ q.T @ wanted - wanted) / np.linalg.norm(best(wanted, 2) - wanted))
    assert max(misses) > 1.2, "it is further from the mean than the best pair of this rank"


def test_fedasks_server_needs_the_sums_of_the_sketches_alone(toy, federation):
    states = []
    for intake in (None, RunningMean):
        fed = federation(toy.method("fedask", 6, ranks=(1, 3, 2), only_sums=intake is not None), SIZES)
        fed.current = Round(1, fed.ledger, intake=intake or (lambda: None))
        fed.round(1)
        states.append(fed.ledger.state)
    assert all((states[0][n] - t).abs().max() < 1e-5 for n, t in states[1].items())


def test_fedask_that_trains_b_is_exact_with_any_sketch_and_leaves_a(toy, federation):
    fed = federation(toy.method("fedask", 2, sketch=2, trains="b"), SIZES)
    downs = {layer: toy.pair(fed.ledger.state, layer)[1] for layer in toy.layers}
    fed.round(1)
    for layer in toy.layers:
        assert all(
            np.array_equal(toy.pair(dict(c.named_parameters()), layer)[1], downs[layer]) for c in fed.copies.values()
        )
        close(toy.change(fed.ledger.state, layer), trained(fed, toy, layer), 2e-5)


# -- hetlora ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(1, 3, 2), (2,)])
def test_hetlora_weights_zero_padded_halves_by_the_norms_of_the_products(toy, federation, ranks):
    method = toy.method("hetlora", ranks=ranks, prune=1.0)
    fed = federation(method, SIZES)
    for round in (1, 2):
        fed.round(round)
        for layer in toy.layers:
            norms = np.array([np.linalg.norm(toy.change(u.tensors, layer)) for u in fed.received])
            up, down = toy.pair(fed.ledger.state, layer)
            padded_up, padded_down = np.zeros_like(up), np.zeros_like(down)
            for w, update in zip(norms / norms.sum(), fed.received):
                b, a = toy.pair(update.tensors, layer)
                rank = len(a)
                padded_up[:, :rank] += w * (toy.alpha / rank) / (toy.alpha / len(down)) * b
                padded_down[:rank] += w * a
            close(up, padded_up)
            close(down, padded_down)


def test_hetlora_keeps_the_rows_of_a_that_no_client_of_the_round_holds(toy, federation):
    fed = federation(toy.method("hetlora", ranks=(2, 4), prune=1.0), SIZES[:2])
    first = {layer: toy.pair(fed.ledger.state, layer)[1] for layer in toy.layers}
    fed.round(1, [1])
    for layer in toy.layers:
        up, down = toy.pair(fed.ledger.state, layer)
        assert not up[:, 2:].any(), "so that the model is the mean of the padded halves"
        assert np.array_equal(down[2:], first[layer][2:]) and down[2:].any(1).all(), "two zeros would never train"


def test_hetlora_refuses_a_start_of_which_a_client_that_shrinks_would_lack_a_part(toy):
    adapter = AdapterSpec(r=4, target_modules=("up",), extra={"init_lora_weights": "pissa"})
    with pytest.raises(UserError, match="init_lora_weights = 'pissa': .* clients of smaller ranks would lack"):
        toy.method("hetlora", adapter=adapter)
    toy.method("hetlora", adapter=adapter, prune=1.0)


def adapter_of(model):
    return named_tensors(model, ("adapter",))


def test_hetlora_adds_the_norm_of_the_last_components_to_the_loss(toy, federation):
    fed = federation(toy.method("hetlora", ranks=(4, 3, 2), prune=0.5, tail_penalty=0.1), SIZES)
    fed.round(1)
    for client, q in ((1, 2), (2, 1), (3, 1)):
        (phase,) = fed.method.phases(2, client)
        halves = [toy.pair(adapter_of(fed.copies[client]), layer) for layer in toy.layers]
        tail = sum(np.linalg.norm(b[:, q:]) * np.linalg.norm(a[q:]) for b, a in halves)
        assert phase.penalty(fed.copies[client]).item() == pytest.approx(0.1 * tail, rel=1e-5)


def test_a_client_of_hetlora_that_trains_again_shrinks_by_its_last_training_alone(toy, federation):
    fed = federation(toy.method("hetlora", ranks=(4,), prune=0.5), SIZES)
    fed.round(1)

    def train(factor):
        (phase,) = fed.method.phases(2, 1)
        phase.penalty(fed.copies[1])
        tensors = adapter_of(fed.copies[1])
        for _, a in pairs(tensors):
            tensors[a].data[2:].mul_(factor)
        phase.ended(fed.copies[1], 1, 0.1)

    train(0.5)
    assert fed.method.shrinking == {1}
    train(4.0)  # once more, before it has sent anything
    assert not fed.method.shrinking


def test_hetloras_clients_shrink_where_their_last_components_do(toy, federation):
    fed = federation(toy.method("hetlora", ranks=(4, 3, 2), prune=0.5), SIZES)
    jump = fed.jump

    def shrink(client, round):  # the last components of client 1 shrink, those of the others grow
        tensors = adapter_of(fed.copies[client])
        for b, a in pairs(tensors):
            for tail in (tensors[b].data[:, 2:], tensors[a].data[2:]):
                tail.mul_(0.5 if client == 1 else 2.0)

    def in_a_phase(change):
        def train(client, round):
            (phase,) = fed.method.phases(round, client)
            phase.penalty(fed.copies[client])
            change(client, round)
            phase.ended(fed.copies[client], 1, 0.1)

        return train

    fed.jump = in_a_phase(jump)
    fed.round(1)
    assert not [n for n in fed.ledger.state if n.startswith("x:rank")], "B was zero: all have grown"
    fed.jump = in_a_phase(shrink)
    fed.play(2)
    trained = {k: {layer: toy.pair(adapter_of(fed.copies[k]), layer) for layer in toy.layers} for k in (1, 2, 3)}
    assert fed.current.uplink[1] == fed.current.uplink[3], "client 1 sends no more than client 3, of rank 2"
    message = fed.finish(2)
    state = fed.ledger.state
    for layer in toy.layers:  # of client 1, the first two components count, in the scale that it has trained them in
        sent = [(4, trained[1][layer], 2), (3, trained[2][layer], 3), (2, trained[3][layer], 2)]
        norms = np.array([toy.alpha / scale * np.linalg.norm(b[:, :r] @ a[:r]) for scale, (b, a), r in sent])
        padded = np.zeros_like(toy.pair(state, layer)[0])
        for weight, (scale, (b, _), r) in zip(norms / norms.sum(), sent):
            padded[:, :r] += weight * 4 / scale * b[:, :r]
        close(toy.pair(state, layer)[0], padded)
    fed.method.apply(fed.model, message, 2)
    assert {n: v for n, v in state.items() if n.startswith("x:rank")} == {"x:rank:1": 2}
    assert not [n for n in message if n.startswith("x:")], "ranks are not sent"
    of_a = [n for n in state if "lora_A" in n]
    assert {len(fed.method.expected(state, 3, 1)[n]) for n in of_a} == {2}
    assert {len(fed.method.tailor(message, 1, state)[n]) for n in of_a} == {2}
    fed.jump = jump
    fed.round(3)
    assert {len(u.tensors[of_a[0]]) for u in fed.received} == {2, 3}
    for layer in toy.layers:  # the function that a client of a smaller rank gets is the server's, cut
        up, down = toy.pair(state, layer)
        close(toy.change(fed.method.view(state, 1), layer), toy.alpha / 4 * up[:, :2] @ down[:2])


# -- fedrot_lora -----------------------------------------------------------------------------------------


def rotation(matrix):
    u, _, vh = np.linalg.svd(matrix)
    vh[-1] *= np.linalg.det(u @ vh)
    return u @ vh


@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
def test_fedrot_lora_averages_pairs_that_are_rotated_to_the_last(toy, federation, lam):
    method = toy.method("fedrot_lora", lam=lam)
    fed = federation(method, SIZES)
    for round in (1, 2, 3):
        before = {layer: toy.pair(fed.ledger.state, layer) for layer in toy.layers}
        fed.round(round)
        for layer in toy.layers:
            up, down = 0, 0
            for w, update in zip(toy.weights(SIZES), fed.received):
                b, a = toy.pair(update.tensors, layer)
                turn = np.eye(len(a))
                if round > 1:
                    near = rotation(a @ before[layer][1].T if round % 2 == 0 else b.T @ before[layer][0])
                    turn = rotation((1 - lam) * turn + lam * near)
                    close(turn.T @ turn, np.eye(len(a)))
                    close(np.linalg.det(turn), 1)
                up, down = up + w * b @ turn, down + w * turn.T @ a
            got = toy.pair(fed.ledger.state, layer)
            close(got[0], up)
            close(got[1], down)


# -- frlora ----------------------------------------------------------------------------------------------


def test_frlora_trains_the_principal_components_and_adds_what_they_learn(toy, federation):
    fed = federation(toy.method("frlora"), SIZES)
    close(toy.outputs(fed.model), toy.dense_outputs({}), 1e-5)  # the function at the start
    for layer in toy.layers:
        up, down = toy.pair(fed.method.view(fed.ledger.state), layer)
        u, s, vh = np.linalg.svd(toy.net().get_submodule(layer).weight.detach().double().numpy().reshape(len(up), -1))
        close(toy.alpha / len(down) * up @ down, u[:, :2] * s[:2] @ vh[:2])
        close(np.linalg.norm(up, axis=0), np.linalg.norm(down, axis=1))
    first = fed.method.view(fed.ledger.state)
    for round in (1, 2):
        before = {layer: weight(fed.model, layer) for layer in toy.layers}
        fed.round(round)
        for layer in toy.layers:
            up, down = toy.mean_pair(fed.received, layer)
            scale = toy.alpha / len(down)
            close(weight(fed.model, layer) - before[layer], scale * up @ down - toy.change(first, layer))
        assert all(torch.equal(fed.everything()[n], first[n]) for n in first if "lora_" in n)


# -- lora_fair -------------------------------------------------------------------------------------------


def changed(fed, change):
    """The updates of round 1, with ``change(name, tensor)`` in place of each tensor."""
    updates = []
    for client in fed.copies:
        fed.jump(client, 1)
        update = fed.update(client, 1)
        tensors = {name: change(name, tensor) for name, tensor in update.tensors.items()}
        updates.append(dataclasses.replace(update, tensors=tensors))
    return updates


@pytest.mark.parametrize("loss", ["cosine", "frobenius"])
def test_lora_fair_leaves_a_layer_that_nobody_trained_at_the_mean(toy, federation, loss):
    fed = federation(toy.method("lora_fair", loss=loss), SIZES)
    updates = changed(fed, lambda name, tensor: 0 * tensor if ".up.lora_B." in name else tensor)
    state, message = fed.method.aggregate(updates, fed.ledger.state, 1)
    assert all(t.isfinite().all() for t in message.values()) and not toy.pair(message, "up")[0].any()


@pytest.mark.parametrize("lam", [0.0, 0.7, 1e9])
def test_lora_fairs_frobenius_correction_is_the_minimum(toy, federation, lam):
    fed = federation(toy.method("lora_fair", loss="frobenius", lam=lam), SIZES)
    fed.round(1)
    for layer in toy.layers:
        target, (up, down) = toy.mean_product(fed.received, layer), toy.pair(fed.ledger.state, layer)
        scale = toy.alpha / len(down)
        mean_up, mean_down = toy.mean_pair(fed.received, layer)
        close(down, mean_down)
        # The gradient of ‖ΔW − s (B̄ + ΔB) Ā‖² + λ ‖ΔB‖² is zero.
        slope = -scale * (target - scale * up @ down) @ down.T + lam * (up - mean_up)
        assert np.abs(slope).max() < 1e-4 * max(1, lam * 1e-3)
        if lam == 0:
            close(scale * up @ down, target @ np.linalg.pinv(down) @ down, 1e-4)
        if lam == 1e9:
            close(up, mean_up)


@pytest.mark.more
def test_lora_fairs_cosine_correction_turns_the_product_towards_the_mean(toy, federation):
    fed = federation(toy.method("lora_fair", lam=0.0, server_steps=3000, server_lr=0.05), SIZES)
    fed.round(1)
    for layer in toy.layers:
        target, (_, down) = toy.mean_product(fed.received, layer), toy.pair(fed.ledger.state, layer)
        mean_up, _ = toy.mean_pair(fed.received, layer)
        highest = cosine(target, target @ np.linalg.pinv(down) @ down)
        reached, before = cosine(target, toy.change(fed.ledger.state, layer)), cosine(target, mean_up @ down)
        assert before < reached <= highest + 1e-6 and highest - reached < 0.2 * (highest - before) + 1e-3


@pytest.mark.parametrize("small", [1.0, 1e-4, 1e-8])
def test_lora_fairs_cosine_objective_never_rises(toy, federation, small):
    """From a small B the steps are too long: at 1e-8 they led from −0.9 to 1,475."""
    fed = federation(toy.method("lora_fair"), SIZES)
    updates = changed(fed, lambda name, tensor: small * tensor if "lora_B" in name else tensor)
    state, _ = fed.method.aggregate(updates, fed.ledger.state, 1)
    for layer in toy.layers:
        target, (up, down) = toy.mean_product(updates, layer), toy.pair(state, layer)
        mean_up, _ = toy.mean_pair(updates, layer)
        before = -cosine(target, mean_up @ down)
        after = -cosine(target, up @ down) + 0.01 * np.linalg.norm(up - mean_up)
        assert after <= before + 1e-6, layer


# -- fedpara ---------------------------------------------------------------------------------------------


def hadamard(tensors, layer):
    """The elementwise product of a layer by the paper's formulas, as a float64 matrix, without its scale."""
    named = ((n.partition(f".{layer}.hada_")[2], t) for n, t in tensors.items())
    own = {n.partition(".")[0]: t.detach().double() for n, t in named if n}
    parts = []
    for i in "12":
        x, y, t = own[f"w{i}_a"], own[f"w{i}_b"], own.get(f"t{i}")
        parts.append(x @ y if t is None else torch.einsum("xykl,xo,yi->oikl", t, x, y).flatten(1))
    return parts[0] * parts[1]


@pytest.mark.parametrize("from_scratch", [False, True])
def test_fedparas_weight_is_the_product_of_the_mean_factors(toy, federation, from_scratch):
    fed = federation(toy.method("fedpara", 3, from_scratch=from_scratch), SIZES)
    for round, present in enumerate((SIZES, (3, 1), (2, 3))):
        if round:
            fed.round(round, present)
            p = toy.weights(u.num_samples for u in fed.received)
            for name, mean in fed.method.view(fed.ledger.state).items():
                close(mean, sum(w * u.tensors[name].double().numpy() for w, u in zip(p, fed.received)), 2e-6)
        # The plain network, whose weights are the paper's formula; at the start of a pre-trained one it is unchanged.
        net, state = toy.net().double(), fed.ledger.state
        with torch.no_grad():
            for name, tensor in state.items():
                if "hada" not in name:
                    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
                    net.get_parameter(name.replace(".base_layer", "")).copy_(tensor)
            for layer in toy.layers:
                own = net.get_submodule(layer).weight
                product = toy.alpha / 3 * hadamard(state, layer).reshape(own.shape)
                assert bool(product.any()) == (from_scratch or round > 0)
                own.copy_(product if from_scratch else own + product)
            close(toy.outputs(fed.model), net(toy.inputs().double()), 2e-5)


def test_fedparas_factors_start_with_hes_deviation():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Conv2d(60, 80, 3))
    adapter = AdapterSpec(r=20, lora_alpha=20, target_modules=("0", "1"))
    state = create_method("fedpara", adapter=adapter, from_scratch=True).adapt(net).state_dict()
    fans = {"0.hada_w1_a": 200, "0.hada_w2_b": 300, "1.hada_w1_a": 80, "1.hada_w2_b": 60, "1.hada_t2": 20 * 9}
    for name, fan in fans.items():
        (factor,) = (t for n, t in state.items() if f".{name}." in n)
        assert float(factor.std()) == pytest.approx((2 / fan) ** 0.5, rel=0.05), name


@pytest.mark.parametrize("own, reason", [({"method": "lokr"}, "trains loha"), ({"use_rslora": True}, "cannot take it")])
def test_fedpara_has_the_factors_of_loha(own, reason):
    with pytest.raises(UserError, match=f"fedpara {reason}"):
        create_method("fedpara", adapter=AdapterSpec(**own))


# -- ravan -----------------------------------------------------------------------------------------------


def nested_products_are_averaged(fed, toy, product):
    """The global pair is the weighted mean of ``alpha / 2 · product(tensors, layer)`` of the clients of the round."""
    total = dict.fromkeys(toy.layers, 0)
    for w, update in zip(toy.weights(u.num_samples for u in fed.received), fed.received):
        assert {n.rpartition(".")[2] for n in update.tensors} == {"H", "weight", "bias"}
        for layer in toy.layers:
            total[layer] = total[layer] + w * toy.alpha / 2 * product(fed.everything(update.client), layer)
    for layer in toy.layers:
        up, down = toy.pair(fed.method.view(fed.ledger.state), layer)
        close(toy.alpha / 2 * up @ down, total[layer])
    close(toy.outputs(fed.model), toy.dense_outputs(total, toy.head(fed.ledger.state)), 1e-5)


def test_ravan_is_the_mean_of_its_clients_products(toy, federation):
    fed = federation(toy.method("ravan", 2, heads=2), SIZES)
    close(toy.outputs(fed.model), toy.dense_outputs({}), 1e-6)  # the function at the start
    fixed = {layer: toy.pair(fed.everything(1), layer) for layer in toy.layers}
    for up, down in fixed.values():
        close(down @ down.T, np.eye(4))
        close(up.T @ up, np.eye(4))
    for round, present in enumerate(((1, 2, 3), (3, 1), (1, 2, 3)), start=1):
        before = dict(fed.ledger.state)
        message = fed.round(round, present)

        def product(own, layer):
            up, down = fixed[layer]
            assert all(np.array_equal(x, y) for x, y in zip(toy.pair(own, layer), fixed[layer]))
            (h,) = (t.double().numpy() for n, t in own.items() if n.endswith(f".{layer}.nested.H"))
            (s,) = (t.double().numpy() for n, t in own.items() if n.endswith(f".{layer}.nested.s"))
            assert (s != 1).all() and h.shape == (2, 2, 2)
            return sum(s[i] * up[:, 2 * i : 2 * i + 2] @ h[i] @ down[2 * i : 2 * i + 2] for i in range(2))

        nested_products_are_averaged(fed, toy, product)
        assert {n.rpartition(".")[2] for n in fed.method.tailor(message, 1, fed.ledger.state)} == {
            "H",
            "weight",
            "bias",
        }
        assert all(
            torch.equal(before[n], t)
            for n, t in fed.ledger.state.items()
            if n.startswith("base_model") and ".lora_" in n
        )


# -- fed_sb ----------------------------------------------------------------------------------------------


def test_fed_sb_starts_with_the_first_step_and_is_the_mean_of_its_clients_products(toy, federation):
    step = 0.01
    fed = federation(toy.method("fed_sb", 2, samples=4, first_step=step), SIZES)
    close(toy.outputs(fed.model), toy.dense_outputs({}), 1e-6)
    exchanges = []
    sums = {layer: 0.0 for layer in toy.layers}
    for client, w in zip(fed.copies, toy.weights(SIZES)):
        net, batches = toy.net().double(), [*fed.batches(client)]
        x, labels = (torch.cat([batch[name] for batch in batches]) for name in ("x", "labels"))
        draw = torch.Generator().manual_seed(derive(fed.method.setting.seed, "gradients", 1, client))
        rows = torch.randperm(len(labels), generator=draw)[:4]
        net(x[rows].double(), labels[rows]).loss.backward()
        for layer in toy.layers:
            gradient = getattr(net, layer).weight.grad.numpy()
            sums[layer] = sums[layer] + w * gradient.reshape(len(gradient), -1)
    jump, starts = fed.jump, {}

    def first_look(client, round):
        starts.setdefault(round, {n: t.double().numpy() for n, t in fed.everything(client).items()})
        jump(client, round)

    fed.jump = first_look
    for round, present in enumerate(((1, 2, 3), (3, 1), (1, 2, 3)), start=1):
        exchanges.append(fed.method.exchanges(fed.ledger.state, round))
        message = fed.round(round, present)

        def product(own, layer):
            up, down = toy.pair(own, layer)
            (r,) = (t[0].double().numpy() for n, t in own.items() if n.endswith(f".{layer}.nested.H"))
            return up @ r @ down

        nested_products_are_averaged(fed, toy, product)
        sent = {n.rpartition(".")[2] for n in fed.method.tailor(message, 2, fed.ledger.state) if ".lora_" not in n}
        assert sent == {"H", "weight", "bias"} and any(".lora_" in n for n in message if ":" not in n) == (round == 1)
    assert exchanges == [("gradients", "train"), ("train",), ("train",)]
    for layer in toy.layers:
        (small,) = (t[0] for n, t in starts[1].items() if n.endswith(f".{layer}.nested.H"))
        up, down = (next(t for n, t in starts[1].items() if f".{layer}.lora_{half}." in n) for half in "BA")
        up, down = up.reshape(len(up), -1), down.reshape(len(down), -1)
        close(toy.alpha / 2 * up @ small @ down, best(-step * np.sign(sums[layer]), 2), 1e-6)
        close(up.T @ up, np.eye(2))


@pytest.mark.parametrize("robust", [None, RobustMean("median")])
def test_fed_sb_starts_with_a_robust_mean_of_the_gradients_if_one_is_asked_for(toy, robust):
    method = toy.method("fed_sb", 2, robust=robust)
    state = method.initial_state(method.adapt(toy.net()))
    draw = torch.Generator().manual_seed(1)
    expected = method.expected(state, 1, 1, "gradients")
    honest = {n: torch.randn(t.shape, generator=draw) for n, t in expected.items()}
    sent = [honest, {n: 1.01 * t for n, t in honest.items()}, {n: -1e6 * t for n, t in honest.items()}]
    wanted = toy.method("fed_sb", 2).tell([Update(1, 1, honest)], state, 1, "gradients")
    found = method.tell([Update(k, 5, tensors) for k, tensors in enumerate(sent, 1)], state, 1, "gradients")
    ups = [n for n in found if "lora_B" in n]
    assert all(torch.allclose(found[n], wanted[n], atol=1e-5) for n in ups) == (robust is not None)


def test_ravan_does_not_go_on_from_a_state_of_an_earlier_version(toy, federation):
    """Its B was the fold, and the fixed one had another name."""
    fed = federation(toy.method("ravan", 2, heads=2), SIZES)
    before = {n.replace("fold:", "fixed:"): t for n, t in fed.ledger.state.items()}
    with pytest.raises(CannotContinue, match="an earlier version"):
        fed.method.view(before)


# -- la_lora ---------------------------------------------------------------------------------------------


def test_la_lora_trains_its_halves_by_turns(toy):
    for first, halves in (("a", ("lora_A", "lora_B")), ("b", ("lora_B", "lora_A"))):
        (phase,) = toy.method("la_lora", first=first).phases(1, 1)
        assert phase.turns == halves and {*phase.train} == {*halves, "head"}


@pytest.mark.parametrize("first, never", [("a", "lora_B"), ("b", "lora_A")])
def test_with_one_step_a_round_a_warning_names_the_half_that_never_trains(tmp_path, caplog, first, never):
    with quietly(tmp_path):
        config = Bench(tmp_path, {"lowrank.first": first}).config("encoder", "la_lora")  # of two steps
        LocalEngine(config)
        longer = [{"clients": 1, "local_update_steps": 2}]
        one = config.replace({"train.local_update_steps": 1})
        LocalEngine(one.replace({"lowrank.clients": longer}))
        assert "by turns" not in caplog.text
        LocalEngine(one)
    assert f": {never} is never trained; give train.local_update_steps at least 2" in caplog.text
