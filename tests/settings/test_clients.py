"""``lowrank.clients``: the forms it takes, what a client trains by, and what is refused with file and line."""

import pytest

from fs_lowrank import UserError, create_method, load_config

BASE = {"federate.client_num": 9, "federate.method": "fedlora", "model.type": "x@transformers", "data.type": "x.csv"}
LISTED = [{"clients": 3, "batch_size": 4, "lr_factor": 0.5}, {"clients": [8, "6-7"], "local_update_steps": 2}]


def test_what_a_client_trains_by():
    config = load_config({**BASE, "lowrank.clients": LISTED, "train.optimizer.lr": 0.2, "dataloader.batch_size": 8})
    own = config.of_client(3)
    assert (own.dataloader.batch_size, own.train.optimizer.lr, own.train.local_update_steps) == (4, 0.1, 1)
    assert [config.of_client(k).train.local_update_steps for k in (5, 6, 7, 8)] == [1, 2, 2, 2]
    assert config.of_client(1) is config and len(config.variants()) == 3
    assert config.lowrank.clients == [
        {"clients": 3, "batch_size": 4, "lr_factor": 0.5},
        {"clients": "6-8", "local_update_steps": 2},
    ]


def test_a_list_a_table_and_a_file_of_the_framework_mean_the_same(tmp_path):
    (tmp_path / "t.csv").write_text("client,batch_size,llm.tok_len,lr\n3,4,,\n\n5,,16,1e-3\n")
    (tmp_path / "c.yaml").write_text(
        "client_5:\n  llm: {tok_len: 16}\n  train: {optimizer: {lr: 1e-3}}\nclient_3: {dataloader: {batch_size: 4}}\n"
    )
    listed = [
        {"clients": 5, "llm.tok_len": 16, "train": {"optimizer": {"lr": 1e-3}}},
        {"clients": [3], "batch_size": 4},
    ]
    given = [listed, str(tmp_path / "t.csv"), str(tmp_path / "c.yaml")]
    configs = [load_config({**BASE, "lowrank.clients": value}) for value in given]
    assert len({config.fingerprint() for config in configs}) == 1
    assert configs[0].fingerprint() != load_config(BASE).fingerprint()
    configs[1].dump(tmp_path / "out.yaml")
    (tmp_path / "t.csv").unlink()
    assert load_config(tmp_path / "out.yaml").to_dict() == configs[0].to_dict()
    assert configs[0].replace(seed=3).lowrank.clients == configs[0].lowrank.clients


def test_a_client_whose_settings_are_nothing_trains_as_all():
    assert load_config({**BASE, "lowrank.clients": [{"clients": 2, "tok_len": None}]}).lowrank.clients == []


def test_a_client_of_images_has_no_length():
    keys = {"model.type": "lenet", "federate.method": "fedavg", "lowrank.clients": [{"clients": 2, "tok_len": 8}]}
    with pytest.raises(UserError, match="lowrank.clients = .*: it gives clients a tok_len, and model.type = lenet is"):
        load_config({**BASE, **keys})


def test_ranks_of_clients_take_the_place_of_those_of_the_method(tmp_path):
    keys = {"federate.method": "flora", "lowrank.ranks": [2, 3], "federate.client_num": 5}
    config = load_config({**BASE, **keys, "lowrank.clients": [{"clients": [2, 5], "rank": 7}]})
    assert config.method_params["ranks"] == (2, 7, 2, 3, 7) and config.lowrank.params["ranks"] == (2, 3)
    file = tmp_path / "c.yaml"
    file.write_text("client_2: {llm: {adapter: {args: [{r: 7}]}}}\nclient_5: {llm: {adapter: {args: [{r: 7}]}}}\n")
    assert load_config({**BASE, **keys, "lowrank.clients": str(file)}).to_dict() == config.to_dict()
    with pytest.raises(UserError, match="gives clients a rank, and federate.method = fedlora has one for all"):
        config.replace(federate__method="fedlora")


def test_a_method_that_computes_with_steps_has_those_of_the_client():
    method = create_method("pfedlora", variant=2, local_steps=3, own_steps={4: 5})
    assert [method.phases(1, client)[0].steps for client in (1, 4)] == [6, 10]


@pytest.mark.parametrize(
    "text, said",
    [
        ("- {clients: 10, batch_size: 2}", "f.yaml, line 3: lowrank.clients.0.clients = 10: there is no client 10;"),
        ("- {clients: [1, 8-12], lr: 1}", "= [1, '8-12']: there is no client 12; federate.client_num is 9"),
        ("- {clients: [], lr: 1}", "expected a client's number, a span such as '3-10', or a list of them"),
        ("- {batch_size: 2}", "f.yaml, line 2: lowrank.clients.0 = {'batch_size': 2}: expected a mapping with the key"),
        ("- {clients: 1}", "expected settings beside clients: batch_size, local_update_steps"),
        ("- {clients: 1, batchsize: 2}", "line 3: lowrank.clients.0.batchsize cannot be set by client; did you mean"),
        ("- {clients: 1, seed: 2}", "lowrank.clients.0.seed cannot be set by client; a client may have: batch_size,"),
        (
            "- {clients: 1, batch_size: 0}",
            "lowrank.clients.0.batch_size = 0: expected a whole number or nothing, at least",
        ),
        ("- {clients: 1, batch_or_epoch: epochs}", "one of batch, epoch"),
        (
            "- {clients: 1, lr: 1}\n  - {clients: [1, 2], lr: 2}",
            "line 4: lowrank.clients.1.lr is given twice for client 1",
        ),
        ("- {clients: 1, lr: 1, lr: 2}", "f.yaml, line 3: lowrank.clients.0.lr is given twice; first in line 3"),
        ("- {clients: 1, lr: 1, train.optimizer.lr: 2}", "and lowrank.clients.0.lr are two spellings of one key"),
        (
            "- {clients: 1, lr: 1}\n  - {clients: 1, lr_factor: 2}",
            "lr_factor is one of lr and lr_factor, and both are given for client 1",
        ),
        (
            "- {clients: 1, llm: {adapter: {args: [{r: 2, lora_alpha: 3}]}}}",
            "of the adapter, a client may have its own rank",
        ),
        ("nobody.txt", "expected a list of mappings, a table (.csv, .tsv), or FederatedScope's file (.yaml)"),
        ("nobody.csv", "nobody.csv: no such file"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_line(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    below = "\n  " if text[0] == "-" else " "
    (tmp_path / "f.yaml").write_text(f"lowrank:\n  clients:{below}{text}\n")
    with pytest.raises(UserError) as caught:
        load_config("f.yaml", BASE)
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.more
@pytest.mark.parametrize(
    "name, text, said",
    [
        ("t.csv", "client,lr\n1,0.1\n12,0.1\n", "t.csv, line 3: client_12 = 12: there is no client 12"),
        ("t.csv", "client,lr\n1,0.1\n1,0.2\n", "t.csv, line 3: client_1.lr is given twice for client 1"),
        ("t.csv", "client,lr\n1,fast\n", "t.csv, line 2: client_1.lr = 'fast': expected a number or nothing"),
        ("t.csv", "client,lr\n1\n", "t.csv, line 2: a cell is not a value, or the header has other columns: ['1']"),
        ("t.csv", "number,lr\n1,2\n", "t.csv, line 1: columns number, lr: expected client, and each column once"),
        ("t.csv", "client,lr\nall,2\n", "t.csv, line 2: client_all = 'all': expected a client's number"),
        ("t.csv", "client,lr\n1,[2\n", "t.csv, line 2: a cell is not a value"),
        (
            "t.yaml",
            "client_1:\n  train: {optimizer: {type: Adam}}\n",
            "t.yaml, line 2: client_1.train.optimizer.type can",
        ),
        ("t.yaml", "everyone:\n  lr: 1\n", "t.yaml, line 1: everyone = {'lr': 1}: expected client_N with a section"),
    ],
)
def test_a_file_that_is_wrong_is_one_line_with_file_and_line(tmp_path, monkeypatch, name, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(BASE, {"lowrank.clients": name})
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value
