"""Quantised tensors, and invalid ones from a hostile sender."""

import pytest
import torch

from fs_lowrank.rounds.codec import Codec, Uniform
from fs_lowrank.rounds.parcel import Parcel


def by_definition(tensor, nbits):
    """``s round(x / s)`` in float64, and how far from it rounding in float32 and in the tensor's dtype may lead."""
    x, largest = tensor.double(), 2 ** (nbits - 1) - 1
    s = x.abs().max() / largest
    return s * torch.round(x / s), s + x.abs() * torch.finfo(tensor.dtype).eps


@pytest.mark.parametrize("nbits", [8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_is_rounded_as_defined_and_once_only(dtype, nbits):
    generator, codec = torch.Generator().manual_seed(0), Uniform(nbits)
    for _ in range(100):
        tensors = {"merge:1:w": (torch.randn(50, 10, generator=generator) * 0.02).to(dtype)}
        sent = codec.encode(tensors)
        # A copy does not hold what is merged into it, so the dtype comes with the message.
        once, of_bytes = codec.decode(sent, {}), codec.decode(Parcel.of(Parcel(sent).to_bytes()).tensors, {})
        found = once["merge:1:w"]
        near, apart = by_definition(tensors["merge:1:w"], nbits)
        assert found.dtype == dtype and ((found.double() - near).abs() <= apart).all()
        assert torch.equal(of_bytes["merge:1:w"], found)
        if dtype in (torch.bfloat16, torch.float16):  # the largest value stays, and with it the scale
            assert torch.equal(codec.decode(codec.encode(once), {})["merge:1:w"], found)


@pytest.mark.parametrize("nbits", [8, 16])
def test_float32_is_encoded_as_ever(nbits):
    """Results in float32 do not depend on how other dtypes are encoded."""
    tensor, largest = torch.randn(1000, generator=torch.Generator().manual_seed(nbits)), 2 ** (nbits - 1) - 1
    scale = tensor.abs().max() / largest
    sent = Uniform(nbits).encode({"w": tensor})
    assert torch.equal(sent["scale:w"], scale.reshape(1)) and Uniform(nbits).sizes({"w": tensor})[0] == 125 * nbits + 4
    assert torch.equal(sent["quantised:w"].float(), (tensor / scale).clamp(-largest, largest).round())
    assert torch.equal(Uniform(nbits).decode(sent, {})["w"], sent["quantised:w"] * scale)


def test_sizes_are_those_of_what_is_encoded():
    tensors = {
        "x.lora_A.default.weight": torch.randn(8, 16),
        "classifier.weight": torch.randn(3, 5),
        "svd:classifier.bias": torch.randn(3),
        "half": torch.randn(7).bfloat16(),
        "double": torch.randn(7).double(),
        "x:count": torch.tensor([3]),
        "empty": torch.zeros(0, 4),
    }
    bare = {name: tensor for name, tensor in tensors.items() if "classifier" not in name}
    for codec in (Codec(), Uniform(8), Uniform(16)):
        meta = {n: t.to("meta") for n, t in tensors.items()}
        by_hand = [sum(t.numel() * t.element_size() for t in codec.encode(part).values()) for part in (tensors, bare)]
        assert codec.sizes(tensors) == codec.sizes(meta) == tuple(by_hand)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda p: p.pop("scale:w"), "w came without its scale"),
        (lambda p: p.update({"scale:w": torch.ones(2)}), "one floating-point number"),
        (lambda p: p.update({"scale:w": torch.ones(0)}), "one floating-point number"),
        (lambda p: p.update({"scale:w": torch.ones(1, dtype=torch.int8)}), "one floating-point number"),
        (lambda p: p.update({"scale:w": torch.ones(1, dtype=torch.bfloat16)}), "one floating-point number"),
        (lambda p: p.update({"scale:w": torch.ones(1).to(torch.float8_e5m2)}), "one floating-point number"),
        (lambda p: p.update({"quantised:w": torch.ones(3, dtype=torch.complex64)}), "expected torch.int8"),
        (lambda p: p.update({"quantised:w": torch.ones(3)}), "expected torch.int8"),
        (lambda p: p.update({"w": torch.ones(3)}), "'w' is not quantised"),
    ],
)
def test_decoding_what_was_not_encoded_is_a_value_error(spoil, reason):
    sent = Uniform(8).encode({"w": torch.randn(3)})
    spoil(sent)
    with pytest.raises(ValueError, match=reason):
        Uniform(8).decode(sent, {})


def test_values_that_cannot_be_quantised():
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="w holds values that are NaN or Inf"):
            Uniform(8).encode({"w": torch.tensor([1.0, value])})
