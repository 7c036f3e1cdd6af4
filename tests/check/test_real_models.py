"""transformers' models: a static cache is clean, a growing one is not, DeepSeek-V4 gives its true list; live too."""

import pytest

from onegraph.check import Report, Verdict, check_step

pytest.importorskip("transformers")
import real_models

GROWN = {
    "self.keys = torch.cat([self.keys, key_states], dim=-2)",
    "self.values = torch.cat([self.values, value_states], dim=-2)",
}
WAYS = [
    pytest.param({"simulate": True}, id="simulated"),
    pytest.param({"simulate": False, "live": True}, id="live", marks=pytest.mark.gpu),
]


def errors(report: Report) -> list[tuple[str, str]]:
    return sorted({(f.code, f.source.strip()) for f in report.errors})


@pytest.mark.parametrize("way", WAYS)
def test_llama_with_a_static_cache_is_clean(way):
    report = check_step(real_models.llama_static, **way)
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line) for f in report.findings]
    assert report.facts["replay equals eager"]


@pytest.mark.parametrize("way", WAYS)
def test_llama_with_a_dynamic_cache_grows(way):
    report = check_step(real_models.llama_dynamic, **way)
    assert {source for code, source in errors(report) if code == "CG208"} >= GROWN, errors(report)


def test_deepseek_v4_gives_its_list():
    pytest.importorskip("transformers.models.deepseek_v4")
    report = check_step(real_models.deepseek_v4)
    for code, part in [
        ("CG102", "torch.tensor(0.0, device=mask.device"),  # a constant made in the mask
        ("CG202", "torch.arange(kv_length"),  # lengths as Python numbers
        ("CG208", "torch.cat([buffered_kv, kv]"),  # the compressor's buffer
        ("CG208", "torch.cat([self.keys, key_states]"),
        ("CG201", "if compressed_len > 0"),  # most steps compress nothing
    ]:
        assert any(c == code and part in source for c, source in errors(report)), (code, part, errors(report))
    assert all("transformers" in f.path for f in report.errors)


@pytest.mark.gpu
def test_deepseek_v4_breaks_the_capture_where_simulation_says():
    pytest.importorskip("transformers.models.deepseek_v4")
    report = check_step(real_models.deepseek_v4, simulate=False, live=True)
    assert not report.facts["captured"]
    found = errors(report)
    assert any(code == "CG102" and "torch.tensor(0.0, device=mask.device" in source for code, source in found), found
