"""Heads that stay with their clients (``lowrank.personal: [head]``), and FedSA-LoRA's B."""

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification

import fs_lowrank
from fs_lowrank import UserError, load_config
from fs_lowrank.errors import say_once
from fs_lowrank.finished import load_run
from fs_lowrank.runs.checkpoint import load_checkpoint
from fs_lowrank.testing.bench import without_seconds

pytestmark = pytest.mark.more


@pytest.mark.parametrize("method, keys", [("rolora", {"lowrank.personal": ["head"]}), ("fedsa_lora", {})])
def test_what_stays_with_a_client_is_resumed_scored_and_saved(settings, tmp_path, caplog, method, keys):
    few = {"federate.method": method, "federate.total_round_num": 3, "train.local_update_steps": 1, **keys}

    def config(name):
        return load_config(settings, {**few, "outdir": str(tmp_path / name)})

    say_once.cache_clear()
    whole = fs_lowrank.run(config("whole"))
    own = "lora_B" if method == "fedsa_lora" else "head"
    assert f"{own} of the model stay with the clients: scores of the global model" in caplog.text
    load_run(tmp_path / "whole")
    assert f"{own} stayed with the clients of {tmp_path / 'whole'}" in caplog.text
    assert f"{own} stayed with the clients" in (tmp_path / "whole" / "adapter" / "README.md").read_text()
    fs_lowrank.run(config("stopped"), on_round=lambda record: record["round"] == 2)
    resumed = fs_lowrank.run(config("stopped"), resume=True)
    assert without_seconds(resumed.history) == without_seconds(whole.history)
    assert "client_test_acc" in whole.final
    part = "lora_B" if method == "fedsa_lora" else "classifier"
    tensors = []
    for result in (whole, resumed):
        for client in (1, 2):
            model = AutoPeftModelForSequenceClassification.from_pretrained(
                result.saved["personal"] / f"client_{client}"
            )
            tensors.append([p for n, p in model.named_parameters() if part in n and "original" not in n][0])
    assert torch.equal(tensors[0], tensors[2]) and torch.equal(tensors[1], tensors[3])
    assert not torch.equal(tensors[0], tensors[1])


@pytest.mark.parametrize("keys", [{"federate.method": "fedpara"}, {"llm.adapter.args.0.use_dora": True}])
def test_heads_beside_other_pairs_are_saved(settings, keys):
    few = {"federate.total_round_num": 1, "train.local_update_steps": 1, "lowrank.personal": ["head"], **keys}
    result = fs_lowrank.run(load_config(settings, few))
    own = load_checkpoint(result.outdir / "checkpoint").parts["personal"]
    model = AutoPeftModelForSequenceClassification.from_pretrained(result.saved["personal"] / "client_1")
    (head,) = (p for n, p in model.named_parameters() if n.endswith("classifier.modules_to_save.default.weight"))
    assert any(torch.equal(head, tensor) for name, tensor in own.items() if name.startswith("1/"))


def test_a_bias_of_b_stays_with_its_client_and_is_saved(settings, tmp_path):
    settings["llm"]["adapter"]["args"][0]["lora_bias"] = True
    few = {"federate.method": "fedsa_lora", "federate.total_round_num": 1, "train.local_update_steps": 1}
    result = fs_lowrank.run(load_config(settings, few))
    own = load_checkpoint(result.outdir / "checkpoint").parts["personal"]
    model = AutoPeftModelForSequenceClassification.from_pretrained(result.saved["personal"] / "client_1")
    biases = {f"1/{n}": p for n, p in model.named_parameters() if n.endswith(".lora_B.default.bias")}
    assert len(biases) == 4 and all(bias.any() and torch.equal(bias, own[n]) for n, bias in biases.items())


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"federate.method": "fedavg"}, "fedavg has none"),
        ({"lowrank.train_head": False}, "lowrank.train_head is False"),
        ({"federate.method": "fedfisher", "llm.adapter.use": True}, "fedfisher computes with all weights"),
        ({"lowrank.personal": ["body"]}, "lowrank.personal.*body.*head"),
    ],
)
def test_what_cannot_be_is_refused(settings, keys, words):
    with pytest.raises(UserError, match=words):
        load_config(settings, {"federate.method": "rolora", "lowrank.personal": ["head"], **keys})


def test_what_is_merged_into_a_base_of_half_precision_is_said(settings, tmp_path, caplog):
    few = {"federate.total_round_num": 1, "train.local_update_steps": 1, "lowrank.dtype": "bfloat16"}
    for method, count in (("fedex_lora", 6), ("fedlora", 2)):  # four weights of the base, and the head
        say_once.cache_clear()
        caplog.clear()
        fs_lowrank.run(load_config(settings, {**few, "federate.method": method, "outdir": str(tmp_path / method)}))
        assert f"{count} tensors that the run changes" in caplog.text
