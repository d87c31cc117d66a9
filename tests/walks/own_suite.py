"""A benchmark suite of the user's own, in a folder that has a folder ``benchmark`` of the user's."""

from pathlib import Path

import yaml
from steps import does, exists, file, is_killed, refuses

from fs_lowrank.testing import small

small.save_encoder("encoder")
small.make_reviews(160).to_csv("reviews.csv", index=False)
file("benchmark/__init__.py", "raise SystemExit('the user\\'s benchmark ran')\n")
does("fs-lowrank init reviews.csv --model encoder --clients 3")
config = yaml.safe_load(Path("reviews.yaml").read_text())
config["federate"]["total_round_num"] = config["train"]["local_update_steps"] = 2
suite = {"config": config, "methods": ["fedlora", "rolora"], "metrics": ["test_acc"]}
file("mine.yaml", yaml.safe_dump(suite))

refuses("fs-lowrank benchmark", "list", "run", "report")
refuses("fs-lowrank benchmark run mime.yaml", "mime.yaml", "did you mean 'mine.yaml'")
is_killed("fs-lowrank benchmark run mine.yaml", after="fedlora")
hint = does("fs-lowrank benchmark run mine.yaml", "0 failed, 0 remain", "next: fs-lowrank benchmark report mine.yaml")
does(hint.partition("next: ")[2].splitlines()[0], "report.html")  # what the last line says works as it stands
exists("results/report.html", "results/report.md")
