"""transformers' models: a static cache is clean, a growing one is not, DeepSeek-V4 gives its true list; live too."""

import linecache
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onegraph.check import Report, Verdict, check_step

pytest.importorskip("transformers")
import real_models
import transformers

GROWN = {
    "self.keys = torch.cat([self.keys, key_states], dim=-2)",
    "self.values = torch.cat([self.values, value_states], dim=-2)",
}
WAYS = ["simulated", pytest.param("live", marks=pytest.mark.gpu)]


def checked(way: str, factory: str) -> Report:
    """Live in a process of its own: a model that fails on the device takes its process with it."""
    if way == "simulated":
        return check_step(getattr(real_models, factory))
    target = f"{Path(real_models.__file__)}:{factory}"
    command = [sys.executable, "-m", "onegraph.cli", "check", "--live", "--json", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return Report.from_json(done.stdout)


def errors(report: Report) -> list[tuple[str, str]]:
    """(code, line of transformers) of every error: it stands at the call in `real_models`, and names those lines."""
    assert all(f.path == str(Path(real_models.__file__)) for f in report.errors)
    packages = Path(transformers.__file__).parents[1]
    found = {(f.code, f.calls[-1].source.strip()) for f in report.errors if f.calls}
    for f in report.errors:
        for path, line in re.findall(r"(transformers/\S+?\.py):(\d+)", f.message):
            found.add((f.code, linecache.getline(str(packages / path), int(line)).strip()))
    return sorted(found)


@pytest.mark.parametrize("way", WAYS)
def test_llama_with_a_static_cache_is_clean(way):
    report = checked(way, "llama_static")
    assert report.verdict is Verdict.CAPTURABLE, [(f.code, f.path, f.line) for f in report.findings]
    assert report.facts["replay equals eager"]


@pytest.mark.parametrize("way", WAYS)
def test_llama_with_a_dynamic_cache_grows(way):
    report = checked(way, "llama_dynamic")
    assert {source for code, source in errors(report) if code == "CG208"} >= GROWN, errors(report)


def test_deepseek_v4_gives_its_list():
    pytest.importorskip("transformers.models.deepseek_v4")
    report = checked("simulated", "deepseek_v4")
    for code, part in [
        ("CG102", "torch.tensor(0.0, device=mask.device"),  # a constant made in the mask
        ("CG202", "torch.arange(kv_length"),  # lengths as Python numbers
        ("CG208", "torch.cat([buffered_kv, kv]"),  # the compressor's buffer
        ("CG208", "torch.cat([self.keys, key_states]"),
        ("CG201", "if compressed_len > 0"),  # most steps compress nothing
    ]:
        assert any(c == code and part in source for c, source in errors(report)), (code, part, errors(report))


@pytest.mark.gpu
def test_deepseek_v4_breaks_the_capture_where_simulation_says():
    pytest.importorskip("transformers.models.deepseek_v4")
    report = checked("live", "deepseek_v4")
    assert not report.facts["captured"]
    found = errors(report)
    assert any(code == "CG102" and "torch.tensor(0.0, device=mask.device" in source for code, source in found), found
