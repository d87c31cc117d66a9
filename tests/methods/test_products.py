"""Products ``s B A`` that are kept beside the base or merged into it, and the layers on which there is none."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from torch.nn import functional as F

from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method
from fs_lowrank.models.accumulated import one_adapter
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.convolution import ComposedLoRA
from fs_lowrank.models.layers import adapted_layers
from fs_lowrank.models.names import named_tensors
from fs_lowrank.models.saved import save_adapter
from fs_lowrank.settings import AdapterSpec
from tests.methods.conftest import best, close

SIZES = (3, 10)
KEPT = [("fedloru", {"merge": False, "tau": 1}), ("flora", {"merge": False})]
#: those whose clients have a pair of their own beside what is kept, too
ALL_KEPT = [*KEPT, ("pfedloru", {"merge": False, "tau": 1})]
MERGED = [("fedloru", {"tau": 1}), ("mfedloru", {"tau": 1}), ("pfedloru", {"tau": 1}), ("flora", {})]


def accumulated(toy, name, updates, layer):
    """What a round adds to ``W`` by the definition of the method, in float64: FLoRA's mean of the products of the
    clients, or FedLoRU's product of the means."""
    if name == "flora":
        return toy.mean_product(updates, layer)
    b, a = toy.mean_pair(updates, layer)
    return toy.alpha / len(a) * b @ a


# -- kept beside the base ------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", ALL_KEPT)
@pytest.mark.parametrize("r", [1, 2])
def test_a_first_product_counts_once_at_any_rank(toy, federation, name, options, r):
    fed = federation(toy.method(name, r=r, **options), SIZES[:1])
    fed.round(1)
    change = {layer: accumulated(toy, name, fed.received, layer) for layer in toy.layers}
    close(toy.outputs(fed.model), toy.dense_outputs(change, toy.head(fed.ledger.state)))


def test_the_best_product_of_rank_one_is_kept(toy, federation):
    fed = federation(toy.method("flora", r=1, merge=False, max_kept_rank=1), SIZES)
    fed.round(1)
    change = {layer: best(accumulated(toy, "flora", fed.received, layer), 1) for layer in toy.layers}
    close(toy.outputs(fed.model), toy.dense_outputs(change, toy.head(fed.ledger.state)))


@pytest.mark.parametrize("name, options", KEPT)
@pytest.mark.parametrize("start", [False, "gaussian", "orthogonal"])
def test_the_initialisation_of_the_pair_is_not_that_of_the_products(toy, federation, name, options, start):
    adapter = AdapterSpec(r=2, lora_alpha=toy.alpha, target_modules=("up", "down"), extra={"init_lora_weights": start})
    fed = federation(toy.method(name, adapter=adapter, **options), SIZES)
    total = dict.fromkeys(("up", "down"), 0.0)
    for round in (1, 2):
        fed.round(round)
        total = {layer: change + accumulated(toy, name, fed.received, layer) for layer, change in total.items()}
    close(toy.outputs(fed.model), toy.dense_outputs(total, toy.head(fed.ledger.state)))


@pytest.mark.parametrize("start", ["pissa", "olora", "loftq"])
@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("fedloru", {"merge": False}, "fedloru with lowrank.merge = False needs a base of which no part is moved"),
        ("flora", {"merge": False}, "flora with lowrank.merge = False needs a base of which no part is moved"),
        ("flora", {"ranks": (1, 4)}, "it moves a part .* clients of smaller ranks would lack some of it"),
        ("flexlora", {"ranks": (1, 2)}, "it moves a part .* clients of smaller ranks would lack some of it"),
        ("frlora", {}, "frlora needs a base of which no part is moved into the pair; leave it out"),
        ("ravan", {}, "ravan needs a base of which no part is moved into the pair; leave it out"),
    ],
)
def test_an_initialisation_that_moves_the_base_is_refused(name, options, reason, start):
    """By methods that keep the base, that move it themselves, or whose clients hold a part of a pair."""
    adapter = AdapterSpec(r=4, extra={"init_lora_weights": start})
    with pytest.raises(UserError, match=f"llm.adapter.args.0.init_lora_weights = {start!r}: {reason}"):
        create_method(name, adapter=adapter, **options)
    for options in ({}, {"ranks": (4, 4)}):
        for name in ("flora", "flexlora"):
            create_method(name, adapter=adapter, **options)
    create_method("fedloru", adapter=adapter, merge=True)


@pytest.mark.parametrize("name, options", ALL_KEPT)
def test_what_is_kept_has_no_dropout(toy, federation, name, options):
    adapter = AdapterSpec(r=2, lora_alpha=toy.alpha, lora_dropout=0.5, target_modules=toy.layers)
    fed = federation(toy.method(name, adapter=adapter, **options), SIZES)
    fed.round(1)  # the new pair has B = 0
    computed = toy.outputs(fed.model.eval())
    close(toy.outputs(fed.model.train()), computed)
    assert any(isinstance(m, nn.Dropout) for m in fed.model.modules())


@pytest.mark.parametrize("name, options", KEPT)
@pytest.mark.parametrize("thin, rsLoRA", [(False, False), (True, True)])
def test_what_is_kept_of_a_convolution_trains_and_is_an_adapter(
    toy, federation, name, options, thin, rsLoRA, tmp_path, monkeypatch
):
    monkeypatch.setattr(ComposedLoRA, "_pays", lambda self, x, rank: not thin)
    fed, net = federation(toy.method(name, rsLoRA=rsLoRA, **options), SIZES), toy.net()
    for round in (1, 2, 3):
        fed.round(round)
    fed.model.train().get_base_model()(toy.inputs()).sum().backward()
    save_adapter(tmp_path, *one_adapter(fed.model))
    # The ranks add up, to the width of a layer at most.
    assert LoraConfig.from_pretrained(str(tmp_path)).r == {"fedloru": 3 * 2, "flora": 7}[name]
    with torch.no_grad():
        for key, value in toy.head(fed.ledger.state).items():
            getattr(net.classifier, key).copy_(torch.from_numpy(value))
    close(toy.outputs(PeftModel.from_pretrained(net, str(tmp_path))), toy.outputs(fed.model))


# -- ranks and biases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedloru", "mfedloru", "pfedloru", "pmfedloru"])
def test_a_bias_of_pairs_that_accumulate_is_refused(name):
    with pytest.raises(
        UserError, match=f"args.0.lora_bias = True: {name} computes with products of pairs, which hold no bias"
    ):
        create_method(name, adapter=AdapterSpec(extra={"lora_bias": True}))


@pytest.mark.parametrize("personal_rank, ranks", [(1, {1}), (0, {2, 3})])
def test_a_personal_rank_is_that_of_all_layers(toy, personal_rank, ranks):
    adapter = AdapterSpec(r=2, target_modules=toy.layers, extra={"rank_pattern": {"up": 3}})
    model = toy.method("pfedloru", adapter=adapter, personal_rank=personal_rank).adapt(toy.net())
    held = {n: t for n, t in named_tensors(model, ("personal",)).items() if "lora_A" in n}
    assert len(held) == 3 and {len(t) for t in held.values()} == ranks
    assert {len(t) for t in named_tensors(model, ("lora_A",)).values()} == {2, 3}


def test_a_personal_rank_above_a_width_is_refused(toy):
    with pytest.raises(UserError, match="rank 50 of the personal pair is above the width of .*: its weight is "):
        toy.method("pfedloru", personal_rank=50).adapt(toy.net())


# -- layers without a product --------------------------------------------------------------------------


class Convolution(nn.Module):
    """One convolution of a row of values, and a classifier."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 6, 3, **{"padding": 1, **options})
        self.classifier = nn.Linear(6, 2)

    def forward(self, x):
        return self.classifier(self.conv(x).mean(-1))


def of_convolution(name, kind="lora", **options):
    return create_method(name, adapter=AdapterSpec(method=kind, r=4, lora_alpha=6, target_modules=("conv",)), **options)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
@pytest.mark.parametrize("name, options", [*KEPT, *MERGED, ("flexlora", {})])
def test_pairs_on_groups_are_refused_where_products_are_needed(name, options):
    with pytest.raises(UserError, match=f"{name} takes no adapter on conv, which has 2 groups: .* another method"):
        of_convolution(name, **options).adapt(Convolution(groups=2))
    of_convolution("fedlora").adapt(Convolution(groups=2))


@pytest.mark.parametrize("name, options", MERGED)
@pytest.mark.parametrize(
    "layer, said",
    [
        ({"padding_mode": "circular"}, "which has padding_mode = circular while adapters pad with zeros: .*merge = F"),
        ({"dilation": 2, "padding": "same"}, "which is dilated while PEFT's pair is not: .* leave it out of modules$"),
    ],
)
def test_what_no_kernel_can_be_is_not_merged(name, options, layer, said):
    with pytest.raises(UserError, match=f"{name} takes no adapter on conv, {said}"):
        of_convolution(name, **options).adapt(Convolution(**layer))
    of_convolution("flexlora").adapt(Convolution(**layer))
    if name in dict(KEPT):
        of_convolution(name, merge=False).adapt(Convolution(**layer))


def test_loha_is_merged_into_groups_and_dilated_kernels():
    method, x = of_convolution("fedloru", "loha", tau=1), torch.randn(3, 4, 9)
    model = method.adapt(Convolution(groups=2, dilation=2))
    drawn = {n: torch.randn(t.shape) for n, t in named_tensors(model, ("adapter",)).items()}
    load_tensors(model, drawn)
    net = model.get_base_model()
    with torch.no_grad():
        wanted = net(x)
        method.apply(model, {f"merge:1:{n}": t for n, t in drawn.items()}, 1)
        torch.testing.assert_close(net(x), wanted, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(wanted, Convolution(groups=2, dilation=2)(x), atol=1e-2)


@pytest.mark.parametrize("shared", ["parameter", "module"])
@pytest.mark.parametrize("name, options", MERGED)
def test_a_weight_that_is_another_layers_too_is_not_merged(toy, federation, name, options, shared):
    def net():
        made = toy.net()
        made.again = made.down if shared == "module" else nn.Linear(15, 6)
        made.again.weight = made.down.weight
        return made

    with pytest.raises(UserError, match="takes no adapter on down, which shares its weight with again: .*merge = Fa"):
        toy.method(name, **options).adapt(net())
    if name in dict(KEPT):
        toy.method(name, merge=False).adapt(net())
    part = nn.ModuleList([net().down])
    whole = toy.net()
    whole.first = whole.second = part  # one layer that is found by two names
    create_method(name, adapter=AdapterSpec(r=2, target_modules=("first.0",)), **options).adapt(whole)


def test_factors_of_a_weight_that_is_another_layers_too_are_refused(toy):
    net = toy.net()
    net.again = nn.Linear(15, 6)
    net.again.weight = net.down.weight
    with pytest.raises(UserError, match="down shares its weight with again, which would not have the factors"):
        create_method("fedhm", adapter=AdapterSpec(r=2, target_modules=("down",)), rank_factors=(2,)).adapt(net)


def test_a_nested_client_computes_convolutions_of_one_axis():
    method, x = of_convolution("mfedloru", nested_ranks=(2,)), torch.randn(3, 4, 9)
    model, plain = method.adapt(Convolution(stride=2)), Convolution(stride=2)
    shared = method.view(method.initial_state(model), 1)
    drawn = {n: torch.randn(t.shape) for n, t in shared.items() if "classifier" not in n}
    load_tensors(model, drawn)
    (layer,) = adapted_layers({n: t.flatten(1) for n, t in drawn.items()})
    pair = (layer.B + 0.5 * layer.B_d @ layer.B_u) @ (layer.A + 0.5 * layer.A_d @ layer.A_u)
    hidden = plain.conv(x) + 6 / 4 * F.conv1d(x, pair.view(6, 4, 3), stride=2, padding=1)
    computed = model.get_base_model()(x)
    torch.testing.assert_close(computed, plain.classifier(hidden.mean(-1)), atol=1e-4, rtol=1e-4)
