"""The fields of a config.json: each checked when it is read, and what nobody read must not matter.

A key that the parser of a family reads is handled by it. Any other may still change what a model computes: a feature of
a relative, or of code that comes with the checkpoint. Such a model is refused, since a feature that was silently
ignored would give text that is only a little wrong. What never matters stands in `INERT`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# Bookkeeping, training and defaults of generation: of no model's logits. auto_map names code beside the weights (Phi-3
# has it), which is never run: a model_type that is read here is the one that transformers knows by that name.
INERT = frozenset((
    "architectures", "model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "license",
    "unsloth_version", "unsloth_fixed", "is_llama_config", "transformers.js_config", "model_max_length", "auto_map",
    "tokenizer_class", "tokenizer_model_max_length", "prefix", "use_cache", "cache_implementation", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits", "torchscript", "use_bfloat16",
    "use_return_dict", "chunk_size_feed_forward", "pretraining_tp", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "_experts_implementation", "tie_encoder_decoder", "tf_legacy_loss",
    "finetuning_task", "initializer_range", "embedding_initializer_range", "attention_dropout", "hidden_dropout",
    "residual_dropout", "resid_pdrop", "embd_pdrop",
    "embedding_dropout", "router_aux_loss_coef", "router_jitter_noise", "input_jitter_noise", "router_z_loss_coef",
    "neftune_noise_alpha", "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "pruned_heads", "classifier_dropout", "do_sample", "temperature", "top_k", "top_p",
    "typical_p", "min_length", "max_length", "max_new_tokens", "num_beams", "num_return_sequences",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "diversity_penalty", "num_beam_groups",
    "early_stopping", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "encoder_no_repeat_ngram_size",
    "remove_invalid_values", "exponential_decay_length_penalty", "return_dict_in_generate", "output_scores",
))  # fmt: skip

# Features of relatives: key -> values that mean "not used", besides null, false and nothing in it.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_interleaved": (),
    "mrope_section": (),
    "use_mrope": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "n_group": (1,),
    "topk_group": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (),
    "use_qk_norm": (),
    "qk_layernorm": (),
    "attention_bias": (),
    "mlp_bias": (),
    "qkv_bias": (),
    "parallel_attn": (),
    "use_parallel_residual": (),
    "use_bidirectional_attention": (),
    "use_sliding_window": (),
    "sliding_window": (0,),
    "sliding_window_pattern": (1,),
    "layer_types": (),
    "rope_local_base_freq": (),
    "num_nextn_predict_layers": (0,),
    "num_mtp_layers": (0,),
    "first_k_dense_replace": (0,),
    "is_encoder_decoder": (),
    "add_cross_attention": (),
    "vision_config": (),
    "text_config": (),
}


class Fields:
    """The config over the defaults of its family, each value checked for its type and range."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults
        self._read: set[str] = set()

    def get(self, key: str, default: object = None) -> Any:
        self._read.add(key)
        return self.config[key] if key in self.config else self.defaults.get(key, default)

    def integer(self, key: str, *, low: int = 1, high: int) -> int:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            got = "missing" if value is None else f"{short(value)}"
            raise ValueError(f"{key} is {got}; it must be an integer from {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {short(value)}; it must be true or false")
        return value

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        return number(self.get(key, default), key, low=low, high=high)

    def read(self, *keys: str) -> None:
        """These are somebody else's to read, or have no meaning beside the values of others."""
        self._read.update(keys)

    def check_fixed(self, fixed: Mapping[str, tuple[object, ...]]) -> None:
        """Raises ValueError for a key with another value than the ones given here; a list may have several of them."""
        for key, allowed in fixed.items():
            value = self.get(key)
            each = value if isinstance(value, list) else [value]
            if value is not None and not all(_same(one, other) or one is other for one in each for other in allowed):
                raise ValueError(f"{key} is {short(value)}; supported: {', '.join(map(str, allowed))}")

    def check_unread(self, family: str) -> None:
        """Raises ValueError for the first key that nobody read, unless it cannot matter or says "not used"."""
        for key, value in self.config.items():
            if key in self._read or key in INERT or unused(value, NEUTRAL.get(key, ())):
                continue
            if key in NEUTRAL:
                raise ValueError(f"{key} is {short(value)}; this feature is not supported for {family}")
            raise ValueError(
                f"{key} is {short(value)}; {family} is not known to have this key, which may change what the model "
                "computes: take it out of config.json if it does not"
            )


def unused(value: object, neutral: Iterable[object]) -> bool:
    """Whether the value of a key says "not used"; `neutral`: more such values than null, false and nothing in it."""
    return value is None or value is False or value in ([], {}, "") or any(_same(value, other) for other in neutral)


def _same(value: object, other: object) -> bool:
    return type(value) is not bool and value == other


def number(value: object, name: str, *, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
    return float(value)


def end_of_text(value: object, vocab: int) -> tuple[int, ...]:
    """eos_token_id: one token, or a list of them."""
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(f"eos_token_id is {short(value)}; it must be one or a list of tokens below {vocab}")
    return tuple(tokens)


def short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
