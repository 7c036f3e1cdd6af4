"""transformers under simulation: a static cache is clean, a growing one is not, DeepSeek-V4 gives its true list."""

import pytest
import torch

from onegraph.check import Verdict, check_step

transformers = pytest.importorskip("transformers")


def tokens(i):
    return torch.tensor([[i + 1]], device="cuda"), torch.tensor([i], device="cuda")


def decode(model, cache):
    @torch.no_grad()
    def step(token, position):
        return model(token, past_key_values=cache, position_ids=position[None], use_cache=True).logits

    return step, tokens


def llama(make_cache):
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
    return decode(transformers.LlamaForCausalLM(config).to("cuda").eval(), make_cache(config))


def test_llama_with_a_static_cache_is_clean():
    report = check_step(lambda: llama(lambda c: transformers.StaticCache(config=c, max_cache_len=32)))
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line) for f in report.findings]
    assert report.facts["replay equals eager"]


def test_llama_with_a_dynamic_cache_grows():
    report = check_step(lambda: llama(lambda c: transformers.DynamicCache(config=c)))
    grown = {f.source.strip() for f in report.errors if f.code == "CG208"}
    assert grown == {
        "self.keys = torch.cat([self.keys, key_states], dim=-2)",
        "self.values = torch.cat([self.values, value_states], dim=-2)",
    }


def test_deepseek_v4_gives_its_list():
    modeling = pytest.importorskip("transformers.models.deepseek_v4")

    def factory():
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
        return decode(model, transformers.DynamicCache(config=config))

    report = check_step(factory)
    lines = {(f.code, f.source.strip()) for f in report.errors}
    for code, part in [
        ("CG102", "torch.tensor(0.0, device=mask.device"),  # a constant made in the mask
        ("CG202", "torch.arange(kv_length"),  # lengths as Python numbers
        ("CG208", "torch.cat([buffered_kv, kv]"),  # the compressor's buffer
        ("CG208", "torch.cat([self.keys, key_states]"),
        ("CG201", "if compressed_len > 0"),  # most steps compress nothing
    ]:
        assert any(c == code and part in source for c, source in lines), (code, part, sorted(lines))
    assert all("transformers" in f.path for f in report.errors)
