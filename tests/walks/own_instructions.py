"""Instructions with answers, for a causal language model."""

from steps import does, exists, refuses

from fs_lowrank.testing import small

small.save_causal("causal")
small.save_instructions(".")

refuses("fs-lowrank init instructions.jsonl --text input --output output --model causal", "give one of them")
refuses("fs-lowrank init instructions.jsonl --model causal@transformers", "is for SequenceClassification")
does("fs-lowrank init instructions.jsonl --model causal --clients 3", "output: output", "modules: [q_proj, v_proj]")
does("fs-lowrank run --cfg instructions.yaml federate.total_round_num 2 train.local_update_steps 2", "round   2/2")
does("fs-lowrank evaluate runs/instructions --data instructions.jsonl", "perplexity", "token acc")
does(
    "head -3 instructions.jsonl > few.jsonl && fs-lowrank predict runs/instructions --data few.jsonl --tokens 3",
    "few.predicted.jsonl",
)
exists("few.predicted.jsonl")
