"""Live mode on a GPU, case by case against what torch alone measured there."""

import json
import subprocess
import sys
from pathlib import Path

import corpus_tools
import pytest
from accuracy import score

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
FOLDERS = corpus_tools.FOLDERS[:7]  # up to held out 6: live does not look into Triton launches
SHARDS = 8
"""Cases need 0.1 s each and a process for themselves, which the rest of a test run must not share: a few each."""


@pytest.mark.parametrize("shard", range(SHARDS))
def test_live_finds_every_hazard_that_this_machine_can_show(shard, tmp_path):
    saved = tmp_path / "live.json"
    command = [sys.executable, str(HERE / "accuracy.py"), "--ways", "live", "--shard", f"{shard}/{SHARDS}"]
    command += ["--folders", *FOLDERS]
    subprocess.run([*command, "--save", str(saved)], check=True, timeout=400, stdout=subprocess.DEVNULL)
    seen = json.loads(saved.read_text())["live"]
    assert len(seen) > 30
    assert {name: answer["error"] for name, answer in seen.items() if "error" in answer} == {}
    for folder in FOLDERS:
        row = score("live", folder, seen, corpus_tools.truth())
        assert row["bad cases"] > 0
        assert row["wrong"] == []
