import numpy as np
import torch

from fs_lowrank.data.examples import Examples
from fs_lowrank.data.ragged import Ragged


def classes():
    return Examples({"input_ids": [[5, 6], [7], [8, 9, 10]], "token_type_ids": [[0, 1], [0], [0, 1, 1]]}, [1, 0, 1], 99)


def test_batch_is_padded_to_its_longest_example():
    batch = classes().batch([1, 0])
    assert batch["input_ids"].tolist() == [[7, 99], [5, 6]]
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["token_type_ids"].tolist() == [[0, 0], [0, 1]]
    assert batch["labels"].tolist() == [0, 1]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_causal_labels_are_padded_with_the_ignored_label():
    examples = Examples({"input_ids": [[1, 2, 3], [4]], "labels": [[-100, 2, 3], [4]]}, None, 0)
    assert examples.batch([0, 1])["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]


def test_padding_token_inside_a_text_stays_visible():
    examples = Examples({"input_ids": [[1, 0], [2, 3, 4]]}, [0, 1], pad_id=0)
    assert examples.batch([0, 1])["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_select_length_and_lengths():
    chosen = classes().select(np.array([2, 0]))
    assert len(chosen) == 2 and chosen.lengths.tolist() == [3, 2]
    assert chosen.labels.tolist() == [1, 1] and chosen.pad_id == 99
    assert len(classes().select([])) == 0


def test_fingerprint_depends_only_on_the_contents():
    assert classes().fingerprint() == classes().select([0, 1, 2]).fingerprint()
    different = {
        classes().fingerprint(),
        classes().select([1, 0, 2]).fingerprint(),
        Examples({"input_ids": [[5], [6, 7], [8, 9, 10]]}, [1, 0, 1]).fingerprint(),
        Examples({"input_ids": [[5, 6], [7], [8, 9, 10]]}, [1, 0, 1]).fingerprint(),
        Examples({"input_ids": [[5, 6], [7], [8, 9, 10]]}, [1, 1, 1]).fingerprint(),
    }
    assert len(different) == 5


def test_the_fingerprint_is_of_the_rows_in_their_order():
    examples = Examples({"input_ids": [[1, 2], [3], [4, 5, 6]]}, np.array([0, 1, 1]))
    # recorded before all rows lay in one array
    assert examples.fingerprint() == "bbe9e3440fbc03a9b40e70d4fafbd8f5c42748bda5ff203efe695d9d5e728f60"


def test_tokens_take_32_bits():
    assert classes().columns["input_ids"].values.dtype == np.int32


def test_sums_over_the_rows_of_each_owner():
    ragged = Ragged.by_owner(np.array([2, 0, 2, 1, 0, 4]), 6)
    of = np.array([1, 10, 100, 1000, 10000, 5])
    assert ragged.sums(of).tolist() == [10010, 1000, 101, 0, 5, 0]
    assert ragged.select(np.array([2, 3, 0])).sums(of).tolist() == [101, 0, 10010]
