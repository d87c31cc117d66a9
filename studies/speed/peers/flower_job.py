"""The job on Flower: its simulation on Ray (``flwr.simulation``), its FedAvg strategy, a PyTorch client with PEFT.

    python flower_job.py JOB OUT '{"threads": 1, "cpus": 2}'

Settings, for its best: Ray has all cores, a client takes ``threads`` of them (two variants: 1, and all); a process
keeps model and data from one message to the next, where Flower's examples load them for every message; no evaluation.
Clients send PEFT's tensors alone.
"""

from __future__ import annotations

import os
from functools import lru_cache

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DOCKER_CPU_WARNING="1")

import fedjob  # noqa: E402
import torch  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

client_app, server_app = ClientApp(), ServerApp()


@lru_cache(1)
def load_job(folder, threads):
    """The job, the model and the samples of all clients, in memory for later messages."""
    torch.set_num_threads(threads)
    job = fedjob.Job.read(folder)
    return job, job.peft_model().train(), job.samples()


@client_app.train()
def train(message, context):
    """A client's part of a round."""
    config = message.content["config"]
    job, model, samples = load_job(config["job"], config["threads"])
    fedjob.load(model, message.content["arrays"].to_torch_state_dict())
    rows = samples[context.node_config["partition-id"]]
    loader = torch.utils.data.DataLoader(rows, batch_size=job.batch_size, collate_fn=job.collate)
    optimizer = job.make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses, steps, seen = 0.0, 0, 0
    while steps < job.local_steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses, steps, seen = losses + loss.item(), steps + 1, seen + len(batch["labels"])
            if steps == job.local_steps:
                break
    metrics = MetricRecord({"loss": losses / steps, "num-examples": seen})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(fedjob.trained(model)), "metrics": metrics}), reply_to=message
    )


def in_sum(replies, weighted_by):
    """The mean loss of a round, and the number of samples."""
    metrics = [reply["metrics"] for reply in replies]
    loss = sum(m["loss"] for m in metrics) / len(metrics)
    return MetricRecord({"loss": loss, "samples": sum(m["num-examples"] for m in metrics)})


def work(job, out, settings):
    meter, results = fedjob.Meter(), {}

    @server_app.main()
    def serve(grid, context):
        strategy = FedAvg(
            fraction_train=job.clients_per_round / job.clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.clients_per_round,
            min_available_nodes=job.clients,
            train_metrics_aggr_fn=in_sum,
        )
        results["result"] = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(fedjob.trained(job.peft_model())),
            train_config=ConfigRecord({"job": str(settings["job"]), "threads": settings["threads"]}),
            num_rounds=job.rounds,
            evaluate_fn=lambda round, arrays: meter.mark(),
        )

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=job.clients,
        backend_config={
            "init_args": {"num_cpus": settings["cpus"], "include_dashboard": False},
            "client_resources": {"num_cpus": settings["threads"], "num_gpus": 0.0},
        },
    )
    rounds = results["result"].train_metrics_clientapp
    result = meter.result(
        versions=fedjob.versions("flwr", "ray"),
        samples=sum(int(r["samples"]) for r in rounds.values()),
        loss=rounds[job.rounds]["loss"],
    )
    return result, results["result"].arrays.to_torch_state_dict()


if __name__ == "__main__":
    import flower_job  # under its own name, so that Ray's processes import the client, with its memo

    fedjob.main(flower_job.work)
