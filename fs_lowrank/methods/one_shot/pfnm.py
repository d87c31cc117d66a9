"""PFNM: the clients' neurons are matched by Bayesian inference, which also determines the number of global neurons.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; for convolutions as in Wang
et al., "Federated Learning with Matched Averaging", ICLR 2020, without their training in between.

    layer by layer    the inputs of W_k go where the layer below was assigned, zeros elsewhere
                      assignment and global neurons are the maximum a posteriori estimate (``algebra.match``)
    the last layer    each class is averaged over the clients that have it, in proportion to its samples

The estimate lies between the clients' neurons and a prior around zero, so a neuron that only one client has is halved
(``sigma = sigma0 = 1``). The global network may be wider than that of a client: ``apply`` gives its layers their new
widths, and in a further round the clients train the wider network. ``last_layer: samples`` takes ``Σ p_k W_k`` instead,
and clients then do not send how many samples of each class they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...algebra import nonparametric_matching
from ...algebra.match import require
from ...models.chain import allow_growth, chain
from ...seeds import derive
from ...settings import key
from ..registry import register_method
from ..terms import RefusedUpdate, refuse_negative
from .base import WITHOUT_ADAPTER, OneShot, meta


@register_method("pfnm")
class PFNM(OneShot):
    source = "Yurochkin et al., ICML 2019"
    sends = "all weights, and its number of samples of each class; receives a network that may be wider"

    @dataclass(frozen=True)
    class Params:
        sigma: float = key(1.0, above=0.0, help="variance of clients' neurons")
        sigma0: float = key(1.0, above=0.0, help="variance of the global neurons around 0")
        gamma: float = key(7.0, above=0.0, help="larger: more global neurons")
        sweeps: int = key(5, min=0, help="times that each client is matched again")
        widest: int = key(700, min=1, help="number of neurons beyond which a layer grows only if it must")
        last_layer: str = key(
            "classes", choices=("classes", "samples"), help="weights of the clients in the last layer"
        )

    params: Params

    @classmethod
    def requires(cls, params: Params):
        needs = replace(super().requires(params), adapter="none", idle=WITHOUT_ADAPTER)
        return replace(needs, tasks=("ImageClassification",))

    def __init__(self, params, setting):
        super().__init__(params, setting)
        require("scipy", "scipy", "pfnm")

    def adapt(self, model):
        self.chain = chain(model, "pfnm")
        allow_growth(model)
        return super().adapt(model)

    def beside(self, model, tensors, round, client):
        if self.params.last_layer != "classes":
            return {}
        last, labels = tensors[self.chain[-1]], torch.cat([batch["labels"] for batch in client.batches()])
        return {"counts:classes": torch.bincount(labels, minlength=len(last)).int().to(last.device)}

    def beside_shapes(self, tensors):
        if self.params.last_layer != "classes":
            return {}
        # Whole numbers, which quantization leaves as they are.
        return {"counts:classes": meta(len(tensors[self.chain[-1]]), dtype=torch.int32)}

    def check(self, update):
        super().check(update)
        if self.params.last_layer == "classes":
            refuse_negative(update, ["counts:classes"])
            total = int(update.tensors["counts:classes"].sum())
            if total != update.num_samples:
                raise RefusedUpdate(
                    f"client {update.client}: counts:classes adds up to {total} samples, it declared "
                    f"{update.num_samples}"
                )

    def aggregate(self, updates, state, round):
        parts = [u.tensors for u in updates]
        message = {n: parts[0][n] for n in self.chain} if len(parts) == 1 else self.match(parts, updates, round)
        return {**state, **message}, message

    def match(self, parts, updates, round):
        """The global weights by name, layer by layer."""
        p = self.params
        rng = np.random.default_rng(derive(self.setting.seed, "pfnm", round))
        *hidden, last = self.chain
        merged, width = {}, 0
        assignments: Sequence[np.ndarray | None] = [None] * len(parts)
        for name in hidden:
            template = parts[0][name]
            nets = [self.enter(part[name], indices, width) for part, indices in zip(parts, assignments)]
            weight, assignments = nonparametric_matching(
                [net.reshape(len(net), -1) for net in nets],
                sigma=p.sigma,
                sigma0=p.sigma0,
                gamma=p.gamma,
                sweeps=p.sweeps,
                widest=p.widest,
                rng=rng,
            )
            width = len(weight)
            merged[name] = torch.from_numpy(weight.reshape(width, *nets[0].shape[1:])).to(template)
        shares = np.array(self.weights(updates))[:, None]
        if p.last_layer == "classes":
            counts = np.stack([part["counts:classes"].double().cpu().numpy() for part in parts])
            present = counts.sum(0) > 0  # a class that no client has is averaged by the clients' sizes
            shares = np.where(present, counts / np.where(present, counts.sum(0), 1), shares)
        total = sum(
            np.broadcast_to(share, len(parts[0][last]))[:, None] * self.enter(part[last], indices, width)
            for share, part, indices in zip(shares, parts, assignments)
        )
        merged[last] = torch.from_numpy(total).to(parts[0][last])
        return merged

    @staticmethod
    def enter(weight: torch.Tensor, indices: np.ndarray | None, width: int) -> np.ndarray:
        """``weight`` ``(d_out, n, …)`` with its inputs at ``indices`` among ``width``; a flattened image by channel."""
        array = weight.double().cpu().numpy()
        if indices is None:
            return array
        grouped = array.reshape(len(array), len(indices), -1)
        moved = np.zeros((len(array), width, grouped.shape[2]))
        moved[:, indices] = grouped
        return moved.reshape(len(array), *((width, *array.shape[2:]) if array.ndim > 2 else (-1,)))
