"""Labelled texts in a CSV file: a killed run goes on where it was, and ends with the adapter of one that was not."""

from steps import does, exists, is_killed, refuses, same

from fs_lowrank.testing import small

small.save_encoder("encoder")
small.make_reviews(240).rename(columns={"text": "review", "label": "stars"}).to_csv("reviews.csv", index=False)

refuses("fs-lowrank init reviews.csv --model encodr", "did you mean 'encoder'")
does(
    "fs-lowrank init reviews.csv --model encoder --clients 4", "guessed: the text is review", "written to reviews.yaml"
)
refuses("fs-lowrank run --cfg review.yaml", "did you mean 'reviews.yaml'")
refuses("fs-lowrank run --cfg reviews.yaml federate.total_rounds_num 3", "did you mean 'federate.total_round_num'")
few = "federate.total_round_num 6 train.optimizer.lr 0.02 lowrank.pictures False"
is_killed(f"fs-lowrank run --cfg reviews.yaml {few}", after="round 3/6")
does(f"fs-lowrank run --cfg reviews.yaml {few} --resume", "round 6/6", "test acc", "runs/reviews/adapter")
does(f"fs-lowrank run --cfg reviews.yaml {few} outdir runs/again", "round 1/6", "round 6/6")
same("runs/reviews/adapter/adapter_model.safetensors", "runs/again/adapter/adapter_model.safetensors")
exists("runs/reviews/adapter/README.md", "runs/reviews/summary.json", "runs/reviews/data.json")
