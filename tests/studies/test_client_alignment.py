"""Cosines between updates: calculated by hand, with one client, and in real runs of three methods."""

import json
import math

import pytest
import torch

import fs_lowrank
from studies.analysis import client_alignment as ca
from studies.analysis import watch

pytestmark = pytest.mark.more

A, B = "x.lora_A.default.weight", "x.lora_B.default.weight"


def pair(b, a, head):
    return {A: torch.tensor([a]), B: torch.tensor([[v] for v in b]), "classifier.bias": torch.tensor([head])}


def test_the_effective_change_by_hand():
    before, after = pair([0.0, 1.0], [1.0, 2.0], 5.0), pair([3.0, 1.0], [1.0, 2.0], 7.0)
    change = ca.effective_change(after, before, scale=2.0)
    assert change.tolist() == [2.0, 6.0, 12.0, 0.0, 0.0]  # the head, then 2 (B' A' - B A) row by row
    assert ca.effective_change({"classifier.bias": torch.tensor([1.0])}, before, 2.0).tolist() == [-4.0]


def test_the_pair_of_a_convolution_counts_as_its_product():
    before = {A: torch.randn(2, 3, 3, 3), B: torch.zeros(5, 2, 1, 1)}
    after = {A: before[A], B: torch.randn(5, 2, 1, 1)}
    product = torch.einsum("or,rikl->oikl", after[B][:, :, 0, 0], after[A])
    torch.testing.assert_close(ca.effective_change(after, before, 0.5), 0.5 * product.flatten())


def test_cosines_by_hand():
    before = {"w": torch.zeros(2)}
    updates = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}, {"w": torch.zeros(2)}]
    found = ca.cosines(updates, {"w": torch.tensor([1.0, 1.0])}, before, 1.0)
    assert found[:2] == pytest.approx([math.sqrt(0.5)] * 2) and math.isnan(found[2])


@pytest.mark.parametrize("method", ca.METHODS)
def test_one_client_agrees_with_the_global_update(settings, method):
    settings["federate"] = {"client_num": 3, "sample_client_num": 1}
    [entry] = ca.runs(settings, (method,), 3, 1, tau=2)
    assert [r["round"] for r in entry["rounds"]] == [1, 2, 3]
    assert ca.mean_curve(entry) == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.parametrize("method", ca.METHODS)
@pytest.mark.slow
def test_observing_a_run_does_not_change_it(settings, tmp_path, method):
    """The tensors are those of the method itself, and there is a cosine for every client in every round."""
    more = {"lowrank.tau": 2} if method == "fedloru" else {}
    seen = []
    name = watch(method, lambda step: seen.append(ca.entry_of(step)))
    watched, plain = (
        fs_lowrank.run(fs_lowrank.load_config(settings, **{"federate.method": m, "outdir": str(tmp_path / m), **more}))
        for m in (name, method)
    )
    for (name, left), right in zip(watched.model.named_parameters(), plain.model.parameters()):
        assert torch.equal(left, right), name
    assert [len(r["cosines"]) for r in seen] == [5] * 4
    assert all(-1.0001 <= c <= 1.0001 for r in seen for c in r["cosines"])
    assert sum(ca.mean_curve({"rounds": seen})) > 0  # a mean is aligned with its parts


def test_the_command_writes_json_and_png(settings, tmp_path):
    del settings["outdir"]
    ca.main(["--rounds", "2", "--tau", "1", "--seeds", "1", "--out", str(tmp_path)], base=settings)
    written = json.loads((tmp_path / "client_alignment.json").read_text())
    assert [e["method"] for e in written["runs"]] == list(ca.METHODS)
    assert all(len(e["rounds"]) == 2 and 0 <= e["test_acc"] <= 1 for e in written["runs"])
    assert (tmp_path / "client_alignment.png").stat().st_size > 10_000
