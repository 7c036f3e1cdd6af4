"""Dense weights: the format of whatever is not quantized."""

from collections.abc import Mapping
from types import MappingProxyType

from onegraph.formats.weight import Field, WeightFormat


class Dense(WeightFormat):
    """weight [n, k], in the dtype of the activations."""

    name = "dense"
    ops = "onegraph.ops.dense"
    fields: Mapping[str, Field] = MappingProxyType({"weight": Field(None, rows=1, columns=1)})


DENSE = Dense()
