"""A search around a configuration of the user's own, in a folder that has an ``hpo.py`` of the user's."""

from steps import does, file, is_killed, refuses

from fs_lowrank.testing import small

small.save_encoder("encoder")
small.make_reviews(400).to_csv("reviews.csv", index=False)
file("hpo.py", "raise SystemExit('the user\\'s hpo ran')\n")
does("fs-lowrank init reviews.csv --model encoder --clients 3")
file("space.yaml", "train.optimizer.lr: {grid: [0.05, 1.0e-9]}\n")

few = "federate.total_round_num 6 data.splitter iid data.splitter_args '[{}]'"
tune = "fs-lowrank hpo tune --cfg reviews.yaml --space"
refuses(f"{tune} spac.yaml", "did you mean 'space.yaml'")
refuses(f"{tune} space.yaml --samplr grid", "--sampler")
search = f"{tune} space.yaml --workers 1 --confirm 1 {few}"
is_killed(search, after="#0 (lr")
ended = does(search, "next: fs-lowrank hpo best")
does(ended.partition("next: ")[2].splitlines()[0], "best.yaml: run it with: fs-lowrank run --cfg best.yaml")
