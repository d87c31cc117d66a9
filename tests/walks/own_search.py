"""A search around a configuration of the user's own, in a folder that has an ``hpo.py`` of the user's."""

from steps import does, exists, file, offered, refuses

from fs_lowrank.testing import small

small.save_encoder("encoder")
small.make_reviews(160).to_csv("reviews.csv", index=False)
file("hpo.py", "raise SystemExit('the user\\'s hpo ran')\n")
does("fs-lowrank init reviews.csv --model encoder --clients 3")
file("space.yaml", "train.optimizer.lr: {grid: [0.01, 0.03]}\n")
few = "federate.total_round_num 2 train.local_update_steps 2"
refuses(f"python -m fs_lowrank hpo tune --cfg reviews.yaml --space spac.yaml {few}", "spac")
printed = does(f"fs-lowrank hpo tune --cfg reviews.yaml --space space.yaml --workers 1 --confirm 1 {few}", "next:")
printed = does(offered(printed), "best.yaml: run it with")
does(f"{offered(printed)} outdir runs/best", "round   2/2")
exists("runs/best/adapter")
