"""The job on pfl (Apple's pfl-research): SimulatedBackend, FederatedAveraging, its PyTorchModel around a PEFT model.

    python pfl_job.py JOB OUT '{"threads": 2}'
    python -m torch.distributed.run --standalone --nproc_per_node 2 pfl_job.py JOB OUT '{"threads": 1}'

Settings, for its best: two variants, one process with all cores and, as its guide says for several workers, a process
for each core under torchrun. Samples are kept in memory and batches made once, as tensors of its own ``Dataset`` would
be, but padded batch by batch as elsewhere, which is less work. pfl evaluates every client before and after the training
of its first round; there is no key against it, so its first round is longer.
"""

from __future__ import annotations

import types

import fedjob
import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Batches(Dataset):
    """A client's samples as padded batches."""

    def __init__(self, job, samples, user_id):
        super().__init__([s["input_ids"] for s in samples], user_id=user_id)
        starts = range(0, len(samples), job.batch_size)
        self.batches = [job.collate(samples[start : start + job.batch_size]) for start in starts]

    def __len__(self):
        return len(self.raw_data)

    def iter(self, batch_size):
        return iter(self.batches)


class Marks(TrainingProcessCallback):
    """Notes the ends of rounds; ``losses`` has the batches' losses of the last round alone."""

    def __init__(self, meter, losses, rounds):
        self.meter, self.losses, self.rounds = meter, losses, rounds

    def on_train_begin(self, *, model):
        self.meter.mark()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.meter.mark()
        if central_iteration + 1 < self.rounds:
            self.losses["seen"] += sum(n for _, n in self.losses["last"])
            self.losses["last"] = []
        return False, Metrics()


def wrapped(job, losses):
    """The PEFT model with the two methods that pfl asks for, as in its benchmark of language models."""
    model = job.peft_model().train()

    def loss(self, **batch):
        value = self(**batch).loss
        losses["last"].append((value.detach(), len(batch["labels"])))
        return value

    def metrics(self, **batch):
        with torch.no_grad():
            return {"loss": Weighted.from_unweighted(self(**batch).loss.item())}

    model.loss, model.metrics = types.MethodType(loss, model), types.MethodType(metrics, model)
    return model


def work(job, out, settings):
    meter, losses = fedjob.Meter(), {"last": [], "seen": 0}
    np.random.seed(job.seed)
    peft = wrapped(job, losses)
    model = PyTorchModel(
        peft,
        lambda parameters, lr: job.make_optimizer([p for p in parameters if p.requires_grad]),
        torch.optim.SGD([p for p in peft.parameters() if p.requires_grad], 1.0),
    )
    users = {k: Batches(job, own, str(k)) for k, own in enumerate(job.samples())}
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(users)))
    marks = Marks(meter, losses, job.rounds)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=job.clients_per_round,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=job.batch_size,
            local_num_epochs=None,
            local_num_steps=job.local_steps,
            local_learning_rate=job.learning_rate,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=job.batch_size),
        callbacks=[marks],
    )
    seen = losses["seen"] + sum(n for _, n in losses["last"])
    loss = float(torch.stack([value for value, _ in losses["last"]]).mean())
    world = pytorch_ops.distributed
    if world.world_size > 1:
        both = torch.tensor([float(seen), loss])
        torch.distributed.all_reduce(both)
        seen, loss = int(both[0]), float(both[1]) / world.world_size
    result = meter.result(versions=fedjob.versions("pfl"), samples=seen, loss=loss)
    return (result, fedjob.trained(peft)) if world.global_rank == 0 else ({}, {})


if __name__ == "__main__":
    fedjob.main(work)
