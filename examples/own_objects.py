"""A run with a model, a tokenizer and data that a program holds, and clients of unequal speed.

The data are a list of data frames, one for each client. Here they are made up, and the model is a small one of random
weights; put your own in their place. Run it with: python own_objects.py
"""

import tempfile

import pandas as pd
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import fs_lowrank
from fs_lowrank.testing import small

# A model and its tokenizer: AutoModelForSequenceClassification.from_pretrained("your/model"), for example.
folder = small.save_encoder(tempfile.mkdtemp())
model = AutoModelForSequenceClassification.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)

# One data set for each client: DataFrames, datasets.Dataset, or torch datasets of {"text": …, "label": …}.
clients = [small.make_reviews(rows, seed=rows) for rows in (60, 90, 150)]
test = small.make_reviews(80, seed=1)

config = fs_lowrank.load_config(
    {
        "outdir": "runs/own_objects",
        "federate": {"method": "rolora", "client_num": len(clients), "total_round_num": 3},
        "data": {"splits": [0.9, 0.1, 0.0]},
        "llm": {"tok_len": "auto", "adapter": {"args": [{"r": 4, "alpha": 8, "modules": ["query", "value"]}]}},
        "dataloader": {"batch_size": 8},
        "train": {"local_update_steps": 4, "optimizer": {"type": "AdamW", "lr": 5e-3}},
        "eval": {"metrics": ["acc", "f1", "matthews"]},
        # Client 1 is slow: fewer steps, of smaller batches.
        "lowrank": {"clients": [{"clients": 1, "local_update_steps": 2, "batch_size": 4}]},
    }
)
result = fs_lowrank.run(
    config, data={"train": clients, "test": test}, model=model, tokenizer=tokenizer, resume="overwrite"
)
print(pd.Series(result.final).round(3).to_string())
print(f"the adapter is in {result.saved['adapter']}")
