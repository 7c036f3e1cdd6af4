"""What a user tries that cannot work as it is written gets one line that says what does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph.cli import env


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("messages") / "plain")


def errors_of(*words: Any) -> str:
    status, _, errors = invoke(list(words))
    assert status == 2
    return errors.splitlines()[-1].removeprefix("onegraph: error: ")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    for command in (["generate", tmp_path, "--prompt", "a"], ["quantize", tmp_path, tmp_path / "out"]):
        said = errors_of(*command)
        assert "is an adapter for 'org/base', not a model; merge it into that" in said.replace('"', "'")


@pytest.mark.parametrize("option", ["--gpus", "--tensor-parallel-size"])
def test_a_cpu_runs_the_whole_model(model: Path, option: str) -> None:
    said = errors_of("generate", model, "--prompt", "a", option, "2", "--device", "cpu")
    assert said == (
        "--tensor-parallel-size: got 2 on the device cpu; leave it out: a CPU runs the whole model; GPUs are counted "
        "from cuda:0 on"
    )


def test_expert_memory_is_for_experts_and_a_gpu(model: Path) -> None:
    words = "generate", model, "--prompt", "a", "--device", "cpu", "--expert-memory"
    assert errors_of(*words, "4") == "--expert-memory: got 4 GB on a CPU, whose memory has all experts; leave it out"
    assert errors_of(*words, "0").startswith("argument --expert-memory: got '0'; allowed is a number from more than 0 ")


def test_fp8_is_of_one_family(model: Path) -> None:
    said = errors_of("generate", model, "--prompt", "a", "--device", "cpu", "--kv", "fp8")
    assert "this model is 'llama': take turboquant:4, a quarter of the memory, or leave it out" in said


def test_what_looks_like_a_path_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    for command in ("generate", "verify"):
        said = errors_of(command, "out/smollm", *(["--prompt", "a"] if command == "generate" else []))
        assert said == (
            "out/smollm: no such file or directory, and not looked up on the Hugging Face hub, because out is a "
            "directory here; for the hub's give out/smollm@main"
        )


def test_a_family_that_transformers_alone_has_is_one_to_quantize(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    said = errors_of("generate", tmp_path, "--prompt", "a")
    assert "model_type 'gpt2' is not supported" in said
    assert "if transformers has this model, `onegraph quantize` makes a checkpoint for it: `import" in said


def test_an_unknown_key_of_a_line_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "wat": 1}\n')
    assert "line 1: got wat; allowed are prompt, messages, id" in errors_of(
        "generate", model, "--batch", tmp_path / "a.jsonl"
    )


def test_the_context_of_generate_may_be_chosen(model: Path) -> None:
    how = ["generate", model, "--prompt", "a", "--device", "cpu", "--raw", "--max-tokens", 4, "--temperature", 0]
    status, text, _ = invoke([*how, "--max-model-len", 32])
    old = invoke([*how, "--max-context", 32])
    assert (status, old[0], old[1]) == (0, 0, text)
    assert "--max-context is deprecated" in old[2]
    assert "at most 1 are possible" in errors_of(*how, "--max-model-len", 2)
    assert "--max-model-len: got 9999; the model's context is" in errors_of(*how, "--max-model-len", 9999)


def test_env_tells_of_extras_the_compiler_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(invoke(["env", "--json"])[1])
    assert any(line.startswith("serve: ") and " uvicorn 0." in line for line in found["extras"])
    own, made, others = found["kernels"][-3:]
    assert own.startswith("cpu own form: ")
    assert "rms_norm" in own
    assert others == "cpu reference: all other ops"
    assert made == "cpu C: e8p_encode, trellis_encode, turboquant"
    assert found["gcc"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert env._gcc() is None
    assert env.cpu_kernels(False)[1].startswith("cpu not C (e8p_encode, trellis_encode, turboquant): gcc is not found")
    monkeypatch.setattr(env.importlib.metadata, "version", _missing)
    serve = next(line for line in env.extras() if line.startswith("serve: "))
    assert "starlette, uvicorn missing; in a checkout of onegraph: pip install" in serve


def _missing(name: str) -> str:
    raise env.importlib.metadata.PackageNotFoundError(name)
