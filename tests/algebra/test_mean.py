"""The weighted mean compared with a loop in float64."""

import numpy as np
import pytest
import torch

import fs_lowrank.algebra.mean as mean_module
from fs_lowrank.algebra import FlatTensors, nbytes, weighted_mean

SHAPES = {"b": (3, 5), "a": (2, 7), "scalar": (), "conv": (4, 3, 2, 2)}


def clients(count, dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()} for _ in range(count)]


def oracle(tensors, weights):
    """name -> float64 array, summed in a plain loop."""
    out = {}
    for name in tensors[0]:
        total = np.zeros(tuple(tensors[0][name].shape))
        for part, weight in zip(tensors, weights):
            total = total + weight * part[name].double().numpy()
        out[name] = total
    return out


def same(result, expected, tolerance):
    assert result.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_allclose(result[name].double().numpy(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-15), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("flat", [False, True])
def test_equals_the_loop(dtype, tolerance, flat):
    parts, weights = clients(4, dtype), [0.1, 0.4, 0.3, 0.2]
    given = [FlatTensors.pack(p) for p in parts] if flat else parts
    result = weighted_mean(given, weights)
    same(result, oracle(parts, weights), tolerance)
    assert all(result[n].dtype == dtype and result[n].shape == parts[0][n].shape for n in SHAPES)


def test_every_tensor_keeps_its_dtype():
    parts = [{**p, "half": p["a"].bfloat16(), "long": p["b"].double()} for p in clients(3)]
    weights = [0.5, 0.2, 0.3]
    result = weighted_mean(parts, weights)
    assert (result["half"].dtype, result["long"].dtype, result["a"].dtype) == (
        torch.bfloat16,
        torch.float64,
        torch.float32,
    )
    assert list(result) == list(parts[0])
    expected = oracle(parts, weights)
    same({"long": result["long"]}, {"long": expected["long"]}, 1e-15)
    same({"half": result["half"]}, {"half": expected["half"]}, 2**-8)


def test_half_precision_is_summed_in_float32():
    # 256 terms of 1/256: a running sum in bfloat16 stops growing long before 1.
    parts = [{"x": torch.full((5,), 1.0, dtype=torch.bfloat16)} for _ in range(256)]
    assert torch.equal(weighted_mean(parts, [1 / 256] * 256)["x"], torch.ones(5, dtype=torch.bfloat16))
    # The result is rounded once: the error is at most half the spacing of bfloat16.
    parts, weights = clients(3, torch.bfloat16, {"x": (4000,)}), [0.2, 0.3, 0.5]
    exact = torch.from_numpy(oracle(parts, weights)["x"])
    half_a_step = torch.exp2(exact.frexp().exponent.double() - 9)
    assert ((weighted_mean(parts, weights)["x"].double() - exact).abs() <= half_a_step * (1 + 1e-4)).all()


def test_blocks_may_end_inside_a_tensor(monkeypatch):
    monkeypatch.setattr(mean_module, "_BLOCK", 4)
    parts, weights = clients(3), [0.2, 0.5, 0.3]
    same(weighted_mean(parts, weights), oracle(parts, weights), 1e-6)


def test_flat_and_dict_clients_give_the_same_bits():
    parts, weights = clients(3), [0.2, 0.5, 0.3]
    plain = weighted_mean(parts, weights)
    mixed = weighted_mean([FlatTensors.pack(parts[0]), parts[1], dict(reversed(parts[2].items()))], weights)
    assert all(torch.equal(plain[n], mixed[n]) for n in plain)


def test_unequal_inputs_are_refused():
    one, two = clients(2)
    for wrong in (([], []), ([one, two], [1.0])):
        with pytest.raises(ValueError, match="one weight per client"):
            weighted_mean(*wrong)
    others = [
        {**two, "a": two["a"].T},
        {n: t for n, t in two.items() if n != "a"},
        {**two, "more": two["a"]},
        {**two, "a": two["a"].double()},
    ]
    for other in others:
        with pytest.raises(ValueError, match="disagree"):
            weighted_mean([one, other], [0.5, 0.5])
        with pytest.raises(ValueError, match="disagree"):
            weighted_mean([other, one], [0.5, 0.5])
    with pytest.raises(ValueError, match="disagree"):
        weighted_mean([FlatTensors.pack(one), FlatTensors.pack({n: t.double() for n, t in one.items()})], [0.5, 0.5])


# -- the flat buffer -----------------------------------------------------------------------------------


def test_flat_tensors_are_views_in_name_order():
    part = clients(1)[0]
    flat = FlatTensors.pack(part)
    assert list(flat) == sorted(part) and len(flat) == len(part) and flat.flat.numel() == 3 * 5 + 2 * 7 + 1 + 48
    assert all(torch.equal(flat[n], part[n]) and flat[n].shape == part[n].shape for n in part)
    flat.flat.zero_()
    assert not any(t.any() for t in flat.values()) and part["a"].any()
    assert len(FlatTensors.pack({})) == 0


def test_bytes_of_tensors():
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.empty(4, 4, device="meta")}
    assert nbytes(tensors) == 3 * 5 * 4 + 7 * 2 + 4 * 4 * 4
    # Only the values of a view count, not all of its storage.
    assert nbytes({"view": torch.zeros(1000)[:3]}) == 12
