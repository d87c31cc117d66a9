"""Records, figures and plots of a run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from fs_lowrank import load_config, run
from fs_lowrank.errors import UserError
from fs_lowrank.runs.environment import changed_since, write_environment
from fs_lowrank.runs.records import read_records
from fs_lowrank.runs.result import RunResult
from fs_lowrank.runs.summary import human_bytes, human_percent, human_time, per_client_and_round, seconds


def record(round, **more):
    return {
        "round": round,
        "loss": 1 / round,
        "metrics": {"test": {"acc": 0.5, "loss": 0.7}},
        "uplink_bytes": 100,
        "uplink_bytes_without_head": 60,
        "downlink_bytes": 0 if round == 1 else 80,
        "downlink_bytes_without_head": 0 if round == 1 else 40,
        "client_uplink_bytes": {1: 50, 2: 50},
        "client_downlink_bytes": {1: 40, 2: 20, 3: 20} if round > 1 else {1: 0, 2: 0, 3: 0},
        "seconds": {"training": 1.0, "aggregation": 0.1 * round, "evaluation": 0.5},
        **more,
    }


@pytest.mark.parametrize("cut", [1, 20])
def test_a_last_line_that_was_cut_off_is_left_out_and_named(tmp_path, caplog, cut):
    path = tmp_path / "rounds.jsonl"
    text = "".join(json.dumps(record(r)) + "\n" for r in (1, 2))
    path.write_text(text[:-cut])
    assert len(read_records(path, up_to=5)) == (2 if cut == 1 else 1)
    assert (f"{path}: line 2 was cut off" in caplog.text) == (cut == 20)
    assert read_records(tmp_path / "none.jsonl", up_to=5) == []


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"round": 1}', "[" * 100_000, "\0" * 9, "\ud800", ""])
def test_a_line_that_is_not_a_record_is_named(tmp_path, line):
    path = tmp_path / "rounds.jsonl"
    path.write_text(f"{json.dumps(record(1))}\n{line}\n{json.dumps(record(3))}\n", errors="surrogatepass")
    with pytest.raises(UserError, match=r"rounds.jsonl, line 2: expected the record of a round .*another outdir"):
        read_records(path, up_to=5)


def test_bytes_until_a_target_is_reached():
    def evaluated(round, acc, loss):
        return {**record(round), "metrics": {"test": {"acc": acc, "loss": loss}} if acc else {}}

    history = [evaluated(1, 0.5, 0.9), evaluated(2, None, None), evaluated(3, 0.8, 0.4)]
    result = RunResult(history, {}, Path(), torch.nn.Linear(1, 1), base_changed=False)
    sent = [r["uplink_bytes"] + r["downlink_bytes"] for r in history]
    assert result.bytes_to(0.5) == sent[0] and result.bytes_to(0.6) == sum(sent) and result.bytes_to(0.9) is None
    assert result.bytes_to(0.9, "test_loss") == sent[0] and result.bytes_to(0.4, "test_loss") == sum(sent)
    for wrong, said in (
        ("nonsense", "metric = 'nonsense': no round has it; measured are: test_acc, test_loss"),
        ("test_los", "did you mean 'test_loss'?; measured are: test_acc, test_loss"),
        ("test_acc_last5", "no round has it; did you mean 'test_acc'"),
        ("best_round", "no round has it"),
        ("test_", "no round has it"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            result.bytes_to(0.5, wrong)
    for none in ([], [evaluated(1, None, None)]):
        result = RunResult(none, {}, Path(), torch.nn.Linear(1, 1), base_changed=False)
        with pytest.raises(UserError, match="'test_acc': no round has it; measured are: none"):
            result.bytes_to(0.5)
    of_clients = [
        {**record(i), "metrics": {"val": {"perplexity": p}, "client_test": {"acc_mean": 1 / p}}}
        for i, p in enumerate((50, 20, 5), 1)
    ]
    result = RunResult(of_clients, {}, Path(), torch.nn.Linear(1, 1), base_changed=False)
    assert result.bytes_to(6, "val_perplexity") == sum(sent) and result.bytes_to(60, "val_perplexity") == sent[0]
    assert result.bytes_to(0.05, "client_test_acc_mean") == sent[0] + sent[1]


def test_figures_of_a_run():
    history = [record(1), record(2), record(3)]
    assert per_client_and_round(history) == {
        "uplink": 300 / 6,
        "uplink_without_head": 180 / 6,
        "downlink": 160 / 6,
        "downlink_without_head": 80 / 6,
    }
    assert per_client_and_round(history[:1])["downlink"] == 0
    spent = seconds(history)
    assert spent["training"] == 3.0 and spent["aggregation"] == pytest.approx(0.6)
    assert spent["aggregation_median"] == pytest.approx(0.2)
    assert [human_bytes(n) for n in (0, 999, 1000, 1.5e6, 2.25e9, 3e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "2.2 GB",
        "3000.0 GB",
    ]
    times = (0, 0.04, 3.2, 45.4, 119, 130, 5400, 7300)
    assert list(map(human_time, times)) == ["0 s", "0.04 s", "3 s", "45 s", "119 s", "2 min", "90 min", "2.0 h"]
    shares = (0, 0.00004321, 0.0009, 0.12345, 1)
    assert list(map(human_percent, shares)) == ["0 %", "0.00432 %", "0.0900 %", "12.3 %", "100 %"]


def test_the_gpu_is_that_of_the_run(tmp_path, monkeypatch, caplog):
    """A change between CPU and GPU is said. What version 0.1.0 wrote, the machine's GPU also of a run on the CPU, or
    nothing, is no error.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    cpu, gpu, path = torch.device("cpu"), torch.device("cuda", 1), tmp_path / "environment.json"
    write_environment(path, [], None, cpu)
    assert json.loads(path.read_text())["gpu"] is None and not changed_since(path, cpu)
    write_environment(path, [], 1, cpu)
    assert not caplog.text
    write_environment(path, [], 2, gpu)
    assert "gpu None → GPU 1" in caplog.text and json.loads(path.read_text())["resumed"][-1]["gpu"] == "GPU 1"
    assert not changed_since(path, gpu) and changed_since(path, cpu) == ["gpu GPU 1 → None"]
    content = json.loads(path.read_text())
    del content["resumed"], content["gpu"]
    for before in ({**content, "gpu": "GPU 0"}, content):
        path.write_text(json.dumps(before))
        write_environment(path, [], 1, cpu)
        assert json.loads(path.read_text())["versions"] == content["versions"]


@pytest.mark.more
def test_a_merge_into_a_tied_head_leaves_the_embedding(tiny_causal, causal_settings, tmp_path, no_curves):
    """The saved model computes what the run's does, and saving does not change that."""
    base = AutoConfig.from_pretrained(tiny_causal)
    base.tie_word_embeddings = True
    shutil.copytree(tiny_causal, tmp_path / "tied")
    LlamaForCausalLM(base).save_pretrained(tmp_path / "tied")
    keys = {"model.type": f"{tmp_path / 'tied'}@huggingface_llm", "federate.total_round_num": 1}
    adapter = [{"r": 2, "alpha": 6, "modules": ["lm_head"]}]
    result = run(load_config(causal_settings, {**keys, "llm.adapter.args": adapter, "train.optimizer.lr": 0.5}))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        wanted = result.model.eval()(input_ids=tokens).logits
        saved = AutoModelForCausalLM.from_pretrained(result.save_model(tmp_path / "saved")).eval()
        torch.testing.assert_close(saved(input_ids=tokens).logits, wanted, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(result.model(input_ids=tokens).logits, wanted, atol=0, rtol=0)
    assert not saved.config.tie_word_embeddings
