"""FedASK: clients send two thin sketches of their products, one after the other, whose sums give the products' mean.

Wen et al., "Differentially Private Federated Low Rank Adaptation Beyond Fixed-Matrix", NeurIPS 2025, Algorithm 1.

    all have the same   Ω (d_in × m), Gaussian, from the seed
    client k sends      Y_k = s_k B_k (A_k Ω)                 and is told   Q = qr(Σ_k p_k Y_k)
    client k sends      P_k = A_kᵀ (s_k B_kᵀ Q)
    the server takes    Q (Σ_k p_k P_k)ᵀ = U Σ Vᵀ,   B ← U_r √(Σ_r / s),   A ← √(Σ_r / s) V_rᵀ

The server needs sums only. ``Q (Σ p_k P_k)ᵀ`` is the mean of the products to rounding where ``m`` is at least the rank
of that, at most ``Σ r_k``, or the smaller side of the layer; with fewer columns it is the part of the mean in
the span of Q. As in FlexLoRA, the server takes its largest r components; a client of rank ``r_k`` receives the first.

The authors' code leaves out the scale s, which matters if alphas or ranks differ.
"""

from dataclasses import dataclass, replace

import torch

from ..algebra import low_rank_sum_svd
from ..models.names import entries_of, named_tensors, pairs, select
from ..seeds import derive
from ..settings import key
from .flexlora import FlexLoRA
from .registry import register_method
from .terms import TRAIN, Phase


@register_method("fedask")
class FedASK(FlexLoRA):
    source = "Wen et al., NeurIPS 2025"
    sends = "two sketches of its product, of `sketch` columns each"

    @dataclass(frozen=True)
    class Params(FlexLoRA.Params):
        split: str = key("sqrt", choices=("sqrt", "b"), help="sqrt: B and A share the singular values; b: all in B")
        sketch: int = key(
            0, min=0, help="columns of a sketch; 0: four times the largest rank, as in the authors' example"
        )
        trains: str = key("both", choices=("both", "b"), help="b: clients leave A as it is, as under privacy noise")

    params: Params

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), sums=True, own_upload=False)

    def phases(self, round, client=None):
        return [Phase(train=("lora_B", *self.whole))] if self.params.trains == "b" else super().phases(round, client)

    def exchanges(self, state, round):
        return (TRAIN, "project")

    def upload(self, model, round, client):
        sent = super().upload(model, round, client)
        sketches = {n: sent[n] for n in select(sent, self.whole) if client.exchange != TRAIN}
        tensors = {n: t.detach() for n, t in named_tensors(model, ("lora_A", "lora_B")).items()}
        for b, a in pairs(tensors):
            up, down = tensors[b].flatten(1), tensors[a].flatten(1)
            up = self.adapter.scale(len(down)) * up
            if client.exchange == TRAIN:
                sketches[f"y:{b}"] = up @ (down @ self.omega(b, *self.size(up, down)).to(down))
            else:
                sketches[f"p:{b}"] = down.T @ (up.T @ client.told[f"q:{b}"].to(up))
        return sketches

    def size(self, up, down) -> tuple[int, int]:
        """The size of Ω, for a pair of matrices."""
        return down.shape[1], min(self.params.sketch or 4 * self.rank(), len(up), down.shape[1])

    def omega(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Ω for the layer whose B is called ``name``."""
        return torch.randn(
            rows, columns, generator=torch.Generator().manual_seed(derive(self.setting.seed, "omega", name))
        )

    def expected(self, state, round, client, exchange=TRAIN):
        tensors = super().expected(state, round, client)
        sketches = {n: tensors[n] for n in select(tensors, self.whole) if exchange != TRAIN}
        for b, a in pairs(state):
            rows, columns = self.size(state[b].flatten(1), state[a].flatten(1))
            name, rows = (f"y:{b}", len(state[b])) if exchange == TRAIN else (f"p:{b}", rows)
            sketches[name] = state[b].new_empty(rows, columns)
        return sketches

    def tell(self, updates, state, round, exchange):
        return {f"q:{b}": torch.linalg.qr(y)[0] for b, y in entries_of("y", self.mean_of(updates)).items()}

    def aggregate(self, updates, state, round):
        mean = self.mean_of(updates)
        message = {n: mean[n] for n in select(mean, self.whole)}
        for b, a in pairs(state):
            svd = low_rank_sum_svd([state[f"q:{b}"]], [mean[f"p:{b}"].T], [1.0], self.rank())
            message[b], message[a] = self.halves(*svd, state[b], state[a])
        return {**state, **message}, message
