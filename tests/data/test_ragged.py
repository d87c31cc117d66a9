"""Arrays of unequal length in one, and items that are made when asked for."""

import numpy as np
import pytest

from fs_lowrank.data.examples import Examples
from fs_lowrank.data.ragged import Lazy, Ragged

ROWS = [[3, 1], [], [7, 7, 7], [0], [5, 6]]


def lists(ragged):
    return [row.tolist() for row in ragged]


def test_rows_lie_in_one_array():
    ragged = Ragged.of(ROWS)
    assert lists(ragged) == ROWS and len(ragged) == 5 and ragged[-1].tolist() == [5, 6]
    assert lists(ragged[1:3]) == ROWS[1:3] and ragged[1:3].values.tolist() == [7, 7, 7]
    some = ragged.select(np.array([4, 0, 0, 1]))
    assert lists(some) == [[5, 6], [3, 1], [3, 1], []] and some.values.tolist() == [5, 6, 3, 1, 3, 1]
    assert np.shares_memory(ragged[0], ragged.values), "a row is a view"
    assert lists(Ragged.join([ragged, some])) == lists(ragged) + lists(some)
    assert lists(Ragged.of([])) == [] == Ragged.of([]).values.tolist() == lists(Ragged.join([]))
    with pytest.raises(IndexError):
        ragged[5]


def test_owners_and_sums():
    ragged = Ragged.by_owner(np.array([2, 0, 2, 1, 0, 4]), 6)
    assert lists(ragged) == [[1, 4], [3], [0, 2], [], [5], []]
    assert ragged.owners().tolist() == [0, 0, 1, 2, 2, 4]
    of = np.array([1, 10, 100, 1000, 10000, 5])
    assert ragged.sums(of).tolist() == [10010, 1000, 101, 0, 5, 0]
    assert ragged.select(np.array([2, 3, 0])).sums(of).tolist() == [101, 0, 10010]


def test_values_take_32_bits_where_they_fit():
    assert Ragged.of(ROWS).narrowed().values.dtype == np.int32
    assert Ragged.of([[1 << 40]]).narrowed().values.dtype == np.int64
    examples = Examples({"input_ids": ROWS[::2]})
    assert examples.columns["input_ids"].values.dtype == np.int32
    assert examples.batch([0, 1])["input_ids"].tolist() == [[3, 1, 0], [7, 7, 7]]


def test_the_fingerprint_is_of_the_rows_in_their_order():
    examples = Examples({"input_ids": [[1, 2], [3], [4, 5, 6]]}, np.array([0, 1, 1]))
    # recorded before all rows lay in one array
    assert examples.fingerprint() == "bbe9e3440fbc03a9b40e70d4fafbd8f5c42748bda5ff203efe695d9d5e728f60"


def test_items_are_made_when_they_are_asked_for():
    made = []
    items = Lazy(10**9, lambda i: made.append(i) or -i)
    assert len(items) == 10**9 and items[3] == -3 and items[-1] == 1 - 10**9 and items[5:7] == [-5, -6]
    assert made == [3, 10**9 - 1, 5, 6]
    with pytest.raises(IndexError):
        items[10**9]
    assert list(Lazy(3, str)) == ["0", "1", "2"]
