"""Live mode on a GPU, against what torch alone measured there. Few cases share a process."""

import json
import subprocess
import sys
from pathlib import Path

import corpus_tools
import pytest
from accuracy import score

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


def test_live_finds_every_hazard_that_one_gpu_can_show(tmp_path):
    command = [sys.executable, str(HERE / "accuracy.py"), "--ways", "live", "--workers", "15"]
    subprocess.run([*command, "--save", str(tmp_path / "live.json")], check=True, timeout=500)
    seen = json.loads((tmp_path / "live.json").read_text())["live"]
    for folder in corpus_tools.FOLDERS:
        row = score("live", folder, seen, corpus_tools.truth())
        assert row["recall"] == 1.0, row["wrong"]
        assert row["precision"] >= 0.98, row["wrong"]
        assert row["right line"] >= 0.95, row["wrong"]
