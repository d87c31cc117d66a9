"""Updates within the bytes of plain averaging: 16 bits a weight, and as many for all that comes beside the weights.

Jhunjhunwala et al., "FedFisher", AISTATS 2024, appendix C. A tensor ``n`` travels as ``codes:n`` (packed uint8) and
``scale:n``; a symmetric matrix as its leading eigenvectors, 8 bits a value, and ``values:n``. The paper sends left and
right singular vectors; of a symmetric matrix they are the same, so here they travel once and twice as many fit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...algebra import bits_for, leading, pack, packed_bytes, unpack, vectors_within
from ..base import Tensors

#: half of what a weight takes in plain averaging
BITS = bits_for(2)
#: of an eigenvector's values
VECTOR_BITS = bits_for(4)


def vectors_kept(weights: Mapping[str, Tensor], matrices: Mapping[str, int]) -> int:
    """Eigenvectors of each of ``matrices`` (name -> size) that fit into 16 bits for every value of ``weights``."""
    return vectors_within(list(matrices.values()), BITS * sum(t.numel() for t in weights.values()), VECTOR_BITS)


def compress(tensors: Tensors, matrices: Tensors, vectors: int) -> dict[str, Tensor]:
    """``tensors`` quantised, symmetric ``matrices`` by ``vectors`` eigenvectors each and quantised."""
    made = {}
    for name, tensor in tensors.items():
        made[f"codes:{name}"], made[f"scale:{name}"] = pack(tensor, BITS)
    for name, matrix in matrices.items():
        kept, values = leading(matrix, min(vectors, len(matrix)))
        made[f"codes:{name}"], made[f"scale:{name}"] = pack(kept, VECTOR_BITS)
        made[f"values:{name}"] = values.float()
    return made


def shapes(tensors: Mapping[str, Tensor], matrices: Mapping[str, int], vectors: int) -> dict[str, Tensor]:
    """What ``compress`` gives, as meta tensors."""

    def meta(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    made = {}
    for name, tensor in tensors.items():
        made[f"codes:{name}"] = meta(packed_bytes(tensor.numel(), BITS), torch.uint8)
        made[f"scale:{name}"] = meta(1, torch.float32)
    for name, size in matrices.items():
        kept = min(vectors, size)
        made[f"codes:{name}"] = meta(packed_bytes(size * kept, VECTOR_BITS), torch.uint8)
        made[f"scale:{name}"] = meta(1, torch.float32)
        made[f"values:{name}"] = meta(kept, torch.float32)
    return made


def expand(sent: Tensors, tensors: Mapping[str, Tensor], matrices: Mapping[str, int]) -> dict[str, Tensor]:
    """The reverse: ``tensors`` gives names, shapes and dtypes, ``matrices`` names and sizes."""
    made = {n: unpack(sent[f"codes:{n}"], sent[f"scale:{n}"], t.shape, BITS).to(t.dtype) for n, t in tensors.items()}
    for name, size in matrices.items():
        values = sent[f"values:{name}"]
        kept = unpack(sent[f"codes:{name}"], sent[f"scale:{name}"], (size, len(values)), VECTOR_BITS)
        made[name] = (kept * values) @ kept.T
    return made
