"""PFNM: which neurons of the clients are one neuron is inferred, and the global net has as many as that takes.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; for convolutions as in Wang
et al., "Federated Learning with Matched Averaging", ICLR 2020, without their training in between.

    layer by layer    the inputs of W_k go where the layer below was assigned, zeros elsewhere
                      assignment and global neurons are the maximum a posteriori estimate (``algebra.match``)
    the last layer    every class by the clients that have it, in proportion to its samples

The estimate lies between the clients' neurons and a prior around zero, so a neuron that one client alone has is halved
(``sigma = sigma0 = 1``). The global net may be wider than a client's: ``apply`` gives its layers their new widths, and
what the clients train in a further round is the wider net. ``last_layer: samples`` takes ``Σ p_k W_k`` instead, and
clients then do not tell how many samples of each class they have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...algebra import nonparametric_matching
from ...algebra.match import require
from ...models.chain import allow_growth, chain
from ...seeds import derive
from ..registry import register_method
from .base import OneShot


@register_method("pfnm")
class PFNM(OneShot):
    source = "Yurochkin et al., ICML 2019"
    sends = "all weights, and its number of samples of each class; receives a net that may be wider"

    @dataclass(frozen=True)
    class Params:
        sigma: float = field(default=1.0, metadata={"above": 0.0, "help": "variance of clients' neurons"})
        sigma0: float = field(default=1.0, metadata={"above": 0.0, "help": "variance of the global neurons around 0"})
        gamma: float = field(default=7.0, metadata={"above": 0.0, "help": "larger: more global neurons"})
        sweeps: int = field(default=5, metadata={"min": 0, "help": "times that each client is matched anew"})
        widest: int = field(default=700, metadata={"min": 1, "help": "neurons beyond which a layer grows by need only"})
        last_layer: str = field(
            default="classes",
            metadata={"choices": ("classes", "samples"), "help": "weights of the clients in the last layer"},
        )

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), adapter="none", tasks=("ImageClassification",))

    def __init__(self, params, setting):
        super().__init__(params, setting)
        require("scipy", "scipy", "pfnm")

    def adapt(self, model):
        self.chain = chain(model, "pfnm")
        allow_growth(model)
        return model

    def upload(self, model, round, client):
        own = super().upload(model, round, client)
        if self.params.last_layer == "classes":
            labels = torch.cat([batch["labels"] for batch in client.batches()])
            counts = torch.bincount(labels, minlength=len(own[self.chain[-1]]))
            own["counts:classes"] = counts.float().to(own[self.chain[-1]].device)
        return own

    def expected(self, state, round, client):
        own = super().expected(state, round, client)
        if self.params.last_layer == "classes":
            own["counts:classes"] = torch.empty(len(own[self.chain[-1]]), dtype=torch.float32, device="meta")
        return own

    def aggregate(self, updates, state, round):
        parts = [u.tensors for u in updates]
        message = {n: parts[0][n] for n in self.chain} if len(parts) == 1 else self.match(parts, updates, round)
        return {**state, **message}, message

    def match(self, parts, updates, round):
        p = self.params
        rng = np.random.default_rng(derive(self.setting.seed, "pfnm", round))
        *hidden, last = self.chain
        found, assigned, width = {}, None, 0
        for name in hidden:
            like = parts[0][name]
            nets = [self.enter(part[name], assigned and assigned[k], width) for k, part in enumerate(parts)]
            weight, assigned = nonparametric_matching(
                [net.reshape(len(net), -1) for net in nets],
                sigma=p.sigma,
                sigma0=p.sigma0,
                gamma=p.gamma,
                sweeps=p.sweeps,
                widest=p.widest,
                rng=rng,
            )
            width = len(weight)
            found[name] = torch.from_numpy(weight.reshape(width, *nets[0].shape[1:])).to(like)
        shares = np.array(self.weights(updates))[:, None]
        if p.last_layer == "classes":
            counts = np.stack([part["counts:classes"].double().cpu().numpy() for part in parts])
            known = counts.sum(0) > 0  # of a class that nobody has, nothing is known but the clients' sizes
            shares = np.where(known, counts / np.where(known, counts.sum(0), 1), shares)
        merged = sum(
            np.broadcast_to(share, len(parts[0][last]))[:, None] * self.enter(part[last], places, width)
            for share, part, places in zip(shares, parts, assigned)
        )
        found[last] = torch.from_numpy(merged).to(parts[0][last])
        return found

    @staticmethod
    def enter(weight: torch.Tensor, places: np.ndarray | None, width: int) -> np.ndarray:
        """``weight`` ``(d_out, n, …)`` with its inputs at ``places`` among ``width``; a flattened image by channel."""
        weight = weight.double().cpu().numpy()
        if places is None:
            return weight
        grouped = weight.reshape(len(weight), len(places), -1)
        moved = np.zeros((len(weight), width, grouped.shape[2]))
        moved[:, places] = grouped
        return moved.reshape(len(weight), *((width, *weight.shape[2:]) if weight.ndim > 2 else (-1,)))
