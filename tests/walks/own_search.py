"""A search around a configuration of the user's own, in a folder that has an ``hpo.py`` of the user's."""

from steps import does, exists, file, is_killed, refuses

from fs_lowrank.testing import small

small.save_encoder("encoder")
small.make_reviews(400).to_csv("reviews.csv", index=False)
file("hpo.py", "raise SystemExit('the user\\'s hpo ran')\n")
does("fs-lowrank init reviews.csv --model encoder --clients 3")
file("space.yaml", "train.optimizer.lr: {grid: [0.05, 1.0e-9]}\n")
file("misspelt.yaml", "train.optimiser.lr: {grid: [0.01, 0.03]}\n")
file("wrong.yaml", "train.optimizer.lr: {gird: [0.01, 0.03]}\n")

few = "federate.total_round_num 6 data.splitter iid data.splitter_args '[{}]'"
tune = "fs-lowrank hpo tune --cfg reviews.yaml --space"
refuses("fs-lowrank hpo status", "there is no study yet; start one with fs-lowrank hpo tune")
refuses(f"{tune} spac.yaml", "did you mean 'space.yaml'")
refuses(f"{tune} misspelt.yaml", "did you mean 'train.optimizer'")
refuses(f"{tune} wrong.yaml", "did you mean 'grid'")
refuses(f"{tune} space.yaml --samplr grid", "--sampler")
search = f"{tune} space.yaml --workers 1 --confirm 1 {few}"
is_killed(search, after="#0 (lr")
ended = does(search, "next: fs-lowrank hpo best")
does("fs-lowrank hpo status", "reviews-space", "2 complete")
refuses("fs-lowrank hpo best --study reviews-spac --out best.yaml", "did you mean 'reviews-space'")
does(ended.partition("next: ")[2].splitlines()[0], "best.yaml: run it with: fs-lowrank run --cfg best.yaml")
does("fs-lowrank run --cfg best.yaml outdir runs/best", "round 6/6")
does("fs-lowrank hpo plot", "history.png")
nothing = "federate.total_round_num 1 train.local_update_steps 1"
file("tiny.yaml", "train.optimizer.lr: {grid: [1.0e-9]}\n")
does(f"{tune} tiny.yaml --workers 0 --confirm 1 {nothing}", "nothing was learned")
refuses("fs-lowrank hpo best --study reviews-tiny --out none.yaml", "--unlearned")
exists("runs/best/adapter", "runs/hpo/plots/history.png")
