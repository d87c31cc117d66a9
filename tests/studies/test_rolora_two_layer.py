"""The two-layer study on scikit-learn's digits: frozen halves do not change, means are exact, RoLoRA beats FFA-LoRA."""

import json
import struct

import pytest
import torch

from studies.analysis import rolora_two_layer as tl
from studies.analysis.data import load

pytestmark = pytest.mark.more

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def random_case(num_clients=3, dim=7, rank=2, classes=4, batch=5):
    generator = torch.Generator().manual_seed(1)
    model = tl.start(dim, rank, classes, generator)
    x = torch.rand(num_clients, batch, dim, generator=generator)
    labels = torch.randint(classes, (num_clients, batch), generator=generator)
    valid = torch.ones(num_clients, batch)
    valid[1, 3:] = 0
    valid[2] = 0
    return model, x, labels, valid


def test_the_gradients_match_autograd_and_ignore_padding():
    model, x, labels, valid = random_case()
    got = tl.gradients(x, x @ model.a, labels, valid, model, ("a", "b"))
    for k in range(2):
        a, b = model.a.clone().requires_grad_(), model.b.clone().requires_grad_()
        real = valid[k].bool()
        loss = torch.nn.functional.cross_entropy(torch.relu(x[k, real] @ a @ b) @ model.w_out, labels[k, real])
        expected_a, expected_b = torch.autograd.grad(loss, (a, b))
        torch.testing.assert_close(got["a"][k], expected_a)
        torch.testing.assert_close(got["b"][k], expected_b)
    assert got["a"][2].count_nonzero() == 0 and got["b"][2].count_nonzero() == 0


def test_a_zero_b_never_moves():
    """This is why the study starts with a random B: ReLU'(0) = 0."""
    model, x, labels, valid = random_case()
    model = tl.Model(model.a, torch.zeros_like(model.b), model.w_out)
    got = tl.gradients(x, x @ model.a, labels, valid, model, ("a", "b"))
    assert got["a"].count_nonzero() == 0 and got["b"].count_nonzero() == 0


def test_one_client_trains_as_plain_sgd(digits):
    """The batched loop is compared with autograd and torch.optim on the same order of samples."""
    part = tl.subsample(digits, 90, seed=0)
    clients = tl.split_by_label(part, 1)
    model = tl.start(64, 3, 10, torch.Generator().manual_seed(0))
    local = tl.train_locally(
        model, clients, ("a", "b"), lr=0.5, epochs=2, batch=64, generator=torch.Generator().manual_seed(4)
    )
    a, b = model.a.clone().requires_grad_(), model.b.clone().requires_grad_()
    optimizer = torch.optim.SGD([a, b], lr=0.5)
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        order = torch.rand(1, 90, generator=generator).argsort(1)[0]
        for index in order.split(64):
            optimizer.zero_grad()
            logits = torch.relu(clients.x[0, index] @ a @ b) @ model.w_out
            torch.nn.functional.cross_entropy(logits, clients.y[0, index]).backward()
            optimizer.step()
    torch.testing.assert_close(local["a"][0], a.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(local["b"][0], b.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_clients", [5, 10])
def test_every_sample_goes_to_the_client_of_its_label(digits, num_clients):
    clients = tl.split_by_label(digits, num_clients)
    assert clients.counts.sum() == len(digits.y)
    assert len(set(clients.counts.tolist())) > 1  # clients of unequal size, so that weights and padding matter
    for k in range(num_clients):
        per_client = 10 // num_clients
        labels = set(clients.y[k, : clients.counts[k]].tolist())
        assert labels == set(range(k * per_client, (k + 1) * per_client))


def test_labels_that_cannot_be_dealt_evenly_are_an_error(digits):
    with pytest.raises(ValueError, match="10 labels cannot be dealt evenly to 3 clients"):
        tl.split_by_label(digits, 3)


@pytest.mark.parametrize("method", tl.METHODS)
def test_frozen_halves_stay_bit_equal_and_the_others_become_the_weighted_mean(digits, method):
    part = tl.subsample(digits, 400, seed=0)
    clients = tl.split_by_label(part, 5)
    trained = []

    def check(t, before, local, after):
        for name in ("a", "b", "w_out"):
            if name not in local:
                assert torch.equal(getattr(before, name), getattr(after, name))
        total = sum(clients.counts.tolist())
        for name, values in local.items():
            expected = sum(n / total * v.double() for n, v in zip(clients.counts.tolist(), values))
            torch.testing.assert_close(getattr(after, name).double(), expected, rtol=1e-5, atol=1e-6)
            assert not torch.equal(getattr(before, name), getattr(after, name))
        trained.append("".join(sorted(local)))

    tl.train(part, clients, method, rounds=4, lr=0.3, seed=0, rank=4, epochs=2, after_round=check)
    assert trained == {"lora": ["ab"] * 4, "ffa_lora": ["b"] * 4, "rolora": ["b", "a", "b", "a"]}[method]


def test_rolora_ends_well_above_ffa_lora(digits):
    """Seeds 0, 1, 2 give margins of 0.38, 0.35 and 0.45."""
    clients = tl.split_by_label(digits, 5)
    ends = {m: tl.tail(tl.train(digits, clients, m, rounds=16, lr=0.3, seed=0, rank=8)) for m in ("rolora", "ffa_lora")}
    assert ends["rolora"] > ends["ffa_lora"] + 0.15, ends


def test_the_rate_is_chosen_on_samples_that_are_neither_trained_nor_tested(digits):
    part = tl.hold_out(digits, 0.1, seed=0)
    assert len(part.y) + len(part.y_test) == len(digits.y)
    rows = {tuple(r) for r in part.x.tolist()}
    assert not rows & {tuple(r) for r in part.x_test.tolist()}
    rate, scores = tl.choose_rate(digits, "ffa_lora", 5, grid=(1e-6, 0.3), rounds=3, rank=4, epochs=1)
    assert rate == 0.3 and scores["0.3"] > scores["1e-06"]


def test_idx_files_are_read_from_a_folder(tmp_path):
    for stem, dims in (
        ("train-images-idx3-ubyte", (4, 2, 2)),
        ("train-labels-idx1-ubyte", (4,)),
        ("t10k-images-idx3-ubyte", (2, 2, 2)),
        ("t10k-labels-idx1-ubyte", (2,)),
    ):
        size = torch.Size(dims).numel()
        header = bytes([0, 0, 8, len(dims)]) + struct.pack(f">{len(dims)}I", *dims)
        (tmp_path / stem).write_bytes(header + bytes(range(size)))
    data = load("mnist", tmp_path)
    assert data.x.shape == (4, 4) and data.x_test.shape == (2, 4)
    assert data.y.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(data.x[0], torch.tensor([0.0, 1, 2, 3]) / 255)


def test_the_command_writes_json_and_png(tmp_path):
    options = "--data digits --samples 300 --rounds 2 --seeds 1 --lr 0.3 --rank 4 --epochs 1"
    tl.main([*options.split(), "--out", str(tmp_path)])
    written = json.loads((tmp_path / "rolora_two_layer_digits.json").read_text())
    assert written["command"].startswith("python -m studies.analysis.rolora_two_layer --data digits --samples 300")
    assert len(written["runs"]) == 6 and all(len(r["curves"][0]) == 3 for r in written["runs"])
    assert (tmp_path / "rolora_two_layer_digits.png").stat().st_size > 10_000
