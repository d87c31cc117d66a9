"""The study of robust means: what it writes, and the attacks it makes."""

import json

import pytest
import torch

from studies.analysis import robust_means

pytestmark = pytest.mark.more


def test_the_command_writes_a_table_of_every_rule_and_attack(tmp_path, monkeypatch):
    monkeypatch.setattr(robust_means, "RULES", ("none", "krum"))
    kept = {name: robust_means.ATTACKS[name] for name in ("no attack", "label flip", "huge")}
    monkeypatch.setattr(robust_means, "ATTACKS", kept)
    threads = torch.get_num_threads()
    options = ["--methods", "fedlora", "--seeds", "1", "--rounds", "2", "--steps", "1", "--out", str(tmp_path)]
    robust_means.main(options)
    assert torch.get_num_threads() == threads, "set back"
    result = json.loads((tmp_path / "robust_means.json").read_text())
    rows = result["table"]["fedlora"]
    assert rows.keys() == {"none", "krum"} and all(cells.keys() == kept.keys() for cells in rows.values())
    assert rows["none"]["no attack"]["survives"] and not rows["none"]["huge"]["survives"]
    assert rows["krum"]["huge"]["malicious_noted"] == robust_means.MALICIOUS
    text = (tmp_path / "README.md").read_text()
    assert result["command"] in text and "| `krum` |" in text and text.count("\n| ") == 4


@pytest.mark.parametrize("name", robust_means.ATTACKS)
def test_attacks_are_what_their_names_say(name):
    start = {"w": torch.tensor([1.0, 2.0])}
    honest = [{"w": torch.tensor([2.0, 2.0])}, {"w": torch.tensor([4.0, 5.0])}]
    own = {"w": torch.tensor([2.0, 4.0])}
    (found,) = robust_means.ATTACKS[name](own, start, honest, torch.Generator().manual_seed(0)).values()
    wanted = {
        "no attack": [2.0, 4.0],
        "label flip": [2.0, 4.0],
        "scaled": [51.0, 102.0],
        "sign flip": [-2.0, -4.0],
        "opposite mean": [-1.0, 0.5],
        "a little": [3 - 1.5 * 2**0.5, 3.5 - 1.5 * 4.5**0.5],
        "zeros": [0.0, 0.0],
        "huge": [1e30, 1e30],
    }
    if name == "noise":
        assert not torch.equal(found, own["w"]) and float((found - own["w"]).abs().max()) < 6
    else:
        torch.testing.assert_close(found, torch.tensor(wanted[name]))
