"""Labelled texts in a CSV file: from the file to predictions and a page; a killed run goes on where it was."""

from steps import does, exists, file, is_killed, refuses, same

from fs_lowrank.testing import small

small.save_encoder("encoder")
reviews = small.make_reviews(240).rename(columns={"text": "review", "label": "stars"})
reviews.to_csv("reviews.csv", index=False)
reviews.assign(stars=reviews["stars"] + 0.5).to_csv("halves.csv", index=False)
new = small.make_reviews(40, seed=7).rename(columns={"text": "review", "label": "stars"})
new.to_csv("new.csv", index=False)
new.assign(stars=9).to_csv("nines.csv", index=False)
new.rename(columns={"review": "said"}).to_csv("renamed.csv", index=False)

# from the file to a configuration
refuses("fs-lowrank run", "run needs --cfg FILE")
refuses("fs-lowrank init review.csv", "did you mean 'reviews.csv'")
refuses("fs-lowrank init reviews.csv --text reviw --model encoder", "did you mean 'review'")
refuses("fs-lowrank init halves.csv --model encoder", "numbers with fractions, such as")
refuses("fs-lowrank init reviews.csv", "fs-lowrank fetch minilm")
does(
    "fs-lowrank init reviews.csv --model encoder --clients 4", "guessed: the text is review", "written to reviews.yaml"
)

# the run
refuses("fs-lowrank run --cfg review.yaml", "did you mean 'reviews.yaml'")
refuses("fs-lowrank run --cfg reviews.yaml federate.total_rounds_num 3", "did you mean 'federate.total_round_num'")
refuses("fs-lowrank run --cfg reviews.yaml eval.freqency 5", "did you mean 'eval.freq'")
refuses("fs-lowrank run --cfg reviews.yaml train.optimizer.lr fast", "train.optimizer.lr")
few = "federate.total_round_num 6 train.optimizer.lr 0.02"
is_killed(f"fs-lowrank run --cfg reviews.yaml {few}", after="round 3/6")
refuses(f"fs-lowrank run --cfg reviews.yaml {few}", "holds a run already", "--resume", "--overwrite")
does(f"fs-lowrank run --cfg reviews.yaml {few} --resume", "round 6/6", "test acc", "runs/reviews/adapter")
does(f"fs-lowrank run --cfg reviews.yaml {few} outdir runs/again", "round 1/6", "round 6/6")
same("runs/reviews/adapter/adapter_model.safetensors", "runs/again/adapter/adapter_model.safetensors")
exists("runs/reviews/adapter/README.md", "runs/reviews/summary.json", "runs/reviews/data.json")
does(
    "fs-lowrank run --cfg reviews.yaml federate.total_round_num 1 train.optimizer.lr 1e-9 hpo.metric x outdir low",
    "hpo.metric = 'x' has no effect",
    "nothing was learned",
)

# after the run
refuses("fs-lowrank evaluate runs/review --data new.csv", "runs/review")
refuses("fs-lowrank evaluate runs/reviews --data newer.csv", "did you mean 'new.csv'")
refuses("fs-lowrank evaluate runs/reviews --data renamed.csv", "review", "said")
refuses("fs-lowrank evaluate runs/reviews --data nines.csv", "9")
does("fs-lowrank evaluate runs/reviews --data renamed.csv --text said", "40 rows", "± is one standard error")
does("fs-lowrank predict runs/reviews --data new.csv", "40 predictions in the column prediction")
refuses("fs-lowrank predict runs/reviews --data new.csv", "new.predicted.csv exists")
refuses("fs-lowrank compare --cfg reviews.yaml --methods rolora,fed_avg", "did you mean 'fedavg'")
does(
    "fs-lowrank compare --cfg reviews.yaml --methods rolora,local,pooled federate.total_round_num 2 outdir runs/cmp",
    "pooled",
)
file("notes/readme.txt", "not a run\n")
refuses("fs-lowrank report notes", "notes")
does("fs-lowrank report runs/reviews runs/cmp", "report.html")
does("fs-lowrank keys splitter_args", "data.splitter_args")
exists("new.predicted.csv", "runs/reviews/report.html", "runs/cmp/curves.png")
