"""The examples of README.md and docs/guides/vllm.md run as they stand, but for the checkpoint's path."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onegraph.integrations.vllm import KV_RATES

PLACE = "out/smollm2-4bit"


def example(repo: Path, file: str) -> str:
    found = [block for block in re.findall(r"```python\n(.*?)```", (repo / file).read_text(), re.S) if "vllm" in block]
    assert len(found) == 1
    assert PLACE in found[0]
    return found[0]


def test_both_show_the_same(repo: Path) -> None:
    assert example(repo, "README.md") == example(repo, "docs/guides/vllm.md")


def test_the_rates_that_are_told_are_registered(repo: Path) -> None:
    told = re.search(r"Rates: (.*?)\. A", (repo / "docs/guides/vllm.md").read_text(), re.S)
    assert told is not None
    rates = ["turboquant" + rate.removeprefix("turboquant") for rate in re.findall(r"`(.*?)`", told.group(1))]
    assert rates == list(KV_RATES)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make vllm`")
def test_the_graph_support_that_is_told_is_what_vllm_is_told(repo: Path) -> None:
    from onegraph.integrations.vllm.turboquant import TurboQuantBuilder

    told = re.findall(r"TurboQuant says\s+`(\w+)`", (repo / "docs/guides/vllm.md").read_text())
    assert told == [TurboQuantBuilder._cudagraph_support.name]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make vllm`")
def test_example(repo: Path, tiny_chat: Path) -> None:
    program = example(repo, "README.md").replace(PLACE, str(tiny_chat))
    # One process: a program without a __main__ guard cannot be imported again by a worker that is spawned.
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"TORCH_COMPILE_DISABLE": "1"}  # half of the time; test_generate has vLLM compile
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert done.stdout.strip()
