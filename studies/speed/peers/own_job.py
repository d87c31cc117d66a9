"""The job on our embedded engine, with its defaults.

python own_job.py JOB OUT '{"threads": 2, "federate.process_num": 1}'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fedjob
import torch
from safetensors.torch import load_file

import fs_lowrank
from fs_lowrank.jobs.files import read_json


def work(job: fedjob.Job, out: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    meter = fedjob.Meter()
    keys = {key: value for key, value in settings.items() if "." in key}
    ours = read_json(Path(settings["job"]) / "ours.json", remedy="run the peers again")
    config = fs_lowrank.load_config(ours, keys, outdir=str(out / "run"))

    def on_client(round: int, done: int, total: int) -> None:
        if not meter.ends:
            meter.mark()

    result = fs_lowrank.run(config, progress=False, on_round=lambda record: meter.mark(), on_client=on_client)
    measured = meter.result(
        versions=fedjob.versions("fs-lowrank"),
        samples=sum(r["samples"] for r in result.history),
        loss=result.history[-1]["loss"],
    )
    adapter = load_file(out / "run" / "adapter" / "adapter_model.safetensors")
    return measured, adapter


if __name__ == "__main__":
    fedjob.main(work)
