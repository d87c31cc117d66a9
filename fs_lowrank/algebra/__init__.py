"""Pure functions on tensors: no model, no file, no method is known here."""
from .factorise import factor_matrices, factor_shapes, factorise, multiply, product_norm_squared
from .flat import FlatTensors, nbytes
from .lowrank import low_rank_sum_svd, stack_pairs, top_components
from .mean import weighted_mean

__all__ = ["FlatTensors", "factor_matrices", "factor_shapes", "factorise", "multiply", "nbytes",
           "product_norm_squared", "low_rank_sum_svd", "stack_pairs", "top_components", "weighted_mean"]
