"""The referee of server steps: right ones pass, and each known mistake is named."""

from functools import partial

import numpy as np
import pytest
import torch

from fs_lowrank import UserError, cli
from fs_lowrank.testing import check_server_step, judge_server_step

LAYERS = [f"base_model.model.{layer}" for layer in ("up", "down")]
HEAD = "base_model.model.classifier.weight"


def weights(sizes):
    return np.array(sizes) / sum(sizes)


def head(states, sizes):
    return {HEAD: sum(p * state[HEAD] for p, state in zip(weights(sizes), states))}


def stacked(states, sizes, ranks, alphas, factors=None):
    """Stacks the pairs, with ``p_k s_k`` in B, for a server whose scale is 1."""
    factors = factors or [p * a / r for p, a, r in zip(weights(sizes), alphas, ranks)]
    answer = head(states, sizes)
    for name in LAYERS:
        ups = [f * s[f"{name}.lora_B.weight"] for f, s in zip(factors, states)]
        answer[f"{name}.lora_B.weight"] = torch.cat(ups, 1)
        answer[f"{name}.lora_A.weight"] = torch.cat([s[f"{name}.lora_A.weight"] for s in states])
    return answer


def dense(states, sizes, ranks, alphas):
    """A change of the weight in place of a pair, as NumPy arrays."""
    answer = stacked(states, sizes, ranks, alphas)
    changes = {f"{n}.weight": (answer[f"{n}.lora_B.weight"] @ answer[f"{n}.lora_A.weight"]).numpy() for n in LAYERS}
    return {**changes, HEAD: answer[HEAD].numpy()}


def split(states, sizes, ranks, alphas, rank=3, half=1.0):
    """The singular value decomposition cut to ``rank``, for a server whose scale is alpha / rank."""
    answer = stacked(states, sizes, ranks, alphas)
    for name in LAYERS:
        product = answer[f"{name}.lora_B.weight"] @ answer[f"{name}.lora_A.weight"] / (alphas[0] / rank)
        u, s, vh = torch.linalg.svd(product, full_matrices=False)
        answer[f"{name}.lora_B.weight"], answer[f"{name}.lora_A.weight"] = (u * s**half)[:, :rank], vh[:rank]
    return answer


def means(states, sizes, ranks, alphas):
    """A and B averaged each by itself, padded with zeros."""
    answer = head(states, sizes)
    for name in LAYERS:
        for part, axis in (("lora_A", 0), ("lora_B", 1)):
            tensors = [s[f"{name}.{part}.weight"] for s in states]
            whole = torch.zeros([max(ranks) if i == axis else n for i, n in enumerate(tensors[0].shape)])
            for p, tensor in zip(weights(sizes), tensors):
                whole[: tensor.shape[0], : tensor.shape[1]] += p * tensor
            answer[f"{name}.{part}.weight"] = whole
    return answer


def of(findings, case="unequal ranks"):
    return {f.layer: (f.exact, f.cause) for f in findings if f.case == case}


def test_right_server_steps_pass():
    assert all(f.error < 1e-5 for f in check_server_step(stacked, scale=1.0))
    assert len(check_server_step(dense)) == 6
    check_server_step(split)  # the best approximation of its rank
    exact, cause = of(judge_server_step(stacked))["up"]
    assert not exact and "counts twice; scale=1" in cause


@pytest.mark.parametrize(
    "factors, cause",
    [
        (lambda p, s: list(p), "the scale alpha / r is left out"),
        (lambda p, s: [x / len(p) for x in s], "a plain mean instead of the weighted one"),
        (
            lambda p, s: [1 / len(p)] * len(p),
            "a plain mean instead of the weighted one; the scale alpha / r is left out",
        ),
        (lambda p, s: s, "a sum instead of a mean"),
        (lambda p, s: [x * min(s) for x in p], "one scale, of the largest rank, for all"),
    ],
)
def test_wrong_weights_and_scales_are_named(factors, cause):
    def wrong(states, sizes, ranks, alphas):
        scales = [a / r for a, r in zip(alphas, ranks)]
        return stacked(states, sizes, ranks, alphas, factors(weights(sizes), scales))

    found = of(judge_server_step(wrong, scale=1.0))
    assert found["up"] == found["down"] == (False, cause) and found["head"][0]


def test_the_product_of_means_and_half_a_root_are_named():
    for layer, (exact, cause) in of(judge_server_step(means)).items():
        assert exact == (layer == "head")
        assert exact or cause.startswith("padding with zeros, and A and B averaged each by itself")
    assert "the product of means" in of(judge_server_step(means), "equal ranks")["up"][1]
    root = judge_server_step(lambda *given: split(*given, half=0.5))
    assert of(root)["up"] == (False, "√Σ in one half only")


def test_heads_shapes_and_errors():
    def no_head(*given):
        return {n: t for n, t in stacked(*given).items() if n != HEAD}

    def first_head(states, *given):
        return {**stacked(states, *given), HEAD: states[0][HEAD]}

    def transposed(*given):
        return {n: t.T for n, t in stacked(*given).items()}

    def equal_only(states, sizes, ranks, alphas):
        return {n: sum(p * s[n] for p, s in zip(weights(sizes), states)) for n in states[0]}

    assert of(judge_server_step(no_head, 1.0))["head"] == (False, "the head is missing")
    assert of(judge_server_step(first_head, 1.0))["head"] == (False, "the head of client 1, not averaged")
    assert "transposed" in of(judge_server_step(transposed, 1.0))["up"][1]
    assert "it raised RuntimeError" in of(judge_server_step(equal_only))["all"][1]

    def without_components(*given):
        answer = stacked(*given)
        return {n: t[:, :0] if "lora_B" in n else t[:0] if "lora_A" in n else t for n, t in answer.items()}

    empty = judge_server_step(without_components)
    assert of(empty)["up"] == (False, "the server's pair has no component")
    with pytest.raises(UserError, match="returned dict, expected a state dict of arrays by name: could not convert"):
        judge_server_step(lambda *given: dict.fromkeys(stacked(*given), "text"))
    with pytest.raises(UserError, match="returned list, expected a state dict"):
        judge_server_step(lambda *given: [])
    with pytest.raises(AssertionError, match="unequal ranks, up: off by .*the scale alpha / r is left out"):
        check_server_step(lambda *given: stacked(*given, factors=list(weights(given[1]))), scale=1.0)


def test_mistakes_of_published_code_are_named():
    def cause(step, layer="up"):
        return {case: of(judge_server_step(step), case)[layer][1] for case in ("equal ranks", "unequal ranks")}

    def rooted(power, states, sizes, ranks, alphas):
        answer, scale = split(states, sizes, ranks, alphas, rank=max(ranks), half=0.5), alphas[0] / max(ranks)
        return {n: t * scale**power if "lora_B" in n else t for n, t in answer.items()}

    for power in (-0.5, 0.5):  # the scale is taken out of B, or not at all
        assert {*cause(partial(rooted, power)).values()} == {"√Σ in one half only"}
    unscaled = {*cause(lambda *given: stacked(*given, factors=list(weights(given[1])))).values()}
    assert unscaled == {"the scale alpha / r is left out"}
    assert {*cause(lambda states, *_: states[0]).values()} == {"the pair of client 1, not averaged"}
    assert {*cause(lambda *given: {**dense(*given), HEAD: dense(*given)[HEAD].T}, "head").values()} == {"transposed"}

    def transposed(*given):
        """The pair of the means, and the residual the wrong way round."""
        return means(*given) | {n: t.T for n, t in dense(*given).items() if n != HEAD}

    assert all(said.endswith("expected (12, 7): transposed") for said in cause(transposed).values())
    for wrong in (lambda states, sizes: {}, dict):
        with pytest.raises(UserError, match="came, expected a function step"):
            judge_server_step(wrong)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "server.py"
    file.write_text("def step(states, sizes, ranks, alphas):\n    return states[0]\n")
    assert cli.main(["check", f"{file}:step"]) == 1
    assert "the head of client 1, not averaged" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["check", f"{file}:other"]) == 2 and "it has: step" in capsys.readouterr().err
    assert cli.main(["check", "nowhere.py:step"]) == 2 and "there is no file" in capsys.readouterr().err
    (tmp_path / "beside_it.py").write_text("def step(states, sizes, ranks, alphas):\n    return states[0]\n")
    file.write_text("from beside_it import step\n")
    assert cli.main(["check", f"{file}:step"]) == 1
    file.write_text(f"import sys\n\nstep = sys.modules[{__name__!r}].stacked\n")
    assert cli.main(["check", f"{file}:step"]) == 1
    assert "--scale 1" in capsys.readouterr().out
    file.write_text("import nowhere_at_all\n")
    assert cli.main(["check", f"{file}:step"]) == 2
    assert f"{file} raises ModuleNotFoundError: No module named 'nowhere_at_all'" in capsys.readouterr().err


@pytest.mark.nvflare
def test_servers_of_nvflare_average_each_matrix_by_itself():
    from nvflare.app_common.aggregators import InTimeAccumulateWeightedAggregator
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.app_opt.pt.fedavg import PTFedAvg

    aggregator = InTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS")
    for server in (aggregator, FedAvg, PTFedAvg):
        found = of(judge_server_step(server), "equal ranks")
        assert found["head"] == (True, "") and found["up"][1].startswith("A and B averaged each by itself")


@pytest.mark.appfl
def test_servers_of_appfl_ignore_sizes_unless_they_are_told():
    from appfl.algorithm.aggregator import FedAvgAggregator
    from omegaconf import DictConfig

    plain = of(judge_server_step(FedAvgAggregator()), "equal ranks")
    assert plain["head"] == (False, "a plain mean instead of the weighted one")
    weighted = FedAvgAggregator(aggregator_configs=DictConfig({"client_weights_mode": "sample_size"}))
    found = of(judge_server_step(weighted), "equal ranks")
    assert found["head"] == (True, "") and found["up"][1].startswith("A and B averaged each by itself")


def test_what_is_no_server_is_refused():
    with pytest.raises(UserError, match="int came, expected a function step"):
        judge_server_step(3)
