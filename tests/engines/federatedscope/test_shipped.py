"""Every YAML file that the framework ships for language models runs one round with a tiny model, or is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fs_lowrank.errors import UserError

pytestmark = [pytest.mark.federatedscope, pytest.mark.slow]
FOLDER = Path(os.environ.get("FEDERATEDSCOPE_ROOT", "nowhere"), "federatedscope/llm/baseline")
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml"))


def refused(raw: dict) -> str:
    """The key for which our methods refuse a file; empty if they run it."""
    if raw["llm"].get("deepspeed", {}).get("use"):
        return "llm.deepspeed.use"
    if raw["llm"].get("offsite_tuning", {}).get("use"):
        return "llm.offsite_tuning.use"
    if raw["federate"].get("client_idx_for_local_train"):
        return "federate.client_idx_for_local_train"
    return ""


@pytest.mark.skipif(not FILES, reason="FEDERATEDSCOPE_ROOT names no checkout of FederatedScope's branch llm")
@pytest.mark.parametrize("name", FILES)
def test_a_shipped_file(tiny_causal, instructions_jsonl, tmp_path, no_curves, name):
    import yaml
    from federatedscope.core.auxiliaries.data_builder import get_data
    from federatedscope.core.auxiliaries.runner_builder import get_runner
    from federatedscope.core.auxiliaries.worker_builder import get_client_cls, get_server_cls
    from federatedscope.core.configs.config import global_cfg

    import fs_lowrank.engines.federatedscope  # noqa: F401
    from fs_lowrank.engines.federatedscope.session import close_session, current

    raw = yaml.safe_load((FOLDER / name).read_text())
    shutil.copy(instructions_jsonl, tmp_path / "tiny.jsonl")
    cfg = global_cfg.clone()
    cfg.merge_from_file(str(FOLDER / name))
    overrides = {
        "federate.method": "rolora",
        "federate.mode": "standalone",
        "federate.save_to": str(tmp_path / "saved.ckpt"),
        "distribute.use": False,
        "use_gpu": False,
        "device": -1,
        "data.root": str(tmp_path),
        "data.type": "tiny.jsonl@llm",
        "data.splits": [0.6, 0.2, 0.2],
        "data.subsample": 1.0,
        "model.type": f"{tiny_causal}@huggingface_llm",
        "llm.adapter.args": [{"adapter_package": "peft", "adapter_method": "lora", "r": 2}],
        "llm.tok_len": 48,
        "federate.total_round_num": 1,
        "train.local_update_steps": 1,
        "train.is_enable_half": False,
        "outdir": str(tmp_path / "exp"),
        "expname": "x",
    }
    cfg.merge_from_list([part for pair in overrides.items() for part in pair])
    key = refused(raw)
    try:
        if key:
            with pytest.raises(UserError, match=key):
                get_data(config=cfg.clone(), client_cfgs=None)
            return
        data, changed = get_data(config=cfg.clone(), client_cfgs=None)
        cfg.merge_from_other_cfg(changed)
        cfg.freeze(inform=False, save=False)
        classes = {"server_class": get_server_cls(cfg), "client_class": get_client_cls(cfg)}
        get_runner(data=data, config=cfg.clone(), **classes).run()
        (record,) = current().result.history
        assert record["clients"] and not record["failed"] and record["uplink_bytes"] > 0
    finally:
        close_session()
