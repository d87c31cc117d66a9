"""The shared part of the peers' scripts: the job, its data and model, and measuring. It imports nothing of ours.

The folder of a job has ``job.json`` (``Job``), ``data.npz`` (``input_ids`` and ``labels`` of all samples in one row
each, with their lengths, and each sample's client) and ``initial.safetensors``, the adapters and the head at the start.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file

IGNORED = -100


@dataclass(frozen=True)
class Job:
    """A job: every client trains ``local_steps`` batches of its data a round, in their order and without dropout.

    Attributes:
        model: folder of the model and its tokenizer. task: ``classification`` or ``causal``.
        data, initial: the files. clients, clients_per_round, rounds: numbers.
        rank, alpha, target_modules: of LoRA on every layer; a classifier's head is trained too.
        optimizer: a class of ``torch.optim``, made anew for every client and round, without weight decay.
    """

    model: str
    task: str
    data: str
    initial: str
    clients: int
    clients_per_round: int
    rounds: int
    batch_size: int
    local_steps: int
    rank: int
    alpha: int
    target_modules: list[str]
    optimizer: str
    learning_rate: float
    pad_id: int
    seed: int

    @classmethod
    def read(cls, folder: str | Path) -> Job:
        """The job in ``folder``."""
        return cls(**json.loads((Path(folder) / "job.json").read_text()))

    def write(self, folder: str | Path) -> None:
        """Write ``job.json``."""
        (Path(folder) / "job.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    def samples(self) -> list[list[dict[str, torch.Tensor]]]:
        """By client the samples: ``input_ids`` (length,), and ``labels`` (length,) of tokens or (1,) of the sample."""
        with np.load(self.data, allow_pickle=False) as arrays:
            owners = arrays["owners"]
            rows = {
                name: np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
                for name in ("input_ids", "labels")
            }
        clients: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(self.clients)]
        for index, owner in enumerate(owners):
            clients[owner].append({name: torch.from_numpy(values[index].copy()) for name, values in rows.items()})
        return clients

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A batch, padded on the right to its longest sample."""
        pad = torch.nn.utils.rnn.pad_sequence
        inputs = pad([s["input_ids"] for s in samples], batch_first=True, padding_value=self.pad_id)
        labels = pad([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED)
        return {"input_ids": inputs, "attention_mask": inputs.ne(self.pad_id), "labels": labels}

    def peft_model(self) -> torch.nn.Module:
        """The model with LoRA through PEFT, and the initial tensors in it."""
        import transformers
        from peft import LoraConfig, get_peft_model

        classes = {"causal": "AutoModelForCausalLM", "classification": "AutoModelForSequenceClassification"}
        base = getattr(transformers, classes[self.task]).from_pretrained(self.model)
        kind = {"causal": "CAUSAL_LM", "classification": "SEQ_CLS"}[self.task]
        lora = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": self.target_modules}
        model = get_peft_model(base, LoraConfig(task_type=kind, **lora))
        load(model, load_file(self.initial))
        return model

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer of one client in one round."""
        return getattr(torch.optim, self.optimizer)(parameters, lr=self.learning_rate, weight_decay=0.0)


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are trained and sent, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def load(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put ``tensors`` into the model; a name that it does not train is an error."""
    targets = trained(model)
    if targets.keys() != tensors.keys():
        raise SystemExit(f"the model trains other tensors than the job: {sorted(targets.keys() ^ tensors.keys())[:4]}")
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)


def _proportional(process: psutil.Process) -> int:
    """The proportional set size in bytes where the system has it (Linux), else the resident set size."""
    try:
        info = process.memory_full_info()
        return getattr(info, "pss", info.rss)
    except psutil.Error:
        return 0


class Meter(threading.Thread):
    """Measures this process and all that it started: memory while it runs, processor seconds at the end of a round.

    Args:
        every: seconds between two looks at the memory, longer where a look takes more than a thirtieth of that.
    """

    def __init__(self, every: float = 0.25):
        super().__init__(daemon=True)
        self.every, self.peak = every, 0
        self.over, self.looking = threading.Event(), threading.Lock()
        self.main = psutil.Process()
        self.spent: dict[tuple[int, float], float] = {}
        self.ends: list[float] = []
        self.processor: list[float] = []
        self.start()

    def run(self) -> None:
        """Look until the end; processes that ended in between keep the seconds of the last look."""
        took = 0.0
        while not self.over.wait(max(self.every, 30 * took)):
            started = time.perf_counter()
            self.look(memory=True)
            took = time.perf_counter() - started

    def look(self, memory: bool = False) -> float:
        """The processor seconds until now."""
        with self.looking:
            processes = [self.main, *self.main.children(recursive=True)]
            for process in processes:
                try:
                    times = process.cpu_times()
                    self.spent[process.pid, process.create_time()] = times.user + times.system
                except psutil.Error:
                    continue
            if memory:
                self.peak = max(self.peak, sum(map(_proportional, processes)))
            return sum(self.spent.values())

    def mark(self) -> None:
        """Round 1 begins (at the first call), or a round has ended."""
        self.processor.append(self.look())
        self.ends.append(time.time())

    def result(self, **extra: Any) -> dict[str, Any]:
        """All measurements, and ``extra``."""
        self.look(memory=True)
        self.over.set()
        return {
            "setup_seconds": self.ends[0] - self.main.create_time(),
            "setup_processor_seconds": self.processor[0],
            "round_seconds": np.diff(self.ends).tolist(),
            "round_processor_seconds": np.diff(self.processor).tolist(),
            "processor_seconds": sum(self.spent.values()),
            "peak_bytes": self.peak,
            "memory": "PSS" if hasattr(self.main.memory_full_info(), "pss") else "RSS",
            **extra,
        }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of the common libraries and of ``packages``."""
    every = ("torch", "transformers", "peft", "numpy", *packages)
    return {"python": ".".join(map(str, sys.version_info[:3])), **{name: version(name) for name in every}}


def main(work: Callable[[Job, Path, Mapping[str, Any]], tuple[dict[str, Any], Mapping[str, torch.Tensor]]]) -> None:
    """The script of a peer: ``python SCRIPT JOB_FOLDER OUT_FOLDER [SETTINGS_AS_JSON]``.

    Args:
        work: of the job, the folder for files of the peer and the settings of the variant; returns the measurements and
            the trained tensors; the result goes to ``result.json``, the tensors to ``final.safetensors``.
    """
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    settings = {"job": str(folder), **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")}
    torch.set_num_threads(int(settings.get("threads", torch.get_num_threads())))
    out.mkdir(parents=True, exist_ok=True)
    result, tensors = work(Job.read(folder), out, settings)
    save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, out / "final.safetensors")
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of a peer must not keep the process
