"""OTFusion, PFNM and DENSE, and the models that they refuse."""

import pytest
import torch

from fs_lowrank.errors import UserError
from fs_lowrank.methods import create_method, requirements
from fs_lowrank.methods.one_shot.base import accuracy, logits_of
from fs_lowrank.methods.one_shot.dense import Generator, doubled
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.vision import VisionOptions, build_vision

SMALL_DENSE = {"epochs": 3, "generator_steps": 6, "images": 16, "latent": 8, "channels": 4}


def answers(model, tensors, data):
    with torch.no_grad():
        return torch.cat([logits_of(model, tensors, b) for b in data])


# -- OTFusion ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["weights", "activations"])
@pytest.mark.parametrize("kind", ["small", "pictures"])
def test_a_permutation_is_undone_exactly(bench, kind, by):
    kind = getattr(bench, kind)
    model = bench.net(kind)
    models = [model, bench.permuted(model, 1), bench.permuted(model, 2)]
    ran = bench.one_round("otfusion", models, kind=kind, by=by, correction="on", past_correction="on")
    for name, tensor in bench.tensors(model).items():
        torch.testing.assert_close(ran.message[name], tensor, atol=1e-6, rtol=1e-5)
    plain = sum(p * m.classifier.weight for p, m in zip(ran.weights, models))
    assert not torch.allclose(plain, model.classifier.weight, atol=1e-2), "the plain mean is another network"


def test_otfusion_tunes_on_validation_data(bench):
    models = [bench.net(seed=k) for k in range(3)]
    ran = bench.one_round("otfusion", models)
    scores = [
        accuracy(ran.method.workbench, bench.one_round("otfusion", models, correction=c, past_correction=p).message)
        for c in ("on", "off")
        for p in ("on", "off")
    ]
    assert accuracy(ran.method.workbench, ran.message) == max(scores)


@pytest.mark.parametrize(
    "name, params, needed",
    [
        ("otfusion", {}, True),
        ("otfusion", {"correction": "on"}, True),
        ("otfusion", {"correction": "on", "past_correction": "off", "by": "activations"}, True),
        ("otfusion", {"correction": "on", "past_correction": "off"}, False),
        ("regmean", {}, True),
        ("regmean", {"scales": (0.5,)}, False),
    ],
)
def test_validation_data_are_needed_where_something_is_chosen(bench, name, params, needed):
    class Validation:
        asked = False

        def __iter__(self):
            self.asked = True
            return iter(bench.data(30, seed=99))

    validation = Validation()
    bench.one_round(name, [bench.net(seed=k) for k in range(3)], validation=validation, **params)
    assert requirements(name, params).validation == validation.asked == needed


def test_the_classes_of_the_last_layer_are_not_reordered(bench):
    models = [bench.net(seed=k) for k in range(2)]
    ran = bench.one_round("otfusion", models, correction="on", past_correction="on")
    aligned = ran.method.align(bench.tensors(models[1]), bench.tensors(models[0]), None, None, True, True)
    data = bench.data(20)
    torch.testing.assert_close(answers(ran.model, aligned, data), answers(ran.model, bench.tensors(models[1]), data))


# -- PFNM ----------------------------------------------------------------------------------------------


def test_two_permuted_copies_are_merged_into_one_network(bench):
    model = bench.net(bench.pictures, scale=8.0)
    ran = bench.one_round("pfnm", [model, bench.permuted(model)], kind=bench.pictures)
    assert all(ran.message[n].shape == p.shape for n, p in model.named_parameters())
    # The prior scales each hidden layer by 2/3, and does not change the last one. In a network without biases this only
    # scales the output.
    data = bench.data(20, kind=bench.pictures)
    torch.testing.assert_close(
        answers(ran.model, ran.message, data),
        answers(ran.model, bench.tensors(model), data) * (2 / 3) ** 3,
        atol=1e-3,
        rtol=1e-3,
    )


def test_a_wider_network_is_loaded_trained_and_sent(bench):
    models = [bench.net(bench.pictures, seed=k, scale=8.0) for k in range(3)]
    ran = bench.one_round("pfnm", models, kind=bench.pictures)
    assert ran.message["conv1.weight"].shape[0] > 3
    ran.method.apply(ran.model, ran.message, 1)
    assert ran.model.conv1.out_channels == ran.model.conv2.in_channels == len(ran.message["conv1.weight"])
    assert ran.model.classifier.in_features == len(ran.message["fc1.weight"]) and ran.model.classifier.out_features == 4
    batch = bench.data(7, kind=bench.pictures)[0]
    ran.model(**batch).loss.backward()
    shapes = {n: t.shape for n, t in ran.method.expected(ran.state, 2, 1).items() if ":" not in n}
    assert shapes == {n: p.shape for n, p in ran.model.named_parameters()}
    # A new copy, as for a checkpoint or a late client, can load the wider network too.
    fresh = ran.method.adapt(bench.net(bench.pictures))
    load_tensors(fresh, ran.method.view(ran.state))
    torch.testing.assert_close(fresh(**batch).logits, ran.model(**batch).logits)


@pytest.mark.parametrize("last_layer", ["classes", "samples"])
def test_the_last_layer_goes_by_classes_or_by_samples(bench, last_layer):
    model = bench.net(scale=8.0)
    other = bench.net(scale=8.0)
    other.classifier.weight.data *= -1
    data = [[{**b, "labels": torch.full_like(b["labels"], k)} for b in bench.data(21, seed=k)] for k in range(2)]
    ran = bench.one_round("pfnm", [model, other], data=data, sizes=[21, 21], last_layer=last_layer)
    found, own = ran.message["classifier.weight"], model.classifier.weight.detach()
    assert ("counts:classes" in ran.updates[0].tensors) == (last_layer == "classes")
    order = [int((own.T - column).norm(dim=1).argmin()) for column in found.T] if last_layer == "classes" else None
    if last_layer == "samples":
        assert float(found.abs().max()) < 1e-5, "half of it and half of its negative"
    else:  # only the first client has class 0, only the second has class 1, and nobody has the others
        assert sorted(found[0].tolist()) == pytest.approx(sorted(own[0].tolist()))
        assert sorted(found[1].tolist()) == pytest.approx(sorted((-own[1]).tolist()))
        assert float(found[2:].abs().max()) < 1e-5 and order


def test_one_client_has_nothing_to_match(bench):
    model = bench.net(bench.pictures)
    for name in ("pfnm", "otfusion"):
        ran = bench.one_round(name, [model], kind=bench.pictures)
        assert all(torch.equal(ran.message[n], p) for n, p in model.named_parameters())


# -- DENSE ---------------------------------------------------------------------------------------------


def trained(bench, seed):
    """A network that has learnt a rule, so that its predictions are confident."""
    model = bench.net(bench.pictures, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        x = torch.randn(32, 1, 10, 10, generator=draw)
        y = 2 * (x[:, 0, :5].mean((1, 2)) > 0).long() + (x[:, 0, 5:].mean((1, 2)) > 0).long()
        x = x + 2 * (y.float()[:, None, None, None] - 1.5)
        loss = model(x, y).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
    return model


@pytest.mark.more
def test_generator_and_student_losses_fall(bench):
    models = [trained(bench, s) for s in (1, 2)]
    ran = bench.one_round(
        "dense",
        models,
        kind=bench.pictures,
        epochs=8,
        generator_steps=25,
        images=32,
        latent=16,
        channels=8,
        generator_lr=0.01,
    )
    losses = ran.method.losses
    first, last = losses["generator_first"], losses["generator_last"]
    assert sum(last) < 0.9 * sum(first) and len(first) == 8
    assert min(losses["student"][-3:]) < losses["student"][0]
    mean = {n: sum(p * u.tensors[n] for p, u in zip(ran.weights, ran.updates)) for n in ran.message}
    assert accuracy(ran.method.workbench, ran.message) >= accuracy(ran.method.workbench, mean)


def test_one_transposed_convolution_is_doubling_and_convolution():
    x, weight = torch.randn(3, 5, 4, 7, dtype=torch.float64), torch.randn(6, 5, 3, 3, dtype=torch.float64)
    apart = torch.nn.functional.conv2d(x.repeat_interleave(2, 2).repeat_interleave(2, 3), weight, padding=1)
    torch.testing.assert_close(doubled(x, weight), apart)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 30, 33)])
def test_generated_images_have_the_shape_and_range_of_the_data(shape):
    images = Generator(latent=6, width=2, shape=shape, low=-1.5, high=2.0)(torch.randn(4, 6))
    assert images.shape == (4, *shape)
    assert images.min() >= -1.5 and images.max() <= 2.0 and images.std() > 0


@pytest.mark.more
def test_dense_depends_on_the_seed_only_and_does_not_change_the_model(bench):
    models = [bench.net(bench.pictures, seed=k) for k in range(2)]
    one, two = (bench.one_round("dense", models, kind=bench.pictures, student_lr=0.1, **SMALL_DENSE) for _ in range(2))
    assert all(torch.equal(one.message[n], two.message[n]) for n in one.message)
    fresh = bench.net(bench.pictures)
    assert all(torch.equal(p, dict(fresh.named_parameters())[n]) for n, p in one.model.named_parameters())
    assert not any(t.requires_grad for t in one.message.values())


def test_batch_norm_statistics_enter_dense(bench):
    models = [bench.net(bench.pictures, seed=k, norm=True) for k in range(2)]
    for model in models:
        model.train()(torch.randn(20, 1, 10, 10))
        model.eval()
    given = {"kind": bench.pictures, "net": {"norm": True}, **SMALL_DENSE}
    runs = [bench.one_round("dense", models, lambda1=weight, **given) for weight in (0.0, 10.0)]
    assert runs[1].method.losses["generator_first"][0] > runs[0].method.losses["generator_first"][0] + 1
    assert "norm.running_mean" in runs[0].message
    assert all(bool(torch.isfinite(t).all()) for t in runs[1].message.values())


# -- models that are refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["otfusion", "pfnm"])
def test_models_whose_neurons_cannot_be_reordered(bench, name):
    def vision(kind, **options):
        return build_vision(VisionOptions(kind, 10, (1, 28, 28), **{"use_bias": False, "width": 0.2, **options}))

    method = create_method(name)
    for model, said in (
        (vision("lenet", use_bias=True), r"model.use_bias False.*; this model has conv1.bias \(Conv2d\)"),
        (vision("resnet10"), r"lowrank.norm none.*\(BatchNorm2d\)"),
        (vision("resnet10", norm="none"), "each layer feeds the next; layer"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)), "this model has none"),
    ):
        with pytest.raises(UserError, match=f"{name} .*{said}"):
            method.adapt(model)
    for kind in ("lenet", "fedma_cnn"):
        assert len(create_method(name).adapt(vision(kind)).adapter_targets) == 3
