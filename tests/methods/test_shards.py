"""Servers that each have some of the adapted layers compute together, to the bit, what one server does."""

import pytest
import torch

from fs_lowrank.methods import Update
from fs_lowrank.settings import AdapterSpec
from tests.methods.conftest import ALPHA, LAYERS, Toy

pytestmark = pytest.mark.more

SIZES = (3, 10, 7)
#: the methods of the table in docs/guides/scale.md, and those that it says cost the same
METHODS = ("fedlora", "flexlora", "flora", "rolora", "fedloru", "mfedloru", "pfedloru", "pmfedloru")


def server(name, layers):
    more = {"tau": 2} if "loru" in name else {}
    return Toy.method(name, adapter=AdapterSpec(r=2, lora_alpha=ALPHA, target_modules=layers), **more)


@pytest.mark.parametrize("name", METHODS)
def test_servers_that_share_the_layers_compute_what_one_does(name):
    whole, parts = server(name, LAYERS), {layer: server(name, (layer,)) for layer in LAYERS}
    state = whole.initial_state(whole.adapt(Toy.net()))
    names = {layer: {*part.initial_state(part.adapt(Toy.net()))} for layer, part in parts.items()}
    states = {layer: {n: state[n] for n in names[layer]} for layer in LAYERS}
    draw = torch.Generator().manual_seed(0)
    for round in range(1, 5):
        sent = {k: whole.expected(state, round, k) for k in range(1, len(SIZES) + 1)}
        drawn = {k: {n: torch.randn(t.shape, generator=draw) for n, t in of.items()} for k, of in sent.items()}
        seen = set()
        for layer, part in parts.items():
            own = [
                Update(k, size, {n: drawn[k][n] for n in part.expected(states[layer], round, k)})
                for k, size in enumerate(SIZES, 1)
            ]
            states[layer], message = part.aggregate(own, states[layer], round)
            seen |= {(n, t.numpy().tobytes()) for n, t in message.items()}
        updates = [Update(k, size, drawn[k]) for k, size in enumerate(SIZES, 1)]
        state, message = whole.aggregate(updates, state, round)
        assert message and seen == {(n, t.numpy().tobytes()) for n, t in message.items()}
