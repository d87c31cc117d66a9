"""Instructions with answers, for a causal language model; those that are too long are not lost in silence."""

import json
from pathlib import Path

from steps import does, exists, file, refuses

from fs_lowrank.testing import small

small.save_causal("causal")
small.save_encoder("encoder")
small.save_instructions(".")
rows = [json.loads(line) for line in Path("instructions.jsonl").read_text().splitlines()]
long = [{**row, "input": "the film was good " * 60} if i % 4 == 0 else row for i, row in enumerate(rows)]
file("long.jsonl", "".join(json.dumps(row) + "\n" for row in long))
file("few.jsonl", "".join(json.dumps({k: row[k] for k in ("instruction", "input")}) + "\n" for row in rows[:3]))
file("broken.jsonl", Path("instructions.jsonl").read_text()[:-40])

refuses("fs-lowrank init instructions.jsonl --text input --output output --model causal", "give one of them")
refuses("fs-lowrank init instructions.jsonl --output answer --model causal", "no such column", "there are: instruction")
classes = "fs-lowrank init instructions.jsonl --model causal@transformers --out classes.yaml"
refuses(classes, "which column is the text? say --text COLUMN")
does(f"{classes} --text input --label category", "label: category")
refuses("fs-lowrank init broken.jsonl --model causal", "broken.jsonl", "line 120")
does("fs-lowrank init instructions.jsonl --model causal --clients 3", "output: output", "modules: [q_proj, v_proj]")

few = "federate.total_round_num 2 train.local_update_steps 2"
refuses(f"fs-lowrank run --cfg instructions.yaml {few} data.type long.jsonl", "data.max_dropped", "llm.tok_len")
does(
    f"fs-lowrank run --cfg instructions.yaml {few} data.type long.jsonl data.max_dropped 0.5 outdir runs/long",
    "left out",
    "round 2/2",
)
refuses("fs-lowrank run --cfg instructions.yaml llm.tok_len 4096", "128 positions")
refuses("fs-lowrank run --cfg instructions.yaml data.args.0.template alpca", "did you mean 'alpaca'")
does(f"fs-lowrank run --cfg instructions.yaml {few}", "round 2/2")
refuses("fs-lowrank evaluate runs/instructions --data instructions.jsonl --label category", "a run over instructions")
refuses("fs-lowrank evaluate runs/instructions --data few.jsonl", "no column 'output'", "--output")
does("fs-lowrank evaluate runs/instructions --data instructions.jsonl", "perplexity", "token acc")
does("fs-lowrank predict runs/instructions --data few.jsonl --tokens 3", "3 predictions")
does("fs-lowrank report runs/long runs/instructions --out both.html", "both.html")
exists("few.predicted.jsonl", "both.html", "runs/instructions/adapter/README.md")
print("  rows:", json.loads(Path("runs/long/summary.json").read_text())["rows"])
