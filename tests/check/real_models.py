"""Decode steps of models as transformers writes them, tiny and with random weights, as targets of `onegraph check`."""

import torch
import transformers


def _tokens(i):
    return torch.tensor([[i + 1]], device="cuda"), torch.tensor([i], device="cuda")


def _decode(model, cache):
    @torch.no_grad()
    def step(token, position):
        return model(token, past_key_values=cache, position_ids=position[None], use_cache=True).logits

    return step, _tokens


def _llama(make_cache):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return _decode(transformers.LlamaForCausalLM(config).to("cuda").eval(), make_cache(config))


def llama_static():
    return _llama(lambda config: transformers.StaticCache(config=config, max_cache_len=32))


def llama_dynamic():
    return _llama(lambda config: transformers.DynamicCache(config=config))


def deepseek_v4():
    from transformers.models import deepseek_v4 as modeling

    torch.manual_seed(0)
    config = modeling.DeepseekV4Config(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    model = modeling.DeepseekV4ForCausalLM(config).to("cuda").eval()
    return _decode(model, transformers.DynamicCache(config=config))
