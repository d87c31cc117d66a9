"""Pure functions on tensors. They do not depend on models, files or methods."""

from .factorise import factor_matrices, factor_shapes, factorise, product_norm_squared
from .flat import FlatTensors, change_norm, change_norms, digest, nbytes, on_device, values_of
from .lowrank import low_rank_sum_svd, signed, stack_pairs, top_components
from .match import exact_transport, move_inputs, move_outputs, nonparametric_matching
from .mean import weighted_mean, wide
from .quantise import leading, pack, packed_bytes, unpack, vectors_within
from .robust import bounded_mean, krum_scores, median, norm_of_change, squared_distances, trimmed_mean
from .solve import adam, conjugate_path, least_change, summed_moments

__all__ = [
    "FlatTensors",
    "adam",
    "bounded_mean",
    "change_norm",
    "change_norms",
    "conjugate_path",
    "digest",
    "exact_transport",
    "factor_matrices",
    "factor_shapes",
    "factorise",
    "krum_scores",
    "leading",
    "least_change",
    "low_rank_sum_svd",
    "median",
    "move_inputs",
    "move_outputs",
    "nbytes",
    "nonparametric_matching",
    "norm_of_change",
    "on_device",
    "pack",
    "packed_bytes",
    "product_norm_squared",
    "squared_distances",
    "signed",
    "stack_pairs",
    "summed_moments",
    "top_components",
    "trimmed_mean",
    "unpack",
    "values_of",
    "vectors_within",
    "weighted_mean",
    "wide",
]
