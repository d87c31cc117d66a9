"""What a client cannot say, shares of its update between processes, and whom the framework's samplers draw."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

import fs_lowrank
from fs_lowrank import load_config
from fs_lowrank.rounds.parcel import Parcel
from tests.engines.federatedscope.conftest import free_ports

pytestmark = pytest.mark.federatedscope
#: half of a surrogate pair
HALF = "\ud800"


def test_a_failure_that_cannot_be_encoded_ends_the_run_with_its_reason(cluster):
    """Too few clients remain, and the others are told so."""
    codes = dict.fromkeys((0, 1, 2), 1)
    workers = cluster.run(2, {"lowrank.min_clients": 2}, sabotage={2: {"says": HALF}}, codes=codes)
    assert "1 usable updates" in workers[0].said
    for worker in workers.values():
        assert worker.kind == "RunFailed" and "RuntimeError: " in worker.said


# -- the framework's samplers --------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["group", "responsiveness"])
def test_clients_that_do_not_answer_are_drawn_again(quick, tmp_path, monkeypatch, sampler):
    """They drop out, fail, or are refused."""
    from federatedscope.core import sampler as samplers

    from fs_lowrank.engines.federatedscope.client import LowRankClient

    for cls in (samplers.GroupSampler, samplers.ResponsivenessRealtedSampler):

        def sample(self, size, draw=cls.sample):
            assert self.client_state.sum() == 10, "a client that is not idle is never drawn, and the draw may not end"
            return draw(self, size)

        monkeypatch.setattr(cls, "sample", sample)
    train = LowRankClient._train

    def spoils(self, round):
        if self.ID == 1:
            raise RuntimeError("out of memory")
        parcel, samples = train(self, round)
        return Parcel(parcel.tensors, **{**parcel.facts, **({"loss": "low"} if self.ID == 2 else {})}), samples

    monkeypatch.setattr(LowRankClient, "_train", spoils)
    shape = {
        "federate.client_num": 10,
        "federate.sample_client_num": 5,
        "data.splitter": "iid",
        "data.splitter_args": [],
    }
    shape |= {"federate.total_round_num": 8, "lowrank.drop_rate": 0.3, "train.local_update_steps": 1, "eval.freq": 0}
    info = tmp_path / "resources.pkl"
    info.write_bytes(pickle.dumps({i: {"computation": 10.0 + i, "communication": 100.0 + i} for i in range(11)}))
    shape |= {"federate.method": "rolora", "federate.sampler": sampler, "federate.resource_info_file": str(info)}
    result = fs_lowrank.run(quick("run", shape), "federatedscope")
    assert [len(r["selected"]) for r in result.history] == [5] * 8
    assert {f["kind"] for r in result.history for f in r["failed"]} == {"dropped", "failed", "refused"}


# -- secret sharing ------------------------------------------------------------------------------------


def test_shares_of_a_round_that_a_resumed_server_begins_again(quick, assert_same, cluster):
    """The server ends when it has the first sum of round 2; the shares of that attempt are in no sum of the next."""
    keys = {"federate.method": "fedlora", "federate.client_num": 3, "federate.total_round_num": 3}
    alone = fs_lowrank.run(quick("alone", keys))
    dies = {"dies_at": ("rounds.round.Round.take", 4)}
    started = cluster.launch(3, {**keys, "federate.use_ss": True}, sabotage={0: dies})
    assert cluster.wait(*started[0]).code == 9
    started[0] = cluster.again(0, {"resume": True})
    assert_same(alone, cluster.ended(started)[0].tensors)


@pytest.fixture
def sharing():
    """``sharing()``: one client's way to the others, on a port of its own."""
    from fs_lowrank.engines.federatedscope.sharing import Sharing

    made = []

    def make(timeout=20.0):
        section = {"client_host": "127.0.0.1", "client_port": free_ports(1)[0], "grpc_compression": "nocompression"}
        section |= {"grpc_max_send_message_length": 2**20, "grpc_max_receive_message_length": 2**20}
        keys = {"federate.method": "fedlora", "model.type": "x@transformers", "data.type": "x.csv"}
        config = load_config({**keys, "federate.client_num": 2, "lowrank.timeout": timeout})
        made.append(Sharing(SimpleNamespace(**section), config, uniform=False))
        return made[-1]

    yield make
    for each in made:
        each.listener.close()


def given(sharing, token, tensors) -> str:
    """The status by which ``sharing`` answers a share."""
    import grpc

    from fs_lowrank.engines.federatedscope.wire import Channel

    channel = Channel(sharing.address, sharing.cfg, token)
    try:
        channel.begin("ss_model_para", 2, Parcel(tensors), timeout=20.0).result()
    except grpc.RpcError as error:
        return error.code().name
    finally:
        channel.close()
    return "OK"


def test_a_client_sends_nothing_if_fewer_clients_share_than_there_are(sharing):
    """Alone, its share of the secret would be its update."""
    update = Parcel({"w": torch.tensor([1.0, -2.5])}, round=3, samples=5)
    answer = sharing().summed(update, 1, {})
    assert not answer.tensors and answer.facts["error"].endswith("1 of 2 clients share in this exchange; all have to")


def test_a_client_takes_one_share_of_each_other_client_in_a_round(sharing):
    """Not from who has no token of the round, nor a second one; the sum is that of the first."""
    from fs_lowrank.engines.federatedscope.sums import recover, split_secret

    one, two = sharing(), sharing()
    update, other = {"w": torch.tensor([1.0, -2.5])}, {"w": torch.tensor([3.0, 0.25])}
    to_one, own = split_secret(other, 5, 2)
    assert given(one, "a" * 32, to_one) == "UNAUTHENTICATED", "nothing is awaited yet"
    for each, place in ((one, two), (two, one)):
        each.others = {"2": (place.address, "a" * 32)}
        each.expect(each.others)
    assert given(one, "b" * 32, to_one) == "UNAUTHENTICATED"
    assert given(one, "a" * 32, to_one) == "OK"
    assert given(one, "a" * 32, {"w": torch.zeros(2, dtype=torch.int64)}) == "OK", "and is left out"
    answer = one.summed(Parcel(update, round=1, samples=3, loss=0.5), 1, one.others)
    assert answer.facts == {"round": 1, "samples": 3, "loss": 0.5}
    total = {"w": answer.tensors["w"] + own["w"] + two._shares["a" * 32].tensors["w"]}
    assert torch.allclose(recover(total, 8, update)["w"], (3 * update["w"] + 5 * other["w"]) / 8)


def test_a_share_that_does_not_come_or_has_another_shape_is_named(sharing):
    one, two = sharing(timeout=2.0), sharing(timeout=2.0)
    others, update = {"2": (two.address, "a" * 32)}, Parcel({"w": torch.ones(2)}, round=1, samples=3, loss=0.5)
    two.expect({"1": (one.address, "a" * 32)})
    one.expect(others)
    assert "no share of client 2 within lowrank.timeout, 2 s" in one.summed(update, 1, others).facts["error"]
    one.expect(others)
    assert given(one, "a" * 32, {"w": torch.zeros(3, dtype=torch.int64)}) == "OK"
    assert "the share of client 2 has other names, shapes" in one.summed(update, 1, others).facts["error"]
    nobody = {"2": (f"127.0.0.1:{free_ports(1)[0]}", "a" * 32)}
    one.expect(nobody)
    assert "its share did not arrive at 127.0.0.1:" in one.summed(update, 1, nobody).facts["error"]


@pytest.mark.parametrize("address", ["127.0.0.1:80", "site-1.example.org:5", "[::1]:80"])
def test_an_address_is_a_host_and_a_port(address):
    """And no other way to connect."""
    import re

    from fs_lowrank.engines.federatedscope.distributed import _ADDRESS

    assert re.fullmatch(_ADDRESS, address)
    for wrong in ("ipv4:127.0.0.1", "unix:there", "a:b", "[::1", "::1:80", "a,b:80", "a/b:80", ":80", "a:80\n"):
        assert not re.fullmatch(_ADDRESS, wrong), wrong
