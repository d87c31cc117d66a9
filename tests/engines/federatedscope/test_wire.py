"""The content of messages: no pickle, true sizes; secret shares; quantisation equal to the framework's."""

import base64
import os
import pickle

import pytest
import torch

from fs_lowrank.rounds.parcel import Parcel

pytestmark = pytest.mark.federatedscope


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    "content", [base64.b64encode(pickle.dumps(Harm())).decode(), "", "!!", None, [1]], ids=range(5)
)
def test_other_content_is_refused_and_never_unpickled(content, tmp_path, monkeypatch):
    from fs_lowrank.engines.federatedscope.wire import parcel_of

    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        parcel_of(content)
    assert not (tmp_path / "harmed").exists()


def test_the_framework_measures_the_size_of_the_tensors():
    from fs_lowrank.engines.federatedscope.wire import message

    tensors = {"a": torch.zeros(1000), "b": torch.zeros(10, dtype=torch.float64)}
    assert message("model_para", 0, [1, 2], Parcel(tensors)).count_bytes() == (4080, 8160)


@pytest.mark.parametrize("parties", [2, 5, 12])
def test_secret_shares_add_up_to_the_tensor(parties):
    from fs_lowrank.engines.federatedscope.sums import add_shares, recover, split_secret

    torch.manual_seed(0)
    owners = [{"w": torch.randn(3, 4), "b": torch.randn(2)} for _ in range(parties)]
    weights = range(1, parties + 1)
    dealt = [split_secret(t, w, parties) for t, w in zip(owners, weights)]
    sums = [add_shares([shares[i] for shares in dealt]) for i in range(parties)]
    mean = recover(add_shares(sums), sum(weights), owners[0])
    for name in ("w", "b"):
        expected = sum(w * t[name] for t, w in zip(owners, weights)) / sum(weights)
        torch.testing.assert_close(mean[name], expected, rtol=0, atol=1e-6)
    one = dealt[0][1]["w"].double() / 2.0**63
    assert one.abs().max() > 0.1, "a share by itself is noise over the whole range"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_cannot_be_shared(value):
    from fs_lowrank.engines.federatedscope.sums import split_secret

    with pytest.raises(ValueError, match="does not fit the fixed-point numbers"):
        split_secret({"w": torch.tensor([value])}, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nbits", [8, 16])
def test_our_quantisation_is_the_frameworks_bit_for_bit(nbits, dtype):
    """The framework rounds only weights whose names say ``fc`` or ``conv``.

    Those of 16 bits it scales in 16 bits, which flips the sign of the largest; ours are what it makes of float32.
    """
    from federatedscope.core.compression import symmetric_uniform_dequantization, symmetric_uniform_quantization

    from fs_lowrank.algebra import wide
    from fs_lowrank.rounds.codec import Uniform

    drawn = torch.Generator().manual_seed(0)
    values = {
        "normal": torch.randn(40, 33, generator=drawn).to(dtype),
        "small": (torch.randn(7, 5, 3, generator=drawn) * 1e-3).to(dtype),
        "zero": torch.zeros(3, 2, dtype=dtype),
        "halves": (torch.arange(-8, 9) / 2).to(dtype),
        "one": torch.tensor([-3.25], dtype=dtype),
    }
    codec = Uniform(nbits)
    ours = codec.encode(values)
    back = codec.decode(ours, {})
    for name, value in values.items():
        theirs = symmetric_uniform_quantization({"fc.weight": value.to(wide(dtype))}, nbits)
        assert torch.equal(ours[f"quantised:{name}"], theirs["fc.weight_quant"])
        assert ours[f"quantised:{name}"].dtype == theirs["fc.weight_quant"].dtype
        assert torch.equal(ours[f"scale:{name}"].view(wide(dtype)), theirs["fc.weight_scale"].reshape(1))
        whole = symmetric_uniform_dequantization(theirs)["fc.weight"].to(dtype)
        assert torch.equal(back[name], whole) and back[name].dtype == dtype


def test_a_client_keeps_its_token(tmp_path):
    from fs_lowrank.engines.federatedscope.distributed import own_token

    path = tmp_path / "client" / "token_1"
    token = own_token(path)
    assert own_token(path) == token and len(token) == 32
    assert path.stat().st_mode & 0o077 == 0, "only the user may read tokens"
