"""benchmarks/tiny_moe.py: trains, quantizes and measures on a CPU, in the form that the results have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_tiny_mode_measures(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    words = [sys.executable, "benchmarks/tiny_moe.py", "--tiny", "--device", "cpu", "--bits", "2", "4"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "rows.jsonl")], capture_output=True, text=True, timeout=300, cwd=root
    )
    assert done.returncode == 0, done.stderr[-2000:]
    two, four = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert two["id"].startswith("tiny-moe-2b")
    assert two["linear_bits"] < 2.6 < 4 < four["linear_bits"] < 4.6
    assert 0 < four["kl"] < two["kl"]
    for row in (two, four):
        assert len(row["least_tokens"]) == len(row["most_tokens"]) == 2  # layers
        assert all(0 <= low <= high <= 1024 for low, high in zip(row["least_tokens"], row["most_tokens"], strict=True))
        assert {"commit", "command", "device", "date", "seed", "top1", "perplexity"} <= set(row)
