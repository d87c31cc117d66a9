"""Data that ``run`` is given as objects: the same as from a file, for every engine, process and resumed run."""

import shutil

import datasets
import pandas as pd
import pytest
import torch

import fs_lowrank
from fs_lowrank import RunFailed, UserError
from fs_lowrank.testing import small

FRAME = small.make_reviews(120)


class Items(torch.utils.data.Dataset):
    """A PyTorch dataset of these items; an error among them is raised."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        if isinstance(self.items[i], Exception):
            raise self.items[i]
        return self.items[i]


ROWS = [{**row, "label": torch.tensor(row["label"])} for row in FRAME.to_dict("records")]
FORMS = {
    "frame": lambda: FRAME,
    "dataset": lambda: datasets.Dataset.from_pandas(FRAME),
    "selected": lambda: datasets.Dataset.from_pandas(pd.concat([FRAME, FRAME])).select(range(120)),
    "torch": lambda: Items(*ROWS),
    "tuples": lambda: Items(*((row["text"], row["label"]) for row in ROWS)),
    "subset": lambda: torch.utils.data.Subset(Items(*ROWS), range(120)),
}


FEW = {"federate.client_num": 3, "train.local_update_steps": 1, "data.type": ""}


@pytest.fixture
def from_file(few, tmp_path):
    """The result of the same rows in a file."""
    FRAME.to_csv(tmp_path / "rows.csv", index=False)
    return fs_lowrank.run(few("file", {"data.type": str(tmp_path / "rows.csv")}))


@pytest.mark.more
def test_every_kind_of_object_is_what_a_file_would_be(few, from_file):
    for name, make in FORMS.items():
        result = fs_lowrank.run(few(name), data=make())
        assert result.facts["data"] == from_file.facts["data"] and result.final == from_file.final, name


@pytest.mark.more
def test_the_run_goes_on_with_the_same_and_without_but_not_with_others(few, from_file, tmp_path):
    config = few("run")
    fs_lowrank.run(config, data=FRAME, on_round=lambda record: True)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    with pytest.raises(UserError, match="data: not the data of the run in .*run .*; continue it with the same"):
        fs_lowrank.run(config, data=FRAME[:-1], resume=True)
    with pytest.raises(UserError, match="holds a run already"):
        fs_lowrank.run(config, data=FRAME[:-1])
    result = fs_lowrank.run(config, data=Items(*ROWS), resume=True)
    assert result.final == from_file.final
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "kept", tmp_path / "run")
    assert fs_lowrank.run(tmp_path / "run" / "config.yaml", resume=True).final == from_file.final
    other = fs_lowrank.run(config, data=FRAME[:60], overwrite=True)
    assert sum(other.facts["clients"]) < 60 and {p.name for p in (tmp_path / "run" / "given_data").iterdir()} == {
        "train.arrow",
        "about.json",
    }


def test_data_that_were_refused_before_a_run_began_do_not_stand_in_its_way(few, tmp_path):
    with pytest.raises(UserError, match="no column 'label'"):
        fs_lowrank.run(few("run"), data=FRAME.rename(columns={"label": "stars"}), resume="auto")
    assert fs_lowrank.run(few("run"), data=FRAME, resume="auto").history


def test_overwrite_keeps_the_run_if_the_data_or_the_model_are_refused(few, tmp_path):
    config, folder = few("run"), tmp_path / "run"
    fs_lowrank.run(config, data=FRAME)

    def files():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}

    before = files()
    for wrong in ({"data": 3}, {"data": [FRAME, FRAME]}, {"data": {"tset": FRAME}}, {"model": 3}):
        with pytest.raises(UserError, match="data|model"):
            fs_lowrank.run(config, overwrite=True, **wrong)
        assert files() == before, wrong


@pytest.mark.more
def test_one_data_set_for_each_client(few):
    parts = [FRAME[:30], datasets.Dataset.from_pandas(FRAME[30:80]), FRAME[80:]]
    config = few("parts", {"federate.process_num": 2})
    result = fs_lowrank.run(config, data={"train": parts, "test": FRAME[:20]})
    assert result.facts["held_out"]["test"] == 20
    clients = result.facts["clients"]
    assert sum(clients) == 120 - result.facts["held_out"]["val"] and clients[0] <= 30 and clients[1] <= 50
    with pytest.raises(UserError, match="data = a list of 2, one for each client, and federate.client_num is 3"):
        fs_lowrank.run(few("two"), data=parts[:2])


@pytest.mark.slow
def test_a_comparison_writes_them_once(few, tmp_path):
    results = fs_lowrank.compare(few("both"), "fedlora,rolora", data=FRAME)
    assert len({r.facts["data"] for r in results.values()}) == 1
    assert {p.name for p in (tmp_path / "both").iterdir() if p.is_dir()} == {"given_data", "fedlora", "rolora"}
    with pytest.raises(UserError, match="holds a run already"):
        fs_lowrank.compare(few("both"), "fedlora,rolora", data=FRAME[:50])
    again = fs_lowrank.compare(few("both"), "fedlora,rolora", data=FRAME, resume=True)
    assert again["rolora"].final == results["rolora"].final


@pytest.mark.federatedscope
def test_on_the_framework(few, from_file):
    result = fs_lowrank.run(few("framework", {"federate.process_num": 3}), "federatedscope", data=FRAME)
    assert result.facts["data"] == from_file.facts["data"]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from iter([])


@pytest.mark.parametrize(
    "data, said",
    [
        (3, "data = int: expected a datasets.Dataset, a DataFrame or a torch Dataset with a length"),
        ([FRAME, [1], FRAME], r"data\[1\] = list: expected a datasets.Dataset"),
        ([{"text": "a", "label": 1}, FRAME, FRAME], r"data\[0\] = dict: expected .*; rows go into Dataset.from_list"),
        ({"train": FRAME, "dev": FRAME}, "a mapping with 'train', 'dev': expected train, and perhaps validation and"),
        ({"train": FRAME, "test": [FRAME]}, r"data\['test'\]: only train is a list"),
        ([], r"data\['train'\]: only train is a list, with one object for each client"),
        (FRAME[:0], "data: it has no rows"),
        (datasets.Dataset.from_dict({"text": [], "label": []}), "data: it has no rows"),
        (Endless(), "data = Endless: expected .* with a length"),
        (FRAME.rename(columns={"text": "review"}), "no column 'text'"),
        (
            pd.concat([FRAME, FRAME["label"]], axis=1),
            "data: making arrow data of it raises ValueError: Duplicate column names",
        ),
        (Items(("a\ud800", 1)), "data: making arrow data of it raises "),
        (
            Items({"text": "a", "label": 1}, {"text": "a", "label": 1, "history": "b"}),
            "data, item 1: it has the columns",
        ),
        (torch.utils.data.TensorDataset(torch.ones(4, 2)), "data, item 0 = tuple: expected a mapping of columns, "),
    ],
)
def test_what_cannot_be_used_is_one_line_and_leaves_nothing(few, tmp_path, data, said):
    with pytest.raises(UserError, match=said) as caught:
        fs_lowrank.run(few("run"), data=data)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob(".given*"))


@pytest.mark.parametrize("error", [OSError("the share\nis gone"), Exception("no such row"), KeyError("text")])
def test_an_error_of_the_data_set_is_none_of_writing(few, tmp_path, error):
    for resume in (False, "auto"):
        with pytest.raises(UserError, match=r"^data\[0\], item 3: the data set raises ") as caught:
            fs_lowrank.run(few("run"), data=[Items(*ROWS[:3], error), FRAME, FRAME], resume=resume)
        assert caught.value.__cause__ is error and not isinstance(caught.value, RunFailed)
        assert " ".join(str(error).split()) in str(caught.value)
    assert not list((tmp_path / "run").glob(".given*"))


def test_data_that_cannot_be_written_are_named(few, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.ipc.new_stream", full)
    with pytest.raises(RunFailed, match="given_data cannot be written: No space left on device"):
        fs_lowrank.run(few("run"), data=Items(*ROWS))


def test_images_are_named_as_files(vision_settings):
    rows = datasets.Dataset.from_dict({"image": [[[0]]], "label": [1]})
    with pytest.raises(UserError, match="data=… is for text, and model.type = resnet10 for images: name them by data"):
        fs_lowrank.run(fs_lowrank.load_config(vision_settings), data=rows)
