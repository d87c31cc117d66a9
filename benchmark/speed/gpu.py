"""On a GPU: local steps of 50 clients that train together, as ``train.cohort: auto`` has it, relative to the same steps
one by one, and the part of the GPU's peak at which the matrix products of the model are computed.

Dropout draws other masks on a GPU where clients train together, so the two are not compared by their results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from fs_lowrank import Config, UserError, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.adapters import layer_stack

from . import cohort, row
from .frozen_cache import MINILM, SMOLLM2
from .whole import peak_rate, products

CLIENTS = 50
#: name -> configuration, the least ratio
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "MiniLM, layers 4 and 5 of 6, float32": (MINILM, 5),
    "SmolLM2-135M, layers 20 to 29 of 30, bfloat16": ({**SMOLLM2, "lowrank": {"dtype": "bfloat16"}}, 2),
}


def measure(config: Config, repeats: int, clients: int = CLIENTS) -> dict[str, Any]:
    """``cohort.measure`` with cohorts of the size that the run of ``config`` has, and ``utilisation``: the operations
    of a plain training step's matrix products on the real tokens, but for those of the layers whose states are kept,
    ÷ what a large product reaches in the same time.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(config.replace(outdir=folder))
    size, device, depth = engine.site.cohort, engine.site.device, engine.site.prefix.depth if engine.site.prefix else 0
    dtype = next(p.dtype for p in engine.model.parameters())
    model = engine.model.to("meta").train()
    del engine
    found = cohort.measure(config, repeats, clients, size)
    stack = layer_stack(model)
    assert stack is not None
    operations = _operations(model, list(stack[1])[:depth], found["tokens"])
    operations /= clients * config.train.local_update_steps
    peak = peak_rate(8192 if device.type == "cuda" else 1024, device=device, dtype=dtype)
    taken = found["seconds_a_clients_step"]
    reached = {name: operations / seconds / peak for name, seconds in taken.items()}
    return {**found, "size": size, "operations": operations, "peak": peak, "utilisation": reached}


def _operations(model: torch.nn.Module, frozen: list[torch.nn.Module], tokens: Mapping[int, int]) -> float:
    """Of the products of a step with ``tokens[n]`` samples of n tokens."""
    return float(sum(count * products(model, frozen, length)[0] for length, count in tokens.items()))


def run() -> dict:
    """Measure the cases.

    Raises:
        UserError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("gpu: torch finds no GPU here; the other parts need none")
    rows, results = [], {}
    for name, (keys, least) in CASES.items():
        config = load_config(keys).replace(
            **{
                "use_gpu": True,
                "federate.client_num": CLIENTS,
                "dataloader.batch_size": 16,
                "train.local_update_steps": 3,
                "train.cohort": "auto",
            }
        )
        found = results[name] = measure(config, 5)
        step = {k: f"{1e3 * v:.4g} ms" for k, v in found["seconds_a_clients_step"].items()}
        case = f"{name}, {CLIENTS} clients, batches of 16, {torch.cuda.get_device_name()}"
        rows += [
            row(
                case,
                f"a client's local step, one by one ÷ {found['size']} clients together",
                found["speed_up"],
                f"{step['alone']} ÷ {step['together']}",
                least=least,
            ),
            row(
                case,
                "matrix products of the real tokens a second, together ÷ the GPU's peak",
                found["utilisation"]["together"],
                f"peak {found['peak'] / 1e12:.3g} TFLOP/s by a product of 8192 × 8192; one by one "
                f"{found['utilisation']['alone']:.2g}",
            ),
        ]
    return {"device": torch.cuda.get_device_name(), "rows": rows, "results": results}
