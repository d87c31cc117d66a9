"""A benchmark suite of the user's own, in a folder that has a folder ``benchmark`` of the user's."""

from pathlib import Path

import yaml
from steps import does, exists, file, offered, refuses

from fs_lowrank.testing import small

small.save_encoder("encoder")
small.make_reviews(160).to_csv("reviews.csv", index=False)
file("benchmark/__init__.py", "raise SystemExit('the user\\'s benchmark ran')\n")
does("fs-lowrank init reviews.csv --model encoder --clients 3")
config = yaml.safe_load(Path("reviews.yaml").read_text())
config["federate"]["total_round_num"] = config["train"]["local_update_steps"] = 2
file("mine.yaml", yaml.safe_dump({"config": config, "methods": ["fedlora", "rolora"], "metrics": ["test_acc"]}))
refuses("python -m fs_lowrank benchmark run nix.yaml", "nix")
does("python -m fs_lowrank benchmark list mine.yaml", "mine")
does(offered(does("python -m fs_lowrank benchmark run mine.yaml", "2 done, 0 failed")), "report.html")
exists("results/report.html")
