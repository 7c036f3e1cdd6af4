"""How many latest keys each layer sees: the ways in which families say so. (fields, layers) -> one number a layer, 0
for all keys. Each raises ValueError where the config says what its family in transformers does not do."""

from onegraph.models.fields import Fields, short

MAX_POSITIONS = 2**24
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def none(fields: Fields, layers: int) -> tuple[int, ...]:
    """No layer has a window."""
    if window := fields.get("sliding_window"):
        raise ValueError(f"sliding_window is {short(window)}; {_family(fields)} with a sliding window is not supported")
    return _all_alike(fields, layers, 0)


def beside_mixers(fields: Fields, layers: int) -> tuple[int, ...]:
    """No layer has a window; layer_types says which attend at all (`models/mixers.py`)."""
    return (0,) * layers


def uniform(fields: Fields, layers: int) -> tuple[int, ...]:
    """All layers have the window that sliding_window says, if any."""
    given = fields.get("sliding_window")
    return _all_alike(fields, layers, 0 if given is None else fields.integer("sliding_window", high=MAX_POSITIONS))


def uniform_if_used(fields: Fields, layers: int) -> tuple[int, ...]:
    """As `uniform` where use_sliding_window is set (Qwen3-MoE)."""
    if fields.flag("use_sliding_window"):
        fields.read("max_window_layers")
        return uniform(fields, layers)
    fields.read("sliding_window", "max_window_layers")
    return _all_alike(fields, layers, 0)


def off(fields: Fields, layers: int) -> tuple[int, ...]:
    """No layer has a window; whatever else is said of one says nothing (Qwen2-MoE)."""
    if fields.flag("use_sliding_window"):
        raise ValueError(f"use_sliding_window is true; {_family(fields)} with a sliding window is not supported")
    fields.read("sliding_window", "max_window_layers")
    return _all_alike(fields, layers, 0)


def upper(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers from max_window_layers on, or as layer_types says, where use_sliding_window is set (Qwen2, Qwen3)."""
    window = _used(fields, layers)
    kinds = _kinds(fields, layers)
    given = fields.get("max_window_layers")
    first = 28 if given is None or not window else fields.integer("max_window_layers", low=0, high=4096)
    return _of(kinds or [SLIDING if i >= first else FULL for i in range(layers)], window)


def unrotated(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers without RoPE, or as layer_types says, where use_sliding_window is set (SmolLM3)."""
    window = _used(fields, layers)
    fields.read("max_window_layers")
    return _of(_kinds(fields, layers) or [FULL if on else SLIDING for on in rotated(fields, layers)], window)


def every_other(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers 0, 2, 4 and so on, or as layer_types says (gpt-oss, Gemma 2)."""
    kinds = _kinds(fields, layers) or [FULL if i % 2 else SLIDING for i in range(layers)]
    window, again = _needed(fields, kinds), fields.get("sliding_window_size")
    # Gemma-2-9B is published with the window under both names; transformers reads the first alone
    if again not in (None, fields.get("sliding_window")):
        raise ValueError(
            f"sliding_window_size is {short(again)} and sliding_window {short(fields.get('sliding_window'))}; where "
            "both are given they must be the same"
        )
    return _of(kinds, window)


def five_of_six(fields: Fields, layers: int) -> tuple[int, ...]:
    """All but each sixth layer, or as sliding_window_pattern or layer_types says (Gemma 3)."""
    key = "sliding_window_pattern"
    every = 6 if fields.get(key) is None else fields.integer(key, high=4096)
    fields.read("_sliding_window_pattern")  # transformers writes it beside layer_types, which decides
    return _but_each(fields, layers, every)


def gemma4(fields: Fields, layers: int) -> tuple[int, ...]:
    """All but each sixth layer, or as layer_types says, and never the last (Gemma 4)."""
    kinds = _kinds(fields, layers) or [SLIDING if (i + 1) % 6 else FULL for i in range(layers)]
    kinds = [*kinds[:-1], FULL]
    return _of(kinds, _needed(fields, kinds))


def three_of_four(fields: Fields, layers: int) -> tuple[int, ...]:
    """All but each fourth layer, or as layer_types says (OLMo 3)."""
    return _but_each(fields, layers, 4)


def exaone(fields: Fields, layers: int) -> tuple[int, ...]:
    """All but each fourth layer, or as sliding_window_pattern or layer_types says; none without a window (EXAONE 4)."""
    key, kinds = "sliding_window_pattern", _kinds(fields, layers)
    if fields.get("sliding_window") is None:
        fields.read(key)
        return _all_alike(fields, layers, 0)
    window = fields.integer("sliding_window", high=MAX_POSITIONS)
    if kinds is not None:
        fields.read(key)  # a number, or a word such as LLLG
        return _of(kinds, window)
    every = fields.integer(key, high=4096)
    return _of([SLIDING if (i + 1) % every else FULL for i in range(layers)], window)


def in_windows(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Layers with a window rotate; without sliding_window all do (EXAONE 4)."""
    found, windowed = exaone(fields, layers), fields.get("sliding_window") is not None
    return tuple(bool(window) or not windowed for window in found)


def above(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers from max_window_layers on, or as layer_types says, where sliding_window is given (dots.llm1)."""
    window, first = fields.get("sliding_window"), fields.integer("max_window_layers", low=0, high=4096)
    kinds = _kinds(fields, layers) or [FULL if window is None or i < first else SLIDING for i in range(layers)]
    return _of(kinds, _needed(fields, kinds))


def indexed(fields: Fields, layers: int) -> tuple[int, ...]:
    """No layer has a window; layer_types names what chooses tokens instead (DeepSeek-V3.2, GLM-5)."""
    if window := fields.get("sliding_window"):
        raise ValueError(f"sliding_window is {short(window)}; {_family(fields)} with a sliding window is not supported")
    return (0,) * layers


def rotated(fields: Fields, layers: int) -> tuple[bool, ...]:
    """SmolLM3: `no_rope_layers` holds 1 where a layer rotates and 0 where it does not."""
    given = fields.get("no_rope_layers")
    interval = fields.get("no_rope_layer_interval")
    if given is None:
        every = 4 if interval is None else fields.integer("no_rope_layer_interval", high=4096)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if (
        not isinstance(given, list)
        or len(given) < layers
        or not all(type(x) in (int, bool) and x in (0, 1) for x in given)
    ):
        raise ValueError(f"no_rope_layers is {short(given)}; it must list a 0 or 1 for each of {layers} layers")
    return tuple(bool(x) for x in given[:layers])


def chosen(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Granite 4: all layers rotate or none, by position_embedding_type."""
    kind = fields.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ValueError(f"position_embedding_type is {short(kind)}; supported: rope, nope")
    return (kind == "rope",) * layers


def _but_each(fields: Fields, layers: int, every: int) -> tuple[int, ...]:
    kinds = _kinds(fields, layers) or [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return _of(kinds, _needed(fields, kinds))


def _kinds(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise ValueError(f"layer_types is {short(kinds)}; it must list {layers} of {FULL}, {SLIDING}")
    return kinds


def _all_alike(fields: Fields, layers: int, window: int) -> tuple[int, ...]:
    kinds, wrong = _kinds(fields, layers), FULL if window else SLIDING
    if kinds is not None and wrong in kinds:
        raise ValueError(
            f"layer_types with {wrong} is not supported for {_family(fields)} and sliding_window {window or None}"
        )
    return (window,) * layers


def _used(fields: Fields, layers: int) -> int:
    """sliding_window where use_sliding_window is set, else 0."""
    given, kinds = fields.get("sliding_window"), _kinds(fields, layers)
    if fields.flag("use_sliding_window") and given is not None:
        return fields.integer("sliding_window", high=MAX_POSITIONS)
    if kinds is not None and SLIDING in kinds:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window is off or sliding_window missing")
    return 0


def _needed(fields: Fields, kinds: list[str]) -> int:
    fields.read("sliding_window")
    return fields.integer("sliding_window", high=MAX_POSITIONS) if SLIDING in kinds else 0


def _of(kinds: list[str], window: int) -> tuple[int, ...]:
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _family(fields: Fields) -> str:
    return str(fields.config.get("model_type"))
