"""A method in a package of the user's own: the README's example, checked and run."""

import shutil
from importlib.metadata import metadata
from pathlib import Path

from steps import does, file, refuses

from fs_lowrank.testing import small

readme = metadata("fs-lowrank").get_payload()
for name in ("my_methods.py", "test_my_methods.py"):
    file(name, readme.split(f"```python\n# {name}\n")[1].split("```")[0])
does("python -m pytest -q -p no:cacheprovider test_my_methods.py", "1 passed")
site = Path(shutil.which("fs-lowrank")).parents[1]
file(str(site / "my_methods-1.0.dist-info" / "METADATA"), "Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
points = "[fs_lowrank.methods]\nmedian_lora = my_methods:MedianLoRA\n"
file(str(site / "my_methods-1.0.dist-info" / "entry_points.txt"), points)
shutil.copy("my_methods.py", site)
does("fs-lowrank methods median_lora", "coordinate-wise median")
small.save_encoder("encoder")
small.make_reviews(120).to_csv("reviews.csv", index=False)
does(
    "fs-lowrank run --data reviews.csv --model encoder --clients 3 --method median_lora federate.total_round_num 2",
    "round   2/2",
)
refuses(
    "fs-lowrank run --cfg reviews.yaml outdir b fedopt.use True", "median_lora's server step is not a weighted mean"
)
shutil.rmtree(site / "my_methods-1.0.dist-info")
(site / "my_methods.py").unlink()
