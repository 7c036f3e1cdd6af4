"""A conversation as the checkpoint's chat template writes it: what is the template's in it, and what the messages'."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from onegraph.api.sandbox import Exhausted, Sandbox, SandboxWorkerError
from onegraph.engine.arguments import ArgumentError

SECONDS = 3  # of CPU time, a rendering
MEMORY = 1 << 30  # bytes of address space
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")
THINKING = ("enable_thinking", "thinking")  # what templates call the switch: Qwen, SmolLM and GLM; DeepSeek and Granite
EFFORT = "reasoning_effort"  # what they call how much to think: gpt-oss, Mistral, Hy3
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's

Thinking = bool | str | None  # on or off, one of EFFORTS, or what the template does

Tools = Sequence[Mapping[str, Any]]  # functions that a model may call, as OpenAI's API describes them

# DeepSeek-V4's checkpoints bring a Python file instead of a template: this is what it writes in chat mode (the block of
# thoughts is closed at once). Users' messages in a row are one, and so are results of tools.
DEEPSEEK_V4 = """\
{%- macro about(tools) -%}
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{% for tool in tools %}{{ tool.function | tojson }}{{ '\\n' if not loop.last }}{% endfor %}


You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
{% endmacro -%}
{{ '<｜begin▁of▁sentence｜>' }}
{%- if tools and messages[0].role != 'system' %}{{ about(tools) }}{% endif %}
{%- for m in messages %}
    {%- set user = m.role in ('user', 'tool') %}
    {%- set again = loop.previtem is defined and loop.previtem.role in ('user', 'tool') %}
    {%- if m.role == 'system' %}
        {{- m.content }}{{ '\\n\\n' ~ about(tools) if tools and loop.first }}
    {%- elif user %}
        {{- '\\n\\n' if again else '<｜User｜>' }}
        {{- m.content if m.role == 'user' else '<tool_result>' ~ m.content ~ '</tool_result>' }}
        {%- if loop.last or loop.nextitem.role == 'assistant' %}{{ '<｜Assistant｜></think>' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {{- m.content }}
        {%- if m.tool_calls %}
            {{- '\\n\\n<｜DSML｜tool_calls>\\n' }}
            {%- for call in m.tool_calls %}
                {{- '<｜DSML｜invoke name="' ~ call.function.name ~ '">\\n' }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') }}
                    {{- '">' ~ (value if value is string else value | tojson) ~ '</｜DSML｜parameter>\\n' }}
                {%- endfor %}
                {{- '</｜DSML｜invoke>\\n' }}
            {%- endfor %}
            {{- '</｜DSML｜tool_calls>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- else %}
        {{- raise_exception('role ' ~ m.role ~ ' is not supported') }}
    {%- endif %}
{%- endfor %}"""


class TemplateError(ValueError):
    """A chat template that is not there, or does not render."""


class ThinkingError(ArgumentError, TemplateError):
    """A chat template without a switch for `thinking`, or without efforts."""


class ChatTemplate:
    """A template with the variables that it sees, rendered where it can do no harm: it came with the weights, is a
    program, and Jinja's sandbox keeps it neither from looping for ever nor, for certain, from Python's objects."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source, self.variables = source, dict(variables)
        self._cage = Sandbox("templates", MEMORY)

    @cached_property
    def switch(self) -> str | None:
        """The variable that turns thinking on and off, None for a template whose text depends on none. Raises
        TemplateError for a template that does not render a question."""
        question = [{"role": "user", "content": "Hi"}]

        def differs(name: str) -> bool:
            on, off = (self._render(question, {name: value}) for value in (True, False))
            return on != off

        return next(filter(differs, THINKING), None)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: Thinking = None,
        tools: Tools | None = None,
        *,
        complete: bool = False,
    ) -> str:
        """The conversation, ready for the answer, or `complete` with it. `thinking` turns the model's thoughts on or
        off, or is an effort: for the template to read, or, of one that reads none, on unless it is "none". None leaves
        it to the template; `tools` are what the model may call. Raises TemplateError where it does not render, or has
        no such switch."""
        given: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
        given |= {"add_generation_prompt": False} if complete else {}
        if thinking is None:
            return self._render(messages, given)
        if isinstance(thinking, str) and EFFORT in self.source:
            return self._render(messages, {EFFORT: thinking} | given)
        if self.switch is None:
            raise ThinkingError(
                "thinking",
                "thinking: the checkpoint's chat template has no switch for it; leave it out",
            )
        return self._render(messages, {self.switch: thinking not in (False, "none")} | given)

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        plain = list(map(dict, messages))
        try:
            text: str = self._cage.call(
                "render",
                seconds=SECONDS,
                template=self.source,
                messages=plain,
                variables={**self.variables, **variables},
            )
        except Exhausted as error:
            raise TemplateError(f"the checkpoint's chat template {error}") from None
        except SandboxWorkerError as error:
            raise TemplateError(f"the checkpoint's chat template failed: {error}") from None
        return text

    def copy(self) -> ChatTemplate:
        """The same template in a process of its own."""
        return ChatTemplate(self.source, self.variables)

    def interrupt(self) -> None:
        """As `Tokenizer.interrupt`."""
        self._cage.interrupt()

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: Thinking = None,
        tools: Tools | None = None,
        names: Sequence[str] = (),
    ) -> list[str] | None:
        """The rendered text as [template's, message's, template's, ..., template's].

        A message's are its content, and other texts of messages and tools but for plain words that hold none of
        `names`. None where the template does more with one than to put it somewhere, as it is or in JSON, or to strip
        blanks from its ends.
        """
        texts: dict[str, str] = {}

        def mark(text: str) -> str:
            if not (bare := text.strip()):
                return text
            found = f"x{secrets.token_hex(16)}x"
            texts[found] = bare
            return text.replace(bare, found)  # its blanks stay, for templates that strip them

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return value if _PLAIN.fullmatch(value) and not any(n in value for n in names) else mark(value)
            if isinstance(value, Mapping):
                return {marked(key): marked(each) for key, each in value.items()}
            return list(map(marked, value)) if isinstance(value, list | tuple) else value

        own = [
            {**marked({**message, "content": ""}), "role": message["role"], "content": mark(message["content"])}
            for message in messages
        ]
        rendered = self.render(own, thinking, None if tools is None else marked(list(tools)))
        pieces = re.split(f"({'|'.join(texts)})", rendered) if texts else [rendered]
        whole = self.render(messages, thinking, tools)
        found, at = [pieces[0]], len(pieces[0])
        for piece, behind in zip(pieces[1::2], pieces[2::2], strict=True):
            text = texts[piece]
            forms = (text, json.dumps(text, ensure_ascii=False)[1:-1])
            form = next((each for each in forms if whole.startswith(each + behind, at)), None)
            if form is None:
                return None
            found += [form, behind]
            at += len(form) + len(behind)
        return found if at == len(whole) and whole.startswith(pieces[0]) else None
