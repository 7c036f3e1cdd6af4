"""A conversation: what the model is given turn by turn, in a pipe and at a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from onegraph import LLM, SamplingParams
from onegraph.api.chat import ChatTemplate
from onegraph.api.conversation import Conversation
from onegraph.cli import main

# As Qwen3's and SmolLM3's templates take the switch: only what is false closes the thoughts; what is not given is true.
QWEN3 = tiny.TEMPLATE.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
SMOLLM3 = """\
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\nReasoning Mode: " + mode + "<|im_end|>\n" -}}
{%- for message in messages -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\n" + message.content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- set text = message.content.lstrip("\n") -%}
        {%- if mode == "/no_think" -%}{%- set text = "<think>\n\n</think>\n" + text -%}{%- endif -%}
        {{ "<|im_start|>assistant\n" + text + "<|im_end|>\n" }}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\n" + ("" if mode == "/think" else "<think>\n\n</think>\n") }}
{%- endif -%}"""
GRANITE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'Think.' if thinking }}"
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "\nHello."},
    {"role": "user", "content": "the hat"},
]
WARM = SamplingParams(temperature=1.0, seed=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that goes on for long: no token ends an answer."""
    path = tiny.write_model(
        tmp_path_factory.mktemp("chat") / "m", tiny.CONFIG | {"max_position_embeddings": 65536, "eos_token_id": None}
    )
    (path / "generation_config.json").unlink()
    template = {"chat_template": tiny.TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(template))
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, max_num_seqs=1, max_model_len=200, device="cpu")


# ------------------------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize("source", [QWEN3, SMOLLM3])
def test_thinking_on_and_off_as_transformers_renders_it(source: str, model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    theirs.chat_template = source
    ours = ChatTemplate(source, {})
    assert ours.switch == "enable_thinking"
    for thinking in (None, True, False):
        told = {} if thinking is None else {"enable_thinking": thinking}
        expected = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True, **told)
        assert ours.render(TURNS, thinking) == expected
        assert "".join(ours.parts(TURNS, thinking) or []) in (expected, ""), "or it says that it cannot tell"


def test_the_switch_by_another_name_and_none_at_all(llm: LLM) -> None:
    assert ChatTemplate(GRANITE, {}).render(TURNS[:1], True) == "HiThink."
    assert ChatTemplate(GRANITE, {}).render(TURNS[:1], False) == ChatTemplate(GRANITE, {}).render(TURNS[:1]) == "Hi"
    with pytest.raises(ValueError, match="thinking: the checkpoint's chat template has no switch"):
        llm.chat("Hi", thinking=True)


# As gpt-oss's begins.
EFFORT = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}Reasoning: "
EFFORT += "{{ reasoning_effort }}{% for m in messages %} {{ m.content }}{% endfor %}"


def test_an_effort_is_the_templates_variable_or_turns_its_switch(llm: LLM) -> None:
    template = ChatTemplate(EFFORT, {})
    assert [template.render(TURNS[:1], how) for how in (None, "high", "none")] == [
        f"Reasoning: {effort} Hi" for effort in ("medium", "high", "none")
    ]
    with pytest.raises(ValueError, match="has no switch"):
        template.render(TURNS[:1], False)
    switched = ChatTemplate(QWEN3, {})
    assert switched.render(TURNS, "none") == switched.render(TURNS, False) != switched.render(TURNS, True)
    assert switched.render(TURNS, "low") == switched.render(TURNS, True)
    with pytest.raises(ValueError, match="has no switch"):
        llm.chat("Hi", thinking="high")


def test_templates_see_that_there_are_no_tools() -> None:
    """`tools is not none` is how Mistral's ask: a name that is merely undefined would be tools."""
    assert ChatTemplate("{% if tools is not none or documents is not none %}tools{% endif %}", {}).render(TURNS) == ""


def test_chat_and_chat_stream_take_the_switch(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "chat_template.jinja").write_text(QWEN3)
    with LLM(path, max_model_len=200, device="cpu") as llm:
        on, off = (llm.chat("Hi", max_tokens=4, temperature=0.0, thinking=thinking) for thinking in (True, False))
        assert off.prompt_tokens - on.prompt_tokens == len(llm.tokenizer.encode("<think>\n\n</think>\n\n"))
        assert "".join(llm.chat_stream("Hi", max_tokens=4, temperature=0.0, thinking=False)) == off.text


# --------------------------------------------------------------------------------------------------------- conversation


def ask(conversation: Conversation, text: str) -> str:
    return "".join(conversation.ask(text))


def test_every_turn_is_the_answer_to_all_that_was_said(llm: LLM) -> None:
    conversation = Conversation(llm, system="Be kind.", params=WARM, max_tokens=6)
    first = ask(conversation, "Hi")
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert first == llm.chat(said, WARM, max_tokens=6).text
    said += [{"role": "assistant", "content": first.strip()}, {"role": "user", "content": "the inn"}]
    assert ask(conversation, "the inn") == llm.chat(said, WARM, max_tokens=6).text
    assert conversation.messages[:4] == said
    conversation.reset()
    assert conversation.messages == said[:1]
    assert ask(conversation, "Hi") == first


def test_the_oldest_turns_go_where_the_context_is_full(llm: LLM) -> None:
    conversation = Conversation(llm, system="Be kind.", params=WARM)
    ask(conversation, "the first")  # takes all that the context leaves
    assert conversation.budget > 100
    ask(conversation, "the second")
    assert conversation.dropped == ["the first"]
    assert [m["content"] for m in conversation.seen][:2] == ["Be kind.", "the second"]
    assert [m["content"] for m in conversation.messages][:4:3] == ["Be kind.", "the second"], "all is kept to be saved"
    conversation.reset()
    assert conversation.messages == conversation.seen == [{"role": "system", "content": "Be kind."}]
    short = Conversation(llm, system="Be kind.", params=WARM, max_tokens=4)
    dropped = []
    for i in range(9):
        ask(short, f"number {i}")
        dropped += short.dropped
        assert len(llm.tokenizer.chat(short.seen[:-1])) + short.budget <= 200
    assert dropped == [f"number {i}" for i in range(len(dropped))] != []
    assert short.seen[1] == {"role": "user", "content": f"number {len(dropped)}"}
    assert [m["content"] for m in short.messages[1::2]] == [f"number {i}" for i in range(9)]
    before = short.messages
    with pytest.raises(ValueError, match=r"the question takes \d+ tokens .* the context of 200 leaves 196 for it"):
        short.ask("x" * 200)
    assert short.messages == before


def test_an_answer_that_is_left_stays_as_far_as_it_came(llm: LLM) -> None:
    conversation = Conversation(llm, params=WARM)
    pieces = conversation.ask("Hi")
    begun = [next(pieces) for _ in range(8)]
    pieces.close()
    assert conversation.messages[1:] == [{"role": "assistant", "content": "".join(begun).strip()}]
    ask(conversation, "go on")
    untouched = Conversation(llm, params=WARM)
    pieces = untouched.ask("Hi")
    pieces.close()
    assert untouched.messages == []


def test_an_answer_is_cancelled_between_two_chunks_of_its_question(model: Path) -> None:
    with LLM(model, max_num_seqs=1, max_model_len=2000, device="cpu") as long:
        free, asked = long.engine.scheduler.allocator.free, iter([False, False, True])
        conversation = Conversation(long, params=WARM)
        assert list(conversation.ask("x" * 1400, lambda: next(asked))) == []
        assert long.stats.prefill_tokens == 2 * long.engine.executor.chunk
        assert (conversation.messages, long.engine.scheduler.allocator.free) == ([], free)
        assert ask(Conversation(long, params=WARM, max_tokens=6), "Hi") == long.chat("Hi", WARM, max_tokens=6).text


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "Yes."),
        ("hm</think>Yes.", "Yes."),  # the template had opened the thoughts
        ("<think>\nhm", None),
        ("<think>\nhm</think>\n", None),
    ],
)
def test_thoughts_are_not_part_of_what_was_said(
    written: str, kept: str | None, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "chat_stream", lambda *_, **__: (piece for piece in written))
    conversation = Conversation(llm)
    assert ask(conversation, "Well?") == written
    assert [m["content"] for m in conversation.messages] == ([] if kept is None else ["Well?", kept])


# ---------------------------------------------------------------------------------------------------------- in a pipe


def pipe(monkeypatch: pytest.MonkeyPatch, text: str | bytes, *command: object) -> int:
    data = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return main(["chat", *map(str, command), "--device", "cpu", "--max-model-len", "200", "--seed", "4"])


def test_each_line_of_a_pipe_is_a_turn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "said.json"
    text = f"Hi\n\n /the inn\n/save {file}\n/reset\nHi\n/help\n/exit\nnever\n"
    assert pipe(monkeypatch, text, model, "--max-tokens", 5, "--temperature", 1, "--system", "Be kind.") == 0
    out, errors = capsys.readouterr()
    said = json.loads(file.read_text())
    assert [m["role"] for m in said] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in said[:4:3]] == ["Be kind.", " /the inn"]
    assert out.startswith(said[2]["content"])
    assert out.endswith(said[2]["content"] + "\n"), "after /reset, the first answer again"
    assert errors.count("tokens/s, eager on cpu]") == 3
    assert errors.count("[stopped after 5 tokens: --max-tokens or the context allows no more]") == 3
    assert "[5 messages in " in errors
    assert "[a new conversation]" in errors
    assert "/save FILE   write" in errors
    assert "> " not in out + errors, "no prompt"


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("/rest\n", (), "error: /rest: unknown command; /help lists the commands, a leading space sends it as text"),
        ("/save\n", (), "error: /save: give a file to write"),
        ("/save /\n", (), "error: /: "),
        (b"\xff\xfe\n", (), "error: standard input: not UTF-8 text at byte 0"),
        ("x" * 300 + "\n", (), " for it; shorten it, or give a larger --max-model-len"),
        ("Hi\n", ("--regex", "("), "error: --regex: at "),
        ("Hi\n", ("--thinking", "on"), "error: --thinking: the checkpoint's chat template has no switch"),
        ("Hi\n", ("--max-model-len", 1 << 17), "error: --max-model-len 131072: the model allows at most 65536"),
        (
            "Hi\n",
            ("--max-model-len", 3),
            "error: the context of 3 tokens leaves 2 for the question, and 'Hi' in the chat template takes ",
        ),
        ("Hi\n", ("--capture", "on"), "error: --capture on needs a GPU"),
        ("Hi\n", ("--kv-cache-dtype", "turbo"), "error: "),
    ],
)
def test_what_is_wrong_is_one_line(
    text: str | bytes,
    more: tuple[Any, ...],
    says: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    context = more if "--max-model-len" in more else ()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode() if isinstance(text, str) else text)))
    command = ["chat", model, "--device", "cpu", *(context or ("--max-model-len", 200)), *(() if context else more)]
    assert main(list(map(str, command))) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert says in line


@pytest.mark.parametrize(
    ("file", "options", "line", "default"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, (), "--temperature 0.6, --top-k 20, --top-p 0.95", None),
        ({"do_sample": True, "top_k": 20}, (), "--temperature 1, --top-k 20", None),
        ({"temperature": 0.6, "top_p": 0.95}, ("--temperature", 2), "--top-p 0.95", None),
        ({"temperature": 0.6, "top_p": 0.95}, ("--temperature", 0), None, None),
        ({"temperature": 0.6, "do_sample": False}, (), None, None),
        ({"temperature": 0, "top_k": 20}, (), None, None),
        ({"top_k": 20}, (), "--top-k 20", "--temperature 0.7, --top-p 0.95"),
        ({"top_k": 20, "do_sample": None}, ("--temperature", 2), "--top-k 20", "--top-p 0.95"),
        ({"top_k": 20}, ("--temperature", 0), None, None),
        ({}, (), None, "--temperature 0.7, --top-p 0.95"),
        ({}, ("--top-p", 0.5), None, "--temperature 0.7"),
        ({"do_sample": False}, (), None, None),
    ],
)
def test_it_draws_as_the_model_suggests_and_options_go_over_it(
    file: dict[str, Any],
    options: tuple[Any, ...],
    line: str | None,
    default: str | None,
    model: Path,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "m"
    shutil.copytree(model, path)
    (path / "generation_config.json").write_text(json.dumps(file))
    assert pipe(monkeypatch, "Hi\n", path, "--max-tokens", 6, *options) == 0
    out, errors = capsys.readouterr()
    told = [each for each in errors.splitlines() if "these options override" in each]
    both = (line, "from the model's generation_config.json"), (default, "onegraph's default")
    assert told == [f"[{each}: {why}; these options override it]" for each, why in both if each is not None]
    words = [*", ".join(filter(None, (line, default))).replace(",", "").split(), *map(str, options)]
    fields = {n[2:].replace("-", "_"): float(v) for n, v in zip(words[::2], words[1::2], strict=True)}
    if "top_k" in fields:
        fields["top_k"] = int(fields["top_k"])
    assert (
        out.strip()
        == llm.chat("Hi", max_tokens=6, seed=4, **({"temperature": 0.0, "top_p": 1.0} | fields)).text.strip()
    )


def test_what_the_model_suggests_and_cannot_be_drawn_with_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m"
    shutil.copytree(model, path)
    (path / "generation_config.json").write_text('{"temperature": 1, "top_p": 2}')
    assert pipe(monkeypatch, "Hi\n", path) == 2
    assert "generation_config.json: top_p: got 2; allowed is above 0, up to 1 for off; give a --top-p of your own" in (
        capsys.readouterr().err
    )
    assert pipe(monkeypatch, "Hi\n", path, "--max-tokens", 1, "--top-p", 1) == 0


def test_a_file_is_not_written_over_and_a_model_without_a_template_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "there"
    file.write_text("mine")
    assert pipe(monkeypatch, f"/save {file}\n", model) == 2
    assert "exists already; give another name" in capsys.readouterr().err
    assert file.read_text() == "mine"
    bare = tiny.write_model(tmp_path / "bare")
    (bare / "tokenizer_config.json").unlink()
    assert pipe(monkeypatch, "Hi\n", bare) == 2
    assert "the model has no chat template; use 'onegraph generate'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", str(model)]) == 2
    assert "standard input is closed" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- at a terminal


# The program with a model that takes its time to read.
SLOW = """
import sys, time
from onegraph.cli import main
from onegraph.engine.executor import Executor
prefill = Executor.prefill
Executor.prefill = lambda *args: time.sleep(0.5) or prefill(*args)
sys.exit(main())
"""


class Terminal:
    """`onegraph chat` at a terminal of its own, whose keys are `type` and whose screen is `screen`."""

    def __init__(self, *command: object, slow: bool = False) -> None:
        begin = ["-c", SLOW] if slow else ["-m", "onegraph"]
        words = [sys.executable, *begin, "chat", *map(str, command), "--device", "cpu"]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, words, os.environ | {"TERM": "dumb", "INPUTRC": "/dev/null"})
        self.screen, self.seen = "", 0

    def type(self, keys: str) -> None:
        self.seen = len(self.screen)
        os.write(self.fd, keys.encode())

    def until(self, text: str = "", longer: int = 0, seconds: float = 120) -> str:
        """What the screen shows since the last keys, once `text` is in it and more than `longer` characters are."""
        end = time.monotonic() + seconds
        while text not in (new := self.screen[self.seen :]) or len(new) <= longer:
            if not select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"{text!r} never came: {self.screen}")
            try:
                self.screen += os.read(self.fd, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
            except OSError:  # the terminal is closed: the program has ended
                raise AssertionError(f"it ended before {text!r}: {self.screen}") from None
        return new

    def interrupt(self, text: str) -> None:
        """Ctrl-C at the prompt, until `text` comes: readline that has shown its prompt and does not wait yet takes the
        signal at the next key only, and two of them as one."""
        for _ in range(5):
            self.type("\x03")
            with contextlib.suppress(TimeoutError):
                self.until(text, seconds=15)
                return
        raise AssertionError(f"{text!r} never came: {self.screen}")

    def end(self) -> int:
        """Its exit status."""
        try:
            while select.select([self.fd], [], [], 60)[0] and (data := os.read(self.fd, 1 << 16)):
                self.screen += data.decode(errors="replace").replace("\r\n", "\n")
        except OSError:
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_ends_an_answer_and_then_the_program(model: Path) -> None:
    terminal = Terminal(model, "--max-model-len", 60000, "--temperature", 1, "--seed", 4)
    terminal.until("[/help lists the commands")
    terminal.until("> ")
    terminal.type("the hat\n")
    terminal.until("the hat\n", longer=60)  # it writes
    terminal.type("\x03")
    ended = terminal.until("tokens/s, eager on cpu]\n")
    assert "[stopping ...]" in ended
    assert int(ended.rpartition(" prompt tokens, ")[2].split()[0]) < 59000
    terminal.until("> ")
    terminal.type("/rest\n")
    terminal.until("onegraph: error: /rest: unknown command")
    terminal.until("> ")
    terminal.interrupt("[Ctrl-C again, or Ctrl-D, ends the program]")
    terminal.until("> ")
    with pytest.raises(AssertionError, match="it ended before"):
        terminal.interrupt("another answer")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.screen


def test_ctrl_c_while_a_long_question_is_read_twice_keeps_the_conversation(model: Path, tmp_path: Path) -> None:
    options = ("--max-model-len", 60000, "--max-tokens", 4, "--temperature", 1, "--seed", 4)
    terminal = Terminal(model, *options, slow=True)
    terminal.until("> ")
    terminal.type("the hat\n")
    terminal.until("tokens/s, eager on cpu]\n")
    terminal.until("> ")
    terminal.type("the hat is in the inn " * 100 + "\n")
    terminal.until("\n")
    time.sleep(1)
    terminal.type("\x03")
    terminal.until("[stopping ...]")
    os.write(terminal.fd, b"\x03")
    ended = terminal.until("[stopped before the answer began; the question was removed]")
    assert 0 < int(ended.partition(" prompt tokens, 0 new")[0].rpartition("[")[2]) < 2000
    terminal.until("> ")
    terminal.type(f"/save {tmp_path / 'said.json'}\n")
    terminal.until("[2 messages in ")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert [m["role"] for m in json.loads((tmp_path / "said.json").read_text())] == ["user", "assistant"]


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ONEGRAPH_SMOLLM2_4BIT"), reason="ONEGRAPH_SMOLLM2_4BIT is not set")
def test_the_real_smollm2_remembers_and_ctrl_d_leaves() -> None:
    terminal = Terminal(
        os.environ["ONEGRAPH_SMOLLM2_4BIT"], "--max-tokens", 8, "--max-model-len", 512, "--temperature", 0
    )
    terminal.until("> ")
    terminal.type("What is the capital of France?\n")
    assert "Paris" in terminal.until("tokens/s")
    terminal.until("> ")
    terminal.type("And of Japan?\n")
    assert "Tokyo" in terminal.until("tokens/s"), "which only makes sense after the first question"
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
