"""The attention of each layer where layers differ in it: sizes of heads, what gives values, whose keys are read.

Meaning and defaults of the fields are transformers' own (5.17).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from onegraph.models import windows
from onegraph.models.fields import Fields, short


class Heads(NamedTuple):
    """Of one layer.

    Args:
        kv_heads, dim: heads of keys and of values, and the size of a head.
        values: a linear of its own gives values; else they are what the linear of keys gives.
        source: the layer whose keys and values it reads in place of its own; None: it has its own.
    """

    kv_heads: int
    dim: int
    values: bool = True
    source: int | None = None


def alike(fields: Fields, layers: int) -> tuple[Heads, ...] | None:
    """All layers are as num_key_value_heads and head_dim say."""
    return None


def gemma4(fields: Fields, layers: int) -> tuple[Heads, ...] | None:
    """Layers without a window have heads of global_head_dim, and keys for values where attention_k_eq_v is set, then
    num_global_key_value_heads of them; per_layer_config says the same by layer. The last num_kv_shared_layers read the
    keys and values of the last layer before them that has the same kind of window."""
    wide = tuple(not window for window in windows.gemma4(fields, layers))
    same = fields.flag("attention_k_eq_v")
    sizes = {"num_key_value_heads": fields.integer("num_key_value_heads", high=4096)}
    sizes["head_dim"] = fields.integer("head_dim", high=1024)
    own = _by_layer(fields, layers, wide, same)
    first = layers - fields.integer("num_kv_shared_layers", low=0, high=4096)
    if first < 1:
        raise ValueError(f"num_kv_shared_layers is {layers - first} of {layers} layers; some must have keys and values")
    found = []
    for i, is_wide in enumerate(wide):
        each = sizes | own.get(i, {})
        source = None
        if i >= first:
            source = next((j for j in reversed(range(first)) if wide[j] == is_wide), None)
            if source is None:
                raise ValueError(
                    f"num_kv_shared_layers is {layers - first}: no layer before layer {first} is of layer_types' kind "
                    f"of layer {i}, whose keys it could read"
                )
        found.append(Heads(each["num_key_value_heads"], each["head_dim"], not (same and is_wide), source))
    heads = fields.integer("num_attention_heads", high=4096)
    for i, layer in enumerate(found):
        if heads % layer.kv_heads or layer.dim % 2:
            raise ValueError(
                f"layer {i} has {layer.kv_heads} heads of keys of {layer.dim} for num_attention_heads {heads}, which "
                "must be a multiple of them, of an even size"
            )
        if layer.source is not None and (layer.kv_heads, layer.dim) != found[layer.source][:2]:
            raise ValueError(f"per_layer_config: layer {i} reads keys of layer {layer.source}, whose heads differ")
    return tuple(found)


_SIZES = "head_dim", "num_key_value_heads"


def _by_layer(fields: Fields, layers: int, wide: tuple[bool, ...], same: bool) -> dict[int, dict[str, int]]:
    """Sizes of layers that have others than the usual ones."""
    given = fields.get("per_layer_config")
    if given is None:
        sizes = {"head_dim": fields.integer("global_head_dim", high=1024)}
        if same and fields.get("num_global_key_value_heads") is not None:
            sizes["num_key_value_heads"] = fields.integer("num_global_key_value_heads", high=4096)
        fields.read("num_global_key_value_heads")
        return {i: sizes for i in range(layers) if wide[i]}
    fields.read("global_head_dim", "num_global_key_value_heads")
    numbers = {str(i).zfill(width): i for i in range(layers) for width in (1, len(str(layers - 1)))}  # 5, or 05
    if not isinstance(given, Mapping) or any(str(key) not in numbers for key in given):
        raise ValueError(f"per_layer_config is {short(given)}; it must have numbers of layers, 0 to {layers - 1}")
    return {numbers[str(key)]: _own_sizes(str(key), value) for key, value in given.items()}


def _own_sizes(layer: str, given: Any) -> dict[str, int]:
    known = isinstance(given, Mapping) and all(
        key in _SIZES and type(value) is int and 1 <= value <= 4096 for key, value in given.items()
    )
    if not known:
        raise ValueError(f"per_layer_config.{layer} is {short(given)}; it may have {' and '.join(_SIZES)}, integers")
    return dict(given)
