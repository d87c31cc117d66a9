"""The folder of a run: started, resumed, replaced, and not changed by a write that fails."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import fs_lowrank
from fs_lowrank import RunFailed, UserError, cli
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.finished import load_run
from fs_lowrank.models.names import named_tensors
from fs_lowrank.rounds import checkpoints, recorder
from fs_lowrank.runs import environment, records
from fs_lowrank.runs.folder import CONTENTS, claim, remove_run
from fs_lowrank.runs.result import sort_configs
from fs_lowrank.runs.shown import read_runs
from tests.cases import killed_after
from tests.torture.child import difference

FEW = {"federate.client_num": 2, "train.local_update_steps": 1}


@pytest.fixture
def config(few):
    return few("run")


def stopped(config):
    """A run that is stopped after round 1."""
    fs_lowrank.run(config, on_round=lambda record: True)
    return Path(config.outdir)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def tensors(result):
    return {n: p.detach().clone() for n, p in named_tensors(result.model, ("adapter", "head")).items()}


@pytest.mark.more
def test_a_finished_run_that_is_continued_and_killed_has_not_ended(config):
    folder = Path(fs_lowrank.run(config).outdir)
    assert load_run(folder)
    killed_after(config.replace({"federate.total_round_num": 4}), 3, resume=True)
    with pytest.raises(UserError, match="holds a run that has not ended"):
        load_run(folder)
    (run,) = read_runs([folder])
    assert not run.ended and len(run.history) == 3
    again = fs_lowrank.run(config.replace({"federate.total_round_num": 4}), resume=True)
    assert len(again.history) == 4 and load_run(folder)


# -- replaced ------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_run_is_replaced_with_overwrite(config, tmp_path):
    folder = stopped(config)
    (folder / "notes.txt").write_text("mine")
    (folder / "process_2.log").write_text("of the run that is replaced")
    with pytest.raises(
        UserError, match="holds a run already; continue it with resume=True, replace it with overwrite=True"
    ):
        fs_lowrank.run(config)
    with pytest.raises(UserError, match="resume continues a run and overwrite removes it"):
        fs_lowrank.run(config, resume=True, overwrite=True)
    result = fs_lowrank.run(config.replace({"seed": 9}), overwrite=True)
    assert len(result.history) == 2 and (folder / "notes.txt").read_text() == "mine"
    assert json.loads((folder / "summary.json").read_text())["seed"] == 9
    assert not {p.name for p in folder.iterdir()} - {*CONTENTS, "notes.txt", ".lock"}, "a file of a run is left"


def test_a_run_that_another_process_writes_to_is_neither_removed_nor_continued(config):
    engine = LocalEngine(config)
    engine.recorder.start(resume=False)
    for write in (lambda: remove_run(Path(config.outdir)), lambda: LocalEngine(config).recorder.start(resume=True)):
        with pytest.raises(RunFailed, match="another run is writing"):
            write()
    assert (Path(config.outdir) / "config.yaml").exists()
    engine.recorder.release()


def test_no_process_writes_into_a_folder_that_another_run_writes_to(config):
    folder = Path(config.outdir)
    with claim(folder), pytest.raises(RunFailed, match="another run is writing"):
        LocalEngine(config.replace({"federate.process_num": 2}))
    assert not list(folder.glob("process_*.log"))
    with claim(folder):
        pass


@pytest.mark.more
@pytest.mark.parametrize("content", ['{"schema": 1, "test_acc": 0.', "[1]", '{"test_acc": "high"}', None])
def test_metrics_before_round_1_that_are_lost(config, caplog, content):
    config = config.replace({"eval.before": True})
    before, path = fs_lowrank.run(config).before, Path(config.outdir) / "before.json"
    assert before and fs_lowrank.run(config, resume=True).before == before
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert fs_lowrank.run(config, resume=True).before == {}
    assert "the result lacks the metrics before round 1" in caplog.text


@pytest.mark.more
def test_the_advice_for_damaged_checkpoints_works(config, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.to_dict()))
    arguments = ["run", "--cfg", str(tmp_path / "run.yaml")]
    assert cli.main(arguments) == 0
    for path in (tmp_path / "run" / "checkpoint").glob("*/state.safetensors"):
        os.truncate(path, 40)
    assert cli.main([*arguments, "--resume"]) == 2
    assert "start it anew with --overwrite" in capsys.readouterr().err
    assert cli.main([*arguments, "--overwrite"]) == 0


def test_a_name_that_no_terminal_can_show(capfd):
    code = "import sys; from fs_lowrank.cli import main; sys.exit(main(['run', '--cfg', '\\udc80.yaml']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "\\udc80.yaml" in done.stderr and "Traceback" not in done.stderr


# -- resumed -------------------------------------------------------------------------------------------


def test_a_record_is_on_the_disk_before_the_checkpoint_that_includes_its_round(config, monkeypatch):
    order, append, save = [], records.append_line, checkpoints.save_checkpoint

    def appended(path, line):
        append(path, line)
        order.append(("record", len(path.read_text().splitlines())))

    def saved(folder, round, *args, **options):
        order.append(("checkpoint", round))
        return save(folder, round, *args, **options)

    monkeypatch.setattr(records, "append_line", appended)
    monkeypatch.setattr(checkpoints, "save_checkpoint", saved)
    fs_lowrank.run(config)
    assert order == [("record", 1), ("checkpoint", 1), ("record", 2), ("checkpoint", 2)]


@pytest.mark.more
def test_a_record_that_was_changed_by_hand_is_named_on_resume(config):
    folder = stopped(config)
    lines = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(lines.replace('"uplink_bytes": ', '"uplink_bytes": 1'))
    with pytest.raises(UserError, match="rounds.jsonl, line 1: the record of round 1 is not what the run wrote"):
        fs_lowrank.run(config, resume=True)


@pytest.mark.more
def test_checkpoints_that_a_kill_left_over_are_removed_on_resume(config):
    """The run was killed while a checkpoint was written, or before the oldest one was removed."""
    config = config.replace({"federate.total_round_num": 3})
    fs_lowrank.run(config)
    folder = Path(config.outdir) / "checkpoint"
    assert sorted(p.name for p in folder.iterdir()) == ["round_000002", "round_000003"]
    shutil.copytree(folder / "round_000002", folder / "round_000001")
    shutil.copytree(folder / "round_000002", folder / ".round_000004.1.writing")
    fs_lowrank.run(config, resume=True)
    assert sorted(p.name for p in folder.iterdir()) == ["round_000002", "round_000003"]
    # The checkpoint from which the run continues is kept, even if there are newer, damaged ones.
    shutil.rmtree(folder / "round_000003")
    for newer in ("round_000003", "round_000004"):
        (folder / newer).mkdir()
    checkpoints.remove_old(folder, 2, loaded=2)
    assert sorted(p.name for p in folder.iterdir()) == ["round_000002", "round_000003", "round_000004"]


@pytest.mark.more
@pytest.mark.parametrize("threads", [1, 2])
def test_results_depend_on_the_number_of_threads_in_their_last_digits_only(config, caplog, threads):
    """They are equal to the bit with equal threads and to 1e-5 otherwise; resuming with others is reported."""
    whole = tensors(fs_lowrank.run(config.replace({"outdir": config.outdir + "_whole"})))
    folder = stopped(config)
    before = torch.get_num_threads()
    assert before == 1
    try:
        torch.set_num_threads(threads)
        with caplog.at_level(logging.WARNING, "fs_lowrank"):
            resumed = tensors(fs_lowrank.run(config, resume=True))
    finally:
        torch.set_num_threads(before)
    for name, value in whole.items():
        if threads == before:
            assert torch.equal(resumed[name], value), name
        else:
            torch.testing.assert_close(resumed[name], value, atol=1e-5, rtol=0)
    assert ("resumed with another environment (threads 1 → 2)" in caplog.text) == (threads == 2)
    content = json.loads((folder / "environment.json").read_text())
    assert content["threads"] == 1 and "new_weights" in content
    (entry,) = content["resumed"]
    assert entry["after_round"] == 1 and entry["threads"] == threads and entry["versions"] == content["versions"]


@pytest.mark.more
def test_another_version_is_named_on_resume(config, caplog, monkeypatch):
    stopped(config)
    now = environment.versions()
    monkeypatch.setattr(environment, "versions", lambda: {**now, "torch": "9.9"})
    fs_lowrank.run(config, resume=True)
    assert f"torch {now['torch']} → 9.9" in caplog.text
    for content in ("{", "[" * 100_000, '{"resumed": 5}', '{"versions": null}'):
        caplog.clear()
        (Path(config.outdir) / "environment.json").write_text(content)
        fs_lowrank.run(config, resume=True)
        assert (
            "environment.json cannot be read" in caplog.text and "the run's first environment is unknown" in caplog.text
        )


@pytest.mark.more
@pytest.mark.parametrize(
    ("file", "key", "value", "what"),
    [
        ("config.json", "layer_norm_eps", 1e-3, "configuration of the model"),
        ("tokenizer_config.json", "model_max_length", 100, "tokenizer"),
        ("tokenizer_config.json", "stride", 1, "tokenizer"),
    ],
)
def test_files_of_the_base_that_changed_are_named_on_resume(
    few, tiny_encoder, tmp_path, caplog, file, key, value, what
):
    """Neither changes weights or tokens; the model computes something else, or the saved tokenizer is another."""
    base = Path(shutil.copytree(tiny_encoder, tmp_path / "base"))
    config = few("run", {"model.type": f"{base}@transformers"})
    stopped(config)
    kept = (base / file).read_text()
    (base / file).write_text(json.dumps({**json.loads(kept), key: value}))
    with pytest.raises(UserError, match=f"the {what} is not what the run in .* started with"):
        fs_lowrank.run(config, resume=True)
    (base / file).write_text(json.dumps(json.loads(kept), indent=7))  # the same content
    fs_lowrank.run(config, resume=True, on_round=lambda record: True)


# -- a write that fails ----------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("what", ["tokenizer", "adapter", "summary"])
def test_a_disk_that_is_full_at_the_end_of_a_run(config, monkeypatch, what):
    """The error is one line that names the file; older files remain, and the run ends when it is resumed."""
    fs_lowrank.run(config)
    folder = Path(config.outdir)
    before = files(folder)
    engine = LocalEngine(config)

    def full(*args, **options):
        if what == "tokenizer":
            raise Exception("No space left on device (os error 28)")  # as raised by the library tokenizers
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if what == "tokenizer":
            patch.setattr(engine.workspace.tokenizer, "save_pretrained", full)
        elif what == "adapter":
            patch.setattr(type(engine.model), "save_pretrained", full)
        else:
            patch.setattr(
                recorder, "to_json", lambda value, **layout: full() if "final" in value else json.dumps(value)
            )
        with pytest.raises(RunFailed, match=f"{folder}.* No space left.*run again.* with resume=True"):
            engine.run(resume=True)
    changed = {n for n in before if before[n] != files(folder).get(n)} - {"environment.json", "data.json"}
    of_ended = {"checksums.json", "summary.json"}
    assert changed == of_ended and not any((folder / name).exists() for name in of_ended)
    assert not [n for n in files(folder) if "writing" in n]
    assert len(fs_lowrank.run(config, resume=True).history) == 2 and (folder / "checksums.json").exists()


# -- the order of what is written ------------------------------------------------------------------------


def test_lists_of_names_in_an_adapters_config_are_sorted(tmp_path):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({"target_modules": ["value", "query"], "r": 2, "layers_to_transform": [2, 1]}))
    sort_configs(tmp_path)
    content = json.loads(path.read_text())
    assert list(content) == ["layers_to_transform", "r", "target_modules"]
    assert content["target_modules"] == ["query", "value"] and content["layers_to_transform"] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rolora", "pfedlora"])
def test_files_do_not_depend_on_the_hash_seed_of_the_process(settings, tmp_path, method):
    few = {**settings, "federate": {"method": method, "client_num": 2, "total_round_num": 2}}
    if method == "rolora":
        few["llm"]["adapter"]["args"][0]["modules"] = ["query", "key", "value", "dense"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(few))
    command = [sys.executable, "-m", "fs_lowrank", "run", "--cfg", str(tmp_path / "run.yaml"), "outdir"]
    for seed in "12":
        environ = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        words, place = [*command, str(tmp_path / seed)], Path(cli.__file__).parents[1]
        subprocess.run(words, check=True, capture_output=True, env=environ, timeout=300, cwd=place)
    assert not difference(tmp_path / "1", tmp_path / "2")
