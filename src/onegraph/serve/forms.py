"""How models write that they think and that they call functions: a record for each form, found by the chat template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Json = Any  # what json.loads gives
NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"


@dataclass(frozen=True)
class Fields:
    """Arguments one by one: `key` KEY `text` VALUE `end` for a text, `key` KEY `other` VALUE `end` for other JSON."""

    key: str
    text: str
    other: str
    end: str


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call: `open` NAME `middle` ARGUMENTS `close`, in these characters where it is constrained.

    mark: what calls begin with in an answer's text; the answer itself where it is empty. head: a regular expression
    for all up to the arguments. arguments: "object", JSON within an object that has the name too; "json", an object of
    their own; "dict", an object with bare keys and texts between `quote`; or Fields. section: around all calls of an
    answer. marks: further beginnings of a call. drop: marks that are no text of the answer. joined: what parallel calls
    are joined by, None where a model makes one call an answer. {n} in `middle` is a number. ids: what templates take as
    the id of a call, anything, nine letters and digits, or the name with a number.
    """

    name: str
    mark: str
    open: str
    middle: str
    close: str
    arguments: Literal["object", "json", "dict"] | Fields
    head: str
    section: tuple[str, str] = ("", "")
    joined: str | None = "\n"
    quote: str = ""
    marks: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    ids: Literal["", "short", "numbered"] = ""

    @property
    def all_marks(self) -> tuple[str, ...]:
        """What an answer's text is searched for: beginnings of calls, and marks that are dropped."""
        begun = self.mark and self.section[0].startswith(self.mark)  # brackets of one list
        sections = () if begun else tuple(each.strip() for each in self.section)
        return tuple(filter(None, (self.mark, *self.marks, *self.drop, *sections)))


@dataclass(frozen=True)
class Thought:
    """Marks around a thought. known: what a template that knows it has in its text. anywhere: not only at the
    beginning of an answer. after: what a model writes ahead of the rest of the answer."""

    begin: str
    end: str
    known: str
    anywhere: bool = False
    after: str = ""


def _object(name: str, mark: str, key: str, **how: Any) -> CallForm:
    head = rf'{re.escape(mark)}\s*\[?\s*\{{\s*"name"\s*:\s*"{NAME}"\s*,\s*"{key}"\s*:\s*(?=\{{)'
    how = {"open": f'{mark}{{"name": "', "close": "}"} | how
    return CallForm(name, mark, middle=f'", "{key}": ', arguments="object", head=head, **how)


def _json(name: str, mark: str, **how: Any) -> CallForm:
    """What stands between name and arguments is not looked at: models leave parts of it out."""
    how = {"open": mark} | how
    begins = "|".join(map(re.escape, (how["open"], *how.get("marks", ()))))
    head = rf"(?:{begins})\s*{NAME}(?![A-Za-z0-9_.-])[^{{]{{0,100}}?(?=\{{)"
    return CallForm(name, mark, arguments="json", head=head, **how)


def _fields(name: str, mark: str, open_: str, middle: str, close: str, fields: Fields, **how: Any) -> CallForm:
    opens = "|".join(map(loose, (open_, *how.get("marks", ()))))
    head = rf"(?:{opens})\s*{NAME}\s*{loose(middle)}" + (r"(?=<)" if not middle.strip() else "")
    return CallForm(name, mark, open_, middle, close, fields, head, **how)


def loose(text: str) -> str:
    """A regular expression for a text with any whitespace where it has some."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", text)))


def _dsml(word: str) -> CallForm:
    p = "｜DSML｜"
    fields = Fields(f'<{p}parameter name="', '" string="true">', '" string="false">', f"</{p}parameter>\n")
    section = (f"<{p}{word}>\n", f"</{p}{word}>")
    return _fields(
        "DeepSeek-V4" if word == "tool_calls" else "DeepSeek-V3.2", f'<{p}invoke name="', f'<{p}invoke name="',
        '">\n', f"</{p}invoke>", fields, section=section,
    )  # fmt: skip


HERMES = _object(
    "Hermes, Qwen 2.5 and 3", "<tool_call>", "arguments", open='<tool_call>\n{"name": "', close="}\n</tool_call>"
)
LLAMA = _object("Llama 3", "", "parameters", drop=("<|python_tag|>",), joined="; ")
BARE = _object("JSON alone", "", "arguments", joined=None)  # where a call is forced that the form cannot hold exactly
QWEN_CODER = _fields(
    "Qwen3-Coder", "<tool_call>", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>",
    Fields("<parameter=", ">\n", ">\n", "\n</parameter>\n"), marks=("<function=",),
)  # fmt: skip
_V3 = {"section": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")}
DEEPSEEK_V3 = _json(
    "DeepSeek-V3 and R1", "<｜tool▁call▁begin｜>", open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n", close="\n```<｜tool▁call▁end｜>", **_V3,
)  # fmt: skip
DEEPSEEK_V31 = _json(
    "DeepSeek-V3.1", "<｜tool▁call▁begin｜>", middle="<｜tool▁sep｜>", close="<｜tool▁call▁end｜>", joined="", **_V3
)
DEEPSEEK_V32, DEEPSEEK_V4 = _dsml("function_calls"), _dsml("tool_calls")
GLM = _fields(
    "GLM-4.5 and later", "<tool_call>", "<tool_call>", "\n", "</tool_call>",
    Fields("<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)  # fmt: skip
HARMONY = _json(
    "gpt-oss (harmony)", "<|channel|>commentary to=functions.", middle=" <|constrain|>json<|message|>", close="",
    marks=("to=functions.",), joined=None,
    drop=("<|channel|>commentary<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", "<|end|>"),
)  # fmt: skip
MISTRAL_LIST = _object(
    "Mistral v3 to v7",
    "[TOOL_CALLS]",
    "arguments",
    open='{"name": "',
    section=("[TOOL_CALLS][", "]"),
    joined=", ",
    ids="short",
)
MISTRAL = _json("Mistral v11 and later", "[TOOL_CALLS]", middle="[ARGS]", close="", joined="", ids="short")
GEMMA = CallForm(
    "Gemma 4", "<|tool_call>", "<|tool_call>call:", "", "<tool_call|>", "dict",
    rf"<\|tool_call>\s*call:{NAME}(?=\{{)", quote='<|"|>', joined="",
)  # fmt: skip
FUNCTION_GEMMA = CallForm(
    "FunctionGemma", "<start_function_call>", "<start_function_call>call:", "", "<end_function_call>", "dict",
    rf"<start_function_call>\s*call:{NAME}(?=\{{)", quote="<escape>", joined="",
)  # fmt: skip
KIMI = _json(
    "Kimi-K2", "<|tool_call_begin|>", open="<|tool_call_begin|>functions.",
    middle=":{n}<|tool_call_argument_begin|>", close="<|tool_call_end|>", joined="", ids="numbered",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)  # fmt: skip
MINIMAX = _fields(
    "MiniMax-M2", '<invoke name="', '<invoke name="', '">\n', "</invoke>",
    Fields('<parameter name="', '">', '">', "</parameter>\n"),
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
)  # fmt: skip
FORMS = (
    HERMES, QWEN_CODER, GLM, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4, HARMONY, MISTRAL_LIST, MISTRAL,
    GEMMA, FUNCTION_GEMMA, KIMI, MINIMAX, LLAMA,
)  # fmt: skip
THOUGHTS = (
    Thought("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>analysis", True, "<|start|>assistant"),
    Thought("<|channel>thought\n", "<channel|>", "<channel|>"),
    Thought("[THINK]", "[/THINK]", "[/THINK]"),
    Thought("<think>", "</think>", "</think>"),
)
