"""The same hour as a notebook, as it ships: a kernel executes it."""

import sys

import nbformat
from nbclient import NotebookClient
from steps import does, exists

does("fs-lowrank examples first_hour", "first_hour.ipynb")
notebook = nbformat.read("first_hour.ipynb", as_version=4)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
printed = "".join(output.get("text", "") for output in outputs)
pictures = sum("image/png" in output.get("data", {}) for output in outputs)
wanted = ("written to reviews.yaml", "60 predictions in the column prediction", "report.html")
if "error:" in printed or pictures != 2 or any(words not in printed for words in wanted):
    print(printed)
    sys.exit(f"walk: {pictures} pictures, expected 2; an error, or not printed: {wanted}")
exists("runs/reviews/report.html", "runs/comparison/curves.png", "new.predicted.csv")
