"""What a site gives to methods and engines."""

import pytest
import torch

from fs_lowrank import UserError, load_config
from fs_lowrank.models.curvature import input_grams
from fs_lowrank.rounds.evaluator import Evaluator
from fs_lowrank.rounds.workspace import Workspace


@pytest.fixture
def workspace(settings):
    return lambda keys=None: Workspace(load_config(settings, {"federate.method": "regmean", **(keys or {})}))


@pytest.mark.more
def test_inputs_of_layers_are_those_of_the_data_and_none_of_padding(workspace):
    """The Gram matrices are those of one text at a time, whatever the size of a batch."""
    made = workspace()
    client, layers = made.clients[1], made.method.layers
    alone, together = made.in_batches(made.data.clients[1], 1), made.in_batches(made.data.clients[1], 8)
    batches = list(together())
    assert all(batch["attention_mask"].all() for batch in batches) and max(len(b["labels"]) for b in batches) > 1
    assert sum(len(batch["labels"]) for batch in batches) == client.num_samples
    one_by_one = [[tuple(ids) for ids in batch["input_ids"].tolist()] for batch in (*alone(),)]
    assert sorted(ids for batch in one_by_one for ids in batch) == sorted(
        tuple(row) for batch in batches for row in batch["input_ids"].tolist()
    )
    wanted, found = (input_grams(made.model, each(), layers) for each in (alone, together))
    for layer in layers:
        torch.testing.assert_close(found[layer], wanted[layer], atol=1e-5, rtol=1e-5)


@pytest.mark.more
def test_a_mean_without_a_gram_matrix_is_refused(workspace):
    keys = {"llm.adapter.use": True, "llm.adapter.args": [{"adapter_method": "loha", "r": 2, "modules": ["query"]}]}
    assert workspace(keys).method.layers, "the head has one"
    with pytest.raises(UserError, match="regmean: no trained tensor is the weight of a linear layer"):
        workspace({**keys, "lowrank.train_head": False})


@pytest.mark.more
@pytest.mark.parametrize("method", ["pfedlora", "pfedloru", "pmfedloru"])
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_base_that_the_start_of_a_pair_changes_has_no_personal_pairs_beside_it(workspace, method, start):
    args = {"r": 2, "alpha": 6, "modules": ["query"], "init_lora_weights": start}
    with pytest.raises(UserError, match=f"init_lora_weights = {start} changes the base, so the clients' own"):
        workspace({"federate.method": method, "llm.adapter.args": [args]})
    assert workspace({"federate.method": "fedlora", "llm.adapter.args": [args]})


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("client, key", [(90, "clients"), (110, "clients"), (110, "ranks")])
@pytest.mark.more
def test_a_client_with_a_rank_of_its_own_counts_whatever_its_number(settings, client, key, rank):
    keys = {"federate.method": "flexlora", "federate.client_num": 120, "federate.sample_client_num": 5}
    keys |= {"data.splitter": "iid", "data.splitter_args": []}
    own = {"clients": [{"clients": client, "rank": rank}], "ranks": [2] * (client - 1) + [rank]}
    workspace = Workspace(load_config(settings, {**keys, f"lowrank.{key}": own[key]}))
    assert workspace.parameters["trainable"] == max(map(workspace._trained_by, range(1, 121)))
    assert Evaluator(workspace).differ(workspace.initial_state)
