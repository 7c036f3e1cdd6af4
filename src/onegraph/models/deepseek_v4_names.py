"""Names of the tensors of DeepSeek-V4 checkpoints, as DeepSeek and as transformers write them."""

import re
from collections.abc import Callable

# transformers' names (as modules, and as save_pretrained writes them) -> DeepSeek's, applied from the first to the last
_RENAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.(attn|compressor)\.kv_proj\.", r".\1.wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.attn\.([qo])_([ab])_proj\.", r".attn.w\1_\2."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.e_score_correction_bias$", ".bias"),
        (r"experts(\.\d+)?\.gate_proj\.", r"experts\1.w1."),
        (r"experts(\.\d+)?\.down_proj\.", r"experts\1.w2."),
        (r"experts(\.\d+)?\.up_proj\.", r"experts\1.w3."),
    )
)


def official(name: str) -> str:
    """DeepSeek's name of a tensor that either of the two wrote."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def beyond(layers: int) -> Callable[[str], bool]:
    """Whether a tensor, by its official name, is of a draft stage, which lies behind so many layers of the decoder."""
    pattern = re.compile(rf"^(mtp\.|layers\.{layers}\.)")
    return lambda name: pattern.match(name) is not None
