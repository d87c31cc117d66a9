"""Samples with which shortcuts are compared with the plain way."""

import numpy as np
import pytest

from fs_lowrank.data import Examples
from fs_lowrank.models.shortcuts.trials import rows_to_try, samples_to_try


def of(*lengths):
    return Examples({"input_ids": [np.full(n, n) for n in lengths]}, np.zeros(len(lengths), dtype=int))


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ([9, 3, 5, 3, 8, 7, 4, 6], [3, 5, 7, 9]),
        ([2, 2, 60, 3], [2, 3, 60, 2]),
        ([5, 5], [5, 5]),
        (list(range(1, 101)), [1, 34, 67, 100]),
    ],
)
def test_from_the_shortest_to_the_longest(lengths, expected):
    lengths = np.array(lengths)
    rows = rows_to_try(lengths)
    assert lengths[rows].tolist() == expected and len(set(rows)) == len(rows)


def test_samples_of_several_sets():
    tried = samples_to_try([of(6, 2), of(9, 3, 4), of(7)])
    assert tried.lengths.tolist() == [2, 4, 6, 9] or tried.lengths.tolist() == [2, 4, 7, 9]
    assert [row.tolist() for row in tried.columns["input_ids"]] == [[n] * n for n in tried.lengths]
