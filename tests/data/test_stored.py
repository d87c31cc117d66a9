"""Arrow data on disk: what is read is what a table would give."""

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fs_lowrank
from fs_lowrank import UserError, load_config
from fs_lowrank.data import build_data, load_raw
from fs_lowrank.models.build import build_tokenizer
from fs_lowrank.testing import small


@pytest.fixture(scope="module")
def reviews():
    frame = small.make_reviews(300)
    return frame.assign(label=np.where(frame["label"] == 1, "good", "bad"))


@pytest.fixture
def written(reviews, tmp_path):
    """The reviews as a table, and in every form on disk, by the name of the form."""
    reviews.to_csv(tmp_path / "r.csv", index=False)
    arrow = pa.Table.from_pandas(reviews, preserve_index=False)
    pq.write_table(arrow, tmp_path / "r.parquet", row_group_size=50)
    with pa.ipc.new_stream(str(tmp_path / "r.arrow"), arrow.schema) as writer:
        writer.write_table(arrow, max_chunksize=70)
    held = datasets.Dataset(arrow)
    held.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (tmp_path / "parts").mkdir()
    for number, start in zip((1, 2, 10), range(0, 300, 100)):
        pq.write_table(arrow.slice(start, 100), tmp_path / "parts" / f"p{number}.parquet")
        reviews[start : start + 100].to_csv(tmp_path / "parts" / f"t{number}.csv", index=False)
    names = {"parquet": "r.parquet", "arrow": "r.arrow", "saved": "saved", "several": "parts/p*.parquet"}
    return {form: tmp_path / name for form, name in {"table": "r.csv", **names, "tables": "parts/t*.csv"}.items()}


@pytest.fixture
def config(settings, tmp_path):
    def make(path, keys=None):
        return load_config(settings, {"data.type": str(path), **(keys or {})})

    return make


def made(config):
    return build_data(config, build_tokenizer(config))


@pytest.mark.more
@pytest.mark.parametrize("form", ["parquet", "arrow", "saved", "several", "tables"])
@pytest.mark.parametrize("splitter", [{"alpha": 0.5, "min_size": 4}, {"field": "domain"}])
def test_the_data_are_those_of_a_table(written, config, form, splitter):
    keys = {"data.splitter_args": [splitter], "data.splitter": "field" if "field" in splitter else "lda"}
    table, data = made(config(written["table"], keys)), made(config(written[form], keys))
    assert data.fingerprint == table.fingerprint and data.describe() == table.describe()
    assert data.label_names == ["bad", "good"] and data.columns == table.columns
    assert all((data.rows[split] == table.rows[split]).all() for split in table.rows)


def test_instructions_conversations_and_templates(config, causal_settings, tmp_path):
    frame = pd.read_json(small.save_instructions(tmp_path), lines=True)
    frame.loc[[3, 70], "output"] = " "
    frame.to_json(tmp_path / "i.jsonl", orient="records", lines=True)
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "i.parquet")
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": "good"}] for q in frame["input"]]
    pq.write_table(pa.table({"messages": turns, "category": frame["category"].tolist()}), tmp_path / "m.parquet")
    for args in ({}, {"template": "{instruction} {input} : {output}"}, {"category": "category", "output": "output"}):
        both = []
        for name in ("i.jsonl", "i.parquet"):
            keys = {"data.type": str(tmp_path / name), "data.args": [args], "data.splitter": "field"}
            keys |= {"data.splitter_args": [{"field": "category"}], "data.max_dropped": 0.02}
            both.append(made(load_config(causal_settings, keys)))
        assert both[0].fingerprint == both[1].fingerprint and both[1].skipped == both[0].skipped
        assert sum(both[1].skipped.values()) == 2
    raw = load_raw(load_config(causal_settings, {"data.type": str(tmp_path / "m.parquet")}).data)
    assert raw.train.iloc[[2]]["messages"].iloc[0] == turns[2] and raw.fields == ["category"]


def test_a_natural_partition_by_file(written, config):
    keys = {"data.splitter": "file", "federate.client_num": 3, "data.splitter_args": []}
    for form, files in (("several", "p{}.parquet"), ("tables", "t{}.csv")):
        data = made(config(written[form], keys))
        assert data.record()["partition"]["files"] == [files.format(number) for number in (1, 2, 10)]
        for client, rows in enumerate(data.partition.indices):
            assert set(data.rows["train"][rows] // 100) == {client}
            held = data.test_shares[client]
            assert set(data.rows["test"][held] // 100) == {client}, "a client is tested on its own file"
    assert "files" not in made(config(written["several"])).record()["partition"]
    with pytest.raises(UserError, match="splitter = file: 3 files have training rows, and there are 5 clients; each"):
        made(config(written["several"], {**keys, "federate.client_num": 5}))
    with pytest.raises(UserError, match="data.splitter = file: the data are one file; name several by a pattern"):
        made(config(written["parquet"], keys))


def test_a_dataset_dict_with_class_names_and_hidden_labels(config, reviews, tmp_path):
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["pos", "neg"]),
            "domain": datasets.Value("string"),
        }
    )
    coded = reviews.assign(label=np.where(reviews["label"] == "good", 0, 1))
    held = datasets.Dataset.from_pandas(coded, features=features, preserve_index=False)
    hidden = datasets.Dataset.from_pandas(coded[:20].assign(label=-1), preserve_index=False).cast(features)
    parts = {"train": held.select(range(200)), "validation": held.select(range(200, 300)), "test": hidden}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "dict"))
    raw = load_raw(config(tmp_path / "dict").data)
    assert raw.label_names == ["pos", "neg"] and raw.test is None and len(raw.validation) == 100
    assert raw.train["text"].tolist() == coded["text"].tolist()[:200]


def test_numbers_of_classes_whose_names_are_numbers(tmp_path, config):
    classes = datasets.Sequence(datasets.ClassLabel(names=["1", "2", "3"]))
    features = datasets.Features({"text": datasets.Value("string"), "label": classes})
    rows = {"text": ["a", "b", "c", "d"], "label": [[0], [1], [2], [0, 2]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "sets"))
    raw = load_raw(config(tmp_path / "sets").data, task="MultiLabelClassification")
    assert raw.label_names == ["1", "2", "3"] and raw.train["label"].tolist() == [1, 2, 4, 5]


def test_a_class_is_its_name_in_files_of_every_kind(tmp_path, config):
    """Files may number the same classes otherwise, or have their names."""
    for number, names in enumerate((["pos", "neg"], ["neg", "pos"])):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        rows = {"text": ["a", "b", "c"], "label": [0, 1, -1]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"p{number}.parquet")
    (tmp_path / "p2.csv").write_text("text,label\nd,neg\n")
    raw = load_raw(config(tmp_path / "p*").data)
    assert raw.label_names == ["pos", "neg"] and raw.train["label"].tolist() == [0, 1, 1, 0, 1]
    assert raw.skipped == {"empty label": 2} and raw.train["file"].tolist()[-1] == "p2.csv"


def test_numbers_beside_names_of_classes_are_no_further_classes(tmp_path, config):
    names = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    rows = {"text": ["a", "b"], "label": [0, 1]}
    for first, second in (("p1", "p2"), ("p2", "p1")):
        datasets.Dataset.from_dict(rows, features=names).to_parquet(tmp_path / f"{first}.parquet")
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{second}.parquet")
        with pytest.raises(UserError, match="label 0 does not occur in training"):
            load_raw(config(tmp_path / "p*.parquet").data)


def test_the_splits_of_several_folders_are_used(config, reviews, tmp_path):
    """As those of one; a site without a split of its own has no share of it."""
    held = datasets.Dataset.from_pandas(reviews, preserve_index=False)
    for site, splits in ((1, ("train", "validation", "test")), (2, ("train", "test"))):
        parts = {split: held.select(range(site * 10, site * 10 + 40 + i)) for i, split in enumerate(splits)}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / f"site_{site}"))
    keys = {"data.splitter": "file", "federate.client_num": 2, "data.splitter_args": []}
    settings = config(tmp_path / "site_*", keys)
    raw = load_raw(settings.data)
    assert [len(frame) for frame in (raw.train, raw.validation, raw.test)] == [80, 41, 42 + 41]
    assert raw.test["text"].tolist() == [*reviews["text"][10:52], *reviews["text"][20:61]]
    data = made(settings)
    assert [sorted(data.rows["test"][share]) for share in data.test_shares] == [[*range(42)], [*range(42, 83)]]


@pytest.mark.more
def test_processes_and_a_resumed_run(written, config, tmp_path, no_curves):
    keys = {"federate.total_round_num": 2, "train.local_update_steps": 1}
    table = fs_lowrank.run(config(written["table"], {**keys, "outdir": str(tmp_path / "a")}))
    two = config(written["saved"], {**keys, "outdir": str(tmp_path / "b"), "federate.process_num": 2})
    fs_lowrank.run(two, on_round=lambda record: True)
    result = fs_lowrank.run(two, resume=True)
    assert result.final == table.final
    pq.write_table(pa.table({"text": ["good"] * 40, "label": [0, 1] * 20}), tmp_path / "saved.parquet")
    with pytest.raises(UserError, match="the data is not what the run in .* started with"):
        fs_lowrank.run(two.replace({"data.type": str(tmp_path / "saved.parquet")}), resume=True)


@pytest.mark.parametrize(
    "name, said",
    [
        ("nobody/*.parquet", "no file matches .*nobody/.*"),
        ("nobody.parquet", "no file .*nobody.parquet"),
        ("broken.parquet", "broken.parquet: reading it raises Arrow"),
        ("broken.arrow", "broken.arrow: reading it raises Arrow"),
        ("empty.arrow", "empty.arrow: no rows in a split 'train'; with rows it has: none"),
        ("hollow", "no rows in a split 'train'; with rows it has: dev"),
    ],
)
def test_what_cannot_be_read_is_one_line(written, config, tmp_path, name, said, capfd, caplog):
    for suffix in ("parquet", "arrow"):
        (tmp_path / f"broken.{suffix}").write_bytes(b"PAR1 is not all of it")
    schema = pa.schema({"text": pa.string(), "label": pa.int64()})
    with pa.ipc.new_stream(str(tmp_path / "empty.arrow"), schema) as writer:
        writer.write_table(schema.empty_table())
    dev = datasets.Dataset.from_dict({"text": ["a"]})
    none = dev.filter(lambda row: False)
    datasets.DatasetDict({"dev": dev, "train": none}).save_to_disk(str(tmp_path / "hollow"))
    verbosity = datasets.logging.get_verbosity()
    capfd.readouterr()
    with pytest.raises(UserError, match=said) as caught:
        load_raw(config(tmp_path / name).data)
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err and not caplog.records, "the library says nothing of its own beside it"
    assert datasets.logging.get_verbosity() == verbosity and datasets.is_progress_bar_enabled()


def test_a_damaged_offset_is_one_line(reviews, written, config):
    """It would end the process when a text is read."""
    ends = np.cumsum([0, *(len(text.encode()) for text in reviews["text"][280:])])  # of the last batch
    raw = bytearray(written["arrow"].read_bytes())
    raw[raw.rindex(ends[1:9].tobytes()) + 8 * 5 + 3] = 0x7F  # of a large_string, as pandas has it
    written["arrow"].write_bytes(raw)
    with pytest.raises(UserError, match="raises ArrowInvalid: .*Offset invariant failure.*; write or copy it"):
        load_raw(config(written["arrow"]).data)


def test_a_text_of_a_parquet_file_that_is_not_utf8_is_one_line(reviews, config, tmp_path):
    column = pa.array([text.encode() for text in reviews["text"][:9]] + [b"\xff"], pa.binary())
    wrong = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    pq.write_table(pa.table({"text": wrong, "label": [0, 1] * 5}), tmp_path / "wrong.parquet")
    with pytest.raises(UserError, match="wrong.parquet: reading it raises .*Invalid UTF8"):
        load_raw(config(tmp_path / "wrong.parquet").data)
