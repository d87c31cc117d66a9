"""On a GPU: rounds of 50 clients that train together (``train.cohort: auto``) relative to the same rounds one by one.

The models have the shapes of known ones and weights drawn at random, on whose values no time depends, so nothing is
downloaded. Needs a GPU, of 40 GB for the largest.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmark.script import script
from fs_lowrank import load_config, run
from fs_lowrank.testing import small

from . import row, row_lines, table

CLIENTS = 50
#: tokens of a sample that are not of its text: the template's words and the answer
AROUND = 64
#: of Llama's configuration: sizes of the vocabulary, the width, layers, heads, heads of keys, the inner width
SIZES = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size".split()
#: case -> sizes, first adapted layer, samples of a batch, tokens of a sample, and the minimum of the ratio
CASES: dict[str, tuple[tuple[int, ...], int, int, int, float]] = {
    "Llama 3.2 1B's shape, all 16 layers": ((128256, 2048, 16, 32, 8, 8192), 0, 4, 512, 1),
    "Llama 2 7B's shape, layers 24 to 31 of 32": ((32000, 4096, 32, 32, 32, 11008), 24, 1, 512, 1),
}


def build(sizes: tuple[int, ...], tokens: int, device: str) -> Any:
    """A Llama in bfloat16 with weights drawn from seed 0, on ``device``."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = LlamaConfig(max_position_embeddings=2 * tokens, **dict(zip(SIZES, sizes)), **special)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def prepare(case: str, folder: Path, device: str = "cuda") -> dict[str, Any]:
    """Write the model, its tokenizer and data into ``folder``; the keys of a run with them."""
    sizes, first, batch, tokens, _ = CASES[case]
    build(sizes, tokens, device).save_pretrained(folder / "model")
    small.save_tokenizer(folder / "model")
    words = " ".join(small.make_reviews(200)["text"]).split()
    text = " ".join((words * (1 + tokens // len(words)))[: tokens - AROUND])
    rows = pd.DataFrame({"instruction": "it was", "input": [text] * 400, "output": " ".join(words[:24])})
    rows.to_csv(folder / "rows.csv", index=False)
    adapter = {"r": 8, "alpha": 16, "modules": ["q_proj", "v_proj"], "layers": list(range(first, sizes[2]))}
    return {
        "federate": {"method": "rolora", "client_num": CLIENTS, "total_round_num": 4},
        "data": {"type": str(folder / "rows.csv"), "splitter": "iid", "splits": [0.9, 0.0, 0.1]},
        "model": {"type": f"{folder / 'model'}@huggingface_llm"},
        "llm": {"tok_len": tokens, "adapter": {"args": [adapter]}},
        "lowrank": {"dtype": "bfloat16", "pictures": False},
        "dataloader": {"batch_size": batch},
        "train": {"local_update_steps": 1, "optimizer": {"type": "SGD", "lr": 0.05}},
        "eval": {"freq": 4, "split": ["test"]},
        "use_gpu": True,
    }


def seconds(keys: dict[str, Any], folder: Path, **overrides: Any) -> float:
    """Median seconds of a round, without the first, which also prepares what later rounds use."""
    history = run(load_config(keys, overrides, outdir=str(folder)), progress=False).history
    return statistics.median(record["seconds"]["training"] for record in history[1:])


def study(case: str) -> dict[str, Any]:
    """The result of the command, as plain data: the cases whose names contain ``case``."""
    rows = []
    for name in [name for name in CASES if case in name]:
        sizes, _, batch, tokens, minimum = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            keys = prepare(name, Path(folder))
            times = [seconds(keys, Path(folder) / cohort, **{"train.cohort": cohort}) for cohort in ("off", "auto")]
        text = f"{name}, bfloat16, {CLIENTS} clients, {batch} × {tokens} tokens"
        note = f"{times[0]:.3g} s ÷ {times[1]:.3g} s"
        rows.append(row(text, "a round of one step, one by one ÷ together", times[0] / times[1], note, minimum=minimum))
    return {"device": torch.cuda.get_device_name(), "rows": rows}


OPTIONS = {"--case": dict(default="", help="a part of a case's name, such as 1B (default: all)")}
main = script(__spec__.name, __doc__, OPTIONS, study, lines=row_lines, readme=table, out="results/speed")


if __name__ == "__main__":
    raise SystemExit(main())
