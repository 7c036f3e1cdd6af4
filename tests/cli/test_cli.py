"""The command line as people and scripts meet it: what it prints, where, and with which status.

Past 400 lines, since each command's refusals are asked of the same tiny model.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz import tiny
from fuzz.run import invoke
from onegraph import __version__
from onegraph.api.tokenizer import Tokenizer
from onegraph.cli import COMMANDS, main
from onegraph.cli.batch import Request
from onegraph.cli.common import (
    QUANTIZING,
    PlainBar,
    Progress,
    UsageError,
    human_bytes,
    number,
    one_line,
    options,
    pick_device,
    print_json,
)
from onegraph.cli.generate import budget
from onegraph.cli.quantize import layer_rate, rates_of
from onegraph.engine.scheduler import Scheduler
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama

ONEGRAPH = [sys.executable, "-m", "onegraph.cli"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("cli") / "plain")


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    file = model.parent / "text.txt"
    file.write_text("the thing in the inn, and a hat. " * 200)
    return file


@pytest.fixture(scope="module")
def quantized(model: Path, text: Path) -> Path:
    status, out, errors = invoke(quantize(model, model.parent / "4bit", text))
    assert status == 0, errors
    assert "bits per weight in the linears" in out
    return model.parent / "4bit"


def quantize(model: Path, output: Path, text: Path, *more: object) -> list[object]:
    return [
        "quantize",
        model,
        output,
        "--calibration",
        text,
        "--num-calibration-tokens",
        512,
        "--calibration-seq-len",
        64,
        "--recipe",
        "quick",
        *more,
    ]


def fails(*words: object, says: str) -> None:
    """The command ends with status 2 and one line, the last on stderr, that holds `says`."""
    status, out, errors = invoke(list(words))
    assert (status, out) == (2, ""), errors
    line = errors.splitlines()[-1]
    assert line.startswith("onegraph: error: ")
    assert says in line
    assert errors.count("onegraph: ") == 1


# ----------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["", "check", "rule", *COMMANDS, "bench step", "bench fit"])
def test_help_teaches(command: str) -> None:
    status, out, errors = invoke([*command.split(), "--help"])
    assert (status, errors) == (0, "")
    assert f"usage: onegraph {command}".strip() in out
    if " " not in command:
        assert f"\n  onegraph {command}".rstrip() in out, "an example"
    assert max(map(len, out.splitlines())) <= 120


def test_help_of_serve_has_groups() -> None:
    lines = invoke(["serve", "--help"])[1].splitlines()
    heads = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["positional arguments:", "options:", "server:", "models:", "engine:", "examples:"]


def test_help_and_usage_errors_do_not_wait_for_torch() -> None:
    code = "import sys; from onegraph.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for words in (["--help"], ["quantize", "--help"], ["generate", "m", "--wat"], ["nonsense"], []):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True)
        assert done.returncode == 0, words


# Runs a command in this process and reports when it starts children, what it imported, and whether Python took its
# modules apart at the end
WATCHED = """
import gc, json, sys
from onegraph.api import sandbox

def spawn(kind, real=sandbox._spawn):
    tell("started", kind, "torch" in sys.modules)
    return real(kind)

def tell(*words):
    print(json.dumps(words), file=sys.stderr)

class Last:
    def __del__(self):
        tell("taken apart")

sandbox._spawn, last = spawn, Last()
from onegraph.cli import main
status = main()
names = "torch", "torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "onegraph.check.api"
names += "tokenizers", "jinja2", "uvicorn", "starlette", "llguidance", "huggingface_hub"
others = *names, "onegraph.quant", "onegraph.cli.quantize", "onegraph.serve"
tell("imported", *(name for name in others if name in sys.modules))
tell("frozen", gc.get_freeze_count() > 100_000, gc.isenabled())
sys.exit(status)
"""


@pytest.mark.parametrize(("option", "kinds"), [("--chat", ["tokenizers", "templates"]), ("--raw", ["tokenizers"])])
def test_what_a_command_does_before_and_after_its_work(option: str, kinds: list[str], tmp_path: Path) -> None:
    """Its sandboxes start before torch is imported, nothing else that is large is, and it ends without a teardown."""
    made = tiny.write_model(tmp_path / "m")
    words = ["generate", str(made), option, "--prompt", "the", "--max-tokens", "2", "--seed", "1", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", WATCHED, *words], capture_output=True, text=True, timeout=300)
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('["')]
    started = [["started", kind, False] for kind in kinds]
    assert told == [*started, ["imported", "torch"], ["frozen", True, True]], done.stderr
    assert (done.returncode, done.stdout != "") == (0, True)


def test_a_command_that_fails_ends_with_its_status(model: Path) -> None:
    words = ["generate", str(model), "--raw", "--prompt", "the", "--max-tokens", "100000"]
    done = subprocess.run([sys.executable, "-c", WATCHED, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "does not fit the model's context" in done.stderr
    assert "taken apart" not in done.stderr


def test_without_a_command_it_prints_its_help() -> None:
    status, out, _ = invoke([])
    assert status == 0
    assert "from a checkpoint to text:" in out


def test_version() -> None:
    assert invoke(["--version"])[:2] == (0, f"onegraph {__version__}\n")


# --------------------------------------------------------------------------------------------------------- errors


def test_mistakes_on_the_command_line_are_one_line(model: Path, text: Path, tmp_path: Path) -> None:
    ask = ["generate", model, "--raw", "--prompt", "the"]
    fails("nonsense", says="invalid choice: 'nonsense'")
    fails("generate", model, says="--prompt --batch is required")
    fails(*ask, "--wat", says="unrecognized arguments: --wat")
    fails(*ask, "--max", "3", says="unrecognized arguments: --max")  # no abbreviations
    fails(*ask, "--max-tokens", "many", says="got 'many'; allowed is an integer from 1 to")
    fails(*ask, "--top-p", "0", says="got '0'; allowed is a number from more than 0 to 1")
    fails(*ask, "--temperature", "nan", says="got 'nan'; allowed is a number")
    fails(*ask, "--stop", "", says="argument --stop: the text is empty")
    fails(*ask, "--max-tokens", "256", says="at most 255 are possible")
    fails(*ask[:-1], "", says="the prompt is empty")
    fails(*ask[:-1], "x " * 300, says="the model's context is 256; shorten the prompt")
    fails(*ask[:-1], "a\udcff", says="not UTF-8")
    fails(*ask, "--chat", says="not allowed with argument")
    fails(
        *ask,
        "--kv-cache-dtype",
        "4",
        says="turboquant:k3v4 (any of 1, 2, 3 and 4 bits), and options behind these, like turboquant:4,w",
    )
    fails("generate", tmp_path / "none", "--prompt", "x", says="no such model")
    fails("generate", model, "--batch", tmp_path / "none", says="no such file")
    fails("generate", model, "--batch", "/dev/null", says="not a regular file")
    fails(*quantize(model, tmp_path / "o", text), "--bits", "5", says="--bits: got 5; allowed is a number from 2")
    fails(*quantize(model, tmp_path / "o", text), "--layer", "*.v_proj", says="is not PATTERN=BITS")
    fails(*quantize(model, tmp_path / "o", text), "--layer", "*.w_proj=2", says="'*.w_proj', which matches no linear")
    fails(*quantize(model, model, text), says="exists already")
    fails(*quantize(model, tmp_path / "o", tmp_path / "none"), says="none: no such file")
    (tmp_path / "short.txt").write_text("the")
    fails(*quantize(model, tmp_path / "o", tmp_path / "short.txt"), says="the text has 3 bytes, fewer than the")
    fails("eval", model, "--text", tmp_path / "short.txt", says="1 tokens of the text are measured; at least 2")
    fails("eval", model, says="the following arguments are required: --text")
    fails("bench", says="WHAT")
    fails("bench", "step", model, says="need 385 positions, the model has 256")
    assert not (tmp_path / "o").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named(model: Path) -> None:
    fails("generate", model, "--prompt", "x", "--device", "cuda", says="torch finds no GPU")
    fails("generate", model, "--prompt", "x", "--capture", "on", says="--capture on needs a GPU")
    assert pick_device("auto") == torch.device("cpu")


def test_devices_that_do_not_exist_are_named() -> None:
    for name in ("tpu", "cuda:x", "cuda:-1", "", "cuda:99999"):
        with pytest.raises(ValueError, match="--device"):
            pick_device(name)


def test_a_bug_says_that_it_is_one_and_debug_shows_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("never\nmind")

    monkeypatch.setattr(Llama, "load", broken)
    command = ["generate", str(model), "--raw", "--prompt", "x"]
    status, _, errors = invoke(list(command))
    assert status == 70
    assert errors.startswith("onegraph: internal error: KeyError: ")
    assert errors.count("\n") == 1
    with pytest.raises(KeyError):
        main([*command, "--debug"])


def test_out_of_memory_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Llama, "load", full)
    fails("generate", model, "--raw", "--prompt", "x", says="out of memory")


# --------------------------------------------------------------------------------------------------------- generate


def test_generate_json(model: Path) -> None:
    command: list[object] = ["generate", model, "--raw", "--prompt", "the thing", "--max-tokens", 5, "--json"]
    status, out, errors = invoke([*command, "--temperature", 1, "--seed", 3])
    assert (status, errors) == (0, "")
    found = json.loads(out)
    (answer,) = found["outputs"]
    assert answer["finish"] == ("stop" if answer["tokens"][-1] == 2 else "length")
    assert len(answer["tokens"]) == 5 or answer["finish"] == "stop"
    assert (found["mode"], found["device"]) == (
        "captured" if torch.cuda.is_available() else "eager",
        str(pick_device("auto")),
    )
    again = json.loads(invoke([*command, "--temperature", 1, "--seed", 3])[1])
    other = json.loads(invoke([*command, "--temperature", 1, "--seed", 4])[1])
    assert again["outputs"] == found["outputs"] != other["outputs"]


def test_generate_streams_what_json_reports(model: Path) -> None:
    command = ["generate", model, "--raw", "--prompt", "the 12", "--max-tokens", 8, "--temperature", 1, "--seed", 5]
    status, out, errors = invoke(list(command))
    assert status == 0
    assert out.strip() == json.loads(invoke([*command, "--json"])[1])["outputs"][0]["text"].strip()
    assert "8 new" in errors


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_while_loading_is_for_terminals(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["generate", str(model), "--raw", "--prompt", "the", "--max-tokens", "1"]) == 0
    assert ("loading: 100%" in screen.getvalue()) is terminal
    assert "loading" not in capsys.readouterr().out


def test_a_batch_gives_each_prompt_what_it_gets_alone(model: Path, tmp_path: Path) -> None:
    prompts = ["the", "a longer one in the inn", "7"]
    (tmp_path / "p.txt").write_text("\n".join(prompts) + "\n\n")
    more = ["--raw", "--max-tokens", 6, "--json"]
    found = json.loads(invoke(["generate", model, "--batch", tmp_path / "p.txt", *more])[1])
    for prompt, output in zip(prompts, found["outputs"], strict=True):
        alone = json.loads(invoke(["generate", model, "--prompt", prompt, *more])[1])["outputs"][0]
        assert output == alone
    plain = invoke(["generate", model, "--batch", tmp_path / "p.txt", "--raw", "--max-tokens", 6])[1]
    assert [line for line in plain.splitlines() if line.startswith("> ")] == [f"> {prompt}" for prompt in prompts]


def test_a_batch_of_json_lines(model: Path, tmp_path: Path) -> None:
    """Fields of a line go over the options; answers are a line each, in order, with the seed that gives them again."""
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    requests = [
        {"id": "a", "prompt": "the", "n": 2, "temperature": 1.0},
        {"messages": conversation, "max_tokens": 3, "logprobs": 1},
        {"prompt": "in", "stop": ["é", 2], "seed": 3, "min_p": 0.1},
    ]
    file = tmp_path / "r.jsonl"
    file.write_text("\n\n".join(map(json.dumps, requests)))
    command = ["generate", model, "--raw", "--max-tokens", 5, "--repetition-penalty", 1.2, "--batch", file]
    status, out, errors = invoke(list(command))
    assert status == 0
    first, second, chat, last = map(json.loads, out.splitlines())
    assert f"{sum(len(each['tokens']) for each in (first, second, chat, last))} new" in errors
    assert (first["id"], first["prompt"], second["id"]) == ("a", "the", "a")
    assert second["seed"] == first["seed"] + 1
    assert chat["messages"] == conversation
    assert len(chat["tokens"]) == len(chat["logprobs"]) == 3
    assert last["seed"] is None, "greedy"
    assert json.loads(invoke([*command, "--json"])[1])["outputs"][2:] == [chat, last]
    alone = ["generate", model, "--raw", "--max-tokens", 5, "--repetition-penalty", 1.2, "--temperature", 1, "--json"]
    again = json.loads(invoke([*alone, "--seed", first["seed"], "--prompt", "the", "--n", 2])[1])["outputs"]
    assert [each["tokens"] for each in again] == [first["tokens"], second["tokens"]]


def test_answers_are_out_before_the_last_is_done(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of a later step leaves those of which all before are done too, as whole lines."""
    lengths = [2, 3, 30, 1]  # the last is done first, and waits for the third
    lines = [json.dumps({"prompt": "the", "max_tokens": each}) for each in lengths]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(lines))
    command = ["generate", model, "--raw", "--batch", file]
    expected = invoke(list(command))[1]
    steps = 0
    real = Scheduler.step

    def step(self: Scheduler) -> Any:
        nonlocal steps
        steps += 1
        if steps > 12:
            raise FloatingPointError("the model gave NaN")
        return real(self)

    monkeypatch.setattr(Scheduler, "step", step)
    status, out, errors = invoke(list(command))
    assert status == 2
    assert "the model gave NaN" in errors
    assert out.endswith("\n")
    assert out.splitlines() == expected.splitlines()[:2]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "regex": "("}', "line 2: regex: "),
        ('{"prompt": "a", "json_schema": {"type": 5}}', "line 2: json_schema: "),
        ("{", "line 2: "),
        ("5", 'line 2: an object with "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 2: an object with "prompt" or "messages"'),
        ('{"prompt": ""}', "line 2: a text, or a list of"),
        ('{"messages": [{"role": "user"}]}', "line 2: a text, or a list of"),
        (
            '{"messages": [{"role": "wizard", "content": "Hi"}]}',
            "line 2: role: got 'wizard'; allowed are system, user, ",
        ),
        (
            '{"prompt": "a", "temprature": 1}',
            "line 2: got temprature; allowed are prompt, messages, id, thinking, max_tokens",
        ),
        ('{"prompt": "a", "top_p": 2}', "line 2: top_p: got 2; allowed is"),
        ('{"prompt": "a", "stop": 5}', "line 2: stop: got 5; allowed is a text, or a list of token ids and texts"),
        ('{"prompt": "a", "stop": [true]}', "line 2: stop: got [True]; allowed is"),
        ('{"prompt": "a", "stop": [265, 266]}', "line 2: stop: got token 266; allowed are 0 to 265, and texts"),
        ('{"prompt": "a", "temperature": true}', "line 2: temperature: got True; allowed is a finite number"),
        ('{"prompt": "a", "max_tokens": 300}', "line 2: it has 1 tokens, and max_tokens 300 does not fit the model's"),
        ('{"prompt": "a", "stop": ["\\ud800"]}', r"line 2: got half a character (\ud800 to \udfff alone); write both"),
        ('{"prompt": "a", "thinking": 1}', "line 2: thinking: got 1; allowed are true, false, none, minimal, low"),
        (
            '{"prompt": "a", "thinking": true}',
            "line 2: thinking needs a chat template, and --raw continues the prompt without one",
        ),
        (
            '{"messages": [{"role": "user", "content": "Hi"}], "thinking": true}',
            "line 2: thinking: the check",
        ),
    ],
)
def test_a_wrong_line_is_named(model: Path, tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    fails("generate", model, "--raw", "--batch", file, says=says)


def test_a_line_is_what_json_calls_one(model: Path, tmp_path: Path) -> None:
    """Behind a byte order mark, and with the separators that Unicode has and JSON may hold."""
    file = tmp_path / "r.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b\x85"}\r\n{"prompt": "c"}'.encode())
    out = invoke(["generate", model, "--raw", "--max-tokens", 1, "--batch", file])[1]
    assert [json.loads(line)["prompt"] for line in out.split("\n")[:-1]] == ["a\u2028b\x85", "c"]
    plain = tmp_path / "p.txt"
    plain.write_bytes(b"\xef\xbb\xbfthe\r\n")
    found = json.loads(invoke(["generate", model, "--raw", "--max-tokens", 1, "--json", "--batch", plain])[1])
    assert found["outputs"][0]["prompt"] == "the"


def test_thinking_by_option_and_by_line(model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "m")
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ ' thinking' if thinking }}")
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, [said, said | {"thinking": False}, {"prompt": "Hi", "thinking": True}])))

    def lengths(*more: str) -> list[int]:
        out = invoke(["generate", path, "--max-tokens", 1, "--batch", file, *more])[1]
        return [json.loads(line)["prompt_tokens"] for line in out.splitlines()]

    short, off, long = lengths()
    assert short == off < long
    assert lengths("--thinking", "on") == [long, short, long]
    fails(
        "generate", path, "--raw", "--prompt", "a", "--thinking", "on", says="--prompt: thinking needs a chat template"
    )
    fails("generate", model, "--prompt", "a", "--thinking", "on", says="error: --thinking: the checkpoint's")


def test_what_only_json_has_room_for_is_not_lost(model: Path, tmp_path: Path) -> None:
    ask = ["generate", model, "--raw", "--prompt", "a", "--max-tokens", 1, "--logprobs", 2]
    fails(*ask, says="--logprobs 2: needs JSON output; add --json")
    assert len(json.loads(invoke([*ask, "--json"])[1])["outputs"][0]["logprobs"]) == 1
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt": "a"}')
    assert len(json.loads(invoke([*ask[:3], "--batch", file, *ask[5:]])[1])["logprobs"]) == 1


def test_log_probabilities_name_tokens_by_their_text(model: Path, tmp_path: Path) -> None:
    """As OpenAI's API has them: tokens and alternatives; of a prompt too. A part of a character is its bytes."""
    file = tmp_path / "r.jsonl"
    wish = {"prompt": "the é", "max_tokens": 24, "logprobs": 4, "prompt_logprobs": 2, "temperature": 3.0, "seed": 1}
    file.write_text(json.dumps(wish))
    (answer,) = map(json.loads, invoke(["generate", model, "--raw", "--batch", file])[1].splitlines())
    with Checkpoint.open(model) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
    known = tokenizer.decode_all([[i] for i in range(tiny.CONFIG["vocab_size"])], special=True)
    prompt = tokenizer.encode("the é")[1:]
    for ids, told, count in ((answer["tokens"], "logprobs", 4), (prompt, "prompt_logprobs", 2)):
        assert len(answer[told]) == len(ids) > 0
        for token, each in zip(ids, answer[told], strict=True):
            assert len(each["top"]) == len(each["top_logprobs"]) == count
            assert [top[1] for top in each["top"]] == [other["logprob"] for other in each["top_logprobs"]]
            for i, entry in [(token, each), *zip([top[0] for top in each["top"]], each["top_logprobs"], strict=True)]:
                if "\ufffd" in known[i]:
                    assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "backslashreplace")
                else:
                    assert (entry["token"], bytes(entry["bytes"]).decode()) == (known[i], known[i])
    assert any("\\x" in other["token"] for each in answer["logprobs"] for other in [each, *each["top_logprobs"]])


def test_help_shows_a_line_break_as_a_shell_takes_it() -> None:
    assert "--stop $'\\n\\n'\n" in invoke(["generate", "--help"])[1]
    assert "--json tells" not in " ".join(invoke(["chat", "--help"])[1].split())


def test_sampling_options_reach_the_model(model: Path, tmp_path: Path) -> None:
    command: list[object] = ["generate", model, "--raw", "--prompt", "the", "--max-tokens", 12, "--json"]
    plain = json.loads(invoke(list(command))[1])["outputs"][0]
    other: list[list[object]] = [["--repetition-penalty", 1.7], ["--frequency-penalty", 2], ["--presence-penalty", -2]]
    for option in other:
        assert json.loads(invoke([*command, *option])[1])["outputs"][0]["tokens"] != plain["tokens"], option
    stopped = json.loads(invoke([*command, "--stop", plain["text"][2:4]])[1])["outputs"][0]
    assert (stopped["text"], stopped["finish"]) == (plain["text"][:2], "stop")
    cold: list[object] = [*command, "--temperature", 2, "--min-p", 1]
    assert json.loads(invoke(cold)[1])["outputs"][0]["tokens"] == plain["tokens"]
    fails(*command, "--json-schema", tmp_path / "none", says="no such file")
    fails(*command, "--json-schema", "a", "--regex", "b", says="not allowed with argument")


def test_chat_is_the_default_where_there_is_a_template(model: Path) -> None:
    counts = {}
    for style in ("--chat", "--raw", None):
        words = ["generate", model, "--prompt", "the", "--max-tokens", 1, "--json", *([style] if style else [])]
        counts[style] = json.loads(invoke(words)[1])["outputs"][0]["prompt_tokens"]
    assert counts[None] == counts["--chat"] > counts["--raw"] == 1


def test_json_lines_from_stdin(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a file of that name; texts that only look like it are texts."""
    ask = ["generate", model, "--raw", "--max-tokens", 1, "--batch", "-"]
    monkeypatch.setattr("onegraph.cli.batch.read_text", lambda _: '{"prompt": "the", "id": 7}\n{"prompt": "in"}\n')
    first, second = map(json.loads, invoke(list(ask))[1].splitlines())
    assert (first["id"], first["prompt"], second["prompt"]) == (7, "the", "in")
    for text in ('{"text": "the"}', '{"prompt"', "[1]"):
        monkeypatch.setattr("onegraph.cli.batch.read_text", lambda _, text=text: text)
        assert json.loads(invoke([*ask, "--json"])[1])["outputs"][0]["prompt"] == text
    monkeypatch.setattr("onegraph.cli.batch.read_text", lambda _: "[" * 100_000)
    fails(*ask, says="--batch -, line 1: ")


def test_a_prompt_from_stdin(model: Path) -> None:
    found = json.loads(invoke(["generate", model, "--raw", "--prompt", "-", "--max-tokens", 1, "--json"])[1])
    assert found["outputs"][0]["prompt"] == "from stdin"


def test_how_many_tokens_fit() -> None:
    request = Request("line 1", "a", {})
    assert budget(request, 10, None, 1000) == 256
    assert budget(request, 990, None, 1000) == 10
    assert budget(request, 990, 10, 1000) == 10
    for length, asked in ((1000, None), (990, 11), (0, 5)):
        with pytest.raises(ValueError, match=r"^line 1: (it|the prompt) "):
            budget(request, length, asked, 1000)


# ----------------------------------------------------------------------------------------------- quantize and eval


def test_quantize_writes_what_the_format_says(model: Path, quantized: Path) -> None:
    with Checkpoint.open(model) as before, Checkpoint.open(quantized) as after:
        assert after.config["quantization_config"]["bits"] == 4
        assert {k: v for k, v in after.config.items() if k != "quantization_config"} == before.config
        name = "model.layers.1.mlp.down_proj"
        assert after.shape(f"{name}.codes") == (64, 128 // 8)
        assert f"{name}.weight" not in after
        for kept in ("model.embed_tokens.weight", "model.norm.weight"):
            assert torch.equal(after.tensor(kept), before.tensor(kept))
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert after.sidecar(file) == before.sidecar(file)
    assert not list(quantized.parent.glob("*.partial"))


def test_a_gguf_quantizes_like_its_directory(model: Path, quantized: Path, text: Path, tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "m.gguf", kinds=("F16",))
    assert invoke(quantize(file, tmp_path / "out", text))[0] == 0
    with Checkpoint.open(quantized) as one, Checkpoint.open(tmp_path / "out") as two:
        assert one.names == two.names
        assert all(torch.equal(one.tensor(name), two.tensor(name).to(one.dtype(name))) for name in one.names)


def test_rates_by_layer(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"*.down_proj": 2, "*.o_proj": 16, "*.v_proj": 2}')
    more = ["--bits", 3, "--map", tmp_path / "map.json", "--layer", "model.layers.1.*=4", "--layer", "*.v_proj=3"]
    status, out, errors = invoke([*quantize(model, tmp_path / "out", text, *more), "--lm-head", 4, "--json"])
    assert status == 0, errors
    assert json.loads(out)["after"]["linear_bits"] > 3
    with Checkpoint.open(tmp_path / "out") as made:
        config = made.config["quantization_config"]
        assert "model.layers.0.self_attn.o_proj.weight" in made
    assert config["lm_head"] == 4
    rates = config["layers"]
    assert rates.pop("model.layers.0.mlp.down_proj") == 2
    assert rates.pop("model.layers.0.self_attn.o_proj") == 16
    assert set(rates.values()) == {4}
    assert len(rates) == 6  # of block 1; v_proj is at 3 like the rest, so it is no exception


def test_patterns_of_layers_come_last(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"a": 2, "b": 3}')
    assert list(rates_of(str(tmp_path / "map.json"), [("a", 4)]).items()) == [("b", 3), ("a", 4)]
    assert layer_rate("*.a=b=3") == ("*.a=b", 3)
    for content in ('{"a": 9}', '{"a": true}', '{"a": 4.0}', '{"a": [4]}', "[4]", "{", '{"a": 2, "a": 3}'):
        (tmp_path / "map.json").write_text(content)
        with pytest.raises(ValueError, match=r"map\.json"):
            rates_of(str(tmp_path / "map.json"), [])


def test_calibration_on_text_that_the_model_samples(model: Path, tmp_path: Path) -> None:
    """Reproducible from the seed, and another text for another seed."""
    made = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        more = [
            "--calibration",
            "self",
            "--num-calibration-tokens",
            96,
            "--calibration-seq-len",
            32,
            "--recipe",
            "quick",
            "--seed",
            seed,
        ]
        status, _, errors = invoke(["quantize", model, tmp_path / name, *more])
        assert status == 0, errors
        made[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert made["a"] == made["b"] != made["c"]


def test_eval_against_the_reference(model: Path, quantized: Path, text: Path) -> None:
    more = ["--text", text, "--tokens", 400, "--window", 100, "--json"]
    found = json.loads(invoke(["eval", quantized, "--reference", model, *more])[1])
    same = json.loads(invoke(["eval", model, "--reference", model, *more])[1])
    assert (same["kl"], same["top1"], same["perplexity"]) == (0, 1, same["reference_perplexity"])
    assert 0 < found["kl"] < 1
    assert found["tokens"] == 396
    assert found["reference_perplexity"] == same["perplexity"]
    assert 4 < found["linear_bits"] < 4.7 < found["bits"]
    alone = json.loads(invoke(["eval", quantized, *more])[1])
    assert alone["perplexity"] == found["perplexity"]
    assert alone["kl"] is None
    _, out, _ = invoke(["eval", quantized, "--reference", model, *more[:-1]])
    assert [line.split()[0] for line in out.splitlines()] == ["tokens", "bits", "perplexity", "of", "KL", "top-1"]


def test_bench_step(model: Path) -> None:
    command = ["bench", "step", model, "--context", 8, "--steps", 8, "--device", "cpu"]
    rows = [json.loads(line) for line in invoke([*command, "--json"])[1].splitlines()]
    assert [row["mode"] for row in rows] == ["eager"]
    assert rows[0]["tokens_per_second"] > 0
    assert "tokens_per_second" in invoke(list(command))[1]
    for dtype in ("auto", "float32", "int8"):  # the weights that `generate` holds
        (row,) = map(json.loads, invoke([*command, "--json", "--dtype", dtype])[1].splitlines())
        told = invoke(
            ["generate", model, "--prompt", "a", "--max-tokens", 1, "--device", "cpu", "--dtype", dtype, "--json"]
        )
        assert row["weights"] == json.loads(told[1])["dtype"]


def test_bench_fit(model: Path) -> None:
    status, out, _ = invoke(["bench", "fit", model, "--context", 100])
    assert status == 0
    rows = [line.split()[:3] for line in out.splitlines()[-3:]]  # no codebook has heads of this model's size
    assert rows == [[size, "GB", "exact"] for size in ("24", "48", "80")]
    fails("bench", "fit", model, "--kv-cache-dtype", "turboquant:4", says="no codebooks for a head size of 16")
    fails("bench", "fit", model, "--kv-cache-dtype", "fp8", says="got fp8, which is for latent attention")
    small = ["bench", "fit", model, "--gpu-memory", 0.75, "--gpu-memory", 0.8, "--kv-cache-dtype", "exact"]
    rows = [json.loads(line) for line in invoke([*small, "--json"])[1].splitlines()]
    assert [(row["gpu_gb"], row["context"], row["sequences"] > 0) for row in rows] == [
        (0.75, 256, False),
        (0.8, 256, True),
    ]
    assert "none  weights do not fit" in invoke(list(small))[1]
    whole, half = (
        json.loads(invoke([*small[:3], "--gpu-memory", 8, "--gpu-memory-utilization", share, "--json"])[1])
        for share in (1, 0.5)
    )
    assert whole["sequences"] / half["sequences"] == pytest.approx((8 - 0.75) / (4 - 0.75), rel=0.01)
    fails("bench", "fit", model, "--context", 257, says="--context: got 257; the model allows 1 to 256")
    fails("bench", "fit", model, "--gpu-memory", 0, says="allowed is a number from more than 0")


def test_env() -> None:
    status, out, _ = invoke(["env"])
    assert status == 0
    found = json.loads(invoke(["env", "--json"])[1])
    assert found["onegraph"] == __version__
    assert found["torch"] == torch.__version__
    assert all(key in out for key in found)
    assert len(found["gpu"] or []) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


# -------------------------------------------------------------------------------------------------- as a process


def start(*words: object, **kwargs: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*ONEGRAPH, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **kwargs
    )


def test_a_reader_that_goes_away_is_no_error(model: Path) -> None:
    process = start("generate", model, "--raw", "--prompt", "the", "--max-tokens", 200)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    assert process.wait(60) == 141
    assert errors == ""


def test_ctrl_c_is_one_line_and_what_is_done_is_kept(model: Path, text: Path, tmp_path: Path) -> None:
    command = ["quantize", model, tmp_path / "out", "--calibration", text, "--recipe", "best", "--tokens", 6000]
    # A shell's background jobs ignore SIGINT, and so does what they start: the tests may be such a job.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start(*command, "--calibration-seq-len", 64, start_new_session=True, preexec_fn=heed)
    partial = tmp_path / "out.partial" / "block-00000.safetensors"
    for _ in range(600):
        if partial.exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert errors.decode().splitlines()[-1] == "onegraph: interrupted; the same command resumes where it stopped"
    assert b"Traceback" not in errors
    assert partial.exists()
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------- small parts


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainBar, "EVERY", 0.0)
    with PlainBar("making", "part", None) as bar:
        bar.total = 2
        bar.update()
        bar.update()
    assert capsys.readouterr().err == "making: 1 of 2 parts, 0 s, about 0 s left\nmaking: 2 of 2 parts, 0 s\n"
    bar = PlainBar("making", "part", 4)
    bar.started, bar.mark = bar.started - 30.0, (bar.started - 30.0, 0)
    bar.update()
    assert capsys.readouterr().err == "making: 1 of 4 parts, 30 s, about 90 s left\n"
    monkeypatch.setattr(PlainBar, "EVERY", 60.0)
    with PlainBar("making", "part", 2) as bar:
        bar.update(2)
    assert capsys.readouterr().err == "making: 2 of 2 parts, 0 s\n"


def test_small_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 98_362_432, 2.5e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "98.4 MB",
        "2.50 GB",
    ]
    assert one_line("a\n  b\x1b[31m\u202e") == "a b?[31m?"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 9999)) == 500
    assert number(int, 0, 5)("5") == 5
    print_json({"a": float("inf"), "b": 1.5})
    assert capsys.readouterr().out == '{"a": null, "b": 1.5}\n'


def test_progress_of_the_api_is_a_bar_for_each_thing_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(sampling_text="token", quantizing="group") as shown:
        for step in (("sampling text", 0, 9), ("sampling text", 9, 9), ("quantizing", 0, 0), ("quantizing", 2, 5)):
            shown(*step)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",", 1)[0] for line in lines] == ["sampling text: 9 of 9 tokens", "quantizing: 2 of 5 groups"]
    shown = Progress(quantizing="group")
    shown("quantizing", 1, 5)
    shown.__exit__(KeyError, KeyError(), None)
    assert capsys.readouterr().err == "", "an error has its own line"


def test_a_bar_on_a_terminal_has_the_words_of_the_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(**QUANTIZING) as shown:
        for step in (("quantizing", 0, 0), ("quantizing", 5, 5)):
            shown(*step)
    bars = capsys.readouterr().err.split("\r")
    assert any("| 0 of ? linears [00:00<" in bar for bar in bars), "the number is not known yet"
    assert "| 5 of 5 linears [00:00<" in bars[-1]


def test_an_error_of_the_api_names_the_option() -> None:
    with pytest.raises(UsageError, match=r"^--gpus is 9$"), options("gpus"):
        raise ValueError("gpus is 9")
    with pytest.raises(ValueError, match=r"^window is 9$"), options("gpus"):
        raise ValueError("window is 9")
