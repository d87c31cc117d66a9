"""Which Gram matrices of clients are refused: those that no data can give, and no rounded one that data gave."""

from __future__ import annotations

import pytest
import torch

from fs_lowrank.algebra import leading, pack, unpack
from fs_lowrank.methods import RefusedUpdate, Update
from fs_lowrank.methods.one_shot import base
from fs_lowrank.methods.one_shot.base import refuse_indefinite
from fs_lowrank.rounds.codec import Codec, Uniform


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_few_values(rows, width):
    """Data of few different columns, so that rounding errors of a Gram matrix are the same in whole blocks."""
    return draw(rows, 7, seed=rows).repeat_interleave(width // 7 + 1, dim=1)[:, :width]


#: rows and columns of data -> the data; few rows give a Gram matrix of low rank
DATA = {
    "normal": lambda rows, width: draw(rows, width),
    "shifted": lambda rows, width: draw(rows, width) + 3,
    "relu": lambda rows, width: draw(rows, width).relu(),
    "sparse": lambda rows, width: draw(rows, width) * (draw(rows, width, seed=1) > 2),
    "blocks": of_few_values,
    "signs": lambda rows, width: of_few_values(rows, width).sign(),
    "one large": lambda rows, width: draw(rows, width) * torch.logspace(0, -4, width),
    "with bias": lambda rows, width: torch.cat([draw(rows, width - 1), torch.ones(rows, 1)], dim=1),
    "bfloat16": lambda rows, width: draw(rows, width).bfloat16().float(),
    "zeros": torch.zeros,
}
CODECS = {"exact": Codec(), "8 bits": Uniform(8), "16 bits": Uniform(16)}


def accept(matrix, codec=CODECS["exact"]):
    sent = codec.decode(codec.encode({"gram:x": matrix}), {"gram:x": matrix})
    refuse_indefinite(Update(3, 5, sent), ["gram:x"])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", DATA)
def test_what_data_give_is_accepted_after_rounding(kind, codec):
    for rows, width in ((1, 5), (2, 300), (5, 64), (40, 300), (400, 64), (3, 2), (9, 1)):
        x = DATA[kind](rows, width)
        for scale in (1.0, 1e-20, 1e15):
            accept(x.T @ x / rows * scale, CODECS[codec])


@pytest.mark.parametrize("kind", DATA)
def test_what_compression_makes_of_it_is_accepted(kind):
    """The server makes the matrix of eigenvectors of 8 bits; it is none that a client sends, and would be accepted."""
    for rows, width in ((2, 300), (40, 64)):
        x = DATA[kind](rows, width)
        vectors, values = leading(x.T @ x / rows, 5)
        vectors = unpack(*pack(vectors, 8), vectors.shape, 8)
        accept((vectors * values) @ vectors.T)


def correlated(width, by):
    return torch.full((width, width), by).fill_diagonal_(1.0)


HOSTILE = {
    "each pair by -0.9": lambda width: correlated(width, -0.9),
    "each pair by -0.6": lambda width: correlated(width, -0.6),
    "scaled": lambda width: 1e20 * correlated(width, -0.9),
    "one direction": lambda width: torch.eye(width) - 2.0 / width,
    "two blocks": lambda width: torch.block_diag(correlated(width - width // 2, -0.9), torch.eye(width // 2)),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_indefinite_matrices_with_sound_minors_are_refused(kind, codec):
    for width in (6, 40, 150):
        matrix = HOSTILE[kind](width)
        said = (
            "^client 3: gram:x has eigenvalues below zero.*expected a symmetric matrix that is positive semi-definite"
        )
        with pytest.raises(RefusedUpdate, match=said):
            accept(matrix, CODECS[codec])


def test_of_a_large_matrix_the_blocks_on_its_diagonal_are_looked_at(monkeypatch):
    monkeypatch.setattr(base, "LARGEST_BLOCK", 8)
    x = draw(3, 30)
    accept(x.T @ x, CODECS["8 bits"])
    with pytest.raises(RefusedUpdate, match="eigenvalues below zero"):
        accept(torch.block_diag(torch.eye(24), correlated(6, -0.9)))
