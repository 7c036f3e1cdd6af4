"""The entry point: what it costs in every process that vLLM starts, and that a second call changes nothing."""

import importlib.util
import json
import subprocess
import sys

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

PROGRAM = """
import importlib.metadata, json, sys
found = [point for point in importlib.metadata.entry_points(group="vllm.general_plugins") if point.name == "onegraph"]
register = found[0].load()
register()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.models.registry import ModelRegistry
once = list(QUANTIZATION_METHODS), dict(ModelRegistry.models)
register()
print(json.dumps({
    "found": len(found),
    "modules": sorted(sys.modules),
    "known": "onegraph" in QUANTIZATION_METHODS,
    "twice": (list(QUANTIZATION_METHODS), dict(ModelRegistry.models)) != once,
}))
"""


def test_cheap_and_idempotent() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["found"] == 1
    assert told["known"]
    assert not told["twice"]
    ours = [name for name in told["modules"] if name.startswith("onegraph.")]
    light = ("onegraph.integrations", "onegraph.formats")
    assert [name for name in ours if not name.startswith(light)] == [], "no op and no kernel is imported"
    assert "vllm.model_executor.models.llama" not in told["modules"], "no model is imported"
    assert "onegraph.integrations.vllm.linear" not in ours
