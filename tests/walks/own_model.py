"""A model in a folder of the user's, with the mistakes that its names lead to."""

import shutil
from pathlib import Path

from steps import does, exists, file, refuses

from fs_lowrank.testing import small

small.save_encoder("my_model")
reviews = small.make_reviews(120)
reviews.assign(label=reviews["label"].map({0: "bad", 1: "good"})).to_csv("reviews.csv", index=False)
for broken, lost in (("no_weights", "model.safetensors"), ("no_tokenizer", "tokenizer.json")):
    shutil.copytree("my_model", broken, ignore=shutil.ignore_patterns(lost))
# a model that PEFT has no default modules for
file(
    "make.py",
    "from transformers import NystromformerConfig, NystromformerModel\n"
    "config = NystromformerConfig(vocab_size=35, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,\n"
    "    intermediate_size=48, max_position_embeddings=64)\n"
    "NystromformerModel(config).save_pretrained('rare')\n",
)
does("python make.py && cp my_model/tokenizer* rare")

refuses("fs-lowrank init reviews.csv --model ./my_modle", "there is no folder './my_modle'")
refuses("fs-lowrank init reviews.csv --model my_modle", "did you mean 'my_model'")
refuses("fs-lowrank init reviews.csv --model no_tokenizer", "tokenizer", "no_tokenizer")
does("fs-lowrank init reviews.csv --model my_model --clients 3", "modules: [query, value]", "in the last 1 of 3 layers")
modules = "llm.adapter.args.0.modules"
refuses(f"fs-lowrank run --cfg reviews.yaml {modules} '[qery]'", "qery", "query")
refuses("fs-lowrank run --cfg reviews.yaml llm.adapter.args.0.layers '[7]'", "7")
refuses("fs-lowrank run --cfg reviews.yaml model.type no_weights@transformers", "no_weights", "weights")
few = "federate.total_round_num 2 train.local_update_steps 2"
does(f"fs-lowrank run --cfg reviews.yaml {few} {modules} '[query, key]'", "round 2/2")
does(f"fs-lowrank run --cfg reviews.yaml {few} {modules} all-linear outdir runs/all", "round 2/2")
rare = f"fs-lowrank run --cfg reviews.yaml {few} model.type rare@transformers outdir runs/rare"
refuses(f"{rare} llm.adapter.args '[{{r: 2}}]'", "query", "value", "all-linear")
does(f"{rare} llm.adapter.args '[{{r: 2, modules: [query]}}]'", "round 2/2")
exists("runs/rare/adapter/adapter_config.json")
card = Path("runs/reviews/adapter/README.md").read_text().split("```python\n")[1].split("```")[0]
file("load.py", card + "print(model.config.id2label)\n")
does("python -W ignore load.py", "{0: 'bad', 1: 'good'}")  # the model card's own code
