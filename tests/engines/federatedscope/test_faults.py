"""Workers that die, do not answer, join late or do not fit the run, and ports in use: nothing waits without a limit."""

import re
import socket
from pathlib import Path

import pytest

import fs_lowrank
from fs_lowrank.errors import RunFailed, UserError
from tests.cases import break_step

pytestmark = pytest.mark.federatedscope


def test_a_client_that_dies_during_a_round_is_left_out(cluster):
    dies = {"dies_at": ("rounds.trainer.Trainer.fit", 2)}
    workers = cluster.run(3, {"lowrank.timeout": 12.0}, sabotage={2: dies}, codes={2: 9})
    rounds = workers[0].history
    assert [r["clients"] for r in rounds] == [[1, 2, 3], [1, 3], [1, 3]]
    (failure,) = rounds[1]["failed"]
    assert failure["client"] == 2 and failure["reason"] == "its process is gone"
    assert "2" not in rounds[2]["client_downlink_bytes"]


def test_the_server_waits_for_a_silent_client_no_longer_than_the_timeout(cluster):
    keys = {"lowrank.timeout": 4.0, "federate.total_round_num": 2}
    started = cluster.launch(2, keys, sabotage={2: {"silent_in": 2}})
    server = cluster.ended({worker: started[worker] for worker in (0, 1)})[0]
    assert "no answer within lowrank.timeout, 4 s" in server.history[1]["failed"][0]["reason"]


def test_clients_stop_when_the_server_is_gone(cluster):
    """They wait for ``lowrank.timeout``, because the server may be resumed."""
    workers = cluster.run(2, {"lowrank.timeout": 6.0}, sabotage={0: {"dies_after": 1}}, codes={0: 9, 1: 1, 2: 1})
    assert all("no server answers" in workers[worker].said for worker in (1, 2))


def test_a_client_that_comes_late_catches_up(cluster, tmp_path):
    """It is started after the first round, which the server begins without it."""
    keys = {"federate.method": "fedloru", "lowrank.tau": 2, "federate.total_round_num": 9, "lowrank.timeout": 6.0}
    started = cluster.launch(
        2,
        keys,
        sabotage={0: {"sleeps": 0.6, "waits_for": str(tmp_path)}},
        changed=dict.fromkeys((1, 2), {"lowrank.timeout": 60.0}),
        only=[0, 1],
    )
    cluster.wait_for(lambda: (tmp_path / "here").exists())
    started[2] = cluster.again(2)
    # The client writes its token just before it asks to join.
    cluster.wait_for(lambda: (tmp_path / "run" / "client_2" / f"token_{cluster.ports[2]}").exists())
    (tmp_path / "go").touch()
    history = cluster.ended(started)[0].history
    took_part = [2 in r["clients"] for r in history]
    assert not took_part[0] and took_part[-1]
    assert history[0]["failed"][0]["kind"] == "absent"


def test_nobody_joins(quick, cluster, caplog):
    """The server says whom it waits for, also where the timeout is short, and its run ends."""
    keys = {"federate.method": "rolora", "federate.client_num": 2, "federate.sample_client_num": 2}
    keys |= {"federate.mode": "distributed", "distribute.use": True, "distribute.role": "server"}
    keys |= {"distribute.server_host": "127.0.0.1", "distribute.server_port": cluster.free_ports(1)[0]}
    with pytest.raises(RunFailed, match="0 usable updates") as error:
        fs_lowrank.run(quick("run", {**keys, "lowrank.timeout": 3.0}), "federatedscope")
    assert "it has not joined" in str(error.value)
    assert re.search(r"waiting for clients 1, 2: no answer for \d s; for up to \d s more", caplog.text)


def test_no_server(cluster, tmp_path):
    client = cluster.ended(cluster.launch(2, {"lowrank.timeout": 3.0}, only=[1]), {1: 1})[1]
    assert "no server answers at 127.0.0.1:" in client.said
    log = (tmp_path / "run" / "client_1" / "exp_print.log").read_text()
    assert log.count("yet; calling it for up to 6 s more") == 1


def test_a_full_disk(quick, tmp_path, caplog, capsys):
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
    assert "exp_print.log cannot be written ([Errno 28] No space left on device); the run goes on" in caplog.text
    assert "Logging error" not in capsys.readouterr().err


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
def test_a_client_with_another_start_is_refused_by_name(cluster, changed, sabotage, named):
    workers = cluster.run(2, {"lowrank.timeout": 5.0}, changed=changed, sabotage=sabotage, codes={1: 2})
    assert named in workers[1].said
    assert all(r["clients"] == [2] for r in workers[0].history)


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


@pytest.mark.parametrize("share", [False, True], ids=["own_models", "one_model"])
@pytest.mark.parametrize(
    "method, more",
    [("rolora", {}), ("fedloru", {"lowrank.tau": 2}), ("pfedloru", {"lowrank.tau": 2})],
    ids=["rolora", "a_merge", "personal_parts"],
)
def test_a_bad_round_is_left_out_by_every_copy(quick, assert_same, monkeypatch, method, more, share):
    """Tensors and bytes are those of the embedded engine; no copy merges a message twice or draws a tensor again."""
    break_step(monkeypatch, method, 2)
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
    "another count": {"samples": 10**6},
    "text": {"loss": "low"},
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


def test_an_update_without_its_scales_is_refused(quick, monkeypatch):
    from fs_lowrank.engines.federatedscope.client import LowRankClient
    from fs_lowrank.rounds.parcel import Parcel

    train = LowRankClient._train

    def lies(self, task):
        parcel, samples = train(self, task)
        sent = {n: t for n, t in parcel.tensors.items() if self.ID != 2 or not n.startswith("scale:")}
        return Parcel(sent, **parcel.facts), samples

    monkeypatch.setattr(LowRankClient, "_train", lies)
    keys = {"federate.method": "rolora", "quantization.method": "uniform", "quantization.nbits": 8, "eval.freq": -1}
    (record,) = fs_lowrank.run(quick("run", {**keys, "federate.total_round_num": 1}), "federatedscope").history
    assert [(failure["client"], failure["kind"]) for failure in record["failed"]] == [(2, "refused")]


@pytest.mark.parametrize("processes", [1, 2])
def test_values_that_cannot_be_quantised_cost_the_client_its_round(quick, processes):
    keys = {"federate.method": "rolora", "quantization.method": "uniform", "quantization.nbits": 8, "eval.freq": -1}
    keys |= {"federate.process_num": processes, "train.optimizer.type": "SGD", "train.local_update_steps": 3}
    keys |= {"lowrank.clients": [{"clients": [2], "lr": 1e30}], "federate.total_round_num": 1}
    (record,) = fs_lowrank.run(quick("run", keys), "federatedscope").history
    (failed,) = record["failed"]
    assert failed["client"] == 2 and failed["kind"] == "failed" and "cannot be quantised" in failed["reason"]


@pytest.mark.parametrize("dying", [(2,), (1, 2)], ids=["one", "all"])
def test_clients_that_die_while_they_evaluate(cluster, dying):
    """The remaining clients evaluate the last round, and its training is kept."""
    keys = {"federate.make_global_eval": False, "eval.freq": 3}
    sabotage = {client: {"dies_at": ("rounds.evaluator.Evaluator.score", 1)} for client in dying}
    history = cluster.run(2, keys, sabotage=sabotage, codes=dict.fromkeys(dying, 9))[0].history
    assert [r["round"] for r in history] == [1, 2, 3]
    assert bool(history[-1]["metrics"]) == (len(dying) == 1)


EVALUATING = {"federate.make_global_eval": False, "eval.split": ["test"], "eval.freq": 1}


def test_a_client_that_has_not_joined_is_named_where_clients_evaluate(cluster):
    for record in cluster.run(3, {**EVALUATING, "lowrank.timeout": 8.0}, only=[0, 1, 2])[0].history:
        assert record["unevaluated"] == [{"client": 3, "reason": "it has not joined"}]
