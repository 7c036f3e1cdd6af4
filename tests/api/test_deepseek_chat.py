"""DeepSeek-V4 on the command line: its chat encoding, and text from a checkpoint."""

import json

import pytest
import torch

from deepseek import SIZES, save_hf
from fuzz import tiny
from onegraph.api.chat import DEEPSEEK_V4, ChatTemplate
from onegraph.cli import main
from onegraph.models.deepseek_v4 import DeepseekV4

BOS, EOS, USER, ANSWER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜></think>"


def say(*turns: tuple[str, str]) -> str:
    return ChatTemplate(DEEPSEEK_V4, {}).render([{"role": role, "content": content} for role, content in turns])


@pytest.mark.parametrize(
    ("turns", "text"),
    [  # what the encoder that comes with the checkpoints writes, in its mode "chat"
        ([("user", "Hi")], f"{BOS}{USER}Hi{ANSWER}"),
        ([("system", "Be kind."), ("user", "Hi\n")], f"{BOS}Be kind.{USER}Hi\n{ANSWER}"),
        (
            [("user", "a"), ("assistant", "b"), ("user", "c")],
            f"{BOS}{USER}a{ANSWER}b{EOS}{USER}c{ANSWER}",
        ),
        ([("user", "a"), ("user", " b")], f"{BOS}{USER}a\n\n b{ANSWER}"),
        ([("user", "a"), ("system", "s"), ("user", "b")], f"{BOS}{USER}as{USER}b{ANSWER}"),
    ],
)
def test_chat_encoding(turns, text):
    assert say(*turns) == text


def test_other_roles_are_refused():
    with pytest.raises(ValueError, match="role critic is not supported"):
        say(("user", "a"), ("critic", "b"))


def test_tools_calls_and_results():
    """As the published encoder writes them, in its mode "chat"."""
    function = {"name": "f", "parameters": {"type": "object"}}
    call = {"function": {"name": "f", "arguments": {"a": "x", "b": [1]}}}
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "So.", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = ChatTemplate(DEEPSEEK_V4, {}).render(turns, tools=[{"type": "function", "function": function}])
    head, _, rest = text.partition(USER)
    assert head.startswith(f"{BOS}Be kind.\n\n## Tools\n\nYou have access")
    assert f"### Available Tool Schemas\n\n{json.dumps(function)}\n\nYou MUST" in head
    d = "｜DSML｜"
    invoke = (
        f'<{d}invoke name="f">\n<{d}parameter name="a" string="true">x</{d}parameter>\n'
        f'<{d}parameter name="b" string="false">[1]</{d}parameter>\n</{d}invoke>\n'
    )
    results = "<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>"
    calls = f"So.\n\n<{d}tool_calls>\n{invoke}{invoke}</{d}tool_calls>{EOS}"
    assert rest == f"Hi{ANSWER}{calls}{USER}{results}{ANSWER}"


def test_generate_from_a_checkpoint(tmp_path, capsys, monkeypatch):
    """The whole way: tokenizer without a template, the official encoding, the engine, text."""
    tiny.write_model(tmp_path / "other")
    size = json.loads((tmp_path / "other" / "config.json").read_text())["vocab_size"]
    save_hf("flash", tmp_path / "m", vocab_size=max(size, SIZES["vocab_size"]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (tmp_path / "other" / name).read_text()
        if name == "tokenizer_config.json":
            content = json.dumps({k: v for k, v in json.loads(content).items() if k != "chat_template"})
        (tmp_path / "m" / name).write_text(content)
    command = ["generate", str(tmp_path / "m"), "--prompt", "Hi", "--max-tokens", "5", "--json", "--device", "cpu"]
    assert main(command) == 0
    chat = json.loads(capsys.readouterr().out)["outputs"][0]
    assert main([*command, "--raw"]) == 0
    raw = json.loads(capsys.readouterr().out)["outputs"][0]
    assert len(chat["tokens"]) == 5
    caches, make = [], DeepseekV4.new_cache
    monkeypatch.setattr(
        DeepseekV4, "new_cache", lambda model, **sizes: caches.append(make(model, **sizes)) or caches[-1]
    )
    assert main([*command, "--kv-cache-dtype", "fp8"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"] == "fp8"
    assert [cache.windows[0].dtype for cache in caches] == [torch.uint8]
    assert main([*command, "--tensor-parallel-size", "8"]) == 2
    assert (
        "--tensor-parallel-size: got 8 on the device cpu; leave it out: a CPU runs the whole model"
        in capsys.readouterr().err
    )
    assert main([*command, "--kv-cache-dtype", "turboquant:4"]) == 2
    assert "a cache of its own kind" in capsys.readouterr().err
    assert (
        main(["generate", str(tmp_path / "other"), "--prompt", "Hi", "--device", "cpu", "--kv-cache-dtype", "fp8"]) == 2
    )
    assert "--kv-cache-dtype fp8 is a way to keep keys for DeepSeek-V4" in capsys.readouterr().err
    assert chat["prompt_tokens"] > raw["prompt_tokens"], "the encoding is used where there is no template"
