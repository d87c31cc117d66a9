"""The server on Flower's grid: equal results, and what becomes of nodes that fail, lie, or come back."""

import json
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank.engines.flower.client import _node
from fs_lowrank.engines.flower.keys import check
from fs_lowrank.engines.flower.messages import packed, unpacked
from fs_lowrank.engines.flower.server import Nodes
from fs_lowrank.engines.transport import run_over
from fs_lowrank.rounds.admission import spent_by
from fs_lowrank.rounds.loop import scores_in
from fs_lowrank.runs.checkpoint import load_checkpoint
from tests.cases import FURTHER, VARIANTS, same_model, same_run

pytestmark = pytest.mark.flower


def serve(config, grid, resume=False, on_round=None, **more):
    check(config)
    return run_over(Nodes(config, grid, pause=0.005, **more), config, resume, on_round)


def same(local, other):
    same_run(local, other, shares_model=False)


@pytest.mark.parametrize("method, keys", [*VARIANTS, *(pytest.param(*v, marks=pytest.mark.slow) for v in FURTHER)])
def test_the_result_is_that_of_the_embedded_engine(quick, federation, method, keys):
    keys = {"federate.method": method, **keys}
    one, loaded = federation(), _node.cache_info().misses
    same(fs_lowrank.run(quick("local", keys)), serve(quick("flower", keys), one.grid))
    assert {kind for _, kind in one.sent} <= {"query", "train", "evaluate"}
    assert _node.cache_info().misses == loaded + 1, "a process that lives on loads the base model once"


def test_numbers_to_predict(quick, federation, task_files):
    """Clients of a regression have a loss, and no accuracy."""
    keys = {"data.type": str(task_files / "scores.csv"), "data.args": [{"label": "score"}]}
    keys |= {"model.task": "SequenceRegression", "federate.total_round_num": 1, "federate.make_global_eval": False}
    local, other = fs_lowrank.run(quick("local", keys)), serve(quick("flower", keys), federation().grid)
    same(local, other)
    assert other.history[0]["client_scores"]["1"].keys() == {"loss", "samples"}


def test_quantised_messages(quick, federation):
    """They are smaller, and the server's model is the one that every copy has."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1}
    plain = serve(quick("plain", keys), federation().grid)
    keys |= {"quantization.method": "uniform", "quantization.nbits": 8}
    small = serve(quick("small", keys), federation().grid)
    assert small.history[-1]["uplink_bytes"] < 0.3 * plain.history[-1]["uplink_bytes"]
    assert not any(r["failed"] for r in small.history)


def test_a_message_without_a_parcel_is_refused():
    from flwr.app import Array, ArrayRecord, RecordDict

    with pytest.raises(ValueError, match="holds no parcel in safetensors, but parcel"):
        unpacked(RecordDict({"parcel": ArrayRecord([torch.zeros(2).numpy()])}))
    with pytest.raises(ValueError, match="holds no parcel in safetensors, but parcel"):
        unpacked(RecordDict({"parcel": ArrayRecord({"parcel": Array("float32", (1,), "numpy.ndarray", b"")})}))


# -- nodes that fail -----------------------------------------------------------------------------------


def test_a_silent_node_costs_its_update_and_the_time_that_the_user_gave(quick, federation, caplog):
    def behave(number, message, answer):
        return None if number == 1 and message.metadata.message_type == "train" else answer()

    config = quick("silent", {"federate.method": "rolora", "lowrank.timeout": 1.5})
    first, second = serve(config, federation(behave=behave).grid).history
    assert first["clients"] == second["clients"] == [1, 3]
    absent = {"client": 2, "kind": "absent", "reason": "no answer within lowrank.timeout, 1.5 s"}
    assert first["failed"] == [absent] == second["failed"]
    assert re.search(r"waiting for node \d+: no answer for . s; for up to . s more, by lowrank.timeout", caplog.text)
    assert "2" not in first["client_downlink_bytes"]


def test_a_node_that_is_gone_and_one_in_its_place(quick, federation):
    """The clients that are there go on; the new node has the old one's disk and is not sent everything again."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 4}
    one, config = federation(), quick("gone", keys)

    def on_round(record):
        if record["round"] == 1:
            one.leave(1)
        if record["round"] == 2:
            one.replace(1)

    history = serve(config, one.grid, on_round=on_round).history
    assert [r["clients"] for r in history] == [[1, 2, 3], [1, 3], [1, 2, 3], [1, 2, 3]]
    assert [f["reason"] for f in history[1]["failed"]] == ["its node is not connected"]
    down = [r["client_downlink_bytes"] for r in history]
    assert down[2]["2"] > down[2]["1"] and down[3]["2"] == down[3]["1"]


def test_a_node_that_ends_while_it_trains(quick, federation):
    """Flower says that it is gone, long before ``lowrank.timeout``; the others' round goes on."""

    def behave(number, message, answer):
        reply = answer()
        if number == 1 and message.metadata.group_id == "1":
            one.leave(1)
            return None
        return reply

    one = federation(behave=behave)
    first, second = serve(quick("ends", {"federate.method": "fedloru", "lowrank.tau": 1}), one.grid).history
    assert first["clients"] == second["clients"] == [1, 3]
    [gone], [absent] = first["failed"], second["failed"]
    assert gone["client"] == 2 and gone["kind"] == "absent" and "Node Unavailable" in gone["reason"]
    assert absent == {"client": 2, "kind": "absent", "reason": "its node is not connected"}


@pytest.mark.parametrize("damaged", [False, True], ids=["lost", "damaged"])
def test_a_node_that_lost_its_disk_is_sent_everything(quick, federation, caplog, tmp_path, damaged):
    keys = {"federate.method": "fedloru", "lowrank.tau": 1, "federate.total_round_num": 3}
    whole = serve(quick("whole", keys), federation(folder=tmp_path / "a").grid)

    def lose(record):
        if record["round"] == 2:
            [copy] = (tmp_path / "b").glob("run_*/client_1")
            if not damaged:
                shutil.rmtree(copy)
            for file in copy.rglob("*.safetensors"):
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)

    lost = serve(quick("lost", keys), federation(folder=tmp_path / "b").grid, on_round=lose)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), lost.model.parameters(), strict=True))
    assert not any(r["failed"] for r in lost.history) and "client 1: its copy of the model is at" in caplog.text
    assert ("client 1: what it saved" in caplog.text and "is damaged; it starts anew" in caplog.text) == damaged
    assert lost.history[2]["client_downlink_bytes"]["2"] < lost.history[2]["client_downlink_bytes"]["1"]


def test_a_client_whose_training_fails_and_one_whose_update_is_not_finite(quick, federation, monkeypatch):
    from fs_lowrank.rounds.trainer import Trainer

    fit = Trainer.fit

    def broken(self, task, *given):
        if not self.workspace.method.workbench and task.client == 1:
            raise RuntimeError("no memory")
        fitted = fit(self, task, *given)
        if task.client == 2:
            next(iter(fitted.update.tensors.values())).fill_(float("nan"))
        return fitted

    monkeypatch.setattr(Trainer, "fit", broken)
    keys = {"federate.method": "fedlora", "federate.total_round_num": 2}
    for record in serve(quick("broken", keys), federation().grid).history:
        assert record["clients"] == [3]
        assert [(f["client"], f["kind"]) for f in record["failed"]] == [(1, "failed"), (2, "refused")]
        assert re.fullmatch(r"RuntimeError: no memory \(test_server.py, line \d+\)", record["failed"][0]["reason"])
        assert "not finite" in record["failed"][1]["reason"] or "NaN" in record["failed"][1]["reason"]


def test_a_node_with_another_configuration_or_base_model(quick, federation, settings, tmp_path, caplog):
    """One has other files where the model lies, one its own configuration."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(settings["model"]["type"].partition("@")[0], model)
    keys = {"federate.method": "rolora", "lowrank.timeout": 2.0, "model.type": f"{model}@transformers"}
    config = quick("server", keys)
    other = config.replace({"train.optimizer.lr": 0.123, "outdir": str(tmp_path / "elsewhere")})
    other.dump(tmp_path / "other.yaml")
    weights = model / "model.safetensors"
    own = weights.read_bytes()
    changed = load_file(weights)
    changed[max(changed)][0] += 1e-6
    save_file(changed, tmp_path / "changed.safetensors", {"format": "pt"})

    def behave(number, message, answer):
        if number != 1:
            return answer()
        weights.write_bytes((tmp_path / "changed.safetensors").read_bytes())
        _node.cache_clear()
        try:
            return answer()
        finally:
            weights.write_bytes(own)
            _node.cache_clear()

    one = federation(behave=behave, own={2: {"cfg": str(tmp_path / "other.yaml")}})
    history = serve(config, one.grid).history
    assert [r["clients"] for r in history] == [[1], [1]]
    reasons = {f["client"]: f["reason"] for f in history[0]["failed"]}
    assert "its model is not the server's at the start: the base model differs" in reasons[2]
    assert "another configuration than the server; they differ in train.optimizer.lr" in reasons[3]
    assert "refused node" in caplog.text


def test_an_undo_stays_until_the_copy_is_kept_with_it(quick, federation, monkeypatch):
    """A client whose training does not count, and which cannot write its copy in the next round, is told again."""
    from fs_lowrank.rounds.copies import OwnCopy

    save, undos = OwnCopy.save, []

    def full(self, folder):
        if self.client == 1 and self.standing.round == 1:
            raise fs_lowrank.RunFailed("No space left on device")
        save(self, folder)

    def behave(number, message, answer):
        order = unpacked(message.content)
        if number == 0 and message.metadata.message_type != "query":
            undos.append(order.facts.get("undo"))
        reply = answer()
        if number == 0 and order.facts.get("round") == 1:
            parcel = unpacked(reply.content)
            parcel.facts["loss"] = "none"
            reply.content = packed(parcel)
        return reply

    monkeypatch.setattr(OwnCopy, "save", full)
    keys = {"federate.method": "pfedlora", "federate.total_round_num": 4}
    history = serve(quick("undo", keys), federation(behave=behave).grid).history
    assert [r["clients"] for r in history] == [[2, 3], [2, 3], [1, 2, 3], [1, 2, 3]]
    assert undos == [None, 1, 1, 1, None, None, None, None]  # to train and to evaluate, by turns


def test_a_node_that_is_started_anew_with_another_configuration(quick, federation, tmp_path):
    """Its number is the one that joined. Its update does not count; it is told what differs, until that is mended."""
    config = quick("changes", {"federate.method": "rolora", "federate.total_round_num": 4})
    config.replace({"train.optimizer.lr": 0.123}).dump(tmp_path / "other.yaml")
    one = federation()

    def on_round(record):
        own = one.contexts[one.nodes[1]].node_config
        if record["round"] == 1:
            own["cfg"] = str(tmp_path / "other.yaml")
        if record["round"] == 3:
            own["cfg"] = ""

    first, second, third, fourth = serve(config, one.grid, on_round=on_round).history
    assert [r["clients"] for r in (first, second, third, fourth)] == [[1, 2, 3], [1, 3], [1, 3], [1, 2, 3]]
    [changed], [absent] = second["failed"], third["failed"]
    assert changed["kind"] == "refused" and "another number, configuration or base model than when" in changed["reason"]
    assert absent["kind"] == "absent" and "they differ in train.optimizer.lr" in absent["reason"]


def test_a_node_that_is_started_anew_as_another_client(quick, federation):
    """It has the same key, and would train on the data of client 3 in the name of client 2."""
    config = quick("moves", {"federate.method": "rolora", "federate.total_round_num": 3, "lowrank.timeout": 3.0})
    one = federation()

    def on_round(record):
        if record["round"] == 1:
            one.contexts[one.nodes[1]].node_config["partition-id"] = 2

    first, second, third = serve(config, one.grid, on_round=on_round).history
    assert [r["clients"] for r in (first, second, third)] == [[1, 2, 3], [1, 3], [1, 3]]
    assert second["failed"][0]["kind"] == "refused" and "another number" in second["failed"][0]["reason"]


def test_a_node_with_data_of_its_own(quick, federation, reviews_csv, tmp_path):
    """It trains and is evaluated on all that its own file holds; the others have their parts of the server's."""
    rows = reviews_csv.read_text().splitlines()
    (tmp_path / "own.csv").write_text("\n".join(rows[:81]) + "\n")
    config = quick("server", {"federate.method": "rolora", "federate.make_global_eval": False})
    other = config.replace({"data.type": str(tmp_path / "own.csv"), "data.splitter": "iid", "data.splitter_args": []})
    other.dump(tmp_path / "own.yaml")
    own = {"cfg": str(tmp_path / "own.yaml"), "own-data": True}
    result = serve(config, federation(own={1: own}).grid)
    for record in result.history:
        assert record["clients"] == [1, 2, 3] and not record["failed"]
        assert record["client_scores"]["2"]["samples"] == 16  # a fifth of its 80 rows
    refused = serve(
        config.replace({"outdir": str(tmp_path / "b"), "lowrank.timeout": 3.0}),
        federation(own={1: {"cfg": own["cfg"]}}).grid,
    )
    assert [r["clients"] for r in refused.history] == [[1, 3], [1, 3]]
    assert "they differ in data." in refused.history[0]["failed"][0]["reason"]


@pytest.mark.more
def test_the_three_sites_of_the_tutorial(federation, monkeypatch, tmp_path):
    """Each trains on the rows of its own file, and the server scores the model on rows that no site has."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "three_sites.md").read_text(encoding="utf-8")
    exec(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1], {})
    text = re.search(r"^```yaml\n# run.yaml\n(.*?)^```$", page, re.M | re.S)[1]
    Path("run.yaml").write_text(text)
    for workspace in (1, 2, 3):
        Path(f"site_{workspace}.yaml").write_text(text.replace("public.csv", f"site_{workspace}.csv"))
    own = {workspace - 1: {"cfg": f"site_{workspace}.yaml", "own-data": True} for workspace in (1, 2, 3)}
    result = serve(fs_lowrank.load_config("run.yaml"), federation(own=own).grid)
    assert [r["clients"] for r in result.history] == [[1, 2, 3]] * 3 and not any(r["failed"] for r in result.history)
    assert result.final["test_acc"] > result.facts["majority"] + 0.2
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


def test_two_nodes_for_one_client_and_a_client_that_there_is_not(quick, federation, caplog):
    config = quick("twice", {"federate.method": "rolora", "federate.client_num": 2, "lowrank.timeout": 2.0})
    one = federation(4, own={2: {"partition-id": 1}, 3: {"partition-id": 7}})
    assert [r["clients"] for r in serve(config, one.grid).history] == [[1, 2], [1, 2]]
    assert "joined already" in caplog.text and "there is no client 8; federate.client_num is 2" in caplog.text


def test_what_a_node_says_of_itself_is_not_believed(quick, federation):
    """Wrong kinds of facts, another round, no parcel, an error of its own making: nothing else is lost."""
    from flwr.app import Error, Message, RecordDict

    def behave(number, message, answer):
        reply = answer()
        if message.metadata.message_type != "query" and number == 4:
            return Message(Error(0, "ray.exceptions.ActorDiedError: The actor died"), reply_to=message)
        if message.metadata.message_type != "query" and number:
            parcel = unpacked(reply.content)
            parcel.facts |= {"standing": {"no": "list"}, "spent": ["x"], "scores": "good"}
            parcel.facts |= {"round": 99} if number == 1 else {}
            reply.content = packed(parcel) if number < 3 else RecordDict()
        return reply

    config = quick("liars", {"federate.method": "pfedlora", "federate.client_num": 5})
    first, second = serve(config, federation(5, behave=behave).grid).history
    assert first["clients"] == second["clients"] == [1, 3]
    reasons = {f["client"]: f["reason"] for f in first["failed"]}
    assert reasons == {
        2: "no answer of it is for this round",
        4: "the message holds no parcel in safetensors, but nothing",
        5: "Flower: ray.exceptions.ActorDiedError: The actor died",
    }


@pytest.mark.parametrize("wrong", [10**400, -(10**400), float("nan"), float("inf"), -1.5, "1", True, None])
def test_numbers_that_cannot_be(wrong):
    """They are left out; none of them is an error, nor comes into a sum."""
    assert spent_by({"spent": {"training": wrong, "upload": 2, "reused": False}}, {})["training"] == 0.0
    assert scores_in({"scores": {"acc": wrong, "loss": 0.5}}, ["loss", "acc"]) == {}
    if wrong != -1.5:
        assert scores_in({"scores": {"acc": 0.5, "loss": wrong}}, ["loss", "acc"]) == {}


def test_the_scores_of_a_client_are_those_that_its_task_has():
    assert scores_in({"scores": {"loss": 2.5}}, ["loss"]) == {"loss": 2.5}
    assert scores_in({"scores": {"loss": 2.5}}, ["loss", "acc"]) == {}
    assert scores_in({"scores": {"loss": 2, "acc": 1, "more": 3}}, ["loss", "acc"]) == {"loss": 2.0, "acc": 1.0}


def test_too_few_clients_end_the_run_and_it_can_be_resumed(quick, federation):
    config = quick("few", {"federate.method": "rolora", "lowrank.min_clients": 3, "lowrank.timeout": 1.0})
    with pytest.raises(fs_lowrank.RunFailed, match="round 1: .*lowrank.min_clients is 3.*start again"):
        serve(config, federation(2).grid)
    config = config.replace({"lowrank.min_clients": 2})
    assert [r["clients"] for r in serve(config, federation(2).grid).history] == [[1, 2], [1, 2]]


# -- stopped, and resumed ------------------------------------------------------------------------------


@pytest.mark.parametrize("method, freq", [("rolora", 1), ("pfedloru", 0), ("fedloru", 2)])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(quick, federation, method, freq, tmp_path):
    """Its clients may be ahead of the checkpoint that it goes on from."""
    keys = {"federate.method": method, "federate.total_round_num": 4, "lowrank.checkpoint_freq": freq}
    keys |= {"lowrank.tau": 1} if method != "rolora" else {}
    whole = serve(quick("whole", keys), federation(folder=tmp_path / "a").grid)
    config, over = quick("cut", keys), threading.Event()

    def behave(number, message, answer):
        reply = answer()
        if message.metadata.group_id == "4":
            over.set()
        return None if over.is_set() else reply

    one = federation(behave=behave, folder=tmp_path / "b")
    with pytest.raises(fs_lowrank.RunFailed, match="was stopped"):
        serve(config, one.grid, stopped=over.is_set)
    one.end()  # its thread would draw from the generator with which the next server makes its model
    done = load_checkpoint(whole.outdir.parent / "cut" / "checkpoint")
    resumed = serve(config, federation(folder=tmp_path / "b").grid, resume=done is not None)
    same_model(whole, resumed)
    assert [r["clients"] for r in resumed.history] == [r["clients"] for r in whole.history]
    assert whole.final == resumed.final


@pytest.mark.parametrize("damage", ["{", "{}", "[]", None])
def test_what_tells_the_run_from_others_is_damaged(quick, federation, caplog, damage):
    """The copies are sent everything; personal parts cannot be found again."""
    for method in ("rolora", "pfedlora"):
        server, personal = Nodes(quick(method, {"federate.method": method})), method == "pfedlora"
        token, path = server.own_token(False, personal), server.folder / "run.json"
        assert server.own_token(True, personal) == token
        path.unlink() if damage is None else path.write_text(damage)
        if personal:
            with pytest.raises(
                fs_lowrank.UserError, match="run.json cannot be read: .*; without it .*restore the file"
            ):
                server.own_token(True, personal)
        else:
            assert server.own_token(True, personal) != token and "sent everything" in caplog.text


def test_a_new_run_takes_nothing_over_from_one_before(quick, federation, tmp_path):
    """Personal parts on a node's disk are of the run that trained them, and stay when another run begins."""
    keys = {"federate.method": "pfedloru", "lowrank.tau": 1}
    first = serve(quick("first", keys), federation().grid)
    again = serve(quick("again", keys), federation().grid)
    assert first.final == again.final
    copies = list((tmp_path / "nodes").glob("run_*/client_*"))
    assert len(copies) == 6 and len({copy.parent for copy in copies}) == 2
    assert all(load_checkpoint(copy).parts["personal"] for copy in copies)


# -- what Flower brings --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LocalDpMod", "fixedclipping_mod", "secaggplus_mod"])
def test_flowers_mods_cannot_change_our_parcels_unnoticed(quick, federation, name):
    """A node whose app has one is refused, with Flower's reason; none clips, masks or disturbs half of a product."""
    import flwr.client.mod
    import flwr.clientapp.mod
    from flwr.app import Error, Message

    mod = getattr(flwr.clientapp.mod, name, None) or getattr(flwr.client.mod, name)
    mod = mod(1.0, 1.0, 1.0, 1e-5) if name == "LocalDpMod" else mod

    def behave(number, message, answer):
        if number != 1:
            return answer()
        try:
            return mod(message, one.contexts[one.nodes[1]], lambda *_: answer())
        except Exception as error:  # as Flower's process of an app does
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)

    one, config = federation(behave=behave), quick("mods", {"federate.method": "rolora", "lowrank.timeout": 2.0})
    result = serve(config, one.grid)
    assert [r["clients"] for r in result.history] == [[1, 3], [1, 3]]
    reason = {
        "LocalDpMod": "Unsupported serialization type for numpy conversion: 'safetensors'",
        "fixedclipping_mod": "fixedclipping_mod expects exactly one ConfigRecord",
        "secaggplus_mod": "secaggplus",
    }[name]
    [record] = [json.loads(line) for line in (result.outdir / "rounds.jsonl").read_text().splitlines()][:1]
    [absent] = record["failed"]
    # Masks are for messages of training alone, so such a node joins.
    wanted = "Flower: " if name == "secaggplus_mod" else "no node has joined for it; one was refused: Flower: "
    assert absent["reason"].startswith(wanted) and reason in absent["reason"], absent
