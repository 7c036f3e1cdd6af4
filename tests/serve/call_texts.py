"""What models of each form write: a chat template with the parts of the published one that speak of tools, and answers
as published models give them. CALLS are the same two calls in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onegraph.api.chat import DEEPSEEK_V4 as V4
from onegraph.serve import forms
from onegraph.serve.forms import CallForm
from onegraph.serve.tools import Tools

CITY: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS: list[Any] = [{"name": "get_weather", "parameters": CITY}, {"name": "now"}]
TOOLS = Tools(tuple({"type": "function", "function": each} for each in FUNCTIONS), (), False, True, False)
CALLS = [("get_weather", {"city": 'Köln "Süd"', "days": 2, "tags": ["a", "b"]}), ("now", {})]
_ARGS = json.dumps(CALLS[0][1], ensure_ascii=False)
D = "｜DSML｜"


def _template(call: str, *, before: str = "", after: str = "", tools: str = "{{ tools | tojson }}") -> str:
    """`call` writes one, as `c`; `before` and `after` stand around all of a message."""
    calls = before + "{% for t in m.tool_calls %}{% set c = t.function %}" + call + "{% endfor %}" + after
    return (
        f"{{% if tools %}}{tools}{{% endif %}}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n"
        f"{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}"
        "{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )


def _fields(key: str, value: str, end: str) -> str:
    return (
        "{% for k, v in c.arguments.items() %}" + key + "{{ k }}" + value
        + "{{ v if v is string else v | tojson }}" + end + "{% endfor %}"
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """text: an answer with CALLS, and `said` ahead of them. control: its marks that are control tokens in published
    tokenizers. one: whether only the first call is in it."""

    form: CallForm
    template: str
    text: str
    said: str = ""
    control: tuple[str, ...] = ()
    one: bool = False


CASES: Mapping[str, Case] = {
    "hermes": Case(
        forms.HERMES,
        _template('\n<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'),
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {_ARGS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        said="Let me see.\n",
    ),
    "llama": Case(
        forms.LLAMA,
        _template('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'),
        f'<|python_tag|>{{"name": "get_weather", "parameters": {_ARGS}}}; {{"name": "now", "parameters": {{}}}}',
        control=("<|python_tag|>",),
    ),
    "qwen_coder": Case(
        forms.QWEN_CODER,
        _template(
            "\n<tool_call>\n<function={{ c.name }}>\n" + _fields("<parameter=", ">\n", "\n</parameter>\n")
            + "</function>\n</tool_call>"
        ),
        'I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln "Süd"\n</parameter>\n<parameter=days>\n'
        '2\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        said="I look.\n\n",
    ),
    "glm": Case(
        forms.GLM,
        _template(
            "\n<tool_call>{{ c.name }}\n" + _fields("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
            + "</tool_call>"
        ),
        'Yes.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln "Süd"</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>tags</arg_key>\n'
        '<arg_value>["a", "b"]</arg_value>\n</tool_call>\n'
        "<tool_call>now\n</tool_call>",
        said="Yes.\n",
    ),
    "deepseek_v3": Case(
        forms.DEEPSEEK_V3,
        _template(
            "{{ '\\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
            "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
        ),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{_ARGS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Case(
        forms.DEEPSEEK_V31,
        _template(
            "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
        ),
        f"A moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ARGS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        said="A moment.",
    ),
    "deepseek_v4": Case(
        forms.DEEPSEEK_V4,
        V4,
        f'Yes.\n\n<{D}tool_calls>\n<{D}invoke name="get_weather">\n<{D}parameter name="city" string="true">Köln "Süd"'
        f'</{D}parameter>\n<{D}parameter name="days" string="false">2</{D}parameter>\n<{D}parameter name="tags" '
        f'string="false">["a", "b"]</{D}parameter>\n</{D}invoke>\n<{D}invoke name="now">\n</{D}invoke></{D}tool_calls>',
        said="Yes.\n\n",
        control=(D,),
    ),
    "harmony": Case(
        forms.HARMONY,
        _template(
            "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
            "{{ c.arguments | tojson }}<|call|>"
        ),
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + _ARGS,
        control=("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"),
        one=True,
    ),
    "mistral_list": Case(
        forms.MISTRAL_LIST,
        _template(
            '{{ ", " if not loop.first }}{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, '
            '"id": "{{ t.id }}"}',
            before="[TOOL_CALLS][", after="]",
        ),
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_ARGS}}}, {{"name": "now", "arguments": {{}}}}]',
        control=("[TOOL_CALLS]",),
    ),
    "mistral": Case(
        forms.MISTRAL,
        _template("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
        f"[TOOL_CALLS]get_weather[ARGS]{_ARGS}[TOOL_CALLS]now[ARGS]{{}}",
        control=("[TOOL_CALLS]", "[ARGS]"),
    ),
    "gemma": Case(
        forms.GEMMA,
        _template(
            "<|tool_call>call:{{ c.name }}{{ '{' }}"
            '{% for k, v in c.arguments.items() %}{{ k }}:<|"|>{{ v }}<|"|>{{ "," if not loop.last }}{% endfor %}'
            "}<tool_call|>"
        ),
        '<|tool_call>call:get_weather{city:<|"|>Köln "Süd"<|"|>,days:2,tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        control=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "function_gemma": Case(
        forms.FUNCTION_GEMMA,
        _template(
            "<start_function_call>call:{{ c.name }}{{ '{' }}"
            "{% for k, v in c.arguments.items() %}{{ k }}:<escape>{{ v }}<escape>{% endfor %}}<end_function_call>"
        ),
        'So <start_function_call>call:get_weather{city:<escape>Köln "Süd"<escape>,days:2,tags:[<escape>a<escape>,'
        "<escape>b<escape>]}<end_function_call><start_function_call>call:now{}<end_function_call>",
        said="So ",
    ),
    "kimi": Case(
        forms.KIMI,
        _template(
            "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>",
            before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_ARGS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        control=("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_calls_section_end|>"),
    ),
    "minimax": Case(
        forms.MINIMAX,
        _template(
            '<invoke name="{{ c.name }}">\n' + _fields('<parameter name="', '">', "</parameter>\n") + "</invoke>\n",
            before="\n<minimax:tool_call>\n", after="</minimax:tool_call>",
        ),
        'Now:\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln "Süd"</parameter>\n'
        '<parameter name="days">2</parameter>\n<parameter name="tags">["a", "b"]</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke></minimax:tool_call>',
        said="Now:\n",
    ),
}  # fmt: skip
