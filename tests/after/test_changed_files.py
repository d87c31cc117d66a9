"""Finished runs whose files have changed since: damaged adapters, another base, another tokenizer beside the base.

``checksums.json`` tells what has changed in the folder of a run. Without it, as in folders of version 0.1.0, more is
left to what the files themselves say.
"""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import fs_lowrank
from fs_lowrank import UserError, cli
from fs_lowrank.config import load_config
from fs_lowrank.data.tokenize import tokenizer_fingerprint
from fs_lowrank.errors import say_once
from fs_lowrank.finished import evaluate_rows, load_run, read_rows
from fs_lowrank.models.build import build_tokenizer
from fs_lowrank.runs.shown import read_runs
from fs_lowrank.testing import small
from fs_lowrank.testing.bench import logits

pytestmark = pytest.mark.more


def unsealed(run):
    """The folder of a run, whose files are no longer compared with what it left."""
    (run / "checksums.json").unlink()
    return run


def copy_of(result, folder):
    """The folder of a run, and the folder of its base, as copies that a test may change."""
    run = shutil.copytree(result.outdir, folder / "run")
    path = run / "config.yaml"
    base = load_config(path).model.type.rpartition("@")[0]
    path.write_text(path.read_text().replace(base, str(folder / "base")))
    return unsealed(run), shutil.copytree(base, folder / "base")


def tensors(change):
    """Damage to an adapter: the tensors of its file by another rule."""

    def damage(folder):
        save_file(change(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")

    return damage


def described(**keys):
    """Damage to an adapter: other values in its configuration."""

    def damage(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return damage


def content(name, change):
    """Damage to an adapter: the bytes of one file by another rule."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DAMAGE = {
    "prefixed": (tensors(lambda all: {f"x.{n}": t for n, t in all.items()}), FILE, r"of other names \(x.base_model"),
    "no lora_B": (tensors(lambda all: {n: t for n, t in all.items() if "lora_B" not in n}), FILE, "lora_B.weight"),
    "one more": (tensors(lambda all: {**all, "y": torch.ones(2)}), FILE, r"there is no place for \(y\)"),
    "shape": (
        tensors(lambda all: {n: t[:1].clone() if "lora_B" in n else t for n, t in all.items()}),
        FILE,
        r"lora_B.weight is \(1, 2\) there, expected \(",
    ),
    "cut": (content(FILE, lambda read: read[:-9]), FILE, "read as an adapter of this model, raises"),
    "gone": (lambda folder: (folder / FILE).unlink(), FILE, "is missing"),
    "config cut": (content(CONFIG, lambda read: read[:9]), CONFIG, "read as an adapter of this model, raises"),
    "config a list": (content(CONFIG, lambda read: b"[]"), CONFIG, "read as an adapter of this model, raises"),
    "config gone": (lambda folder: (folder / CONFIG).unlink(), CONFIG, "is missing"),
    "kind": (described(peft_type="FOO"), CONFIG, "read as an adapter of this model, raises"),
    "kind of another": (described(peft_type="IA3", feedforward_modules=[]), FILE, "ia3_l"),
    "modules": (described(target_modules=["none"]), CONFIG, "read as an adapter of this model, raises"),
    "rank": (described(r=7), FILE, r"lora_A.weight is \(2, "),
}


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_adapter_is_refused_and_not_used_without_what_it_lacks(runs, tmp_path, name):
    damage, file, said = DAMAGE[name]
    for task, result in runs.items():
        folder = shutil.copytree(result.outdir, tmp_path / task)
        damage(folder / "adapter")
        with pytest.raises(
            UserError,
            match=rf"{folder}/adapter/adapter_\w+\.(json|safetensors) differs from the file that the run wrote",
        ):
            load_run(folder)
        unsealed(folder)
        with pytest.raises(UserError, match=f"adapter/{file}.*{said}.*; put back the files of this folder"):
            _ = load_run(folder).model


def test_a_base_that_is_spread_over_devices_refuses_the_same(runs, instructions_jsonl, tmp_path):
    """The place of the weights changes neither the fingerprint of the base nor what is asked of the adapter."""
    run, _ = copy_of(runs["instructions"], tmp_path)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("device_map: ''", "device_map: auto"))
    loaded = load_run(run)
    scores = evaluate_rows(loaded, read_rows(loaded, instructions_jsonl))
    one = load_run(runs["instructions"].outdir)
    assert scores["loss"] == pytest.approx(evaluate_rows(one, read_rows(one, instructions_jsonl))["loss"], abs=1e-6)
    DAMAGE["no lora_B"][0](run / "adapter")
    with pytest.raises(UserError, match="lora_B.weight"):
        _ = load_run(run).model


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`")
def test_an_adapted_output_layer_loads_although_its_file_has_the_weight_of_the_base(
    tiny_causal, instructions_jsonl, tmp_path
):
    settings = small.causal_settings(tiny_causal, instructions_jsonl, tmp_path / "run")
    settings["llm"]["adapter"]["args"] = [{"r": 2, "alpha": 6, "modules": ["q_proj", "lm_head"]}]
    result = fs_lowrank.run(load_config(settings, {"federate.total_round_num": 1, "lowrank.pictures": False}))
    file = result.outdir / "adapter" / FILE
    assert any("base_layer" in name for name in load_file(file))
    run = load_run(result.outdir)
    examples = read_rows(run, instructions_jsonl).examples
    torch.testing.assert_close(logits(run.model, examples), logits(result.model, examples))
    unsealed(result.outdir)
    tensors(lambda all: {n: t[:-1].clone() if "base_layer" in n else t for n, t in all.items()})(file.parent)
    with pytest.raises(UserError, match="lm_head.base_layer.weight is"):
        _ = load_run(result.outdir).model


# -- checksums -----------------------------------------------------------------------------------------


def flipped(path):
    """Flip one bit in the middle of a file, where a tensor has its values."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def read_all(folder, best=False):
    """All that is read of a finished run, by what comes after it."""
    run = load_run(folder, best)
    return run, run.which


def test_a_flipped_bit_in_what_was_trained_is_refused(runs, reviews_csv, tmp_path, capsys):
    """It is a valid file of another result, which evaluate and predict used as if it were the run's."""
    run = shutil.copytree(runs["classes"].outdir, tmp_path / "renamed")
    assert cli.main(["evaluate", str(run), "--data", str(reviews_csv)]) == 0
    flipped(run / "adapter" / FILE)
    capsys.readouterr()
    for command in (["evaluate"], ["predict", "--out", str(tmp_path / "out.csv"), "--column", "guess"]):
        assert cli.main([command[0], str(run), "--data", str(reviews_csv), *command[1:]]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            f"{run / 'adapter' / FILE} differs from the file that the run wrote (its checksum does not match)" in line
        )
        assert "--resume" in line and f"if it was changed on purpose, remove {run / 'checksums.json'}" in line
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0, "the page reads no weights"
    unsealed(run)  # what the message advises
    assert cli.main(["evaluate", str(run), "--data", str(reviews_csv)]) == 0


def test_every_file_that_is_read_of_a_finished_run_is_compared(runs, tmp_path):
    outdir = runs["classes"].outdir
    sums = json.loads((outdir / "checksums.json").read_text())
    assert list(sums) == sorted(sums)
    whole = {p.relative_to(outdir).as_posix() for p in outdir.rglob("*") if p.is_file()}
    beside = {"config.yaml", "summary.json", "rounds.jsonl", "environment.json"}
    table = {"data.json", "rows.npz"}
    of_weights = {name for name in whole if name.split("/")[0] in ("adapter", "adapter_best") and "README" not in name}
    assert of_weights | beside | table == set(sums) and any(name.startswith("adapter_best") for name in sums)
    for name in sorted(sums):
        run = shutil.copytree(outdir, tmp_path / "run")
        flipped(run / name)
        named = f"{run / name}"
        if name not in table:
            with pytest.raises(UserError) as refused:
                read_all(run, best=name.startswith("adapter_best"))
            assert named in str(refused.value) and len(str(refused.value).splitlines()) == 1
        if name in beside - {"environment.json"} | table:
            with pytest.raises(UserError) as refused:
                read_runs([run])
            assert named in str(refused.value) and len(str(refused.value).splitlines()) == 1
        shutil.rmtree(run)


def test_what_is_read_by_nobody_may_change(runs, tmp_path):
    run = shutil.copytree(runs["classes"].outdir, tmp_path / "run")
    (run / "adapter" / "README.md").write_text("Our model of reviews.")
    for name in ("adapter_best", "checkpoint"):
        shutil.rmtree(run / name)
    (run / "notes.txt").write_text("kept for the paper")
    read_all(run)
    read_runs([run])


@pytest.mark.parametrize("content", ["{", "[]", '{"config.yaml": 5}', "[" * 100_000], ids=lambda text: text[:4])
def test_a_damaged_list_of_checksums_is_one_line(runs, tmp_path, content):
    run = shutil.copytree(runs["classes"].outdir, tmp_path / "run")
    (run / "checksums.json").write_text(content)
    with pytest.raises(
        UserError, match=f"{run}/(checksums.json|config.yaml) differs from the file that the run wrote .*remove"
    ):
        load_run(run)


def test_a_resumed_run_writes_what_is_damaged_anew(runs, tmp_path):
    outdir = runs["classes"].outdir
    run = shutil.copytree(outdir, tmp_path / "run")
    flipped(run / "adapter" / FILE)
    config = load_config(run / "config.yaml").replace({"outdir": str(run), "expname": ""})

    def on_round(record):
        assert not (run / "checksums.json").exists(), "files are changing, and the page may read them meanwhile"

    fs_lowrank.run(config.replace({"federate.total_round_num": 4}), resume=True, on_round=on_round)
    read_all(run)
    again = json.loads((run / "checksums.json").read_text())
    assert list(again) == list(json.loads((outdir / "checksums.json").read_text()))


# -- the base ------------------------------------------------------------------------------------------


def scale(base):
    """Other weights under the names of the base."""
    path = Path(base) / "model.safetensors"
    save_file({name: 3 * t for name, t in load_file(path).items()}, path, metadata={"format": "pt"})


def test_another_base_at_its_place_is_refused(runs, tmp_path):
    for task, result in runs.items():
        run, base = copy_of(result, tmp_path / task)
        _ = load_run(run).model  # where the base lies does not matter
        scale(base)
        with pytest.raises(UserError, match="has other weights than when the run in .*put back the files that were"):
            _ = load_run(run).model


def test_other_settings_of_the_base_are_refused(runs, tmp_path):
    """With the same weights the model computes something else."""
    run, base = copy_of(runs["classes"], tmp_path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(UserError, match="has other settings in its config.json than when the run in"):
        _ = load_run(run).model


def test_where_versions_differ_another_base_is_a_warning(runs, tmp_path, caplog):
    """Another version may draw new weights otherwise, which does not make the run useless."""
    run, base = copy_of(runs["classes"], tmp_path)
    scale(base)
    path = run / "environment.json"
    then = json.loads(path.read_text())
    now = then["versions"]["transformers"]
    say_once.cache_clear()
    path.write_text(json.dumps({**then, "threads": 4711, "resumed": []}))
    with pytest.raises(UserError, match="has other weights"):  # the number of threads changes no weight
        _ = load_run(run).model
    older = {**then, "versions": {**then["versions"], "transformers": "5.0.0"}}
    path.write_text(json.dumps(older))
    assert load_run(run).model is not None
    assert f"what has changed here: transformers 5.0.0 → {now}" in caplog.text
    path.write_text(json.dumps({**older, "resumed": [{**then, "after_round": 1}]}))
    with pytest.raises(UserError, match="has other weights"):  # it ended with these versions
        _ = load_run(run).model
    path.unlink()
    assert load_run(run).model is not None and "the run's versions are not known" in caplog.text


def test_a_summary_that_does_not_say_what_the_base_was_is_read(runs, tmp_path, caplog):
    run, base = copy_of(runs["classes"], tmp_path)
    scale(base)
    summary = json.loads((run / "summary.json").read_text())
    assert summary.pop("model") and summary.pop("configuration")
    (run / "summary.json").write_text(json.dumps(summary))
    assert load_run(run).model is not None and not caplog.records


def test_a_model_that_was_saved_whole_needs_no_base(tiny_encoder, reviews_csv, tmp_path):
    settings = small.encoder_settings(tiny_encoder, reviews_csv, tmp_path / "made")
    keys = {"federate.method": "fedavg", "federate.total_round_num": 1, "lowrank.pictures": False}
    run, base = copy_of(fs_lowrank.run(load_config(settings, keys)), tmp_path)
    shutil.rmtree(base)
    loaded = load_run(run)
    assert evaluate_rows(loaded, read_rows(loaded, reviews_csv))["rows"] == len(pd.read_csv(reviews_csv))


# -- the tokenizer -------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_one_that_was_saved_with_the_adapter(runs, reviews_csv, tmp_path):
    run, base = copy_of(runs["classes"], tmp_path)
    before = build_tokenizer(load_config(run / "config.yaml"))
    wanted = tokenizer_fingerprint(before)
    path = base / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    words = [word for word in vocabulary if not word.startswith("[")]
    vocabulary.update(zip(words, [vocabulary[word] for word in reversed(words)]))
    path.write_text(json.dumps(content))
    loaded = load_run(run)
    assert tokenizer_fingerprint(loaded.tokenizer) == wanted
    assert tokenizer_fingerprint(build_tokenizer(loaded.config)) != wanted
    one = load_run(runs["classes"].outdir)
    assert evaluate_rows(loaded, read_rows(loaded, reviews_csv)) == evaluate_rows(one, read_rows(one, reviews_csv))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # version 0.1.0 saved none with an adapter
        (run / "adapter" / name).unlink()
    assert tokenizer_fingerprint(load_run(run).tokenizer) != wanted


def test_a_damaged_tokenizer_is_one_line(runs, tmp_path):
    run, _ = copy_of(runs["classes"], tmp_path)
    path = run / "adapter" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(UserError, match="cannot load the tokenizer of .*run/adapter"):
        load_run(run)
