"""Configurations written for a file of the user: what is guessed, what is refused, and that they run."""

import json
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from fs_lowrank import UserError, cli, load_config
from fs_lowrank.data.template import SYNONYMS
from fs_lowrank.settings.reading import Loader
from fs_lowrank.start import _USUAL, Setup, _yaml, draft
from fs_lowrank.testing.small import make_reviews


@pytest.fixture
def at(tmp_path, monkeypatch):
    """``at(name, table)`` writes a file to the working folder, which is otherwise empty."""
    monkeypatch.chdir(tmp_path)

    def write(name, table):
        path = tmp_path / name
        if name.endswith(".csv"):
            table.to_csv(path, index=False)
        else:
            table.to_json(path, orient="records", lines=True)
        return path

    return write


def given(path, model="", **said):
    """What the user says: columns by role, and other keys."""
    columns = {role: said.pop(role) for role in (*_USUAL, *SYNONYMS) if role in said}
    return Setup(path, columns, model=str(model), **said)


def made(path, model, **said):
    text = draft(given(path, model=model, **said))
    return yaml.safe_load(text), text


def test_columns_modules_and_layers_are_found(at, tiny_encoder):
    reviews = make_reviews(200).rename(columns={"text": "Review", "label": "stars"})
    path = at("own reviews.csv", reviews[["stars", "Review"]])
    tree, text = made(path, tiny_encoder, clients=4)
    assert tree["data"]["args"] == [{"text": "Review", "label": "stars"}]
    assert "guessed: about" not in text and "guessed: the usual" not in text and "a client has 40 rows" in text
    assert "guessed: the text is Review, the label is stars" in text
    assert "guessed: the label" in made(path, tiny_encoder, text="Review")[1]
    (args,) = tree["llm"]["adapter"]["args"]
    assert args["modules"] == ["query", "value"] and args["layers"] == [2] and tree["llm"]["tok_len"] == "auto"
    assert tree["federate"] == {"method": "rolora", "client_num": 4, "sample_client_num": -1, "total_round_num": 8}
    assert load_config(tree).dataloader.batch_size == 16
    assert all("#" in line for line in text.splitlines() if "guessed" in line or "proposed" in line)


def test_all_rows_of_data_with_their_own_splits_are_for_training(tmp_path, tiny_encoder):
    rows = datasets.Dataset.from_pandas(make_reviews(200))
    splits = {"train": rows, "validation": rows.select(range(20)), "test": rows.select(range(20))}
    for names, share in ((("train",), 40), (("train", "test"), 45), (tuple(splits), 50)):
        path = tmp_path / "-".join(names)
        datasets.DatasetDict({name: splits[name] for name in names}).save_to_disk(str(path))
        assert f"about {share} training rows each" in draft(given(path, model=tiny_encoder, clients=4))


def test_pairs_instructions_and_conversations(at, tiny_encoder, tiny_causal, instructions_jsonl):
    two = make_reviews(80).assign(text_pair=make_reviews(80, seed=5)["text"])
    tree, text = made(at("named.csv", two), tiny_encoder)
    assert tree["data"]["args"] == [{"text": "text", "text_pair": "text_pair", "label": "label"}]
    assert "guessed: about 32 training rows" in text and "guessed, since a client has few rows" in text
    two = two.rename(columns={"text": "sentence1", "text_pair": "sentence2"})
    tree, _ = made(at("pairs.csv", two), tiny_encoder, text="sentence1", text_pair="sentence2")
    assert tree["data"]["args"] == [{"text": "sentence1", "text_pair": "sentence2", "label": "label"}]
    tree, text = made(instructions_jsonl, tiny_causal)
    assert tree["data"]["args"] == [{"instruction": "instruction", "input": "input", "output": "output"}]
    assert tree["model"]["type"].endswith("@huggingface_llm") and tree["data"]["splitter"] == "iid"
    (args,) = tree["llm"]["adapter"]["args"]
    assert args["modules"] == ["q_proj", "v_proj"] and load_config(tree).model.task == "CausalLM"
    tree, text = made(instructions_jsonl, f"{tiny_causal}@transformers", text="input", label="category")
    assert tree["data"]["args"] == [{"text": "input", "label": "category"}] and "3 classes" in text
    tree, _ = made(instructions_jsonl, tiny_encoder, text="input", label="output")
    assert tree["data"]["args"] == [{"text": "input", "label": "output"}] and tree["model"]["type"].endswith(
        "transformers"
    )


NAMES = "no yes null ~ NaN true on y 1e5 1e-3 0x1F 1_000 12 .inf 2026-01-01 = @x -a a:b [a] #a %a &a *a!".split()
NAMES += ["a, b", "it's", 'say "no"', "a: b", "a #b", " a ", "two\nlines", "ligne\u2028é", "a" * 200, "a " * 60 + "b"]


def test_whatever_data_type_reads(at, tiny_encoder, tiny_causal, capsys):
    reviews = make_reviews(120)
    folder = at("a.csv", reviews).parent
    reviews.to_parquet(folder / "whole.parquet")
    datasets.Dataset.from_pandas(reviews).save_to_disk(folder / "saved")
    for name, stem in (("whole.parquet", "whole"), ("saved", "saved")):
        tree, _ = made(folder / name, tiny_encoder)
        assert tree["outdir"] == f"runs/{stem}" and tree["data"]["args"] == [{"text": "text", "label": "label"}]
        assert f"{name}: 120 rows, 2 classes" in _
    (folder / "cc").mkdir()
    for number in range(1, 4):
        reviews.to_csv(folder / "cc" / f"client_{number}.csv", index=False)
    options = ["--model", str(tiny_encoder)]
    assert cli.main(["init", "cc/*.csv", *options]) == 0
    out = capsys.readouterr().out
    assert "written to cc.yaml" in out and "client_num: 3 " in out and "  splitter: file\n" in out
    assert cli.main(["init", "cc", *options]) == 2
    assert "For tables, give a file's name, or a pattern: 'cc/*.csv'" in capsys.readouterr().err
    talk = [{"from": "human", "value": "is it good"}, {"from": "gpt", "value": "it is good"}]
    (folder / "talks.json").write_text(json.dumps([{"conversations": talk}] * 50))
    tree, text = made(folder / "talks.json", tiny_causal)
    assert "args" not in tree["data"] and "guessed: conversations" in text


@pytest.mark.parametrize("name", ["site", "Hospital", "client_id", "users"])
def test_sites_in_a_column_are_clients(at, tiny_encoder, name):
    """Rather than the files that the rows are in."""
    table = make_reviews(90).drop(columns="domain")
    table = table.assign(**{name: [f"of {i % 3}" for i in range(90)]})
    tree, text = made(at("own.csv", table), tiny_encoder)
    assert tree["federate"]["client_num"] == 3 and "simulated" not in text
    assert tree["data"]["splitter"] == "field" and tree["data"]["splitter_args"] == [{"field": name}]
    for i, part in enumerate((table[:40], table[40:])):
        at(f"part{i}.csv", part)
    tree, _ = made(Path("part*.csv"), tiny_encoder)
    assert tree["federate"]["client_num"] == 3 and tree["data"]["splitter"] == "field"
    alone = table.assign(**{name: range(90)})
    assert "# simulated clients" in made(at("own.csv", alone), tiny_encoder)[1]


def test_several_files_are_clients_and_a_run_says_where_clients_are_simulated(at, tiny_encoder, capsys):
    for i in range(4):
        at(f"site{i}.csv", make_reviews(30, seed=i).drop(columns="domain"))
    few = ["federate.total_round_num", "1", "train.local_update_steps", "1", "outdir", "run"]
    assert cli.main(["run", "--data", "site*.csv", "--model", str(tiny_encoder), *few]) == 0
    out = capsys.readouterr().out
    assert "rolora: 4 clients" in out and "simulated" not in out
    assert json.loads(Path("run/data.json").read_text())["partition"]["files"] == [f"site{i}.csv" for i in range(4)]
    asked = made(Path("site*.csv"), tiny_encoder, clients=5)
    assert asked[0]["data"]["splitter"] == "iid" and "# simulated clients" in asked[1]
    # what the comment advises works in the file that it is in
    tree = asked[0] | {"outdir": "other"}
    tree["federate"] |= {"client_num": 4, "total_round_num": 1}
    Path("own.yaml").write_text(yaml.safe_dump(tree))
    assert cli.main(["run", "--cfg", "own.yaml", "--dry-run"]) == 0
    assert "simulated clients: one table is dealt out (iid)" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["run", "--cfg", "own.yaml", "data.splitter", "file", *few[:-2]]) == 0


def test_one_row_without_a_label_does_not_end_init(at, tiny_encoder):
    table = make_reviews(400).astype({"label": object})
    table.loc[7, "label"] = ""
    tree, text = made(at("own.csv", table), tiny_encoder)
    assert ": 399 rows, 2 classes (0, 1)" in text and tree["data"]["args"] == [{"text": "text", "label": "label"}]


def test_columns_of_any_name(at, tiny_encoder):
    for name in NAMES:
        assert yaml.load(f"[{{text: {_yaml(name)}}}]  # a comment", Loader) == [{"text": name}], name
    table = make_reviews(60).rename(columns={"label": "no", "text": "a\nb"})
    text = draft(given(at("own.jsonl", table), text="a\nb", label="no", model=str(tiny_encoder)))
    assert yaml.load(text, Loader)["data"]["args"] == [{"text": "a\nb", "label": "no"}]


@pytest.mark.parametrize(
    "table, said, message",
    [
        (
            make_reviews(60),
            {"text": "txt"},
            "text='txt': .* no column 'txt'; did you mean 'text'.*there are: text, label",
        ),
        (
            make_reviews(60).assign(label=0.25),
            {},
            "such as 0.25, which is a regression: set model.task SequenceRegression",
        ),
        (make_reviews(150).assign(label=range(150)), {}, "150 different values in 150 rows; expected classes"),
        (
            make_reviews(60).drop(columns="label").assign(a=1, b=[*"xy"] * 30),
            {},
            "which column is the label. say label='COLUMN', of domain, b$",
        ),
        (
            pd.DataFrame({name: [f"{name} {i}" for i in range(40)] for name in ("task", "reply")}),
            {},
            "is the text. say text='COLUMN', of task, reply; of instructions .* instruction='task' and output='reply'$",
        ),
        (make_reviews(60).assign(review="x"), {}, "which column is the text. say text='COLUMN', of text, review$"),
        (make_reviews(60), {"label": "label", "output": "text"}, "label is of a classification, output of instr"),
        (make_reviews(60), {"clients": 55}, "clients=55: .* has 60 rows"),
        (make_reviews(60), {"instruction": "text"}, "which column is the output. say output='COLUMN'"),
    ],
)
def test_errors_name_the_option_to_give(at, tiny_encoder, table, said, message):
    with pytest.raises(UserError, match=message) as error:
        draft(given(at("own.csv", table), model=str(tiny_encoder), **said))
    assert "\n" not in str(error.value)


def test_a_model_of_the_other_kind_is_named(at, tiny_encoder):
    path = at("own.csv", make_reviews(60))
    with pytest.raises(UserError, match="is for CausalLM, and .*own.csv has classes"):
        draft(given(path, model=f"{tiny_encoder}@huggingface_llm", label="label"))
    with pytest.raises(UserError, match="which column is the instruction.*for plain text"):
        draft(given(path, model=f"{tiny_encoder}@huggingface_llm"))


def pictures(folder, sizes, count=24):
    """``count`` pictures each of two classes, bright and dark, of these sizes in turn."""
    draw = np.random.default_rng(0)
    for kind, light in (("day", 200), ("night", 40)):
        (folder / kind).mkdir(parents=True)
        for i in range(count):
            size = sizes[i % len(sizes)]
            values = np.clip(draw.normal(light, 20, (*size, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(values).save(folder / kind / f"{i}.png")
    return folder


def test_pictures_of_one_size_keep_it_and_others_are_resized(tmp_path):
    tree, text = made(pictures(tmp_path / "small", [(12, 16)]), "")
    assert not tree["data"].get("args") and tree["model"]["type"] == "resnet10"
    assert "48 rows, 2 classes (day, night)" in text and tree["data"]["splits"] == [0.8, 0.1, 0.1]
    tree, _ = made(pictures(tmp_path / "photos", [(12, 16), (40, 30)]), "lenet", method="fedavg", clients=3)
    assert tree["data"]["args"] == [{"size": 64}] and tree["model"]["type"] == "lenet"
    assert (tree["federate"]["method"], tree["federate"]["client_num"]) == ("fedavg", 3)
    for split in ("train", "test"):
        pictures(tmp_path / "split" / split, [(8, 8)], 12)
    tree, text = made(tmp_path / "split", "")
    assert tree["federate"]["client_num"] == 2 and "24 rows" in text
    with pytest.raises(UserError, match="'tiny@transformers' reads texts, and .* has pictures; name one of lenet"):
        made(tmp_path / "small", "tiny@transformers")


def test_a_folder_of_pictures_is_a_run_in_one_command(tmp_path, monkeypatch, capsys):
    pictures(tmp_path / "photos", [(8, 8)])
    monkeypatch.chdir(tmp_path)
    few = ["federate.total_round_num", "2", "train.local_update_steps", "2", "lowrank.width", "0.125"]
    assert cli.main(["run", "--data", "photos", *few]) == 0
    assert "photos.yaml: written for" in capsys.readouterr().out
    assert json.loads(Path("runs/photos/summary.json").read_text())["final"]["test_acc"] >= 0


def test_init_takes_the_only_file_or_folder_of_pictures_here(at, capsys):
    assert cli.main(["init"]) == 2 and "no texts or pictures are in this folder" in capsys.readouterr().err
    pictures(Path("photos"), [(8, 8)])
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/curves.png").touch(), Path("runs/one/config.yaml").touch()  # the folder of a run is none
    assert cli.main(["init"]) == 0 and "resnet10" in Path("photos.yaml").read_text()
    at("reviews.csv", make_reviews(60))
    assert cli.main(["init"]) == 2 and "init needs a FILE: photos, reviews.csv" in capsys.readouterr().err


def test_init_writes_once_and_run_runs_it(at, tiny_encoder, capsys):
    path = at("reviews.csv", make_reviews(120).rename(columns={"text": "review", "label": "stars"}))
    options = ["--text", "review", "--label", "stars", "--model", str(tiny_encoder), "--clients", "3"]
    assert cli.main(["init", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert "written to reviews.yaml; run it with: fs-lowrank run --cfg reviews.yaml" in out
    few = ["federate.total_round_num", "2", "train.local_update_steps", "1"]
    assert cli.main(["run", "--data", str(path), *options, *few]) == 0
    out = capsys.readouterr().out
    assert "reviews.yaml: written for" in out and "round   2/2" in out
    assert json.loads((path.parent / "runs" / "reviews" / "summary.json").read_text())["clients"]
    (path.parent / "reviews.yaml").write_text("mine: 1\n")
    assert cli.main(["init", str(path), *options]) == 2
    assert "reviews.yaml exists and differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "--cfg", "a.yaml", "--data", "b.csv"], "run needs --cfg FILE"),
        (["run", "--cfg", "a.yaml", "--text", "x"], "--text: options of --data FILE"),
        (["init", "no.csv"], "no file no.csv"),
        (["init", "."], ".: folders with images: none; expected one for each class"),
        (["init", ".", "--label", "x"], "--label x: . is a folder of pictures, which have no columns"),
        (["init", "a.txt"], "expected a file that ends with .csv"),
        (["init", "nowhere"], "a folder of save_to_disk, or a pattern; there is nothing of this name"),
        (["init", "no.csv", "--clients", "-3"], "--clients: '-3': expected a whole number, 1 or more"),
        (["init", "no.csv", "--method", "rolorra"], "did you mean 'rolora'"),
    ],
)
def test_wrong_use_is_one_line(at, capsys, arguments, said):
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == 1, told


def test_a_file_or_model_that_is_not_here_is_one_line(at, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tmp_path / "home"))
    at("reviews.csv", make_reviews(60))
    for arguments, said in (
        (["review.csv"], "did you mean 'reviews.csv'"),
        (["nofile.csv"], "no file nofile.csv\n"),
        (["reviews.csv"], "fs-lowrank fetch minilm"),
        (["reviews.csv", "--model", "./my_modle"], "there is no folder './my_modle'"),
    ):
        assert cli.main(["init", *arguments]) == 2
        told = capsys.readouterr().err
        assert said in told and len(told.splitlines()) == 1, told
