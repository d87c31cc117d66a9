"""Tiny models, tiny data, and the configurations of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fs_lowrank.testing import small

#: variants of a run by name: keys that replace those of ``settings``. All but the last three use the encoder. Three
#: draw pictures, which take ten times as long as all else that a tiny run does.
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"federate.method": "fedavg"},
    "fedlora under FedAdam": {
        "federate.method": "fedlora",
        "fedopt.use": True,
        "fedopt.optimizer": {"type": "Adam", "lr": 0.01},
    },
    "rolora, two of three": {"federate.method": "rolora", "federate.sample_client_num": 2, "lowrank.pictures": True},
    "ffa_lora, merged": {"federate.method": "ffa_lora", "lowrank.save_merged": True},
    "flexlora of three ranks": {"federate.method": "flexlora", "lowrank.ranks": [1, 3, 2]},
    "flora of three ranks": {"federate.method": "flora", "lowrank.ranks": [1, 3, 2]},
    "fedloru": {"federate.method": "fedloru", "lowrank.tau": 2},
    "pfedloru": {"federate.method": "pfedloru", "lowrank.tau": 2},
    "pfedlora": {"federate.method": "pfedlora"},
    "fedlora with dropouts": {"federate.method": "fedlora", "lowrank.drop_rate": 0.3},
    "fedlora, clients reused": {"federate.method": "fedlora", "lowrank.reuse_clients": "{outdir}.clients"},
    "fedlora, states on disk": {"federate.method": "fedlora", "train.cache_frozen_dir": "{outdir}.states"},
    "causal fedlora": {
        "federate.method": "fedlora",
        "eval.generate.freq": 1,
        "eval.generate.prompts": 2,
        "eval.generate.max_tokens": 3,
        "lowrank.pictures": True,
        "kind": "causal",
    },
    "fedhm": {"federate.method": "fedhm", "lowrank.pictures": True, "kind": "vision"},
    "fedloru from scratch": {"federate.method": "fedloru", "lowrank.tau": 2, "kind": "vision"},
}

#: further runs, on data in other formats
FORMATS: dict[str, dict[str, Any]] = {
    "fedavg on parquet": {"federate.method": "fedavg", "data.type": "{inputs}/formats/reviews.parquet"},
    "fedavg on arrow": {"federate.method": "fedavg", "data.type": "{inputs}/formats/reviews.arrow"},
    "fedavg on a saved folder": {"federate.method": "fedavg", "data.type": "{inputs}/formats/saved"},
    "fedavg on idx images": {
        "federate.method": "fedavg",
        "kind": "vision",
        "data.type": "mnist",
        "data.root": "{inputs}/formats/idx",
    },
}


def make_inputs(folder: Path) -> None:
    """Write ``encoder``, ``causal``, ``reviews.csv``, ``instructions.jsonl`` and ``images`` to ``folder``; and in
    ``formats`` the reviews as parquet, as a stream of arrow and as saved by ``save_to_disk``, and images as IDX files.
    """
    import datasets
    import pandas as pd
    import pyarrow as pa

    small.save_encoder(folder / "encoder")
    small.save_causal(folder / "causal")
    small.save_reviews(folder)
    small.save_instructions(folder)
    small.save_images(folder / "images")
    target = folder / "formats"
    (target / "idx").mkdir(parents=True)
    rows = pd.read_csv(folder / "reviews.csv")
    rows.to_parquet(target / "reviews.parquet")
    table = pa.Table.from_pandas(rows, preserve_index=False)
    with pa.OSFile(str(target / "reviews.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    datasets.Dataset.from_pandas(rows).save_to_disk(str(target / "saved"))
    draw = np.random.default_rng(0)
    for split, count in (("train", 60), ("t10k", 20)):
        labels = np.arange(count) % 10
        images = (draw.integers(0, 50, (count, 28, 28)) + 20 * labels[:, None, None]).astype(np.uint8)
        for what, values in (("images", images), ("labels", labels.astype(np.uint8))):
            head = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
            (target / "idx" / f"{split}-{what}-idx{values.ndim}-ubyte").write_bytes(head + values.tobytes())


def settings(inputs: Path, outdir: Path, run: str = "", **changes: Any) -> dict[str, Any]:
    """A configuration as nested data: three clients, three rounds, one step.

    Args:
        inputs: a folder that ``make_inputs`` wrote.
        run: a name in ``RUNS`` or ``FORMATS``.
        changes: further keys that replace those of the run, by dotted name.
    """
    keys = {**RUNS, **FORMATS}.get(run, {}) | changes
    kind = keys.pop("kind", "encoder")
    few: dict[str, Any] = {"federate.client_num": 3, "federate.total_round_num": 3, "train.local_update_steps": 1}
    few["lowrank.pictures"] = False
    if kind == "causal":
        tree = small.causal_settings(inputs / "causal", inputs / "instructions.jsonl", outdir)
    elif kind == "vision":
        tree = small.vision_settings(inputs / "images", outdir)
        few |= {"model": {"type": "lenet", "use_bias": False}, "lowrank.width": 0.25}
    else:
        tree = small.encoder_settings(inputs / "encoder", inputs / "reviews.csv", outdir)
    few["data"] = {"type": tree["data"]["type"], "splitter": "iid", "splits": [0.7, 0.1, 0.2]}
    for name, value in {**few, **keys}.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value.format(outdir=outdir, inputs=inputs) if isinstance(value, str) else value
    return tree
