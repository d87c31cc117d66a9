"""A model in a folder of the user's, with the mistakes that its names lead to."""

from steps import does, refuses

from fs_lowrank.testing import small

small.save_encoder("my_model")
small.make_reviews(120).to_csv("reviews.csv", index=False)

refuses("fs-lowrank init reviews.csv --model ./my_modle", "there is no folder './my_modle'")
does(
    "fs-lowrank init reviews.csv --model my_model --clients 3", "proposed: queries and values of the last 1 of 3 layers"
)
wrong = "llm.adapter.args.0.modules '[qery]'"
refuses(f"fs-lowrank run --cfg reviews.yaml {wrong}", "query")
does(
    "fs-lowrank run --cfg reviews.yaml federate.total_round_num 2 llm.adapter.args.0.modules '[query, key]'",
    "round   2/2",
)
