"""Pure functions on tensors: no model, no file, no method is known here."""
from .flat import FlatTensors, nbytes
from .lowrank import low_rank_sum_svd, stack_pairs, top_components
from .mean import weighted_mean

__all__ = ["FlatTensors", "nbytes", "low_rank_sum_svd", "stack_pairs", "top_components", "weighted_mean"]
