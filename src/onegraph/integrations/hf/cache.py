"""TurboQuant as a transformers cache: `past_key_values=TurboQuantCache(...)`, compileable like StaticCache.

Every layer is one buffer of codes at its final size, and a ring of the latest tokens, exact. With
`attn_implementation="turboquant"` a decode step is two launches around them: one turns the query and stores the token,
one attends to codes and ring. With any other implementation a layer's keys and values are decoded before it attends,
which costs time, not memory.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant import DRAFTS, EXACT, TurboQuantConfig, parse_kv
from onegraph.formats.turboquant_layout import TurboQuantLayout, unpack_pages
from onegraph.nn.turboquant import CodedLayer
from onegraph.ops.turboquant import dequantize

ATTENTION = "turboquant"
PAGE = 64  # tokens; rows have pages of their own, one after the other, behind page 0, which is nobody's


def _stays(tensor: Any) -> None:
    """CUDA graphs skip what is written in place where they are not told that it keeps its address. Unguarded: with
    another cache the graph is captured again, and nothing is compiled again."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor, guard=False)


class _Layer:
    """What attention does decides what `update` gives it: `from_codes`, the layer itself and the new keys and values,
    which attention stores; else all keys and values."""

    model_config: Any

    @property
    def from_codes(self) -> bool:
        return self.model_config._attn_implementation == ATTENTION


class TurboQuantLayer(_Layer, CacheLayerMixin):
    """The codes of one layer."""

    is_compileable = True
    is_sliding = False  # a window is applied when attending; all tokens are kept

    cumulative_length: Any  # int64 [], on the device
    coded: CodedLayer  # of rings 1 + B, of which ring 0 is nobody's
    block_table: Tensor
    positions: Tensor
    ones: Tensor
    slots: Tensor | None

    def __init__(
        self, config: TurboQuantConfig, bits: tuple[int, int], max_cache_len: int, model_config: Any, guards: bool
    ) -> None:
        super().__init__()
        self.config, self.bits, self.model_config, self.guards = config, bits, model_config, guards
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.int64)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        config, dtype = self.config, key_states.dtype
        self.dtype, self.device = dtype, key_states.device
        self.batch_size, self.kv_heads = key_states.shape[:2]
        dim = key_states.shape[-1]
        if value_states.shape[-1] != dim:
            raise ValueError(
                f"keys have a head size of {dim}, values of {value_states.shape[-1]}; TurboQuant needs one"
            )
        layout = TurboQuantLayout(dim, *self.bits, config.keys, config.values, PAGE)
        _ = layout.sections  # kept by the layout from now on; Dynamo cannot trace the lock of a cached property
        rows, pages = self.batch_size, -(-self.max_cache_len // PAGE)

        def placed(tensor: Tensor) -> Tensor:
            tensor = tensor.to(self.device)
            _stays(tensor)
            return tensor

        rotation = formats.rotation(dim, config.rotation, config.seed).to(dtype)
        prod = "prod" in (config.keys, config.values)
        ring = 1 + rows, config.ring, 2, self.kv_heads, dim
        self.coded = CodedLayer(
            config,
            layout,
            rotation=placed(rotation),
            turn=placed(rotation.T.contiguous()),
            projection=placed(formats.projection(dim, config.seed).to(dtype)) if prod else None,
            k_codebook=placed(formats.codebook(dim, layout.k_code_bits)),
            v_codebook=placed(formats.codebook(dim, layout.v_code_bits)),
            codes=placed(torch.zeros(layout.cache_shape(1 + rows * pages, self.kv_heads), dtype=torch.uint8)),
            ring=placed(torch.zeros(ring, dtype=dtype)) if config.ring else None,
        )
        self.block_table = placed(torch.arange(1, 1 + rows * pages, dtype=torch.int32).view(rows, pages))
        self.positions = placed(torch.zeros(rows, dtype=torch.int32))
        self.ones = placed(torch.ones(rows, dtype=torch.int32))
        self.slots = placed(torch.arange(1, 1 + rows, dtype=torch.int32)) if config.ring else None
        self.cumulative_length = placed(self.cumulative_length)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Stores key_states and value_states [B, kv_heads, Q, D], after RoPE, behind what is there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, length, _ = key_states.shape
        if batch != self.batch_size:
            raise ValueError(
                f"{batch} rows do not fit a TurboQuantCache that began with {self.batch_size}: make a new one"
            )
        if length > self.max_cache_len:
            raise ValueError(f"{length} tokens do not fit a TurboQuantCache of max_cache_len {self.max_cache_len}")
        self.positions.copy_(self.cumulative_length.expand(batch))
        self.cumulative_length.add_(length)
        if self.guards:
            torch._assert_async(
                self.cumulative_length <= self.max_cache_len, "TurboQuantCache is full: raise max_cache_len"
            )
        if self.from_codes:
            return self, (key_states, value_states)
        self.store(key_states, key_states, value_states)
        return self.whole(key_states, value_states)

    def store(self, query: Tensor, key_states: Tensor, value_states: Tensor) -> Tensor:
        """Stores the tokens that `update` was told of; their queries [B, H, Q, D] come back rotated, [B, Q, H, D]."""
        batch, heads, length, _ = query.shape
        qkv = torch.cat((query, key_states, value_states), dim=1).transpose(1, 2).reshape(batch, length, -1)
        counts = self.ones if length == 1 else self.positions.new_full((batch,), length)
        tokens = qkv, None, None, 0.0, None, None, self.positions, counts, self.block_table
        return self.coded.write(tokens, self.slots, heads, False)[0]

    def whole(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all places [B, kv_heads, max_cache_len, D] for attention that knows no codes: decoded, but
        exact where the last token sees the ring and, in a prefill with one, for the tokens of the call."""
        length, start = self.cumulative_length, self.cumulative_length - key_states.shape[2]
        coded = self.coded
        window, dim = self.config.window, coded.layout.head_dim
        place = torch.arange(self.max_cache_len, device=self.device)
        recent = ((place >= length - window) | (length <= window + DRAFTS)) & (place < start)
        new = ((place >= start) & (place < length)).view(-1, 1)
        found = []
        for i, (part, table) in enumerate(
            zip(unpack_pages(coded.layout, coded.codes[1:]), (coded.k_codebook, coded.v_codebook), strict=True)
        ):
            flat = dequantize(part, table, coded.projection).view(self.batch_size, -1, self.kv_heads, PAGE, dim)
            flat = flat.transpose(1, 2).reshape(self.batch_size, self.kv_heads, -1, dim)[:, :, : self.max_cache_len]
            if coded.ring is not None:
                kept = coded.ring[1:, :, i].index_select(1, place % self.config.ring).transpose(1, 2).float()
                flat = torch.where(recent.view(-1, 1), kept, flat)
            flat = (flat @ coded.rotation.float() * dim**-0.5).to(self.dtype)
            if coded.ring is not None:
                exact = (key_states, value_states)[i].index_select(2, (place - start).clamp(0, key_states.shape[2] - 1))
                flat = torch.where(new, exact, flat)
            found.append(flat)
        return found[0], found[1]

    def attend(self, query: Tensor, key_states: Tensor, value_states: Tensor, scaling: float, window: int) -> Tensor:
        """Stores the tokens that `update` was told of, and attends for their queries [B, H, Q, D] -> [B, Q, H, D], from
        codes and ring; `window` > 0: only the latest so many keys are seen."""
        turned = self.store(query, key_states, value_states)
        counts = self.ones if query.shape[2] == 1 else self.positions.new_full((self.batch_size,), query.shape[2])
        rows = self.block_table, self.positions, counts
        return self.coded.attend(turned, *rows, self.coded.ring, self.slots, scaling, window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Of offset 0, in a form that `attention_mask` can tell apart.
        return self.max_cache_len, False if self.from_codes else 0

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        if self.is_initialized:
            self.coded.codes.zero_()
            self.positions.zero_()
            if self.coded.ring is not None:
                self.coded.ring.zero_()
        self.cumulative_length.zero_()

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "a TurboQuantCache stays where it is and keeps its rows and tokens: no offloading, no beam search, no "
            "assisted generation"
        )

    offload = prefetch = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse

    @property
    def nbytes(self) -> int:
        """Bytes of codes, norms and exact tokens; 0 before the first call."""
        if not self.is_initialized:
            return 0
        return self.coded.codes.nbytes + (0 if self.coded.ring is None else self.coded.ring.nbytes)


class ExactLayer(_Layer, StaticLayer):
    """A layer that the setting leaves in the model's dtype, among layers of codes."""

    def __init__(self, max_cache_len: int, model_config: Any) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.model_config = model_config

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        for tensor in (self.keys, self.values, self.cumulative_length):
            _stays(tensor)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return (self, (keys, values)) if self.from_codes else (keys, values)

    def whole(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, False if self.from_codes else 0

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes


class TurboQuantCache(Cache):
    """A quantized KV cache of fixed size for `past_key_values`; `generate` compiles and captures the step with it.

    Args:
        config: the model's config (`model.config`).
        max_cache_len: tokens that a row can hold, prompt included.
        kv: `turboquant:4`, `turboquant:k3v4` and options as `formats.turboquant.parse_kv` reads them; layers that they
            leave at 16 bits are transformers' StaticLayer.

    One cache is one conversation: what follows on its tokens may be given to `generate` with it, a new prompt after
    `reset()`. Raises ValueError for a setting that does not exist or that is no mode of this cache (`shadow`).
    """

    def __init__(self, config: Any, max_cache_len: int, kv: str | TurboQuantConfig = "turboquant:4") -> None:
        config = config.get_text_config(decoder=True)
        setting = parse_kv(kv) if isinstance(kv, str) else kv
        if not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len is {max_cache_len!r}; it must be a number of tokens, 1 or more")
        if not isinstance(setting, TurboQuantConfig) or setting.mode == "shadow":
            raise ValueError(f"kv is {str(kv)!r}; TurboQuantCache takes turboquant:RATE in the modes hybrid and full")
        self.setting = setting
        count = config.num_hidden_layers
        layers: list[Any] = []
        for i in range(count):
            bits = setting.rate(i, count)
            if bits == (EXACT, EXACT):
                layers.append(ExactLayer(max_cache_len, config))
            else:
                guards = not any(isinstance(layer, TurboQuantLayer) for layer in layers)  # all have the same length
                layers.append(TurboQuantLayer(setting, bits, max_cache_len, config, guards))
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes that all layers hold."""
        layers: list[Any] = self.layers
        return sum(layer.nbytes for layer in layers)


def attention_forward(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, *, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """`attn_implementation="turboquant"`: a decode step from the codes of a TurboQuantLayer. SDPA for every other
    cache, for a prefill beside exact tokens, and for batches with padding, whose mask codes do not take."""
    if isinstance(key, TurboQuantLayer | ExactLayer):
        layer, sliding, length = key, kwargs.get("sliding_window") or 0, query.shape[2]
        key, value = value
        if isinstance(layer, TurboQuantLayer):
            if attention_mask is None and (length == 1 or not layer.config.window):
                return layer.attend(query, key, value, scaling, sliding), None
            layer.store(query, key, value)
        key, value = layer.whole(key, value)
        if attention_mask is None:
            place = torch.arange(layer.max_cache_len, device=query.device)
            token = layer.cumulative_length - length + torch.arange(length, device=query.device).unsqueeze(1)
            attention_mask = place <= token
            if sliding:
                attention_mask = attention_mask & (place > token - sliding)
            attention_mask = attention_mask[None, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def attention_mask(
    *args: Any, kv_offset: int = 0, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """No mask for a TurboQuantCache where nothing is padded: its attention knows positions and windows. (`generate`
    makes masks outside the compiled step, so the look at the padding is no read inside it.)"""
    if kv_offset is False and (
        attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all()))
    ):
        return None
    return sdpa_mask(*args, kv_offset=int(kv_offset), attention_mask=attention_mask, **kwargs)


def register() -> None:
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, attention_mask)
