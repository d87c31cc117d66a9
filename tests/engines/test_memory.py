"""What saves memory while a client trains: recomputed layers, autocast, batches by tokens, optimizers of 8 bits."""

import numpy as np
import pytest
import torch
from torch import nn

from fs_lowrank import RunFailed, UserError, load_config
from fs_lowrank.data import Examples
from fs_lowrank.estimate import peak_activations
from fs_lowrank.models import quantised
from fs_lowrank.models.adapters import layer_stack
from fs_lowrank.models.checkpointing import recompute
from fs_lowrank.settings import OPTIMIZERS_8BIT, Optimizer
from fs_lowrank.settings.sections import Dataloader
from fs_lowrank.testing.bench import equal, state_of
from fs_lowrank.training.cohort import elementwise
from fs_lowrank.training.local import batch_indices, loss_of
from fs_lowrank.training.optimizer import make_optimizer
from tests.cases import same_end

#: every layer trains, so that there is something to compute again
ALL = {"llm.adapter.args.0.layers": [0, 1, 2], "federate.total_round_num": 2, "train.cohort": "off"}


def same(one, other):
    """State and losses equal to the bit."""
    assert equal(state_of(one), state_of(other))
    assert [r["loss"] for r in one.recorder.history] == [r["loss"] for r in other.recorder.history]


# -- train.checkpointing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, keys",
    [
        ("encoder", ALL),  # with dropout
        ("causal", ALL),
        ("causal", {**ALL, "train.cache_frozen": "off", "train.only_read": "off", "train.blocks": 1}),
        ("causal", {**ALL, "train.cohort": 2, "federate.method": "rolora"}),
        ("causal", {"llm.adapter.args.0.layers": [1, 2], "train.local_update_steps": 4}),  # kept states below
        ("encoder", {"llm.adapter.args.0.modules": ["query", "key", "value"], "llm.adapter.args.0.layers": [1, 2]}),
    ],
    ids=["encoder", "causal", "plain", "cohort", "frozen", "keys and values"],
)
@pytest.mark.more
def test_recomputed_activations_give_the_same_to_the_bit(make_engine, task, keys):
    # A batch with dropout is not divided where layers are computed again.
    keys = {**keys, **({"train.blocks": 1} if task == "encoder" else {})}
    plain, again = (make_engine(task, {**keys, "train.checkpointing": c}) for c in (False, True))
    plain.run(), again.run()
    same(plain, again)
    assert [layer.gradient_checkpointing for layer in layer_stack(again.model)[1]] == [True, True, False]
    assert bool(plain.workspace.reads) == bool(again.workspace.reads)


@pytest.mark.more
def test_fewer_activations_are_kept(make_engine):
    kept = {}
    for checkpointing in (False, True):
        engine = make_engine("causal", {**ALL, "train.checkpointing": checkpointing, "train.only_read": "off"})
        batch = engine.workspace.data.clients[0].batch(np.arange(8))
        engine.model.train()
        with peak_activations(engine.workspace) as found:
            loss_of(engine.model, batch).backward()
        kept[checkpointing] = found[0]
    assert kept[True] < 0.6 * kept[False]


@pytest.mark.more
def test_a_model_that_cannot_is_refused(make_engine):
    model = make_engine("causal", {}).model
    model.get_base_model().supports_gradient_checkpointing = False  # as of models without such layers
    with pytest.raises(UserError, match="LlamaForCausalLM does not compute its layers again; leave the key out"):
        recompute(model)


# -- train.autocast and the code of attention --------------------------------------------------------------


@pytest.mark.parametrize("task", ["encoder", "causal"])
@pytest.mark.more
def test_autocast_computes_in_bfloat16_and_keeps_float32(make_engine, task):
    few = {"federate.method": "rolora", "train.optimizer": {"type": "SGD", "lr": 0.05}, "train.local_update_steps": 2}
    plain, half, uncached = (
        make_engine(task, {**few, **keys})
        for keys in ({}, {"train.autocast": "bfloat16"}, {"train.autocast": "bfloat16", "train.cache_frozen": "off"})
    )
    for engine in (plain, half, uncached):
        engine.run()
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    seen = []
    linear = next(m for m in half.model.modules() if type(m) is nn.Linear)
    hook = linear.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    loss_of(half.model, half.workspace.data.clients[0].batch(np.arange(2)))
    hook.remove()
    assert set(seen) == {torch.bfloat16}
    assert not equal(state_of(plain), state_of(half))
    for name, value in state_of(plain).items():
        torch.testing.assert_close(half.ledger.state[name], value, atol=2e-2, rtol=0)
    # The states of frozen layers are kept, in entries of their own, and are those that are computed each time.
    assert half.workspace.prefix.cached and half.workspace.prefix._key(
        half.workspace.data.clients[0]
    ) != plain.workspace.prefix._key(plain.workspace.data.clients[0])
    for name, value in state_of(half).items():
        torch.testing.assert_close(uncached.ledger.state[name], value, atol=1e-2, rtol=0)
    assert half.workspace.reads and half.config.fingerprint() != plain.config.fingerprint()


def test_a_gpu_without_room_for_the_model_is_one_line(make_engine, monkeypatch):
    said = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"

    def full(self, model):
        raise torch.OutOfMemoryError(said)

    monkeypatch.setattr("fs_lowrank.methods.base.Method.adapt", full)
    with pytest.raises(
        RunFailed, match="the GPU has no room for the model: CUDA out of.*2.00 GiB. `fs-lowrank run --cfg FILE --d"
    ):
        make_engine("causal", {})


@pytest.mark.more
def test_the_code_of_attention(make_engine):
    few = {"federate.total_round_num": 1, "train.optimizer": {"type": "SGD", "lr": 0.05}}
    engines = {
        name: make_engine("causal", {**few, "model.attn_implementation": name}) for name in ("", "eager", "sdpa")
    }
    for engine in engines.values():
        engine.run()
    found = {name: e.model.get_base_model().config._attn_implementation for name, e in engines.items()}
    assert found == {"": "sdpa", "eager": "eager", "sdpa": "sdpa"}
    assert equal(state_of(engines[""]), state_of(engines["sdpa"]))
    for name, value in state_of(engines["eager"]).items():
        torch.testing.assert_close(engines["sdpa"].ledger.state[name], value, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="cannot load the weights of .*the package for FlashAttention2"):
        make_engine("causal", {"model.attn_implementation": "flash_attention_2"})


# -- dataloader.batch_tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 17, 40, 1000])
def test_batches_have_at_most_so_many_tokens_with_padding(most):
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, 25, 50)
    texts = Examples({"input_ids": [np.arange(n) for n in lengths]}, np.zeros(50, dtype=int))
    loads = Dataloader(batch_tokens=most)
    batches = list(batch_indices(texts, loads, np.random.default_rng(1)))
    assert sorted(np.concatenate(batches).tolist()) == list(range(50))
    for batch, following in zip(batches, [*batches[1:], []]):
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= most
        if len(following):  # no room for the next sample
            more = [*batch, following[0]]
            assert len(more) * lengths[more].max() > most
    others = batch_indices(texts, loads, np.random.default_rng(2))
    assert [b.tolist() for b in batches] != [b.tolist() for b in others]


@pytest.mark.parametrize("unit", ["batch", "epoch"])
@pytest.mark.more
def test_a_run_with_batches_by_tokens(make_engine, unit):
    keys = {"dataloader.batch_tokens": 60, "train.batch_or_epoch": unit, "train.local_update_steps": 2}
    keys |= {"federate.total_round_num": 2, "train.optimizer": {"type": "SGD", "lr": 0.05}}
    alone, together = (make_engine("causal", {**keys, "train.cohort": c}) for c in ("off", 3))
    alone.run(), together.run()
    same_end(together, alone)
    sizes = sum(len(examples) for examples in alone.workspace.data.clients)
    assert [r.get("samples") for r in alone.recorder.history] == [2 * sizes if unit == "epoch" else None] * 2
    assert "60 tokens" in (alone.recorder.outdir / "adapter" / "README.md").read_text()


def test_what_does_not_go_with_batches_by_tokens(settings):
    with pytest.raises(UserError, match="dataloader.drop_last.*by dataloader.batch_tokens batches differ"):
        load_config(settings, {"dataloader.batch_tokens": 60, "dataloader.drop_last": True})


# -- optimizers of bitsandbytes ----------------------------------------------------------------------------


@pytest.mark.quantised
@pytest.mark.parametrize("kind", OPTIMIZERS_8BIT)
def test_an_optimizer_of_8_bits_steps(kind):
    draw = torch.Generator().manual_seed(0)
    large, reference = (nn.Parameter(torch.randn(128, 64, generator=draw.manual_seed(1))) for _ in range(2))
    ours = make_optimizer([large], kind, 0.01, {"momentum": 0.9} if kind == "SGD8bit" else {})
    if kind in ("AdamW8bit", "PagedAdamW8bit"):
        theirs = torch.optim.AdamW([reference], lr=0.01)
    elif "Adam" in kind:
        theirs = torch.optim.Adam([reference], lr=0.01)
    else:
        theirs = None
    before = large.detach().clone()
    for _ in range(3):
        gradient = torch.randn(128, 64, generator=draw)
        large.grad, reference.grad = gradient.clone(), gradient.clone()
        ours.step()
        if theirs:
            theirs.step()
    assert torch.isfinite(large).all() and (large - before).abs().max() > 1e-3
    kept = [t for state in ours.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert any(t.dtype == torch.uint8 and t.numel() == large.numel() for t in kept)
    if theirs:
        torch.testing.assert_close(large, reference, atol=5e-3, rtol=0)
    assert not elementwise(Optimizer(type=kind))


@pytest.mark.quantised
def test_a_run_with_an_optimizer_of_8_bits(make_engine):
    keys = {"train.optimizer": {"type": "adamw8bit", "lr": 5e-3, "weight_decay": 0.01}, "federate.total_round_num": 2}
    history = make_engine("causal", keys).run().history
    assert not any(r["failed"] for r in history) and history[1]["loss"] < history[0]["loss"]


@pytest.mark.quantised
def test_what_an_optimizer_of_8_bits_does_not_take_is_refused(settings):
    with pytest.raises(UserError, match="train.optimizer: SGD8bit does not take .*: SGD without momentum"):
        load_config(settings, {"train.optimizer": {"type": "SGD8bit", "lr": 0.1}})
    with pytest.raises(UserError, match="unknown key 'train.optimizer.beta'; did you mean 'betas'"):
        load_config(settings, {"train.optimizer": {"type": "AdamW8bit", "lr": 0.1, "beta": [0.9, 0.99]}})


def test_without_bitsandbytes_its_optimizers_are_refused(make_engine, monkeypatch):
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train.optimizer.type = AdamW8bit needs bitsandbytes.*fs-lowrank\[quant\]"):
        make_engine("causal", {"train.optimizer": {"type": "AdamW8bit", "lr": 0.01}})
