"""Models and cases that several tests take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fs_lowrank import list_methods
from fs_lowrank.methods import get_method_class, requirements
from fs_lowrank.testing import TASKS
from fs_lowrank.testing.small import _save, save_tokenizer


def break_step(monkeypatch, method: str, broken_round: int) -> None:
    """From now on the server's step of ``method`` fails in that round."""
    cls = get_method_class(method)
    aggregate = cls.aggregate

    def broken(self, updates, state, round):
        if round == broken_round:
            raise ArithmeticError("no convergence")
        return aggregate(self, updates, state, round)

    monkeypatch.setattr(cls, "aggregate", broken)


def killed_after(config: Any, round: int, **options: Any) -> None:
    """A run that ends in ``round``, after its record is written, as if its process were killed."""
    import pytest

    import fs_lowrank

    class Killed(BaseException):
        pass

    def on_round(record):
        if record["round"] == round:
            raise Killed

    with pytest.raises(Killed):
        fs_lowrank.run(config, on_round=on_round, **options)


SPECIAL = {"bos_token_id": 2, "eos_token_id": 3}
#: what a configuration may call its sizes, and small values
_SMALL = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "emb_dim", "dim", "embedding_size", "word_embed_proj_dim", "n_embd"), 32
    ),
    **dict.fromkeys(("intermediate_size", "d_inner", "ffn_dim", "hidden_dim", "d_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intra_bottleneck_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2),
    **{"attention_hidden_size": 32, "rotary_dim": 4, "max_position_embeddings": 128, "vocab_size": 40},
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "mamba_d_state"), 16),
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")

#: hyperparameters that change what is sent, or what a copy must remember
VARIANTS = [
    ("rolora", {}),
    ("flora", {"lowrank.ranks": [1, 3, 2]}),
    ("fedloru", {"lowrank.tau": 2, "federate.total_round_num": 3, "federate.sample_client_num": 2, "seed": 5}),
    ("fedloru", {"lowrank.tau": 1, "fedopt.use": True, "fedopt.optimizer.type": "Adam", "fedopt.optimizer.lr": 0.01}),
    ("pfedloru", {"lowrank.tau": 2, "federate.total_round_num": 3, "lowrank.drop_rate": 0.4, "seed": 5}),
    ("fedloru", {"lowrank.tau": 2, "lowrank.merge": False, "federate.total_round_num": 3}),
    ("rolora", {"federate.make_global_eval": False}),
    ("rolora", {"model.device_map": "auto"}),
    ("rolora", {"lowrank.drift": "scaffold", "train.optimizer": {"type": "SGD", "lr": 0.1}}),
]
#: the same, for slow tests
FURTHER = [
    ("fedloru", {"lowrank.tau": 2, "lowrank.init": "momentum", "federate.total_round_num": 3}),
    ("fedloru", {"lowrank.tau": 2, "lowrank.merge": False, "lowrank.init": "momentum", "federate.total_round_num": 3}),
    ("fedloru", {"lowrank.tau": 1, "llm.adapter.args.0.adapter_method": "loha"}),
    ("fedloru", {"lowrank.tau": 1, "llm.adapter.args.0.adapter_method": "lokr"}),
    ("pmfedloru", {"lowrank.tau": 2, "lowrank.nested_ranks": [1, 0], "llm.adapter.args.0.r": 3}),
    ("mfedloru", {"lowrank.robust": "median", "lowrank.nested_ranks": [1, 0], "llm.adapter.args.0.r": 3}),
    ("pfedlora", {"lowrank.variant": 2}),
    ("rolora", {"lowrank.robust": "norm_bound"}),
    ("fedlora", {"lowrank.drift": "feddyn", "lowrank.drift_weight": 0.5}),
    ("rolora", {"eval.client_scores": True, "eval.before": True}),
    ("fedhm", {"lowrank.rank_factors": [2, 8, 4]}),
    ("fedfisher", {"lowrank.fisher": "kfac", "lowrank.steps": 40}),
    ("fedfisher", {"lowrank.fisher": "kfac", "lowrank.steps": 40, "lowrank.compress": True}),
    ("mfedloru", {"lowrank.tau": 2, "lowrank.nested_ranks": [1, 0], "llm.adapter.args.0.r": 3}),
    ("pfedlora", {"lowrank.drop_rate": 0.4, "seed": 5, "federate.total_round_num": 3}),
    ("fedloru", {"lowrank.tau": 2, "federate.sample_client_num": 1, "seed": 5, "federate.total_round_num": 5}),
]


def small_config(kind: str, *, layers: int = 2, **own: Any) -> Any:
    """A configuration of the family ``kind`` of width 32, by the names that it has for its sizes, and with ``own``."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(kind)
    named = {*defaults.to_dict(), *defaults.attribute_map}
    sizes = {n: size for n, size in {**_SMALL, **dict.fromkeys(_LAYERS, layers)}.items() if n in named}
    return AutoConfig.for_model(kind, **{**sizes, "pad_token_id": 0, **SPECIAL, **own})


def enlarge(model: Any, std: float, part: str = "") -> Any:
    """The model, with new matrices under the names with ``part``, so large that each has its say."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and part in name:
            torch.nn.init.normal_(parameter, std=std)
    return model


def save_family(folder: str | Path, kind: str, auto: Any, **own: Any) -> Path:
    """Write a small model of the family ``kind`` (``small_config``), that ``auto`` makes, with its tokenizer."""
    import torch

    config = small_config(kind, **{"vocab_size": save_tokenizer(folder), **own})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(str(folder))
    return Path(folder)


def save_qwen(folder: str | Path) -> Path:
    """Write a Qwen2 of 3 layers and width 32 with its tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    own = {"num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, **SPECIAL}
    return _save(folder, Qwen2ForCausalLM, Qwen2Config, **own)


def save_t5(folder: str | Path) -> Path:
    """Write a T5 of two and two layers and width 32 with its tokenizer; its ``wi`` is 48 × 32."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=save_tokenizer(folder), **shape, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        T5ForConditionalGeneration(config).save_pretrained(str(folder))
    return Path(folder)


def engine_cases(task: str = "encoder") -> list[tuple[str, dict[str, Any]]]:
    """What the results of another engine are compared with those of the embedded one on: every method that takes
    ``task``, and again with keys that change what it sends."""
    methods = [m for m in list_methods() if TASKS[task] in requirements(m).tasks]
    cases: list[tuple[str, dict[str, Any]]] = [(m, {}) for m in methods]
    for name, value in (("ranks", [1, 3, 2]), ("tau", 2)):
        takes = [m for m in methods if name in get_method_class(m).Params.__dataclass_fields__]
        cases += [(m, {f"lowrank.{name}": value}) for m in takes]
    return cases


def same_model(a: Any, b: Any, atol: float = 0.0) -> None:
    """The parameters of two results are equal to the bit, or up to ``atol``."""
    import torch

    for (name, x), (_, y) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.equal(x, y) if not atol else torch.allclose(x, y, rtol=0, atol=atol), name


def same_end(ours: Any, plain: Any, tolerance: float = 1e-5) -> None:
    """The state, personal tensors, losses, scores and bytes of two engines that have run are equal, up to rounding."""
    import pytest
    import torch

    parts = [(ours.ledger.state, plain.ledger.state)]
    parts += [(ours.workspace.personal[client], own) for client, own in plain.workspace.personal.items()]
    for found, wanted in parts:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, atol=tolerance, rtol=tolerance)
    for a, b in zip(ours.recorder.history, plain.recorder.history, strict=True):
        assert a["clients"] == b["clients"] and a["failed"] == b["failed"] == []
        assert a["uplink_bytes"] == b["uplink_bytes"] and a["loss"] == pytest.approx(b["loss"], abs=tolerance)
        for split, scores in b["metrics"].items():
            assert a["metrics"][split]["loss"] == pytest.approx(scores["loss"], abs=10 * tolerance)


def same_run(local: Any, other: Any, shares_model: bool = True) -> None:
    """The global tensors of two results are equal to the bit, and so are the records except for seconds, the last, best
    and first scores, and what is saved of the best round.

    Args:
        shares_model: clients of the other engine use the server's model as well. If they have copies, and evaluate
            models of their own, they are sent the result of the round for it, which counts. The embedded engine
            sends it in the next round instead, and never sends the last one.
    """
    same_model(local, other)
    follow = not shares_model and "client_test" in local.history[-1]["metrics"]
    for a, b in zip(local.history, other.history, strict=True):
        for key in a.keys() - {"seconds", "client_seconds"}:
            assert (follow and "downlink" in key) or a[key] == b[key], key
        assert a["client_seconds"].keys() == b["client_seconds"].keys()
    assert local.final == other.final and local.best == other.best and local.before == other.before
    saved = [
        {file.relative_to(result.outdir): file.read_bytes() for file in result.outdir.glob("*_best/*.safetensors")}
        for result in (local, other)
    ]
    assert saved[0] == saved[1]
    if follow:
        next_round, at_once = ([record["downlink_bytes"] for record in result.history] for result in (local, other))
        assert sum(next_round) < sum(at_once)
        assert not any("evaluation_downlink_bytes" in record for record in local.history)
        assert all(0 < record["evaluation_downlink_bytes"] <= record["downlink_bytes"] for record in other.history)
        if all(len(record["selected"]) == len(local.facts["clients"]) for record in local.history):
            assert next_round[1:] == at_once[:-1]


def lives(process: Any) -> bool:
    """Whether a ``psutil.Process`` has not ended; one that has, and that nobody waits for, is a zombie."""
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def finished(job: Any, **known: Any) -> dict[str, Any]:
    """The record of a cell of a suite that has run, with as much as a report needs, and what is ``known`` of it."""
    ran = {"rounds": 1, "samples": 8, "samples_counted": True, "metrics": {}, "finished": 1.0}
    return {**job.identity(), **ran, **known}
