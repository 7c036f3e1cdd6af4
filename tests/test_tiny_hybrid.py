"""benchmarks/tiny_hybrid.py: trains, quantizes and measures on a CPU, in the form that the results have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_tiny_mode_measures(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    words = [sys.executable, "benchmarks/tiny_hybrid.py", "--tiny", "--device", "cpu", "--bits", "2", "4"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "rows.jsonl")], capture_output=True, text=True, timeout=600, cwd=root
    )
    assert done.returncode == 0, done.stderr[-2000:]
    two, four, *single = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert 0 < four["kl"] < two["kl"]
    assert len(two["drift"]) == 8
    assert len({row["projection"] for row in single}) == len(single) == 10
    assert all(0 < row["kl"] < two["kl"] for row in single)
