"""FedProx, SCAFFOLD and FedDyn over averaging methods, against their algorithm boxes in float64."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fs_lowrank import UserError, load_config
from fs_lowrank.methods import (
    DriftCorrection,
    RobustMean,
    create_method,
    get_method_class,
    list_methods,
)
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.names import all_tensors
from fs_lowrank.rounds.workspace import method_of
from fs_lowrank.settings import AdapterSpec
from fs_lowrank.testing import Bench, checks, quietly
from fs_lowrank.training.local import set_trainable

SIZES, LR = (3, 10, 27), 0.3
#: the third round has a client that missed two, the fourth all of them
PARTICIPATION = ((1, 3), (1,), (2, 3), (1, 2, 3), (2,))
KINDS = ("fedprox", "scaffold", "feddyn")
SGD = {"train.optimizer": {"type": "SGD", "lr": 0.1}}


def steps_of(client):
    return client + 1


def loss(model, client):
    draw = torch.Generator().manual_seed(client)
    inputs, labels = torch.randn(SIZES[client - 1], 7, generator=draw), torch.arange(SIZES[client - 1]) % 3
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return F.cross_entropy(plain(inputs.to(next(model.parameters()).dtype)), labels)


def trains(fed, lr=LR):
    """The federation, whose clients train on data of their own instead of jumping."""

    def train(client, round):
        model = fed.copies[client]
        for phase in fed.method.phases(round, client):
            optimizer = torch.optim.SGD(set_trainable(model, phase.train), lr)
            for _ in range(steps_of(client)):
                optimizer.zero_grad()
                (loss(model, client) + (phase.penalty(model) if phase.penalty else 0)).backward()
                optimizer.step()
            if phase.ended:
                with torch.no_grad():
                    phase.ended(model, steps_of(client), lr)

    fed.jump = train
    return fed


class Box:
    """An algorithm box in float64, over the tensors of ``model`` by name, without the functions of the package."""

    def __init__(self, model, kind, weight, uniform, trained_in):
        self.model, self.kind, self.weight = copy.deepcopy(model).double(), kind, weight
        self.parameters = {n: p.requires_grad_() for n, p in self.model.named_parameters()}
        self.sizes, self.trained_in = [1 if uniform else n for n in SIZES], trained_in
        self.w = {n: p.detach().clone() for n, p in self.parameters.items()}
        self.own = {k: {n: torch.zeros_like(t) for n, t in self.w.items()} for k in range(1, len(SIZES) + 1)}
        self.seen = set()

    def mean_of_all(self, own):
        """Over all clients by samples; one that has not taken part has zeros, and the mean size of the others."""
        known = [self.sizes[k - 1] for k in self.seen]
        total = sum(known) / max(len(known), 1) * len(SIZES) or 1
        return {n: sum(self.sizes[k - 1] / total * own[k][n] for k in self.seen) + 0 * self.w[n] for n in self.w}

    def local(self, client, names, control):
        w = {n: t.clone() for n, t in self.w.items()}
        own = self.own[client]
        for _ in range(steps_of(client)):
            with torch.no_grad():
                for n, p in self.parameters.items():
                    p.copy_(w[n])
            value = loss(self.model, client)
            for n, g in zip(names, torch.autograd.grad(value, [self.parameters[n] for n in names])):
                near = self.weight * (w[n] - self.w[n])
                g = g + {"fedprox": near, "scaffold": control[n] - own[n], "feddyn": near - own[n]}[self.kind]
                w[n] = w[n] - LR * g
        return w

    def round(self, number, clients):
        names = [n for n in self.w if any(part in n for part in self.trained_in(number)) and "original" not in n]
        control = self.mean_of_all(self.own)
        sent = {k: self.local(k, names, control) for k in clients}
        for k, w in sent.items():
            for n in names:
                if self.kind == "scaffold":
                    self.own[k][n] = self.own[k][n] - control[n] + (self.w[n] - w[n]) / (steps_of(k) * LR)
                elif self.kind == "feddyn":
                    self.own[k][n] = self.own[k][n] - self.weight * (w[n] - self.w[n])
        self.seen |= {*clients}
        total = sum(self.sizes[k - 1] for k in clients)
        h = self.mean_of_all(self.own)
        for n in names:
            self.w[n] = sum(self.sizes[k - 1] / total * w[n] for k, w in sent.items())
            if self.kind == "feddyn":
                self.w[n] = self.w[n] - h[n] / self.weight


TRAINED = {
    "fedavg": lambda round: ("",),
    "fedlora": lambda round: ("lora_", "classifier"),
    "rolora": lambda round: (("lora_B", "lora_A")[round % 2 == 0], "classifier"),
}


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uniform", [False, True], ids=["by samples", "equal weights"])
def test_rounds_are_those_of_the_algorithm_box(toy, federation, kind, method, uniform):
    weight = 0.2
    drift = DriftCorrection(kind, weight, len(SIZES))
    fed = trains(federation(toy.method(method, drift=drift, uniform=uniform), SIZES))
    box = Box(fed.model, kind, weight, uniform, TRAINED[method])
    for number, clients in enumerate(PARTICIPATION, start=1):
        fed.round(number, clients)
        box.round(number, clients)
        state = fed.ledger.state
        for n in fed.method.view(state):
            if not n.startswith("control:"):
                np.testing.assert_allclose(state[n], box.w[n], atol=2e-5, rtol=2e-5, err_msg=f"{number}: {n}")
    control = box.mean_of_all(box.own)
    kept = {n for n in state if n.startswith(("control:", "h:"))}
    assert bool(kept) == (kind != "fedprox")
    for n in kept:
        np.testing.assert_allclose(state[n], control[n.split(":", 1)[1]], atol=2e-5, rtol=2e-4, err_msg=n)
    for client, model in fed.copies.items():
        for n, t in all_tensors(model).items():
            if n.startswith("own:"):
                own = box.own[client][n.split(":", 1)[1]]
                np.testing.assert_allclose(t, own, atol=2e-5, rtol=2e-4, err_msg=n)


@pytest.mark.parametrize("method", ["fedlora", "fedsa_lora", "pfedlora", "mfedloru", "ravan"])
def test_fedprox_with_mu_0_is_the_method_to_the_bit(toy, federation, method):
    states = []
    for drift in (None, DriftCorrection("fedprox", 0.0)):
        fed = trains(federation(toy.method(method, drift=drift), SIZES))
        for number, clients in enumerate(PARTICIPATION[:3], start=1):
            fed.round(number, clients)
        states.append(fed.ledger.state)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0] if isinstance(states[0][n], torch.Tensor))


def test_what_is_beside_the_model_is_no_part_of_it(toy):
    model = toy.method("fedlora", drift=DriftCorrection("scaffold", clients=3)).adapt(toy.net())
    plain = toy.method("fedlora").adapt(toy.net())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    beside = all_tensors(model).keys() - all_tensors(plain).keys()
    name = next(n for n in all_tensors(plain) if "lora_A" in n)
    assert {f"control:{name}", f"own:{name}"} <= beside and len(beside) == 2 * (6 + 2)
    load_tensors(model, {f"own:{name}": torch.ones_like(all_tensors(model)[name])})
    assert copy.deepcopy(model).get_buffer(f"own:{name}".replace(".", "|")).sum() > 0


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_takes_a_correction_or_says_why_not(kind):
    taken = set()
    for name in list_methods():
        needs = {"adapter": AdapterSpec(), "rounds": 4, "drift": DriftCorrection(kind, 0.1, 3)}
        try:
            method = create_method(name, **needs)
        except UserError as error:
            assert f"lowrank.drift = {kind}" in str(error) and "\n" not in str(error), name
            continue
        taken.add(name)
        assert method.name == name and not hasattr(get_method_class(name), "drift")
    assert {"fedavg", "fedlora", "ffa_lora", "rolora", "fedsa_lora", "fedpara", "pfedlora"} <= taken
    assert not {"flora", "flexlora", "fedfisher", "otfusion"} & taken
    assert ("fedloru" in taken) == ("ravan" in taken) == (kind == "fedprox")
    assert ("la_lora" in taken) == (kind != "scaffold")


TEXTS = {"model.type": "small@transformers"}


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"lowrank.drift": "fedprx"}, "did you mean 'fedprox'"),
        ({"lowrank.drift_weight": 0.5}, "weight = 0.5: it is for fedprox and feddyn; lowrank.drift is none"),
        ({"lowrank.drift": "scaffold", "lowrank.drift_weight": 0.5}, "lowrank.drift is scaffold"),
        ({"lowrank.drift": "feddyn", "lowrank.drift_weight": 0.0}, "a number above 0"),
        ({"lowrank.drift": "scaffold", "train.optimizer.type": "AdamW"}, "plain steps"),
        ({"lowrank.drift": "scaffold", "train.optimizer.momentum": 0.9}, "plain steps"),
        ({"lowrank.drift": "scaffold", "grad.grad_clip": 1.0}, "plain steps"),
        ({"lowrank.drift": "feddyn", "fedopt.use": True}, "fedopt.use = True: .*feddyn has a server's step"),
        ({"lowrank.drift": "scaffold", "lowrank.robust": "median"}, "lowrank.robust = 'median': .*leave one"),
        ({"lowrank.drift": "scaffold", "federate.online_aggr": True}, "online_aggr = True: .*leave one"),
        ({"lowrank.drift": "scaffold", "federate.use_ss": True}, "federate.use_ss = True: .*leave one"),
        ({"lowrank.drift": "feddyn", "quantization.method": "uniform"}, "method = 'uniform': .*leave one"),
        ({"lowrank.drift": "fedprox", "model.device_map": "auto", **TEXTS}, "device_map = 'auto': .*on one device"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys, said):
    with pytest.raises(UserError, match=f"override: .*{said}"):
        load_config({"federate.method": "fedlora", "federate.client_num": 8}, keys)


def test_keys_reach_the_method():
    content = {"federate": {"method": "rolora", "client_num": 8, "ignore_weight": True}}
    both = {"drift": "fedprox", "drift_weight": 0.5}
    method = method_of(load_config({**content, "lowrank": both, "fedopt": {"use": True}}))
    assert method.drift == DriftCorrection("fedprox", 0.5, 8) and method.wrappers
    assert DriftCorrection.from_config(load_config(content)) is None


def test_a_robust_mean_goes_with_fedprox_alone(toy):
    assert toy.method("fedlora", drift=DriftCorrection("fedprox"), robust=RobustMean("median")).robust
    with pytest.raises(UserError, match="an aggregate of its own"):
        toy.method("fedlora", drift=DriftCorrection("scaffold"), robust=RobustMean("median"))


# -- whole runs ------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", ["seed", "bytes", "dropouts", "resume", "arguments"])
def test_the_generic_suite(tmp_path, kind, check):
    one = next(c for c in checks.CHECKS if c.name == check)
    with quietly(tmp_path):
        method = "fedsa_lora" if check == "resume" else "rolora"
        one.function(Bench(tmp_path, {"lowrank.drift": kind, **SGD}), method, "encoder")


@pytest.mark.more
@pytest.mark.parametrize("kind", ["fedprox", "feddyn"])
def test_a_run_saves_what_plain_libraries_load(tmp_path, kind):
    with quietly(tmp_path):
        checks.check_run(Bench(tmp_path, {"lowrank.drift": kind}), "fedlora", "encoder")


@pytest.mark.more
def test_scaffold_s_variates_are_the_gradients_of_a_real_run(tmp_path):
    """Of clients with unequal numbers of steps, the last of which has fewer batches than the others."""
    keys = {"federate.total_round_num": 1, "train.batch_or_epoch": "epoch", "grad.grad_accum_count": 2}
    sent = {}
    with quietly(tmp_path):
        bench = Bench(tmp_path, SGD)
        for kind in ("none", "scaffold"):
            engine = bench.make("encoder", "fedlora", {**keys, "lowrank.drift": kind})
            start, (_, sent[kind]) = checks.state_of(engine), checks._run_and_keep_uploads(engine)
    workspace, q = engine.workspace, engine.workspace.sizes / engine.workspace.sizes.sum()
    batches = [-(-int(n) // engine.config.dataloader.batch_size) for n in workspace.sizes]
    assert len(set(batches)) > 1 and any(n % 2 for n in batches)
    for n in sent["none"][1]:
        own = {}
        for client in (1, 2, 3):
            assert torch.equal(sent["none"][client][n], sent["scaffold"][client][n])
            way = batches[client - 1] / 2 * engine.config.train.optimizer.lr
            own[client] = (start[n].double() - sent["none"][client][n].double()) / way
            torch.testing.assert_close(
                workspace.personal[client][f"own:{n}"].double(), own[client], atol=1e-5, rtol=1e-4
            )
        mean = sum(float(q[k - 1]) * own[k] for k in own)
        torch.testing.assert_close(engine.ledger.state[f"control:{n}"].double(), mean, atol=1e-5, rtol=1e-4)
