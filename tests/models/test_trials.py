"""Samples with which shortcuts are compared with the plain way."""

import numpy as np
import pytest

from fs_lowrank.models.shortcuts.trials import rows_to_try


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
