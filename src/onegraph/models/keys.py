"""config.json under the keys that the parser reads, for families whose files spell some of them otherwise.

Each takes a config and returns one. A key that is given under both names must have one value.
"""

from collections.abc import Mapping
from typing import Any

from onegraph.models.fields import short
from onegraph.models.windows import FULL, LINEAR

Config = Mapping[str, Any]


def usual(config: Config) -> Config:
    """As it is."""
    return config


def olmo_hybrid(config: Config) -> Config:
    """The sizes of linear attention that follow from others where they are left out."""
    found = dict(config)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        found[key] = heads if found.get(key) is None else found[key]
    keys, size = found["linear_num_key_heads"], found.get("linear_key_head_dim")
    if size is None and type(keys) is int and type(hidden) is int and keys > 0:
        size = found["linear_key_head_dim"] = int(0.75 * hidden / keys)
    if found.get("linear_value_head_dim") is None and type(size) is int:
        found["linear_value_head_dim"] = 2 * size
    return found


def kimi_linear(config: Config) -> Config:
    """The published keys, and those of transformers 5; head_dim, which either overwrites, is left out."""
    found = _renamed(
        config,
        model_max_length="max_position_embeddings",
        moe_renormalize="norm_topk_prob",
        num_expert_group="n_group",
        num_experts_per_token="num_experts_per_tok",
        num_shared_experts="n_shared_experts",
    )
    found.pop("head_dim", None)
    inner = found.pop("linear_attn_config", None)
    if inner is None:
        return found
    if not isinstance(inner, Mapping):
        raise ValueError(f"linear_attn_config is {short(inner)}; it must be an object")
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    if unknown := sorted(set(map(str, inner)) - {*names, "full_attn_layers", "kda_layers"}):
        raise ValueError(
            f"linear_attn_config has {', '.join(unknown)}; known are {', '.join(names)} and lists of layers"
        )
    found = _merged(found, {new: inner[old] for old, new in names.items() if old in inner})
    if "full_attn_layers" in inner or "kda_layers" in inner:
        found = _merged(found, {"layer_types": _numbered(inner, found.get("num_hidden_layers"))})
    return found


def hy_v3(config: Config) -> Config:
    """The published key of the experts' size, and that of transformers."""
    return _renamed(config, expert_hidden_dim="moe_intermediate_size")


_BLOCKS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_FORMER = {"mamba": LINEAR, "attention": FULL}  # names of kinds before transformers 5


def nemotron_h(config: Config) -> Config:
    """layers_block_type from hybrid_override_pattern, whose length num_hidden_layers is; likewise of a draft layer."""
    found = dict(config)
    for prefix in ("", "mtp_"):
        key, short_key = f"{prefix}layers_block_type", f"{prefix}hybrid_override_pattern"
        kinds, pattern = found.get(key), found.pop(short_key, None)
        if isinstance(kinds, list):
            found[key] = [_FORMER.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        if pattern is not None:
            if not isinstance(pattern, str) or not pattern or set(pattern) - {*_BLOCKS}:
                raise ValueError(f"{short_key} is {short(pattern)}; it must be made of {' '.join(_BLOCKS)}")
            found = _merged(found, {key: [_BLOCKS[each] for each in pattern]})
    if found.get("layers_block_type") is None:
        found |= {"layers_block_type": [LINEAR, "moe", FULL, "mlp"], "num_hidden_layers": 4}  # the class default
    if isinstance(found["layers_block_type"], list):
        found.setdefault("num_hidden_layers", len(found["layers_block_type"]))
    return found


def granite_hybrid(config: Config) -> Config:
    """layer_types under either name that transformers has for it, and kinds by the present names."""
    found = _renamed(config, layers_block_type="layer_types")
    if isinstance(kinds := found.get("layer_types"), list):
        found["layer_types"] = [_FORMER.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    return found


def _numbered(inner: Config, layers: object) -> list[str]:
    """The kind of each layer from two lists of numbers that begin at 1."""
    full, others = (_numbers(inner.get(key)) for key in ("full_attn_layers", "kda_layers"))
    if type(layers) is not int or sorted([*full, *others]) != [*range(1, layers + 1)]:
        raise ValueError(
            f"linear_attn_config has full_attn_layers {short(inner.get('full_attn_layers'))} and kda_layers "
            f"{short(inner.get('kda_layers'))}; together they must number each of {short(layers)} layers once, from 1"
        )
    return [FULL if i in full else LINEAR for i in range(1, layers + 1)]


def _numbers(given: object) -> list[int]:
    """As it is; of anything but integers none."""
    whole = isinstance(given, list) and all(type(i) is int for i in given)
    return given if isinstance(given, list) and whole else []


def _renamed(config: Config, **names: str) -> dict[str, Any]:
    """Keys by other names: old=new."""
    found = {key: value for key, value in config.items() if key not in names}
    return _merged(found, {new: config[old] for old, new in names.items() if old in config})


def _merged(config: Config, more: Config) -> dict[str, Any]:
    for key, value in more.items():
        if config.get(key) is not None and config[key] != value:
            raise ValueError(f"{key} is {short(config[key])} and, by another name, {short(value)}; give one of them")
    return {**config, **more}
