"""Data of a federated run: a data set by name, from files or from objects, encoded and partitioned among clients."""

from __future__ import annotations

from fs_lowrank.data.build import build_data
from fs_lowrank.data.examples import Examples
from fs_lowrank.data.federated import FederatedData, row_lines
from fs_lowrank.data.images import ImageExamples
from fs_lowrank.data.partition import PARTITIONERS, Rows, register_partitioner
from fs_lowrank.data.sources import load_raw, user_files
from fs_lowrank.data.tables import CAUSAL_LM, CLASSIFICATION, IMAGE_CLASSIFICATION, RawData

__all__ = [
    "CAUSAL_LM",
    "CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "PARTITIONERS",
    "Examples",
    "FederatedData",
    "ImageExamples",
    "RawData",
    "Rows",
    "build_data",
    "load_raw",
    "user_files",
    "register_partitioner",
    "row_lines",
]
