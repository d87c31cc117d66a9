"""Updates in the bytes of plain averaging: 16 bits per weight, and as many for all that is sent besides the weights.

Jhunjhunwala et al., "FedFisher", AISTATS 2024, appendix C. A tensor ``n`` is sent as ``codes:n`` (packed uint8) and
``scale:n``; a symmetric matrix as its leading eigenvectors, 8 bits per value, and ``values:n``. The paper sends left
and right singular vectors; those of a symmetric matrix are equal, so they are sent once here and twice as many fit.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ...algebra import leading, pack, packed_bytes, unpack, vectors_within
from ..terms import Tensors

#: bits per weight, half of the 32 bits in plain averaging
BITS = 32 // 2
#: bits per value of an eigenvector: compression by 4 (appendix C)
VECTOR_BITS = 32 // 4


def quantised(kind: str, sent: Tensors) -> dict[str, Tensor]:
    """The values, flat, of the tensors ``KIND:NAME`` that ``sent`` has as codes of ``BITS`` bits."""
    codes = {n.removeprefix("codes:"): t for n, t in sent.items() if n.startswith(f"codes:{kind}:")}
    return {n: unpack(t, sent[f"scale:{n}"], (t.numel() * 8 // BITS,), BITS) for n, t in codes.items()}


class Budget:
    """How one update is compressed.

    Args:
        tensors: the uncompressed update, by name; ``shapes`` and ``expand`` do not use the values.
        parameters: the names in ``tensors`` that are quantised; the other tensors are sent as they are.
        beside: the tensors that a method sends besides them, as ``KIND:NAME``. If NAME is a parameter, it is quantised
            like the parameter; otherwise it is a symmetric matrix, of which eigenvectors are sent: one number for all,
            as many as fit into 16 bits per value of the parameters.
    """

    def __init__(self, tensors: Tensors, parameters: Collection[str], beside: Tensors):
        weights = {n: tensors[n] for n in parameters}
        self.exact = {n: t for n, t in tensors.items() if n not in weights}
        self.matrices = {n: t for n, t in beside.items() if n.partition(":")[2] not in weights}
        self.plain = {**weights, **{n: t for n, t in beside.items() if n not in self.matrices}}
        bits = BITS * sum(t.numel() for t in weights.values())
        vectors = vectors_within([len(m) for m in self.matrices.values()], bits, VECTOR_BITS)
        #: number of eigenvectors of each matrix
        self.counts = {n: min(vectors, len(m)) for n, m in self.matrices.items()}

    def compress(self) -> dict[str, Tensor]:
        """The compressed update."""
        sent = dict(self.exact)
        for name, tensor in self.plain.items():
            sent[f"codes:{name}"], sent[f"scale:{name}"] = pack(tensor, BITS)
        for name, matrix in self.matrices.items():
            vectors, values = leading(matrix, self.counts[name])
            sent[f"codes:{name}"], sent[f"scale:{name}"] = pack(vectors, VECTOR_BITS)
            sent[f"values:{name}"] = values.float()
        return sent

    def shapes(self) -> dict[str, Tensor]:
        """Names, shapes and dtypes of ``compress``; compressed tensors are meta tensors."""
        codes = {n: packed_bytes(t.numel(), BITS) for n, t in self.plain.items()}
        codes |= {n: packed_bytes(len(m) * self.counts[n], VECTOR_BITS) for n, m in self.matrices.items()}
        with torch.device("meta"):
            sent = {f"codes:{n}": torch.empty(size, dtype=torch.uint8) for n, size in codes.items()}
            sent |= {f"scale:{n}": torch.empty(1) for n in codes}
            return {**self.exact, **sent, **{f"values:{n}": torch.empty(count) for n, count in self.counts.items()}}

    def expand(self, sent: Tensors) -> dict[str, Tensor]:
        """The arguments of ``compress`` from its result, up to rounding."""
        tensors = {n: sent[n] for n in self.exact}
        for name, tensor in self.plain.items():
            tensors[name] = unpack(sent[f"codes:{name}"], sent[f"scale:{name}"], tensor.shape, BITS).to(tensor.dtype)
        for name, matrix in self.matrices.items():
            shape = len(matrix), self.counts[name]
            vectors = unpack(sent[f"codes:{name}"], sent[f"scale:{name}"], shape, VECTOR_BITS)
            tensors[name] = (vectors * sent[f"values:{name}"]) @ vectors.T
        return tensors
