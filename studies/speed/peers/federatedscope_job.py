"""The job on stock FederatedScope (branch llm): its StandaloneRunner, its FedAvg, its LLMTrainer, its AdapterModel.

    PYTHONPATH=CHECKOUT python federatedscope_job.py JOB OUT '{"threads": 1}'

Settings, for its best: one shared model (``share_local_model``, as its guide says for language models), no evaluation
between rounds, no checkpoint. It sets one thread for itself; a second variant gives it all cores once its runner is
made. The encoder goes through ``register_model`` and the data through ``register_data``, the framework's own doors. No
code of it is mended: the environment has protobuf 3.20, because later ones refuse its generated messages, and pympler,
which it imports and does not name. What is added here only notes times, losses and numbers of samples.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path

import federatedscope
import federatedscope.register as register
import fedjob
import torch
from federatedscope.core.auxiliaries.data_builder import get_data
from federatedscope.core.auxiliaries.logging import update_logger
from federatedscope.core.auxiliaries.runner_builder import get_runner
from federatedscope.core.auxiliaries.utils import setup_seed
from federatedscope.core.auxiliaries.worker_builder import get_client_cls, get_server_cls
from federatedscope.core.configs.config import global_cfg
from federatedscope.core.data import ClientData, StandaloneDataDict
from federatedscope.core.workers import Server
from federatedscope.llm.model.adapter_builder import AdapterModel
from federatedscope.llm.trainer.trainer import LLMTrainer
from safetensors.torch import load_file


def configuration(job, out):
    """The keys that differ from the framework's defaults."""
    lora = {"r": job.rank, "lora_alpha": job.alpha, "lora_dropout": 0.0, "target_modules": job.target_modules}
    keys = {
        "use_gpu": False,
        "seed": job.seed,
        "outdir": str(out),
        "expname": "job",
        "federate.mode": "standalone",
        "federate.method": "FedAvg",
        "federate.client_num": job.clients,
        "federate.sample_client_num": job.clients_per_round,
        "federate.total_round_num": job.rounds,
        "federate.share_local_model": True,
        "federate.online_aggr": False,
        "data.type": "job@llm",
        "data.root": str(out),
        "data.splitter": "iid",  # required, and not used: register_job assigns the rows to clients
        "dataloader.batch_size": job.batch_size,
        "dataloader.shuffle": False,
        "model.type": f"{job.model}@huggingface_llm",
        "llm.adapter.use": True,
        "llm.adapter.args": [{"adapter_package": "peft", "adapter_method": "lora", **lora}],
        "train.local_update_steps": job.local_steps,
        "train.batch_or_epoch": "batch",
        "train.optimizer.type": job.optimizer,
        "train.optimizer.lr": job.learning_rate,
        "train.optimizer.weight_decay": 0.0,
        "criterion.type": "CrossEntropyLoss",
        "trainer.type": "llmtrainer",
        "early_stop.patience": 0,
        "eval.freq": job.rounds + 1,
        "eval.split": ["test"],
        "eval.metrics": ["loss"],
        "eval.count_flops": False,
        "eval.best_res_update_round_wise_key": "test_loss",
    }
    nested = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        functools.reduce(lambda inner, section: inner.setdefault(section, {}), sections, nested)[name] = value
    (out / "job.yaml").write_text(json.dumps(nested))  # its reader takes JSON, which is YAML
    config = global_cfg.clone()
    config.merge_from_file(str(out / "job.yaml"))
    return config


def register_job(job):
    """Tell the framework of the data and, for a classifier, of the model."""
    samples = job.samples()

    def data(config, client_cfgs):
        # One sample to test, for the evaluation at the end, which the framework cannot leave out.
        clients = {k + 1: ClientData(config, train=rows, val=None, test=rows[:1]) for k, rows in enumerate(samples)}
        return StandaloneDataDict(clients, config), config

    register.register_data("job", data)
    if job.task == "classification":
        register.register_model("classifier", lambda config, shape: AdapterModel(job.peft_model(), use_adapter=False))


def revision():
    """The framework's version and, where git can tell, its commit."""
    command = ["git", "-C", Path(federatedscope.__file__).parent, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return f"{federatedscope.__version__} {commit}".strip()


def work(job, out, settings):
    meter, losses = fedjob.Meter(), [[]]
    register_job(job)
    config = configuration(job, out)
    update_logger(config, clear_before_add=True)
    setup_seed(config.seed)
    data, changed = get_data(config=config.clone())
    config.merge_from_other_cfg(changed)
    config.freeze()

    @functools.wraps(LLMTrainer._hook_on_fit_end)
    def on_fit_end(self, ctx, plain=LLMTrainer._hook_on_fit_end):
        plain(self, ctx)
        if ctx.cur_mode == "train":
            losses[-1].append((ctx.loss_batch_total / ctx.num_samples, ctx.num_samples))

    @functools.wraps(Server._perform_federated_aggregation)
    def aggregate(self, plain=Server._perform_federated_aggregation):
        number = plain(self)
        meter.mark()
        losses.append([])
        return number

    LLMTrainer._hook_on_fit_end, Server._perform_federated_aggregation = on_fit_end, aggregate
    runner = get_runner(
        data=data, server_class=get_server_cls(config), client_class=get_client_cls(config), config=config.clone()
    )
    fedjob.load(runner.server.model.model, load_file(job.initial))
    torch.set_num_threads(settings["threads"])
    meter.mark()
    runner.run()
    rounds = losses[: job.rounds]
    result = meter.result(
        versions={"federatedscope": revision(), **fedjob.versions("protobuf", "grpcio")},
        samples=sum(number for round_losses in rounds for _, number in round_losses),
        loss=sum(loss for loss, _ in rounds[-1]) / len(rounds[-1]),
    )
    return result, fedjob.trained(runner.server.model.model)


if __name__ == "__main__":
    fedjob.main(work)
