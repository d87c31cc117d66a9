"""Updates within the bytes of plain averaging: 16 bits a weight, and as many for all that comes beside the weights.

Jhunjhunwala et al., "FedFisher", AISTATS 2024, appendix C. A tensor ``n`` travels as ``codes:n`` (packed uint8) and
``scale:n``; a symmetric matrix as its leading eigenvectors, 8 bits a value, and ``values:n``. The paper sends left and
right singular vectors; of a symmetric matrix they are the same, so here they travel once and twice as many fit.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ...algebra import bits_for, leading, pack, packed_bytes, unpack, vectors_within
from ..base import Tensors

#: half of what a weight takes in plain averaging
BITS = bits_for(2)
#: of an eigenvector's values
VECTOR_BITS = bits_for(4)


class Budget:
    """How one update travels compressed.

    Args:
        own: what the client would send plainly, by name; values do not count for ``shapes`` and ``expand``.
        parameters: those of ``own`` that are quantised; the rest travels as it is.
        beside: what a method sends beside them, ``KIND:NAME``. With a parameter's name it is quantised as the parameter
            is; otherwise it is a symmetric matrix, of which eigenvectors travel: as many of each as fit into 16 bits
            for every value of the parameters.
    """

    def __init__(self, own: Tensors, parameters: Collection[str], beside: Tensors):
        weights = {n: own[n] for n in parameters}
        self.rest = {n: t for n, t in own.items() if n not in weights}
        self.matrices = {n: t for n, t in beside.items() if n.partition(":")[2] not in weights}
        self.plain = {**weights, **{n: t for n, t in beside.items() if n not in self.matrices}}
        bits = BITS * sum(t.numel() for t in weights.values())
        self.vectors = vectors_within([len(m) for m in self.matrices.values()], bits, VECTOR_BITS)

    def compress(self) -> dict[str, Tensor]:
        """What travels."""
        made = dict(self.rest)
        for name, tensor in self.plain.items():
            made[f"codes:{name}"], made[f"scale:{name}"] = pack(tensor, BITS)
        for name, matrix in self.matrices.items():
            kept, values = leading(matrix, min(self.vectors, len(matrix)))
            made[f"codes:{name}"], made[f"scale:{name}"] = pack(kept, VECTOR_BITS)
            made[f"values:{name}"] = values.float()
        return made

    def shapes(self) -> dict[str, Tensor]:
        """What ``compress`` gives, as meta tensors where it is not sent as it is."""

        def meta(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device="meta")

        made = dict(self.rest)
        for name, tensor in self.plain.items():
            made[f"codes:{name}"] = meta(packed_bytes(tensor.numel(), BITS), torch.uint8)
            made[f"scale:{name}"] = meta(1, torch.float32)
        for name, matrix in self.matrices.items():
            kept = min(self.vectors, len(matrix))
            made[f"codes:{name}"] = meta(packed_bytes(len(matrix) * kept, VECTOR_BITS), torch.uint8)
            made[f"scale:{name}"] = meta(1, torch.float32)
            made[f"values:{name}"] = meta(kept, torch.float32)
        return made

    def expand(self, sent: Tensors) -> dict[str, Tensor]:
        """What ``compress`` was given, from what it gave."""
        made = {n: sent[n] for n in self.rest}
        for name, like in self.plain.items():
            made[name] = unpack(sent[f"codes:{name}"], sent[f"scale:{name}"], like.shape, BITS).to(like.dtype)
        for name, like in self.matrices.items():
            values = sent[f"values:{name}"]
            kept = unpack(sent[f"codes:{name}"], sent[f"scale:{name}"], (len(like), len(values)), VECTOR_BITS)
            made[name] = (kept * values) @ kept.T
        return made
