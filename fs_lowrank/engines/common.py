"""What every engine's run has in common: data, method and model made from a configuration, and what it leaves behind.

All randomness is derived from the seed by purpose, round and client, so that a run which was stopped and
resumed draws what it would have drawn, on every engine.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import peft
import torch
from filelock import FileLock
from torch import Tensor, nn

from ..algebra import nbytes
from ..config import Config, Eval, load_config
from ..data import build_data, load_raw
from ..errors import RunFailed, UserError
from ..jobs.files import write_text
from ..jobs.locks import take
from ..methods import Client, Method, Update, Workbench, create_method
from ..models.adapters import adapter_name, load_tensors, save_adapter, start_at_zero
from ..models.build import build_model, build_tokenizer
from ..models.frozen import FrozenPrefix
from ..models.names import is_statistic, named_tensors, tags
from ..runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ..runs.environment import environment, model_fingerprint
from ..runs.plots import plot_curves
from ..runs.records import Records, read_records
from ..runs.result import RunResult
from ..seeds import derive
from ..training import evaluate, train_client
from ..training.local import LocalResult
from ..training.schedule import check_scheduler, lr_at
from .reuse import Reuse
from .server import Server

logger = logging.getLogger("fs_lowrank")

#: how the names of ``eval.split`` stand in the data
_SPLITS = {"test": "test", "val": "validation"}
#: where the metrics of the clients' own models stand
_CLIENTS = "client_test"


def watched(config: Config) -> tuple[str, str]:
    """Split and metric of ``eval.best_res_update_round_wise_key``; the framework's ``avg_loss`` is our loss."""
    key = config.eval.best_res_update_round_wise_key.rpartition(".")[2]
    split = _CLIENTS if key.startswith(_CLIENTS) else key.partition("_")[0]
    return split, key.removeprefix(f"{split}_").removeprefix("avg_")


def outdir_of(config: Config) -> Path:
    """The folder that a run writes into."""
    return Path(config.outdir) / config.expname


def check_outdir(config: Config, resume: bool) -> None:
    """Whether a run may begin in its folder; worth asking before data and model are made.

    Raises:
        UserError: another run's results are there and this one does not continue it, or cannot.
    """
    folder = outdir_of(config)
    records = folder / "rounds.jsonl"
    checkpoint, finished = (folder / "checkpoint").exists(), (folder / "summary.json").exists()
    if not resume and (checkpoint or finished or (records.exists() and records.stat().st_size)):
        raise UserError(f"{folder} holds a run already; continue it with --resume, or choose another outdir")
    if resume and finished and not checkpoint:
        raise UserError(
            f"{folder} holds a finished run that kept no checkpoint (lowrank.checkpoint_freq 0), so there "
            "is nothing to continue; choose another outdir"
        )


def device_of(config: Config) -> torch.device:
    """The device the configuration asks for.

    Raises:
        UserError: a GPU is asked for and there is none.
    """
    if config.torch_device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("use_gpu is True, but torch finds no GPU; set use_gpu False, or install a CUDA build of torch")
    return torch.device("cuda", max(config.device, 0))


def method_of(config: Config) -> Method:
    """The configured method."""
    server = config.fedopt.optimizer
    return create_method(
        config.federate.method,
        adapter=config.adapter,
        rounds=config.federate.total_round_num,
        seed=config.seed,
        uniform=config.federate.ignore_weight,
        from_scratch=config.from_scratch,
        with_adapter=bool(config.llm.adapter.use),
        only_sums=config.federate.use_ss or config.federate.online_aggr,
        server_optimizer={"type": server.type, "lr": server.lr, **server.extra} if config.fedopt.use else None,
        **config.method_params,
    )


class Run:
    """One run: what an engine drives.

    Args:
        config: the run's configuration.
        keep_messages: keep the messages' values on the server; for clients that have a model of their own.
    """

    #: the file that the resolved configuration is written to
    config_name = "config.yaml"
    #: holds ``outdir`` while the run writes there
    lock: FileLock | None = None

    def __init__(self, config: Config, keep_messages: bool = False):
        check_scheduler(config.train.scheduler)
        self.config = config
        self.device = device_of(config)
        self.method = method_of(config)
        self.tokenizer = build_tokenizer(config)
        raw = load_raw(config.data)
        if (raw.images is not None) != config.is_vision:
            raise UserError(
                f"model.type = {config.model.type} takes {'images' if config.is_vision else 'text'}, but "
                f"data.type = {config.data.type} holds {'text' if config.is_vision else 'images'}"
            )
        self._check_task(raw)
        self.data = build_data(config, self.tokenizer, raw=raw)
        self._check_splits()
        model = self.plain_model()
        self.base_fingerprint = model_fingerprint(model)
        total = sum(p.numel() for p in model.parameters())
        self.model = self.adapted(model)
        self.method.workbench = self._workbench() if self.method.selects else None
        self.clients = [Client(i + 1, len(e), batches=self._passes(e)) for i, e in enumerate(self.data.clients)]
        self.server = Server(
            self.method,
            self.method.initial_state(self.model),
            len(self.clients),
            config.sampled_per_round,
            config.lowrank.min_clients,
            config.seed,
            drop_rate=config.lowrank.drop_rate,
            keep_messages=keep_messages,
        )
        self.personal: dict[int, dict[str, Tensor]] = {}
        self.reuse = Reuse(config.lowrank.reuse_clients) if config.lowrank.reuse_clients else None
        #: seconds of each client in the round that runs: for training, for what its upload takes, and whether what it
        #: trained came from ``reuse``
        self.spent: dict[int, dict] = {}
        self.untrained_personal = self._personal_now()
        #: of the plain model, and the most that any client trains in the course of the run
        self.parameters = {"total": total, "trainable": max(self._trained_by(c.id) for c in self.clients)}
        self.prefix = self._frozen_prefix()

    def plain_model(self) -> nn.Module:
        """The model before the method puts anything on it; the same at every call."""
        pad = None if self.tokenizer is None else self.tokenizer.pad_token_id
        return build_model(self.config, self.data.num_labels, pad, self.data.image_shape, self.data.label_names)

    def adapted(self, model: nn.Module) -> nn.Module:
        """``model`` with the method's parts on it, on the run's device."""
        model = self.method.adapt(model)
        if self.config.lowrank.base_init == "zero":
            start_at_zero(model, self.config.seed)
        return model.to(self.device)

    def _trained_by(self, client: int) -> int:
        """How many numbers ``client`` trains in some phase of some round."""
        rounds = range(1, self.config.federate.total_round_num + 1)
        trained = {tag for t in rounds for phase in self.method.phases(t, client) for tag in phase.train}
        held = {**self.method.view(self.server.state, client), **self.untrained_personal}
        return sum(t.numel() for n, t in held.items() if tags(n) & trained and not is_statistic(n))

    def _passes(self, examples, size: int = 0):
        size = size or self.config.dataloader.batch_size

        def batches():
            for start in range(0, len(examples), size):
                yield examples.batch(range(start, min(start + size, len(examples))))

        return batches

    def _workbench(self) -> Workbench | None:
        """What the server's step chooses by: the same held-out samples for every method.

        Raises:
            UserError: there is no validation split.
        """
        held_out, config = self.data.validation, self.config
        if held_out is None:
            raise UserError(
                f"federate.method = {config.federate.method} chooses among models by validation data, and "
                f"there are none; give data.splits a share for them (now {list(config.data.splits)})"
            )
        draw = np.random.default_rng(derive(config.seed, "validation"))
        chosen = np.sort(draw.permutation(len(held_out))[: config.lowrank.validation_samples])
        return Workbench(
            self.model, self._passes(held_out.select(chosen), config.eval.batch_size), derive(config.seed, "workbench")
        )

    def _check_task(self, raw) -> None:
        model, data = self.config.model, self.config.data.type
        labelled = model.task == "SequenceClassification"
        if raw.images is None and (raw.task == "classification") != labelled:
            raise UserError(
                f"model.type = {model.type} is "
                + (
                    f"a classifier, but data.type = {data} has instructions and answers and no labels; take "
                    "NAME@huggingface_llm, or name the columns text and label in data.args"
                    if labelled
                    else f"a language model, but data.type = {data} has labels and no answers; take NAME@transformers, "
                    "or data with instruction and output"
                )
            )

    def _check_splits(self) -> None:
        if not self.config.federate.make_global_eval and self.data.test is None:
            raise UserError(
                "federate.make_global_eval = False evaluates every client on its share of the test set, "
                "but there is no test set; give data.splits a share for it"
            )
        for split in self.config.eval.split:
            if split == "train":
                raise UserError(
                    "eval.split: held-out data is evaluated, test or val; a round's record has the "
                    "training loss already"
                )
            # By default whatever there is of validation data is evaluated.
            asked = split == "test" or set(self.config.eval.split) != set(Eval().split)
            if asked and getattr(self.data, _SPLITS[split]) is None:
                raise UserError(
                    f"eval.split asks for {split!r}, but the data has none; give data.splits a share "
                    f"for it (now {list(self.config.data.splits)}) or take it out of eval.split"
                )

    def _frozen_prefix(self) -> FrozenPrefix | None:
        train = self.config.train
        if train.frozen_dropout:
            return None
        prefix = FrozenPrefix(
            self.model,
            {*self.method.shared, *self.method.personal},
            limit=train.cache_frozen_bytes if train.cache_frozen == "auto" else 0,
            folder=train.cache_frozen_dir or None,
        )
        prefix.plan(self._owners())
        return prefix if prefix else None

    def _owners(self) -> dict[str, tuple[object, float]]:
        """Whose data the run goes through, and how often: for ``FrozenPrefix.plan``."""
        train = self.config.train
        rounds = range(1, self.config.federate.total_round_num + 1)
        owners = {split: (examples, sum(map(self._evaluates, rounds))) for split, examples in self._held_out().items()}
        share = len(rounds) * self.config.sampled_per_round / len(self.clients)
        for client, examples in zip(self.clients, self.data.clients):
            steps = train.local_update_steps * share
            samples = self.config.dataloader.batch_size * self.config.grad.grad_accum_count
            passes = steps if train.batch_or_epoch == "epoch" else steps * samples / len(examples)
            owners[f"client {client.id}"] = (examples, passes)
        return owners

    def _held_out(self) -> dict[str, object]:
        """The splits to evaluate on, by the names of ``eval.split``; an empty validation set is left out."""
        found = {split: getattr(self.data, _SPLITS[split]) for split in self.config.eval.split if split in _SPLITS}
        return {split: examples for split, examples in found.items() if examples is not None}

    def _personal_now(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in named_tensors(model or self.model, self.method.personal).items()}

    def _fit(
        self, client: Client, examples, round: int, model: nn.Module, prefix: FrozenPrefix | None
    ) -> tuple[Update, LocalResult]:
        """Train ``model`` as ``client`` in ``round``; the update holds the model's own tensors."""
        config, phases = self.config, self.method.phases(round, client.id)
        rounds, train = config.federate.total_round_num, config.train
        options = {
            "lr": lr_at(round, rounds, train.optimizer.lr, train.scheduler),
            "seed": derive(config.seed, "train", round, client.id),
        }
        started = time.perf_counter()
        key = self.reuse.key(config, model, examples, phases, **options) if self.reuse else None
        kept = self.reuse.find(key) if key else None
        if kept:
            load_tensors(model, kept[0])
            result, seconds = LocalResult(**kept[1]["result"]), kept[1]["seconds"]
        else:
            result = train_client(
                model, examples, phases, config, owner=f"client {client.id}", prefix=prefix, **options
            )
            seconds = time.perf_counter() - started
            if key:
                self.reuse.keep(key, model, phases, {"result": dataclasses.asdict(result), "seconds": seconds})
        trained = time.perf_counter()
        tensors = {n: t.detach() for n, t in self.method.upload(model, round, client).items()}
        self.spent[client.id] = {"training": seconds, "upload": time.perf_counter() - trained, "reused": bool(kept)}
        return Update(client.id, client.num_samples, tensors), result

    def _record(
        self,
        round: int,
        *,
        selected: list[int],
        failed: list[dict],
        losses: Mapping[int, float],
        uplink: Mapping[int, tuple[int, int]],
        downlink: Mapping[int, tuple[int, int]],
        samples: Mapping[int, int],
        metrics: dict,
        seconds: Mapping[str, float],
        spent: Mapping[int, dict],
    ) -> dict:
        """The line of ``rounds.jsonl``; bytes come by client, with and without the head.

        ``client_seconds`` says of each client that this process trained how long training and upload took, and
        whether it was reused; the seconds are then those of the time it was trained.
        """
        seconds = dict(seconds)
        losses = dict(sorted(losses.items()))  # updates come in any order between processes
        # What was not trained again counts with the time it took when it was.
        seconds["training"] += sum(s["training"] for s in spent.values() if s["reused"])
        return {
            "round": round,
            "selected": selected,
            "clients": sorted(losses),
            "failed": sorted(failed, key=lambda f: f["client"]),
            "loss": sum(losses[c] * samples[c] for c in losses) / sum(samples[c] for c in losses),
            "metrics": metrics,
            "uplink_bytes": sum(b for b, _ in uplink.values()),
            "uplink_bytes_without_head": sum(b for _, b in uplink.values()),
            "downlink_bytes": sum(b for b, _ in downlink.values()),
            "downlink_bytes_without_head": sum(b for _, b in downlink.values()),
            "client_uplink_bytes": {c: b for c, (b, _) in sorted(uplink.items())},
            "client_downlink_bytes": {c: b for c, (b, _) in sorted(downlink.items())},
            "adapter_norm": self._norms(),
            "seconds": seconds,
            "client_seconds": spent,
        }

    def _spent(self) -> dict[int, dict]:
        """What the clients have spent since this was asked for last."""
        spent, self.spent = dict(sorted(self.spent.items())), {}
        return spent

    def _norms(self) -> dict[str, float]:
        """Frobenius norm over all layers, of each half of the pair, or of the weights of a full method."""
        groups: dict[str, list[Tensor]] = {}
        for name, tensor in self.method.view(self.server.state).items():
            group = next((t for t in ("lora_A", "lora_B", "adapter", "head", "base") if t in tags(name)), "other")
            groups.setdefault(group, []).append(tensor)
        return {g: float(torch.stack([t.float().norm() for t in ts]).norm()) for g, ts in sorted(groups.items())}

    def _evaluates(self, round: int) -> bool:
        freq = self.config.eval.freq
        return (freq > 0 and round % freq == 0) or round == self.config.federate.total_round_num

    def _evaluate(self) -> dict[str, dict[str, float]]:
        """Metrics of the global model by split, and of the clients' own models as ``client_test``.

        The clients' own are evaluated where they differ from the global one, and where
        ``federate.make_global_eval`` is False, which leaves the global one out.
        """
        held_out = self._held_out()
        return {
            split: self._evaluate_clients() if split == _CLIENTS else self._score(held_out[split], split)
            for split in self._evaluated()
        }

    def _evaluated(self) -> list[str]:
        """The names of what ``_evaluate`` measures."""
        everywhere = self.config.federate.make_global_eval
        clients = (self.untrained_personal or not everywhere) and self.data.test is not None
        return [*(self._held_out() if everywhere else ()), *([_CLIENTS] if clients else ())]

    def _score(self, examples, owner: str) -> dict[str, float]:
        size = self.config.eval.batch_size or self.config.dataloader.batch_size
        return evaluate(self.model, examples, size, owner=owner, prefix=self.prefix)

    def _evaluate_clients(self) -> dict[str, float]:
        """Every client's own model on its share of the test set (``FederatedData.client_tests``).

        Returns:
            ``acc`` and ``loss`` over all samples; over the clients ``acc_mean``, ``acc_std`` and
            ``acc_worst_decile``, the mean of the lowest tenth (one client at least).
        """
        scores, sizes = [], []
        for client, examples in zip(self.clients, self.data.client_tests):
            if examples is None:
                continue
            self._load_client(client.id)
            scores.append(self._score(examples, f"client {client.id} test"))
            sizes.append(len(examples))
        self._load_global()
        accuracies = np.sort([s["acc"] for s in scores])
        return {
            **{m: float(np.average([s[m] for s in scores], weights=sizes)) for m in ("acc", "loss")},
            "acc_mean": float(accuracies.mean()),
            "acc_std": float(accuracies.std()),
            "acc_worst_decile": float(accuracies[: max(len(accuracies) // 10, 1)].mean()),
        }

    def _load_client(self, client: int) -> None:
        """Put the model of ``client`` into the one model."""
        load_tensors(self.model, self.method.view(self.server.state, client))
        load_tensors(self.model, self.personal.get(client, self.untrained_personal))

    def _load_global(self) -> None:
        """Make the one model a copy that stands at the last round, as every other copy would."""
        load_tensors(self.model, {**self.method.view(self.server.state), **self.untrained_personal})

    # -- on disk -------------------------------------------------------------------------------------

    @property
    def outdir(self) -> Path:
        return outdir_of(self.config)

    def _claim(self) -> None:
        """Hold the folder until ``_release``, or until this process ends, however it does.

        Raises:
            RunFailed: another run writes into it.
        """
        self.lock = take(self.outdir / ".lock")
        if self.lock is None:
            raise RunFailed(f"another run is writing into {self.outdir}; wait for it, or choose another outdir")

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _start(self, resume: bool) -> Checkpoint | None:
        self._claim()
        check_outdir(self.config, resume)
        records = self.outdir / "rounds.jsonl"
        checkpoint = load_checkpoint(self.outdir / "checkpoint") if resume else None
        history = []
        if checkpoint:
            self._restore(checkpoint)
            history = read_records(records, up_to=checkpoint.round)
            if [record["round"] for record in history] != list(range(1, checkpoint.round + 1)):
                raise UserError(
                    f"{records} does not hold the rounds 1 to {checkpoint.round} once each; something else "
                    "wrote into it, so the run cannot be continued; start again in another outdir"
                )
        self.records = Records(records, history)
        self.config.dump(self.outdir / self.config_name)
        write_text(self.outdir / "environment.json", json.dumps(environment(), indent=1))
        write_text(self.outdir / "data.json", json.dumps(self.data.record(), separators=(",", ":")))
        return checkpoint

    def _checkpoint_due(self, round: int) -> bool:
        freq = self.config.lowrank.checkpoint_freq
        return freq > 0 and (round % freq == 0 or round == self.config.federate.total_round_num)

    def _save(self, round: int) -> None:
        state = self.server.state
        changed = set(self.method.changed_base(self.model))
        parts = {
            "state": {n: v for n, v in state.items() if isinstance(v, Tensor)},
            "base": {n: p for n, p in self.model.named_parameters() if n in changed},
            "personal": {f"{c}/{n}": t for c, own in self.personal.items() for n, t in own.items()},
        }
        outbox = {
            n: [came, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, (came, t) in self.server.outbox.items()
        }
        save_checkpoint(
            self.outdir / "checkpoint",
            round,
            {n: p for n, p in parts.items() if p},
            {
                "numbers": {n: v for n, v in state.items() if not isinstance(v, Tensor)},
                "synced": self.server.synced,
                "outbox": outbox,
                "config": self.config.to_dict(),
                "data": self.data.fingerprint,
                "model": self.base_fingerprint,
            },
            keep=self.config.lowrank.keep_checkpoints,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        for what, now in (("data", self.data.fingerprint), ("model", self.base_fingerprint)):
            if checkpoint.meta[what] != now:
                raise UserError(
                    f"the {what} is not what the run in {self.outdir} started with; it cannot be continued with another"
                )
        self._check_same_run(checkpoint.meta["config"])
        to = lambda tensors: {n: t.to(self.device) for n, t in tensors.items()}  # noqa: E731
        self.server.state = {**to(checkpoint.parts.get("state", {})), **checkpoint.meta["numbers"]}
        self.server.synced = {int(c): r for c, r in checkpoint.meta["synced"].items()}
        self.server.outbox = {
            n: (came, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
            for n, (came, shape, dtype) in checkpoint.meta["outbox"].items()
        }
        for key, tensor in to(checkpoint.parts.get("personal", {})).items():
            client, name = key.split("/", 1)
            self.personal.setdefault(int(client), {})[name] = tensor
        load_tensors(self.model, to(checkpoint.parts.get("base", {})))
        load_tensors(self.model, self.method.view(self.server.state))

    def _check_same_run(self, then: dict) -> None:
        then, now = load_config(then).decisive(), self.config.decisive()
        if not (self.method.plans_ahead or self.config.train.scheduler.type):
            then["federate.total_round_num"] = now["federate.total_round_num"]
        free = {"lowrank.min_clients"}  # else a round that too few clients finished could never be got past
        differing = sorted(key for key in (then.keys() | now.keys()) - free if then.get(key) != now.get(key))
        if differing:
            raise UserError(
                f"the run in {self.outdir} was started with another {', '.join(differing)}; "
                "continue it with its own config.yaml, or choose another outdir"
            )

    def _stalled(self) -> bool:
        """FederatedScope's early stopping: ``patience`` evaluations running, none better than the best by ``delta``."""
        stop = self.config.early_stop
        best, without = math.inf, 0
        for value in (self._key_value(r) for r in self.records.history if r["metrics"]):
            better = value is not None and value < best - stop.delta
            best, without = (value, 0) if better else (best, without + 1)
        return 0 < stop.patience <= without

    def _key_value(self, record: dict) -> float | None:
        """The record's value of ``eval.best_res_update_round_wise_key``, smaller is better; None if it has none."""
        split, metric = watched(self.config)
        value = record["metrics"].get(split, {}).get(metric)
        return None if value is None else (value if metric == "loss" else -value)

    def _formula_bytes(self) -> int:
        """The papers' estimate of all traffic, ``2 · K · C · P · bytes · rounds``: what a client sends, both ways.

        It leaves out that round 1 sends nothing down, what a late client needs more, and ranks that differ.
        """
        sent = self.method.expected(self.server.state, 1, 1)
        return 2 * self.config.sampled_per_round * nbytes(sent) * len(self.records.history)

    def _save_personal(self) -> Path:
        """Every client's own adapter, in PEFT's format, in a folder of its number."""
        folder = self.outdir / "personal"
        for client in self.personal:
            self._load_client(client)
            for name in {adapter_name(n) for n in self.personal[client]}:
                save_adapter(
                    folder / f"client_{client}",
                    self.model.peft_config[name],
                    peft.get_peft_model_state_dict(self.model, adapter_name=name),
                )
        self._load_global()
        return folder

    def _finish(self) -> RunResult:
        history = self.records.history
        last = next((r["metrics"] for r in reversed(history) if r["metrics"]), {})
        final = {f"{split}_{name}": v for split, values in last.items() for name, v in values.items()}
        for metric in {m for m in final if m.endswith("_acc")}:
            split = metric.removesuffix("_acc")
            final[f"{metric}_last5"] = float(
                np.mean([r["metrics"][split]["acc"] for r in history if split in r["metrics"]][-5:])
            )
        ranked = [r for r in history if r["metrics"] and self._key_value(r) is not None]
        if ranked:
            final["best_round"] = min(ranked, key=self._key_value)["round"]
        result = RunResult(
            history=history,
            final=final,
            outdir=self.outdir,
            model=self.model,
            base_changed="base" in self.method.shared
            or any("base" in tags(n) for n in self.method.changed_base(self.model)),
            facts={
                "method": self.method.name,
                "source": self.data.source,
                "data": self.data.fingerprint,
                "model": self.base_fingerprint,
                "config": self.config.fingerprint(),
                "clients": [c.num_samples for c in self.clients],
                "majority": self.data.majority,
                "parameters": self.parameters,
                "images": self.data.image_shape,
                "labels": self.data.label_names,
                "formula_bytes": self._formula_bytes(),
            },
        )
        if not result.base_changed:
            result.saved["adapter"] = result.save_adapter(self.outdir / "adapter")
        if result.base_changed or self.config.lowrank.save_merged:
            result.saved["model"] = result.save_model(self.outdir / "model")
        if self.personal:
            result.saved["personal"] = self._save_personal()
        for folder in (result.saved[what] for what in ("adapter", "model") if what in result.saved):
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(str(folder))
        result.saved["curves"] = plot_curves(
            {self.method.name: history}, self.outdir / "curves.png", self.data.majority
        )
        summary = {
            "final": final,
            "bytes": dict(result.bytes),
            **result.facts,
            "versions": environment()["versions"],
            "seed": self.config.seed,
        }
        write_text(self.outdir / "summary.json", json.dumps(summary, indent=1))
        return result
