"""Local training, evaluation and learning rates compared with plain loops."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fs_lowrank.config import load_config
from fs_lowrank.data import Examples
from fs_lowrank.errors import UserError
from fs_lowrank.methods import Phase
from fs_lowrank.models.adapters import add_adapter, load_tensors
from fs_lowrank.models.names import all_tensors
from fs_lowrank.seeds import derive
from fs_lowrank.settings import OPTIMIZERS as CONFIGURABLE
from fs_lowrank.settings import AdapterSpec, Optimizer, Scheduler
from fs_lowrank.settings.sections import Dataloader
from fs_lowrank.training import evaluate, samples_trained, steps_taken, train_client
from fs_lowrank.training.evaluate import worst_tenth
from fs_lowrank.training.local import batch_indices, set_trainable
from fs_lowrank.training.optimizer import check_optimizer, make_optimizer
from fs_lowrank.training.schedule import lr_at, schedule_of


def config(keys=None):
    own = {"federate.client_num": 1, "federate.method": "fedlora", "dataloader.batch_size": 4}
    return load_config({**own, **(keys or {})})


def data(count=10, classes=3, seed=0):
    draw = np.random.default_rng(seed)
    return Examples(
        {"input_ids": [draw.integers(4, 30, draw.integers(3, 9)) for _ in range(count)]},
        draw.integers(0, classes, count),
    )


@pytest.fixture
def model(tiny_encoder):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        str(tiny_encoder), num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return add_adapter(model, AdapterSpec(r=2, lora_alpha=6, target_modules=("query",)), seed=0)


def snapshot(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def moved(model, before):
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def close(model, other, atol, rtol):
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


# -- what trains ---------------------------------------------------------------------------------------

OPTIMIZERS = [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.5}),
    ("Adam", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("kind, extra", OPTIMIZERS)
@pytest.mark.parametrize("half, frozen", [("lora_B", "lora_A"), ("lora_A", "lora_B")])
def test_the_frozen_half_does_not_change(model, kind, extra, half, frozen):
    for n, p in model.named_parameters():  # with B = 0, A has no gradient
        if "lora_B" in n:
            p.data.normal_()
    before = snapshot(model)
    cfg = config({"train.local_update_steps": 5, "train.optimizer": {"type": kind, **extra}})
    train_client(model, data(), [Phase((half, "head"))], cfg, lr=0.05, seed=1)
    changed = moved(model, before)
    assert changed == {n for n in before if half in n or "modules_to_save" in n}
    assert not any(frozen in n or "base_layer" in n or "original_module" in n for n in changed)
    assert all(p.grad is None for p in model.parameters())


def test_no_optimizer_state_survives_a_switch_of_halves(model, monkeypatch):
    import fs_lowrank.training.local as local

    made = []

    def spy(parameters, *rest):
        optimizer = make_optimizer(parameters, *rest)
        made.append((len(parameters), optimizer))
        return optimizer

    monkeypatch.setattr(local, "make_optimizer", spy)
    cfg = config({"train.local_update_steps": 2, "train.optimizer": {"type": "AdamW"}})
    train_client(
        model, data(), [Phase(("lora_B",)), Phase(("lora_A",), steps=1), Phase(("lora_B",))], cfg, lr=0.05, seed=1
    )
    assert len(made) == 3 and len({id(o) for _, o in made}) == 3
    assert [max(int(s["step"]) for s in o.state.values()) for _, o in made] == [2, 1, 2]


@pytest.mark.parametrize("kind, extra", OPTIMIZERS)
def test_turns_are_steps_of_one_optimizer_that_sees_one_half_at_a_time(model, kind, extra):
    """As in LA-LoRA's code: what trains is set before each step; an optimizer passes over what has no gradient."""
    for n, p in model.named_parameters():  # with B = 0, A has no gradient
        if "lora_B" in n:
            p.data.normal_()
    halves = "lora_B", "lora_A"
    whole = {"dataloader.batch_size": len(data()), "grad.grad_clip": 0.5}
    cfg = config({"train.local_update_steps": 5, "train.optimizer": {"type": kind, **extra}, **whole})
    other = copy.deepcopy(model)
    train_client(model, data(), [Phase((*halves, "head"), turns=halves)], cfg, lr=0.05, seed=1)
    own = set_trainable(other, (*halves, "head"))
    optimizer, batch = make_optimizer(own, kind, 0.05, extra), data().batch(range(len(data())))
    for step in range(5):
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(halves[step % 2] in name)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            other(**{n: t for n, t in batch.items() if n != "labels"}).logits, batch["labels"]
        ).backward()
        torch.nn.utils.clip_grad_norm_(own, 0.5)
        optimizer.step()
    close(model, other, 1e-5, 1e-4)


def test_turns_are_of_what_trains():
    with pytest.raises(UserError, match="turns = .*: lora_A is not in train"):
        Phase(("lora_B", "head"), turns=("lora_A", "lora_B"))


class Normed(nn.Module):
    """Two norms in the base and one in the head; that of the head is ``classifier.1``."""

    def __init__(self, norm=nn.BatchNorm1d, **options):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.first, self.second = nn.Conv1d(3, 4, 1), norm(4, **options), norm(4, **options)
        self.classifier = nn.Sequential(nn.Conv1d(4, 4, 1), norm(4, **options), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x, labels):
        logits = self.classifier(self.second(torch.tanh(self.first(self.up(x)))))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


class Numbers:
    """Samples of three channels and two positions, as ``train_client`` asks for them."""

    def __init__(self, seed, count=12):
        drawn = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, 2, generator=drawn) + 5
        self.y = torch.randint(0, 3, (count,), generator=drawn)

    def __len__(self):
        return len(self.y)

    def batch(self, indices, augment=None):
        return {"x": self.x[indices], "labels": self.y[indices]}


def statistics(model):
    return {n: b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_the_statistics_of_a_frozen_norm_do_not_change(norm, affine):
    model = Normed(norm, affine=affine, track_running_stats=True)
    before = statistics(model)
    train_client(model, Numbers(0), [Phase(("head",))], config({"train.local_update_steps": 3}), lr=0.1, seed=1)
    after = statistics(model)
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    assert changed == {"classifier.1.running_mean", "classifier.1.running_var"}
    model.train()
    assert len(set_trainable(model, ("base", "head"))) == 6 + 6 * affine
    assert model.first.training and model.second.training and model.classifier[1].training
    model.eval()
    set_trainable(model, ("base", "head"))
    assert not any(m.training for m in model.modules()), "a model in evaluation stays there"


def test_no_client_counts_the_batches_of_another():
    """With ``momentum=None``, running statistics are means over the batches that a norm has counted."""
    cfg, model, ends = config({"train.local_update_steps": 3}), Normed(momentum=None), []
    sent = {n: t.clone() for n, t in all_tensors(model).items()}
    seen = []
    model.first.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().double()))
    for client in (2, 1, 2):
        load_tensors(model, sent)
        seen.clear()
        train_client(model, Numbers(client), [Phase(("base", "head"))], cfg, lr=0.1, seed=client)
        means = torch.stack([x.mean((0, 2)) for x in seen])
        assert len(means) == 3
        torch.testing.assert_close(model.first.running_mean.double(), means.mean(0), rtol=1e-5, atol=1e-6)
        ends.append({n: t.clone() for n, t in model.state_dict().items()})
    assert all(torch.equal(ends[0][n], ends[2][n]) for n in ends[0])


def test_against_a_plain_loop(model):
    """The same batches are trained with plain torch."""
    other = copy.deepcopy(model)
    cfg = config(
        {
            "train.local_update_steps": 3,
            "train.batch_or_epoch": "epoch",
            "train.optimizer": {"type": "SGD", "momentum": 0.5},
        }
    )
    examples = data()
    result = train_client(model, examples, [Phase(("adapter", "head"))], cfg, lr=0.1, seed=7)
    trained = [p for n, p in other.named_parameters() if "lora_" in n or "modules_to_save" in n]
    for p in other.parameters():
        p.requires_grad_(any(p is t for t in trained))
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
    order, losses = np.random.default_rng(7), []
    for _ in range(3):
        shuffled = order.permutation(10)
        for batch in (shuffled[:4], shuffled[4:8], shuffled[8:]):
            optimizer.zero_grad()
            loss = other(**examples.batch(batch)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert (result.steps, result.samples) == (9, 30) and result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    close(model, other, 1e-6, 1e-5)


# -- how long ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_of_batches(size, drop_last):
    loads = Dataloader(batch_size=4, drop_last=drop_last)
    batches = list(batch_indices(range(size), loads, np.random.default_rng(0)))
    seen = np.concatenate(batches)
    assert len(set(seen.tolist())) == len(seen)
    assert len(seen) == (size if not drop_last or size < 4 else size // 4 * 4)
    assert all(len(b) == 4 for b in batches[:-1])
    loads = Dataloader(batch_size=4, shuffle=False)
    ordered = np.concatenate(list(batch_indices(range(size), loads, np.random.default_rng(0))))
    assert ordered.tolist() == list(range(size))


@pytest.mark.parametrize(
    "keys, steps, samples",
    [
        ({"train.local_update_steps": 7}, 7, 4 + 4 + 2 + 4 + 4 + 2 + 4),
        ({"train.local_update_steps": 2, "train.batch_or_epoch": "epoch"}, 6, 20),
        ({"train.local_update_steps": 2, "train.batch_or_epoch": "epoch", "dataloader.drop_last": True}, 4, 16),
        ({"train.local_update_steps": 2, "grad.grad_accum_count": 3}, 6, 20),
    ],
)
def test_number_of_steps(model, keys, steps, samples):
    result = train_client(model, data(), [Phase(("lora_B",))], config(keys), lr=0.1, seed=0)
    assert (result.steps, result.samples) == (steps, samples)


@pytest.mark.more
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("unit, accumulated", [("batch", 1), ("batch", 3), ("epoch", 2)])
def test_samples_and_steps_are_counted_as_they_are_taken(model, size, drop_last, unit, accumulated):
    settings = config(
        {
            "train.local_update_steps": 3,
            "train.batch_or_epoch": unit,
            "grad.grad_accum_count": accumulated,
            "dataloader.drop_last": drop_last,
        }
    )
    phases = [Phase(("lora_A",)), Phase(("lora_B",), steps=2)]
    taken: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    trained = train_client(model, data(size), phases, settings, lr=0.1, seed=0).samples
    hook.remove()
    assert samples_trained(size, phases, settings) == trained
    assert steps_taken(size, phases, settings) == len(taken)


def test_accumulated_gradients_are_one_larger_batch(model):
    other = copy.deepcopy(model)
    common = {"train.local_update_steps": 1, "dataloader.shuffle": False}
    train_client(
        model, data(8), [Phase(("lora_B", "head"))], config({**common, "dataloader.batch_size": 8}), lr=0.5, seed=0
    )
    train_client(
        other,
        data(8),
        [Phase(("lora_B", "head"))],
        config({**common, "dataloader.batch_size": 4, "grad.grad_accum_count": 2}),
        lr=0.5,
        seed=0,
    )
    close(model, other, 1e-6, 1e-4)


# -- optimizers ----------------------------------------------------------------------------------------


def test_optimizers_by_name():
    parameters = [nn.Parameter(torch.zeros(2))]
    assert isinstance(make_optimizer(parameters, "AdamW", 0.1, {"betas": [0.8, 0.9]}), torch.optim.AdamW)
    with pytest.raises(UserError, match="SGD does not take {'nesterov': True}: Nesterov momentum requires a momentum"):
        make_optimizer(parameters, "SGD", 0.1, {"nesterov": True})


@pytest.mark.parametrize("kind", CONFIGURABLE)
def test_every_optimizer_takes_the_step_that_checks_it(kind):
    check_optimizer(Optimizer(type=kind, lr=0.1, extra={} if kind == "Rprop" else {"weight_decay": 0.1}))
    with pytest.raises(UserError, match="unknown key 'train.optimizer.beta'.*; there are: lr, "):
        check_optimizer(Optimizer(type=kind, lr=0.1, extra={"beta": 1}))


def test_device_arguments_are_not_tried():
    check_optimizer(Optimizer(type="AdamW", lr=0.1, extra={"capturable": True}))


# -- evaluation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 100])
def test_evaluation_of_a_classifier(model, size):
    examples = data(11)
    model.train()  # evaluation disables dropout by itself
    found = evaluate(model, examples, size)
    losses, right = [], 0
    model.eval()
    for i in range(11):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(examples.columns["input_ids"][i])[None]).logits[0].double()
        label = int(examples.labels[i])
        losses.append(float(torch.logsumexp(logits, 0) - logits[label]))
        right += int(logits.argmax()) == label
    assert found == {"loss": pytest.approx(np.mean(losses), rel=1e-5), "acc": pytest.approx(right / 11)}


def test_evaluation_of_a_causal_model_is_per_token(tiny_causal):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny_causal)).eval()
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, 30, n) for n in (3, 8, 5, 12, 2)]
    labels = [np.where(np.arange(len(r)) < len(r) // 2, -100, r) for r in rows]
    examples = Examples({"input_ids": rows, "labels": labels})
    losses, right = [], 0
    for row, wanted in zip(rows, labels):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(row)[None]).logits[0].double()
        for at in range(1, len(row)):  # position ``at − 1`` predicts the token ``at``
            if wanted[at] != -100:
                losses.append(float(torch.logsumexp(logits[at - 1], 0) - logits[at - 1, wanted[at]]))
                right += int(logits[at - 1].argmax()) == wanted[at]
    for size in (1, 2, 5):
        found = evaluate(model, examples, size)
        assert found == {"loss": pytest.approx(np.mean(losses), rel=1e-5), "acc": pytest.approx(right / len(losses))}


# -- learning rates ------------------------------------------------------------------------------------


def test_learning_rates_by_round():
    def rates(kind, rounds=5, **extra):
        warmup = extra.pop("warmup_ratio", 0.0)
        schedule = schedule_of(Scheduler(type=kind, warmup_ratio=warmup, extra=extra))
        return [lr_at(r, rounds, 1.0, schedule) for r in range(1, rounds + 1)]

    assert rates("") == rates("constant") == [1.0] * 5
    assert rates("linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rates("linear", min_lr=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert rates("cosine") == pytest.approx([(1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)])
    assert rates("linear", 6, cycle=3) == pytest.approx([1, 0.5, 0, 1, 0.5, 0])
    assert rates("constant", 5, warmup_ratio=0.4) == pytest.approx([0.5, 1, 1, 1, 1])
    assert rates("linear", 1) == [1.0]
    assert rates("linear", min_lr=3.0) == rates("cosine", min_lr=3.0) == [1.0] * 5, "it never rises"
    for share in (0.07, 0.14, 0.28, 0.55, 0.56):  # in floating point, 0.07 · 100 is above 7
        assert rates("constant", 100, warmup_ratio=share).index(1.0) + 1 == round(100 * share)


@pytest.mark.parametrize(
    "scheduler, message",
    [
        (Scheduler(type="linear", extra={"min_rl": 0.1}), "did you mean 'min_lr'"),
        (Scheduler(type="cosine", extra={"min_lr": "abc"}), "min_lr = 'abc': expected a learning rate"),
        (Scheduler(type="cosine", extra={"min_lr": -0.1}), "min_lr = -0.1: expected a learning rate, at least 0"),
        (Scheduler(type="cosine", extra={"cycle": "abc"}), "cycle = 'abc': expected a whole number of rounds"),
        (Scheduler(type="cosine", extra={"cycle": -3}), "cycle = -3: expected"),
    ],
)
def test_wrong_schedules_are_named(scheduler, message):
    with pytest.raises(UserError, match=message):
        schedule_of(scheduler)


def test_derived_seeds_differ():
    drawn = {
        derive(seed, purpose, round, client)
        for seed in (0, 1)
        for purpose in ("train", "participation")
        for round in range(20)
        for client in range(20)
    }
    assert len(drawn) == 2 * 2 * 20 * 20 and all(0 <= d < 2**63 for d in drawn)
    assert derive(1, "train", 12) != derive(11, "train", 2) and derive(1, 23) == derive(1, 23)


def test_a_loss_that_is_not_a_number_is_among_the_worst_tenth():
    values = [*range(20)]
    assert worst_tenth(values, larger=True) == 0.5 and worst_tenth(values, larger=False) == 18.5
    for diverged in (0, 10, 19):
        values = [math.nan if i == diverged else float(i) for i in range(20)]
        assert math.isnan(worst_tenth(values, larger=False)) and math.isnan(worst_tenth(sorted(values), larger=False))
