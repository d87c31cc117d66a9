"""Quantised tensors, and invalid ones from a hostile sender."""

import pytest
import torch

from fs_lowrank.rounds.codec import Plain, Uniform, without_head


@pytest.mark.parametrize("nbits, worst", [(8, 1 / 127), (16, 1 / 32767)])
def test_rounding(nbits, worst):
    torch.manual_seed(0)
    tensors = {
        "x.lora_A.default.weight": torch.randn(8, 16),
        "zero": torch.zeros(3, 2),
        "merge:1:a": torch.randn(5),
        "x:count": torch.tensor([3]),
    }
    codec = Uniform(nbits)
    back = codec.decode(codec.encode(tensors), tensors)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert (back[name] - tensor).abs().max() <= 0.51 * worst * max(float(tensor.abs().max()), 1e-9)
    again = codec.decode(codec.encode(back), tensors)
    for name in tensors:
        torch.testing.assert_close(again[name], back[name], rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="is not quantised"):
        codec.decode(tensors, {})


def test_sizes_are_those_of_what_is_encoded():
    tensors = {
        "x.lora_A.default.weight": torch.randn(8, 16),
        "classifier.weight": torch.randn(3, 5),
        "svd:classifier.bias": torch.randn(3),
        "x:count": torch.tensor([3]),
        "empty": torch.zeros(0, 4),
    }
    bare = without_head(tensors)
    assert bare.keys() == {"x.lora_A.default.weight", "x:count", "empty"}
    for codec in (Plain(), Uniform(8), Uniform(16)):
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
    with pytest.raises(ValueError, match="4 bits: expected 8 or 16"):
        Uniform(4)
