"""Workers that die, do not answer, join late or do not fit the run, and ports in use: nothing waits without a limit."""

import re
import socket
import time
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank.errors import RunFailed, UserError
from fs_lowrank.methods import get_method_class

pytestmark = pytest.mark.federatedscope
KEYS = {"federate.method": "rolora", "train.local_update_steps": 2, "federate.total_round_num": 3}


def keys(tmp_path, **more):
    return {**KEYS, "outdir": str(tmp_path / "run"), **more}


def test_a_client_that_dies_during_a_round_is_left_out(settings, cluster, tmp_path):
    workers = cluster.run(settings, 3, keys(tmp_path, **{"lowrank.timeout": 12.0}), sabotage={2: {"dies_in": 2}})
    assert [workers[w].code for w in (0, 1, 2, 3)] == [0, 0, 9, 0], workers[0].said
    rounds = workers[0].history
    assert [r["clients"] for r in rounds] == [[1, 2, 3], [1, 3], [1, 3]]
    (failure,) = rounds[1]["failed"]
    assert failure["client"] == 2 and failure["reason"] == "its process is gone"
    assert "2" not in rounds[2]["client_downlink_bytes"]


def test_the_run_stops_when_too_few_clients_remain(settings, cluster, tmp_path):
    began = time.monotonic()
    workers = cluster.run(settings, 2, keys(tmp_path, **{"lowrank.min_clients": 2}), sabotage={2: {"dies_in": 2}})
    assert workers[0].kind == "RunFailed" and workers[0].code == 1
    assert "1 usable updates" in workers[0].said and "last good round, 1," in workers[0].said
    assert workers[1].code == 1 and "the server stopped" in workers[1].said
    assert (tmp_path / "run" / "checkpoint" / "round_000001").is_dir()
    assert time.monotonic() - began < 30


def test_the_server_waits_for_a_silent_client_no_longer_than_the_timeout(settings, cluster, tmp_path):
    started = cluster.launch(
        settings,
        2,
        keys(tmp_path, **{"lowrank.timeout": 4.0, "federate.total_round_num": 2}),
        sabotage={2: {"silent_in": 2}},
    )
    server = cluster.wait(*started[0], timeout=60)
    assert server.code == 0, server.said
    assert "no answer within lowrank.timeout, 4 s" in server.history[1]["failed"][0]["reason"]
    assert cluster.wait(*started[1]).code == 0


def test_clients_stop_when_the_server_is_gone(settings, cluster, tmp_path):
    """They wait for ``lowrank.timeout``, because the server may be resumed."""
    workers = cluster.run(settings, 2, keys(tmp_path, **{"lowrank.timeout": 6.0}), sabotage={0: {"dies_after": 1}})
    assert workers[0].code == 9
    for worker in (1, 2):
        assert workers[worker].code == 1 and "no server answers" in workers[worker].said


def test_a_client_that_comes_late_catches_up(settings, cluster, tmp_path):
    """It is started after the first round, which the server begins without it."""
    shape = {"federate.method": "fedloru", "lowrank.tau": 2, "federate.total_round_num": 9}
    started = cluster.launch(
        settings,
        2,
        keys(tmp_path, **shape, **{"lowrank.timeout": 6.0}),
        sabotage={0: {"sleeps": 0.6, "waits_for": str(tmp_path)}},
        changed={1: {"lowrank.timeout": 60.0}},
        only=[0, 1],
    )
    cluster.wait_for(lambda: (tmp_path / "here").exists())
    own = {"distribute.data_idx": 2, "distribute.client_port": cluster.ports[2]}
    started[2] = cluster.start(settings, {**cluster.commands[1], **own})
    # The client writes its token just before it asks to join.
    cluster.wait_for(lambda: (tmp_path / "run" / "client_2" / f"token_{cluster.ports[2]}").exists())
    (tmp_path / "go").touch()
    workers = {w: cluster.wait(*process) for w, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    took_part = [2 in r["clients"] for r in workers[0].history]
    assert not took_part[0] and took_part[-1]
    assert workers[0].history[0]["failed"][0]["kind"] == "absent"


def test_nobody_joins(quick, cluster, caplog):
    """The server says whom it waits for, also where the timeout is short, and its run ends."""
    keys = {"federate.method": "rolora", "federate.client_num": 2, "federate.sample_client_num": 2}
    keys |= {"federate.mode": "distributed", "distribute.use": True, "distribute.role": "server"}
    keys |= {"distribute.server_host": "127.0.0.1", "distribute.server_port": cluster.free_ports(1)[0]}
    with pytest.raises(RunFailed, match="0 usable updates") as error:
        fs_lowrank.run(quick("run", {**keys, "lowrank.timeout": 3.0}), "federatedscope")
    assert "it has not joined" in str(error.value)
    assert re.search(r"waiting for clients 1, 2: no answer for \d s; for up to \d s more", caplog.text)


def test_no_server(settings, cluster, tmp_path):
    (client,) = (
        cluster.wait(*one)
        for one in cluster.launch(settings, 2, keys(tmp_path, **{"lowrank.timeout": 3.0}), only=[1]).values()
    )
    assert client.code == 1 and "no server answers at 127.0.0.1:" in client.said
    log = (tmp_path / "run" / "client_1" / "exp_print.log").read_text()
    assert log.count("yet; calling it for up to 6 s more") == 1


def test_a_full_disk(quick, tmp_path):
    """Without its log the run goes on; without another of the framework's files it ends, and can be resumed."""
    config = quick("run", {"federate.method": "rolora", "federate.client_num": 2, "federate.total_round_num": 2})
    folder = Path(config.outdir) / config.expname
    folder.mkdir(parents=True)
    (folder / "exp_print.log").symlink_to("/dev/full")
    (folder / "eval_results.log").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match="cannot be written: No space left on device; make room"):
        fs_lowrank.run(config, "federatedscope")
    (folder / "eval_results.log").unlink()
    assert len(fs_lowrank.run(config, "federatedscope", resume=True).history) == 2


@pytest.mark.parametrize(
    "changed, sabotage, named",
    [
        ({1: {"seed": 4}}, {}, "they differ in seed"),
        ({1: {"train.optimizer.lr": 0.5}}, {}, "train.optimizer.lr"),
        ({}, {1: {"other_start": True}}, "lora_A.default.weight differs"),
        ({}, {1: {"revision": 2}}, "it has revision 2 of rolora, the server has revision 1"),
    ],
    ids=["seed", "learning_rate", "frozen_half", "revision"],
)
def test_a_client_with_another_start_is_refused_by_name(settings, cluster, tmp_path, changed, sabotage, named):
    workers = cluster.run(settings, 2, keys(tmp_path, **{"lowrank.timeout": 5.0}), changed=changed, sabotage=sabotage)
    assert workers[1].code == 2 and named in workers[1].said
    assert workers[0].code == 0, workers[0].said
    assert all(r["clients"] == [2] for r in workers[0].history)


def test_a_second_client_with_the_same_number_is_refused(settings, cluster, tmp_path):
    same = {"distribute.data_idx": 1, "outdir": str(tmp_path / "elsewhere")}
    workers = cluster.run(settings, 2, keys(tmp_path, **{"lowrank.timeout": 6.0}), changed={2: same})
    assert workers[0].code == 0, workers[0].said
    (refused,) = (workers[w] for w in (1, 2) if workers[w].code)
    assert refused.code == 2 and "client 1 has joined already" in refused.said


@pytest.mark.parametrize("role", ["server", "client"])
def test_a_port_in_use(quick, role):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = quick(
            "run",
            {
                "federate.mode": "distributed",
                "distribute.use": True,
                "distribute.role": role,
                "distribute.server_host": "127.0.0.1",
                "distribute.client_host": "127.0.0.1",
                f"distribute.{role}_port": port,
                "federate.use_ss": role == "client",  # else it does not listen
                "distribute.data_idx": 1,
            },
        )
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            fs_lowrank.run(config, "federatedscope")


def test_a_client_without_its_data(quick):
    config = quick("run", {"federate.mode": "distributed", "distribute.role": "client", "distribute.data_idx": 9})
    with pytest.raises(UserError, match="distribute.data_idx = 9: expected 1 to 5"):
        fs_lowrank.run(config, "federatedscope")


def test_a_model_that_the_method_cannot_adapt(quick):
    config = quick("run", {"llm.adapter.args": [{"r": 2, "modules": ["conv_pw"]}]})
    with pytest.raises(UserError, match="no module 'conv_pw'"):
        fs_lowrank.run(config, "federatedscope")


def test_a_round_continues_without_a_refused_update(quick, monkeypatch):
    from fs_lowrank.methods.rolora import RoLoRA

    send = RoLoRA.upload

    def broken(self, model, round, client):
        tensors = send(self, model, round, client)
        if client.id == 2 and round == 2:
            name = next(iter(tensors))
            tensors[name] = tensors[name].detach() * float("nan")
        return tensors

    monkeypatch.setattr(RoLoRA, "upload", broken)
    result = fs_lowrank.run(quick("run", {"federate.method": "rolora"}), "federatedscope")
    (failure,) = result.history[1]["failed"]
    assert failure["client"] == 2 and failure["kind"] == "refused" and "NaN" in failure["reason"]
    assert result.history[2]["clients"] == [1, 2, 3, 4, 5]


def test_a_failing_client_is_recorded(quick, monkeypatch):
    from fs_lowrank.rounds.trainer import Trainer

    fit = Trainer.fit

    def fails(self, client, *args):
        if client.id == 3:
            raise RuntimeError("out of memory")
        return fit(self, client, *args)

    monkeypatch.setattr(Trainer, "fit", fails)
    result = fs_lowrank.run(quick("run", {"federate.method": "rolora"}), "federatedscope")
    said = re.compile(r"RuntimeError: out of memory \(test_faults.py, line \d+\)")
    assert all(said.fullmatch(r["failed"][0]["reason"]) for r in result.history)
    with pytest.raises(UserError, match="4 usable updates.*out of memory"):
        fs_lowrank.run(quick("strict", {"federate.method": "rolora", "lowrank.min_clients": 5}), "federatedscope")


@pytest.mark.parametrize("share", [False, True], ids=["own_models", "one_model"])
@pytest.mark.parametrize(
    "method, more",
    [("rolora", {}), ("fedloru", {"lowrank.tau": 2}), ("pfedloru", {"lowrank.tau": 2})],
    ids=["rolora", "a_merge", "personal_parts"],
)
def test_a_bad_round_is_left_out_by_every_copy(quick, assert_same, monkeypatch, method, more, share):
    """Tensors and bytes are those of the embedded engine; no copy merges a message twice or draws a tensor again."""
    cls = get_method_class(method)
    aggregate = cls.aggregate

    def broken(self, updates, state, round):
        if round == 2:
            raise ArithmeticError("no convergence")
        return aggregate(self, updates, state, round)

    monkeypatch.setattr(cls, "aggregate", broken)
    keys = {
        "federate.method": method,
        "federate.total_round_num": 5,
        "federate.sample_client_num": 3,
        "train.optimizer.type": "SGD",
        "train.optimizer.lr": 0.05,
        "lowrank.on_bad_round": "skip",
        **more,
    }
    local = fs_lowrank.run(quick("local", keys))
    keys["federate.share_local_model"] = share
    other = fs_lowrank.run(quick("other", keys), "federatedscope")
    assert [bool(r.get("skipped")) for r in other.history] == [False, True, False, False, False]
    counted = ("clients", "skipped", "uplink_bytes", "downlink_bytes", "client_downlink_bytes")
    assert [[r.get(k) for k in counted] for r in other.history] == [[r.get(k) for k in counted] for r in local.history]
    assert_same(local, other)
    with pytest.raises(RunFailed, match="round 2: the server's step failed.*last good round, 1,.*on_bad_round to skip"):
        fs_lowrank.run(quick("stop", {**keys, "lowrank.on_bad_round": "stop"}), "federatedscope")


FACTS = {
    "many digits": {"samples": 10**400},
    "true": {"samples": True},
    "half": {"samples": 3.5},
    "another count": {"samples": 10**6},
    "no count": {"samples": None},
    "text": {"loss": "low"},
    "nan": {"loss": float("nan")},
    "a long loss": {"loss": 10**400},
    "a list": {"loss": [1.0]},
    "fatal": {"error": "I give up", "fatal": True},
    "an error of no text": {"error": {"a": 1}},
    "shares": {"shares": True, "sent_bytes": "x"},
}


@pytest.mark.parametrize("online", [False, True], ids=["kept", "running_mean"])
def test_wrong_facts_from_a_client_do_not_end_the_run(quick, monkeypatch, online):
    """Client 2 sends a wrong fact in each round; the round continues with the other clients."""
    from fs_lowrank.engines.federatedscope.client import LowRankClient
    from fs_lowrank.rounds.parcel import Parcel

    train, said = LowRankClient._train, list(FACTS)

    def lies(self, task):
        parcel, samples = train(self, task)
        if self.ID == 2:
            parcel = Parcel(parcel.tensors, **{**parcel.facts, **FACTS[said[task.round - 1]]})
        return parcel, samples

    monkeypatch.setattr(LowRankClient, "_train", lies)
    keys = {"federate.total_round_num": len(FACTS), "federate.online_aggr": online, "eval.freq": -1}
    history = fs_lowrank.run(quick("run", {"federate.method": "rolora", **keys}), "federatedscope").history
    for record, what in zip(history, said, strict=True):
        if what == "shares":  # facts that have no meaning in this run
            assert not record["failed"]
            continue
        (failure,) = record["failed"]
        assert failure["client"] == 2 and failure["kind"] == ("failed" if "error" in FACTS[what] else "refused"), what
        assert record["clients"] == [1, 3, 4, 5] and len(failure["reason"]) < 1100


def test_a_wrongly_quantised_update_does_not_end_the_run(quick, monkeypatch):
    """Quantised tensors of a wrong form, and missing ones, are refused."""
    from fs_lowrank.engines.federatedscope.client import LowRankClient
    from fs_lowrank.rounds.parcel import Parcel

    train = LowRankClient._train
    spoil = {
        1: lambda t: {n: x for n, x in t.items() if not n.startswith("scale:")},
        2: lambda t: {n: x.repeat(2) if n.startswith("scale:") else x for n, x in t.items()},
        3: lambda t: {n: x.to(torch.complex64) if n.startswith("quantised:") else x for n, x in t.items()},
        4: lambda t: {n: x[:0] if n.startswith("scale:") else x for n, x in t.items()},
    }

    def lies(self, task):
        parcel, samples = train(self, task)
        return (Parcel(spoil[task.round](parcel.tensors), **parcel.facts) if self.ID == 2 else parcel), samples

    monkeypatch.setattr(LowRankClient, "_train", lies)
    keys = {"federate.method": "rolora", "quantization.method": "uniform", "quantization.nbits": 8, "eval.freq": -1}
    history = fs_lowrank.run(quick("run", {**keys, "federate.total_round_num": 4}), "federatedscope").history
    assert [[f["client"] for f in r["failed"]] for r in history] == [[2]] * 4
    assert all(r["failed"][0]["kind"] == "refused" for r in history)


@pytest.mark.more
@pytest.mark.parametrize("bound", [{"lowrank.max_update_norm": 1e6}, {"lowrank.max_update_norm_factor": 1000}])
def test_a_huge_update_is_refused_where_norms_are_bounded(quick, monkeypatch, bound):
    from fs_lowrank.methods.rolora import RoLoRA

    send = RoLoRA.upload

    def huge(self, model, round, client):
        tensors = send(self, model, round, client)
        return {n: t * 0 + 1e19 for n, t in tensors.items()} if (client.id, round) == (2, 2) else tensors

    monkeypatch.setattr(RoLoRA, "upload", huge)
    result = fs_lowrank.run(quick("run", {"federate.method": "rolora", **bound}), "federatedscope")
    (failure,) = result.history[1]["failed"]
    assert failure["client"] == 2 and failure["kind"] == "refused" and next(iter(bound)) in failure["reason"]
    assert "2" not in result.history[1]["client_uplink_bytes"] and result.history[2]["clients"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("key", ["federate.use_ss", "federate.online_aggr"])
def test_a_norm_factor_needs_the_updates(quick, key):
    with pytest.raises(UserError, match=f"lowrank.max_update_norm_factor = 10.0 and {key} together"):
        config = quick("run", {"federate.method": "fedlora", key: True, "lowrank.max_update_norm_factor": 10})
        fs_lowrank.run(config, "federatedscope")


@pytest.mark.parametrize("dying", [(2,), (1, 2)], ids=["one", "all"])
def test_clients_that_die_while_they_evaluate(settings, cluster, tmp_path, dying):
    """The remaining clients evaluate the last round, and its training is kept."""
    workers = cluster.run(
        settings,
        2,
        keys(tmp_path, **{"federate.make_global_eval": False, "eval.freq": 3}),
        sabotage={client: {"dies_evaluating": True} for client in dying},
    )
    assert workers[0].code == 0, workers[0].said
    assert [workers[w].code for w in (1, 2)] == [9 if w in dying else 0 for w in (1, 2)]
    assert [r["round"] for r in workers[0].history] == [1, 2, 3]
    assert bool(workers[0].history[-1]["metrics"]) == (len(dying) == 1)


@pytest.mark.parametrize(
    "reports, said",
    [
        ({"loss": 1e300}, "no loss and acc that it can be"),
        ({"acc": "1"}, "no loss and acc that it can be"),
    ],
    ids=["a_number", "a_type"],
)
def test_metrics_of_a_process_that_lies_are_left_out(settings, cluster, tmp_path, reports, said):
    workers = cluster.run(
        settings,
        2,
        keys(tmp_path, **{"federate.make_global_eval": False, "eval.split": ["test"], "eval.freq": 1}),
        sabotage={2: {"reports": reports}},
    )
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    for record in workers[0].history:
        assert record["clients"] == [1, 2] and list(record["client_scores"]) == ["1"]
        (left_out,) = record["unevaluated"]
        assert left_out["client"] == 2 and said in left_out["reason"]


def test_a_client_that_has_not_joined_is_named_where_clients_evaluate(settings, cluster, tmp_path):
    more = {"federate.make_global_eval": False, "eval.split": ["test"], "eval.freq": 1, "lowrank.timeout": 8.0}
    started = cluster.launch(settings, 3, keys(tmp_path, **more), only=[0, 1, 2])
    workers = {worker: cluster.wait(*process) for worker, process in started.items()}
    assert [w.code for w in workers.values()] == [0, 0, 0], [w.said for w in workers.values()]
    for record in workers[0].history:
        assert record["unevaluated"] == [{"client": 3, "reason": "it has not joined"}]
