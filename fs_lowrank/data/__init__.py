"""Data of a federated run: a data set by name, from files or from objects, encoded and partitioned among clients."""

from __future__ import annotations

from fs_lowrank.data.build import LONGEST, build_data
from fs_lowrank.data.examples import Examples
from fs_lowrank.data.federated import FederatedData, rows_said
from fs_lowrank.data.fetch import FETCHABLE, fetch, home, resolve
from fs_lowrank.data.images import ImageExamples
from fs_lowrank.data.partition import PARTITIONERS, Partition, Rows, partition, register_partitioner
from fs_lowrank.data.sources import load_raw, own_files
from fs_lowrank.data.tables import CAUSAL_LM, CLASSIFICATION, IMAGE_CLASSIFICATION, RawData

__all__ = [
    "CAUSAL_LM",
    "CLASSIFICATION",
    "FETCHABLE",
    "IMAGE_CLASSIFICATION",
    "LONGEST",
    "PARTITIONERS",
    "Examples",
    "FederatedData",
    "ImageExamples",
    "Partition",
    "RawData",
    "Rows",
    "build_data",
    "fetch",
    "home",
    "load_raw",
    "own_files",
    "partition",
    "register_partitioner",
    "resolve",
    "rows_said",
]
