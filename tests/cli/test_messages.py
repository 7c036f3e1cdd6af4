"""What a user tries that cannot work as it is written gets one line that says what does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph.api import resources
from onegraph.cli import build_parser, env
from onegraph.cli.common import UsageError, options
from onegraph.cli.quantize import byte_count
from onegraph.cli.vllm_options import CURES, cure


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


@pytest.mark.parametrize(("command", "more"), [("generate", ("--prompt", "a")), ("serve", ("--port", "0"))])
def test_a_share_of_a_gpu_is_not_for_a_cpu(model: Path, command: str, more: tuple[str, ...]) -> None:
    words = command, model, *more, "--device", "cpu", "--gpu-memory-utilization"
    assert errors_of(*words, "0.9") == "--gpu-memory-utilization: got 0.9 on a CPU; it is for GPUs: leave it out"
    said = errors_of(*words, "90")
    assert said.startswith("argument --gpu-memory-utilization: got '90'; allowed is a number from more than 0 to 1")


def test_fp8_is_of_one_family(model: Path) -> None:
    said = errors_of("generate", model, "--prompt", "a", "--device", "cpu", "--kv", "fp8")
    assert "this model is 'llama': take turboquant:4, a quarter of the memory, or leave it out" in said


@pytest.mark.parametrize(
    ("command", "more"), [("generate", ("--prompt", "a", "--device", "cpu")), ("bench", ()), ("eval", ("--text", "-"))]
)
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("turboquant:9", "--kv-cache-dtype: 9 bits for keys; allowed are 1, 2, 3 and 4"),
        ("turboquant:4,wat=1", "--kv-cache-dtype: option 'wat=1' is not understood; allowed are "),
        ("turbo", "--kv-cache-dtype is 'turbo'; allowed are exact, "),
    ],
)
def test_a_wrong_cache_names_the_option(
    model: Path, command: str, more: tuple[str, ...], setting: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onegraph.cli.eval.read_text", lambda _: "some text")
    words = ["bench", "fit", model] if command == "bench" else [command, model]
    assert errors_of(*words, *more, "--kv-cache-dtype", setting).startswith(says)


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("turbo", "turboquant:4"),
        ("turboqant:k3v4,window=128", "turboquant:k3v4,window=128"),
        ("TurboQuant:3", "turboquant:3"),
        ("exakt", "exact"),
        ("auto", "exact"),
        ("bfloat16", "exact"),
        ("fp8_e4m3", "fp8"),
        ("turboquant:4,windw=128", "window"),
        ("int4", None),
        ("turboquant:4,wat=1", None),
    ],
)
def test_a_cache_that_is_misspelt(model: Path, setting: str, meant: str | None) -> None:
    said = errors_of("generate", model, "--prompt", "a", "--device", "cpu", "--kv-cache-dtype", setting)
    assert said.partition("; did you mean ")[2] == ("" if meant is None else f"{meant}?")


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("ngrm", "ngram"),
        ("n-gram", "ngram"),
        ("NGRAM", "ngram"),
        ("mpt", "mtp"),
        ("eagle", "eagle:PATH"),
        ("eagle3:out/head", "eagle:PATH"),
        ("Eagle:out/head", "eagle:PATH"),
        ("out/ngrm", None),
        ("smaller", None),
    ],
)
def test_a_draft_method_that_is_misspelt(model: Path, method: str, meant: str | None) -> None:
    said = errors_of("generate", model, "--prompt", "a", "--device", "cpu", "--speculative", method)
    assert said.startswith(f"--speculative: {method}: no such" if meant is None else f"--speculative: got '{method}'")
    assert said.partition("; did you mean ")[2] == ("" if meant is None else f"{meant}?")


def test_a_directory_may_have_a_name_like_a_draft_method(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngrams").symlink_to(model)
    words = "generate", model, "--prompt", "a", "--device", "cpu", "--raw", "--max-tokens", 3, "--speculative", "ngrams"
    assert invoke(list(words))[0] == 0


def test_a_cache_that_the_model_cannot_have_names_the_option(model: Path) -> None:
    said = errors_of("bench", "fit", model, "--kv-cache-dtype", "fp8")
    assert said.startswith("--kv-cache-dtype: got fp8, which is for latent attention; llama has none")


def test_options_are_named_within_a_message(model: Path, tmp_path: Path) -> None:
    said = errors_of("serve", model, "--port", 0, "--device", "cpu", "--kv-cache-tokens", 1)
    assert said.endswith("tokens: allowed is that and more, or a smaller --max-model-len")
    says = "max_rows: got 1 in x/max_rows, 'max_rows'; fewer max_rows, or config.json: max_rows"
    with pytest.raises(UsageError) as caught, options("max_rows", "size:"):
        raise ValueError(says)
    assert str(caught.value) == (
        "--max-rows: got 1 in x/max_rows, 'max_rows'; fewer --max-rows, or config.json: max_rows"
    )
    with pytest.raises(UsageError, match=r"^--size: too small, of this size$"), options("max_rows", "size:"):
        raise ValueError("size: too small, of this size")
    with pytest.raises(ValueError, match=r"^the size is max_row$") as kept, options("max_rows", "size:"):
        raise ValueError("the size is max_row")
    assert type(kept.value) is ValueError


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "m", "--enforce-eager"], "; use --capture off"),
        (["serve", "m", "--enforce_eager"], "; use --capture off"),
        (["chat", "m", "--trust-remote-code"], "; leave it out: no code of a checkpoint is run"),
        (["serve", "--model", "m"], "; give MODEL without an option"),
        (["serve", "m", "--uvicorn-log-level=debug"], "; use --log-level"),
        (["generate", "m", "--uvicorn-log-level", "debug"], ""),
        (["bench", "step", "m", "--trust-remote-code"], ""),
    ],
)
def test_an_option_of_vllm_leads_to_what_stands_for_it(words: list[str], says: str) -> None:
    option = next(word for word in words if word.startswith("--"))
    command = " ".join(words[: words.index("m")]) if words[0] == "bench" else words[0]
    assert errors_of(*words) == f"unrecognized arguments: {option}{says}; see 'onegraph {command} --help'"


def test_what_stands_for_an_option_of_vllm_is_there() -> None:
    known = build_parser("serve")._subparsers._group_actions[0].choices["serve"]._option_string_actions
    assert not CURES.keys() & known.keys()
    assert all(cure(option, known) for option in CURES)


def test_words_that_a_command_does_not_have_lead_to_its_help() -> None:
    assert errors_of("env", "x", "y") == "unrecognized arguments: x y; see 'onegraph env --help'"
    assert errors_of("bench", "fit", "a", "b") == "unrecognized arguments: b; see 'onegraph bench fit --help'"


@pytest.mark.parametrize("out", [".", "/", ".."])
def test_the_output_is_a_directory_that_is_there(model: Path, out: str) -> None:
    for command in ("quantize", "draft-head"):
        assert errors_of(command, model, out) == f"{out}: exists already; choose another output directory or remove it"


def test_sizes_have_units_in_either_case(model: Path, tmp_path: Path) -> None:
    said = errors_of("quantize", model, tmp_path / "out", "--dry-run", "--device", "cpu", "--size", "1KB")
    assert said.startswith("--size: got 1.0 kB; this model takes ")
    assert [byte_count(text) for text in ("3.2gb", "800 mB", "98000000", "2T")] == [
        32 * 10**8,
        8 * 10**8,
        98 * 10**6,
        2 * 10**12,
    ]


@pytest.mark.parametrize("option", ["--lm-head", "--embed-tokens"])
def test_a_rate_of_an_end_is_a_word_of_the_command_line(model: Path, tmp_path: Path, option: str) -> None:
    said = errors_of("quantize", model, tmp_path / "out", "--device", "cpu", option, "5")
    assert said == f"{option}: got 5; allowed is 2, 3, 4, 16 to keep it, or 'auto'"


def test_an_empty_text_has_no_bytes(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    said = errors_of("quantize", model, tmp_path / "out", "--device", "cpu", "--calibration", empty, "--dry-run")
    assert said.startswith("--calibration: the text has 0 bytes, fewer than the ")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--layer", "*=16"], ": no layer is left to be rounded; the rates by pattern keep all of them"),
        (
            ["--per-linear", "--layer", "*=3"],
            "no rate is left to be chosen, the rates by pattern set all; leave some out",
        ),
        (["--prefer", "speed"], "--prefer: got 'speed' with the format 'e8p'; it is for format 'auto': leave it out"),
    ],
)
def test_messages_of_quantize_name_no_argument_of_python(
    model: Path, tmp_path: Path, more: list[str], says: str
) -> None:
    said = errors_of("quantize", model, tmp_path / "out", "--device", "cpu", "--dry-run", *more)
    assert says in said
    assert "layers`" not in said


def test_a_draft_head_is_not_trained_for_an_output_that_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onegraph.api.draft_head.LLM", lambda *_, **__: pytest.fail("the model is loaded"))
    (tmp_path / "file").write_text("x")
    assert "file is no directory" in errors_of("draft-head", model, tmp_path / "file" / "head", "--length", 100)
    monkeypatch.setattr(resources.os, "access", lambda *_: False)  # who runs as root may write anywhere
    assert "cannot be written to" in errors_of("draft-head", model, tmp_path / "head", "--length", 100)


def test_texts_of_a_draft_head_fit_the_model(model: Path, tmp_path: Path) -> None:
    head = ["draft-head", model, tmp_path / "head", "--device", "cpu"]
    assert errors_of(*head) == (
        "--length: got 192; with the prompt a text has up to 304 tokens, and the model's context is 256: "
        "give 144 or less"
    )
    short = tiny.write_model(tmp_path / "short", tiny.CONFIG | {"max_position_embeddings": 128})
    assert errors_of("draft-head", short, *head[2:]).endswith(" is 128: it is too short for a draft head")


def test_a_constraint_is_read_before_the_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("onegraph.cli.generate.load", load)
    schema = tmp_path / "schema.json"
    ask = "generate", model, "--raw", "--prompt", "a", "--device", "cpu"
    for text, says in (("{", ": not valid JSON: Expecting "), ('{"type": "wat"}', ": Invalid type: wat")):
        schema.write_text(text)
        assert errors_of(*ask, "--json-schema", schema).startswith(f"--json-schema {schema}{says}")
    assert errors_of(*ask, "--regex", "(").startswith("--regex: at ")
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "a", "regex": "b"}\n{"prompt": "a"}\n')
    assert errors_of("generate", model, "--raw", "--batch", lines, "--device", "cpu", "--regex", "(").startswith(
        "--regex: at "
    )


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


def test_a_field_out_of_range_names_the_option_or_the_line(model: Path, tmp_path: Path) -> None:
    ask = "generate", model, "--raw", "--device", "cpu"
    says = "temperature: got 1e-09; allowed is 0 for greedy, or 0.001 to 1000"
    assert errors_of(*ask, "--prompt", "a", "--temperature", "1e-9") == f"--{says}"
    lines = tmp_path / "a.jsonl"
    for field, of_line in (('"temperature": 1e-9', says), ('"grammar": "x"', "grammar: ")):
        lines.write_text(f'{{"prompt": "a", {field}}}\n')
        assert errors_of(*ask, "--batch", lines).startswith(f"--batch {lines}, line 1: {of_line}")


def test_a_pipe_is_read_by_another_name(model: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for command in (["generate", model, "--batch"], ["eval", model, "--text"]):
        said = errors_of(*command, pipe)
        assert said == f"{pipe}: not a regular file; give one, or '-' and the text on standard input"


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
