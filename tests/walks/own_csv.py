"""Labelled texts in a CSV file: from the file to predictions and a page."""

from steps import does, exists, refuses

from fs_lowrank.testing import small

small.save_encoder("encoder")
small.make_reviews(240).rename(columns={"text": "review", "label": "stars"}).to_csv("reviews.csv", index=False)
small.make_reviews(40, seed=7).rename(columns={"text": "review", "label": "stars"}).to_csv("new.csv", index=False)

refuses("fs-lowrank run", "run needs --cfg FILE")
refuses("fs-lowrank init review.csv", "did you mean 'reviews.csv'")
refuses("fs-lowrank init reviews.csv --text reviw --model encoder", "did you mean 'review'")
refuses("fs-lowrank init reviews.csv", "fs-lowrank fetch minilm")
does(
    "fs-lowrank init reviews.csv --model encoder --clients 4", "guessed: the text is review", "written to reviews.yaml"
)
refuses("fs-lowrank run --cfg reviews.yaml federate.total_rounds_num 3", "did you mean 'federate.total_round_num'")
few = "federate.total_round_num 6 train.optimizer.lr 0.02"
does(f"fs-lowrank run --cfg reviews.yaml {few}", "round   6/6", "test acc", "runs/reviews/adapter")
refuses(f"fs-lowrank run --cfg reviews.yaml {few}", "holds a run already")
exists("runs/reviews/adapter/README.md", "runs/reviews/summary.json")
does("fs-lowrank evaluate runs/reviews --data new.csv", "40 rows", "± is one standard error")
does("fs-lowrank predict runs/reviews --data new.csv", "40 predictions in the column prediction")
does(
    "fs-lowrank compare --cfg reviews.yaml --methods rolora,local,pooled federate.total_round_num 2 outdir runs/cmp",
    "pooled",
)
does("fs-lowrank report runs/reviews runs/cmp", "report.html")
does("fs-lowrank keys splitter_args", "data.splitter_args")
exists("new.predicted.csv", "runs/reviews/report.html")
