"""For methods that average a pair and add further products to the base: what all of them need."""

from dataclasses import replace

from ..models.adapters import base_weight_name
from ..models.merging import check_products
from ..models.names import named_tensors, pairs
from .base import Method
from .terms import ONE_SCALE


class Merging(Method):
    """A method whose clients send A and B at one rank, and whose copies add products to their base weights."""

    shared = ("lora_A", "lora_B", "head")

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), without=ONE_SCALE)

    def adapt(self, model):
        model = super().adapt(model)
        check_products(model, self.name, merges=True)
        return model

    def changed_base(self, model):
        return [base_weight_name(a) for _, a in pairs(named_tensors(model, ("adapter",)))]
