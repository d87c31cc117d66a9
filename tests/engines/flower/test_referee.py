"""The referee calls a strategy of Flower as Flower does."""

import pytest

from fs_lowrank.testing import check_server_step, judge_server_step

pytestmark = pytest.mark.flower


def test_fedavg_of_flower_averages_each_matrix_by_itself():
    from flwr.serverapp.strategy import FedAvg

    strategy = FedAvg()
    found = {(f.case, f.layer): f for f in judge_server_step(strategy)}
    assert found["equal ranks", "head"].exact
    assert found["equal ranks", "up"].cause.startswith("A and B averaged each by itself")
    assert "it raised" in found["unequal ranks", "all"].cause
    with pytest.raises(AssertionError, match="equal ranks, down: off by"):
        check_server_step(strategy)


def test_an_exact_strategy_passes():
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg
    from torch import cat

    class Stacked(FedAvg):
        """The pairs side by side, with a client's share and its scale of alpha 6 in B; the server's scale is 1."""

        def aggregate_train(self, server_round, replies):
            contents = [reply.content for reply in replies]
            states = [next(iter(c.array_records.values())).to_torch_state_dict() for c in contents]
            sizes = [next(iter(c.metric_records.values()))[self.weighted_by_key] for c in contents]
            answer = {}
            for name in states[0]:
                if "lora_A" in name:
                    answer[name] = cat([state[name] for state in states])
                elif "lora_B" in name:
                    shares = [n / sum(sizes) * 6 / s[name].shape[1] for n, s in zip(sizes, states)]
                    answer[name] = cat([p * state[name] for p, state in zip(shares, states)], 1)
                else:
                    answer[name] = sum(n / sum(sizes) * s[name] for n, s in zip(sizes, states))
            return ArrayRecord(answer), None

    check_server_step(Stacked(), scale=1.0)
