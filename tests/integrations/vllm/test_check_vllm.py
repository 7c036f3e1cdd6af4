"""`onegraph check --vllm MODEL`: on the CPU the model's source is read, the step served, and limits are told."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onegraph.cli import main

VLLM = importlib.util.find_spec("vllm") is not None


def test_one_line_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "--vllm", str(tmp_path), "steps.py:decode"]) == 2
    assert "--vllm and the target 'steps.py:decode': give one of the two" in capsys.readouterr().err
    assert main(["check", "--vllm", str(tmp_path), "--live"]) == 2
    assert "leave out --live and --all" in capsys.readouterr().err
    assert main(["check", "--vllm", str(tmp_path), "--steps", "2"]) == 2
    assert "--steps: got 2" in capsys.readouterr().err
    assert main(["check"]) == 2
    assert "got no target" in capsys.readouterr().err


@pytest.mark.skipif(VLLM, reason="vLLM is installed")
def test_without_vllm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "--vllm", str(tmp_path)]) == 2
    assert "vLLM cannot be imported" in capsys.readouterr().err


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed; `make vllm` installs it")
def test_report_of_a_served_model(tiny_chat: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onegraph.cli", "check", "--vllm", str(tiny_chat), "--json"]
    command += ["--html", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    read = {Path(file).name for file, *_ in json.loads(done.stdout)["facts"]["read"]}
    assert {"llama.py", "fused.py"} <= read, "our class of the model and vLLM's, above it"
    assert "<html" in (tmp_path / "page.html").read_text()
    assert "vLLM: CPU_ATTN (NEVER): graphs around attention only" in done.stderr


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed; `make vllm` installs it")
def test_the_second_decode_step_is_the_one_that_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the call that is stepped into is the second with one token, and the model is left as it was."""
    import torch

    from onegraph.check import live
    from onegraph.check.report import Report
    from onegraph.integrations.vllm import check

    class Model(torch.nn.Module):
        def forward(self, input_ids: Any, positions: Any) -> Any:
            return input_ids * positions

    seen: list[Any] = []

    def look(factory: Any, *, steps: int, target: str) -> Report:
        step, inputs = factory()
        seen.append([(inputs(i)[0].tolist(), step(*inputs(i)).tolist()) for i in range(steps)])
        return Report(target=target, findings=(), origins=())

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(live, "live_step", look)
    model, reports = Model(), list[Report]()
    assert check._step_into(model, "model", 3, reports) == [__file__]
    for tokens in ([5, 6, 7], [8], [9], [9]):
        ids = torch.tensor(tokens).as_subclass(OnGpu)
        assert model(input_ids=ids, positions=torch.tensor(2)).tolist() == [2 * token for token in tokens]
    assert seen == [[([1], [2]), ([2], [4]), ([3], [6])]]
    assert len(reports) == 1
