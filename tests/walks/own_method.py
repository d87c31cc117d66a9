"""A method in a package of the user's own: the tutorial's example, installed, checked and run."""

import re
from pathlib import Path

from steps import does, file, refuses

from fs_lowrank.testing import small

tutorial = (Path(__file__).parents[2] / "docs" / "tutorials" / "new_method.md").read_text(encoding="utf-8")


def example(name: str) -> str:
    """The tutorial's file of this name."""
    (block,) = re.findall(rf"```python\n(# {re.escape(name)}(?: .*)?\n.*?)```", tutorial, re.DOTALL)
    return block


for name in ("my_methods.py", "test_my_methods.py", "setup.py"):
    file(name, example(name))
broken = example("my_methods.py").replace("median_lora", "no_lora").replace("MedianLoRA", "NoLoRA")
file("broken.py", broken.replace("return {**state, **message}, message", "return state, {}"))
test = example("test_my_methods.py").replace("my_methods", "broken").replace("MedianLoRA", "NoLoRA")
file("test_broken.py", test.replace("(NoLoRA)", '(NoLoRA, only="learns")'))
small.save_encoder("encoder")
small.make_reviews(120).to_csv("reviews.csv", index=False)
does("fs-lowrank init reviews.csv --model encoder --clients 3 --method fedlora")

few = "federate.total_round_num 2 train.local_update_steps 2 federate.method"
refuses(f"fs-lowrank run --cfg reviews.yaml {few} median_lora", "median_lora")  # not installed yet
does("python -m pip install --quiet .")
does("fs-lowrank methods median_lora", "coordinate-wise median")
does("python -m pytest -q -p no:cacheprovider test_my_methods.py", "1 passed")
does("python -m pytest -q -p no:cacheprovider test_broken.py", "no_lora fails", "1 failed", code=1)
refuses(f"fs-lowrank run --cfg reviews.yaml {few} median_lara", "did you mean 'median_lora'")
refuses(f"fs-lowrank run --cfg reviews.yaml {few} median_lora lowrank.trim 3", "lowrank.trim")
refuses(
    f"fs-lowrank run --cfg reviews.yaml {few} median_lora fedopt.use True",
    "median_lora's server step is not a weighted mean",
)
does(
    f"fs-lowrank compare --cfg reviews.yaml --methods median_lora,fedlora {few} fedlora outdir runs/both",
    "round 2/2",
    "median_lora",
)
