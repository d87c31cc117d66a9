"""The YAML files that the framework ships for language models: each is resolved and runs a round, or is refused.

A file is read as the framework reads it, with ``federate.method rolora`` on the command line. In the folder of the test
its model's name is that of a folder with a tiny model, and ``data/`` has the files that the framework would download,
so nothing in a file is replaced but, of those that run, the number of rounds, and the GPU where there is none.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from fs_lowrank.errors import UserError

pytestmark = [pytest.mark.federatedscope, pytest.mark.slow]
FOLDER = Path(os.environ.get("FEDERATEDSCOPE_ROOT", "nowhere"), "federatedscope/llm/baseline")
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml"))
#: what our methods do not run, and the one line that says so
REFUSED = {
    "llm.deepspeed.use": "llm.deepspeed.use = True: our training loop does not use it",
    "llm.offsite_tuning.use": "llm.offsite_tuning.use = True: it needs a server and client of its own",
}


def read(name: str) -> dict:
    import yaml

    return yaml.safe_load((FOLDER / name).read_text())


def refused(raw: dict) -> str:
    """The key for which our methods refuse a file; empty if they run it."""
    return next((key for key in REFUSED if raw["llm"].get(key.split(".")[1], {}).get("use")), "")


KIND = {name: "refused" if refused(raw := read(name)) else raw["federate"]["mode"] for name in FILES}


def files(*kinds: str) -> list[str]:
    return [name for name in FILES if KIND[name] in kinds]


@pytest.fixture
def downloaded(tiny_causal, instructions_jsonl, tmp_path, monkeypatch):
    """A folder with every model and data set that the files name, and the working directory."""
    # Ten times over, so that the thousandth part that many files hold out is a row.
    rows = [json.loads(line) for line in instructions_jsonl.read_text().splitlines()] * 10
    data = tmp_path / "data"
    data.mkdir()
    (data / "alpaca_data.json").write_text(json.dumps(rows))
    as_dolly = [
        {"instruction": r["instruction"], "context": "", "response": r["output"], "category": f"category {i % 8}"}
        for i, r in enumerate(rows)
    ]
    (data / "databricks-dolly-15k.jsonl").write_text("\n".join(map(json.dumps, as_dolly)))
    as_gsm = [{"question": r["instruction"], "answer": f"{r['output']} #### 7"} for r in rows]
    (data / "gsm8k_train.jsonl").write_text("\n".join(map(json.dumps, as_gsm)))
    languages = ["X86-64 Assembly", *(f"language {i}" for i in range(9))]
    as_rosetta = [{**r, "input": languages[min(i, i % 9 + 1)]} for i, r in enumerate(rows)]
    (data / "rosetta_alpaca.json").write_text(json.dumps(as_rosetta))
    for language in ("python", "javascript", "java", "ruby", "php", "go"):
        folder = data / language / "final" / "jsonl" / "train"
        folder.mkdir(parents=True)
        as_code = [{"docstring": r["instruction"], "language": language, "code": r["output"]} for r in rows[:200]]
        with gzip.open(folder / f"{language}_train_0.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, as_code)))
    model = shutil.copytree(tiny_causal, tmp_path / "model")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 1024}))
    for name in {read(file)["model"]["type"].partition("@")[0] for file in FILES}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_framework(name: str, **more):
    """The framework's configuration of a file."""
    from federatedscope.core.configs.config import global_cfg

    import fs_lowrank.engines.federatedscope  # noqa: F401

    cfg = global_cfg.clone()
    cfg.merge_from_file(str(FOLDER / name))
    overrides = {"federate.method": "rolora", **more}
    cfg.merge_from_list([part for pair in overrides.items() for part in pair])
    return cfg


@pytest.mark.parametrize("name", files("standalone", "distributed"))
def test_every_value_of_a_shipped_file_is_in_the_configuration(name):
    from fs_lowrank.engines.federatedscope.config import from_framework
    from fs_lowrank.settings import flatten

    config = from_framework(of_framework(name))
    given = flatten(read(name))
    assert len(given) > 15
    (adapter,) = given.pop("llm.adapter.args", [{}])
    assert adapter.items() <= config.get("llm.adapter.args.0").items()
    # The task decides the trainer, and rolora trains an adapter.
    assert given.pop("trainer.type") == "llmtrainer" and given.pop("llm.adapter.use", True)
    assert {key: config.get(key) for key in given} == given


@pytest.mark.parametrize("name", files("refused"))
def test_a_shipped_file_that_our_methods_do_not_run(name):
    from fs_lowrank.engines.federatedscope.config import from_framework

    with pytest.raises(UserError) as caught:
        from_framework(of_framework(name))
    what, line = str(caught.value).splitlines()
    assert what == "federate.method = rolora on engine='federatedscope' does not honour; remove:"
    assert line.strip() == REFUSED[refused(read(name))]


def run_round(name: str):
    """Run the first round of a file, and return its record and the session's data."""
    from federatedscope.core.auxiliaries.data_builder import get_data
    from federatedscope.core.auxiliaries.runner_builder import get_runner
    from federatedscope.core.auxiliaries.worker_builder import get_client_cls, get_server_cls

    from fs_lowrank.engines.federatedscope.session import close_session, current

    cfg = of_framework(name, **{"federate.total_round_num": 1, "use_gpu": torch.cuda.is_available()})
    try:
        data, changed = get_data(config=cfg.clone(), client_cfgs=None)
        cfg.merge_from_other_cfg(changed)
        cfg.freeze(inform=False, save=False)
        classes = {"server_class": get_server_cls(cfg), "client_class": get_client_cls(cfg)}
        get_runner(data=data, config=cfg.clone(), **classes).run()
        (record,) = current().result.history
        return record, current().workspace.data
    finally:
        close_session()


@pytest.mark.parametrize("name", files("standalone"))
def test_a_shipped_file_runs_a_round(downloaded, no_curves, name):
    record, data = run_round(name)
    federate = read(name)["federate"]
    clients = 1 if federate.get("client_idx_for_local_train") else federate["client_num"]
    assert record["clients"] == list(range(1, clients + 1)) and not record["failed"]
    assert record["uplink_bytes"] > 0 and record["samples"] > 0


def test_the_shipped_server_and_client_run_a_round_together(downloaded, cluster):
    ports = cluster.free_ports(2)
    places = {
        "model.type": f"{downloaded / 'gpt2'}@huggingface_llm",
        "data.root": str(downloaded / "data"),
        "outdir": str(downloaded / "run"),
        "federate.save_to": str(downloaded / "gpt2_new.ckpt"),
        "distribute.server_port": ports[0],
        "distribute.client_port": ports[1],
    }
    more = {"federate.method": "rolora", "federate.total_round_num": 1, "use_gpu": torch.cuda.is_available()}
    assert set(files("distributed")) == {"server.yaml", "client.yaml"}
    started = [cluster.start(str(FOLDER / name), {**more, **places}) for name in ("server.yaml", "client.yaml")]
    server, client = (cluster.wait(*process, timeout=120) for process in started)
    assert (server.code, client.code) == (0, 0), (server.said, client.said)
    (record,) = server.history
    assert record["clients"] == [1] and not record["failed"] and record["uplink_bytes"] > 0
