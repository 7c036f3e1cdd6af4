"""A model's way to think and to call functions, and what of it one request needs: the narrow side that endpoints use.

`Dialect.answer_form` says how the answers to a request are read and constrained; `AnswerForm.reader` reads one of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from onegraph.api.chat import ChatTemplate, TemplateError, Thinking
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.arguments import ArgumentError
from onegraph.serve.call_grammar import CallGrammar
from onegraph.serve.calls import AnswerReader
from onegraph.serve.forms import BARE, FORMS, HERMES, THOUGHTS, CallForm, Thought
from onegraph.serve.tools import Tools

Json = Any  # what json.loads gives
Message = dict[str, Any]
_WORD = "xprobe"
_ARGUMENTS = {"xkey": "xvalue"}
_ASK: Message = {"role": "user", "content": "Hi"}
# For models whose template has no tools, or calls in an unknown form
_SYSTEM = """\
You may call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call a function, write this and nothing behind it:
<tool_call>
{{"name": <its name>, "arguments": <an object with its arguments>}}
</tool_call>"""


@dataclass(frozen=True)
class AnswerForm:
    """How the answers to one request are read. grammar: what they must match, in place of the request's own
    constraint; None for that. keep: control tokens that are marks, and so become text.

    form, tools, thought, opened: as `AnswerReader` has them.
    """

    form: CallForm | None = None
    tools: Tools | None = None
    thought: Thought | None = None
    opened: bool = False
    grammar: str | None = None
    keep: frozenset[int] = frozenset()

    def reader(self) -> AnswerReader | None:
        """For one answer; None where its text is all there is."""
        marked = self.tools is not None or self.thought is not None or bool(self.form and self.form.drop)
        return AnswerReader(self.form, self.tools, self.thought, self.opened) if marked else None


class Dialect:
    """Of one model, by its tokenizer and chat template.

    form: how it writes calls. native: whether the template itself writes tools and calls in this form; otherwise
    `messages` writes them. thought: its marks of thoughts, None where the template knows none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._template, self._control = tokenizer.template, tokenizer.control_tokens
        found = find_form(self._template)
        self.form, self.native = found or HERMES, found is not None
        source = "" if self._template is None else self._template.source
        self.thought = next((each for each in THOUGHTS if each.known in source), None)
        self._opened = cache(self._find_opened)

    def messages(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[Sequence[Message], tuple[Mapping[str, Json], ...] | None]:
        """Messages and tools as the template takes them."""
        defined = None if tools is None else tools.defined
        if self.native:
            return [*_renamed(messages, self.form)], defined
        written = [*map(_as_text, messages)]
        if defined is None:
            return written, None
        about = _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in defined))
        if not self._takes_system:
            return _ahead(written, "user", about), None
        if written and written[0]["role"] == "system":
            return _ahead(written, "system", written[0]["content"] + "\n\n" + about, replaced=True), None
        return [{"role": "system", "content": about}, *written], None

    def answer_form(
        self, tools: Tools | None, thinking: Thinking, constraint: Mapping[str, Json] | None = None
    ) -> AnswerForm:
        """For a chat with these tools. constraint: the request's own "json_schema" or "regex".

        Raises ArgumentError where a strict tool cannot be held.
        """
        form, grammar, opened = self.form, None, self._opened(thinking)
        write = CallGrammar(form, self._control, self.thought)
        if tools is not None and tools.called:
            may_think = thinking not in (False, "none") and self.thought is not None
            how: dict[str, Any] = {"several": tools.several and tools.required, "opened": opened, "thinking": may_think}
            grammar = write.forced(tools.called, **how)
            if grammar is None:
                form = BARE
                grammar = CallGrammar(BARE, self._control, self.thought).forced(tools.called, **how)
        elif tools is not None and tools.strict and not constraint:
            grammar = write.allowed([tool["function"] for tool in tools.defined], several=tools.several)
            if grammar is None:
                raise ArgumentError(
                    "tools",
                    f"tools: calls in the form of {form.name} cannot be held to a strict schema under tool_choice "
                    "auto; leave strict out, or set tool_choice to required",
                )
        elif constraint and opened:
            grammar = write.after_thought(constraint)
        marks = [] if self.thought is None else [self.thought.begin, self.thought.end]
        marks += form.drop if tools is None else [*form.all_marks, form.open, form.middle, form.close, form.quote]
        keep = frozenset(i for name, i in self._control.items() if any(name in mark for mark in marks))
        return AnswerForm(form, tools, self.thought, opened, grammar, keep)

    def _find_opened(self, thinking: Thinking) -> bool:
        """Whether the template begins the answer's thought."""
        if self.thought is None or self._template is None:
            return False
        try:
            text = self._template.render([_ASK], thinking)
        except (TemplateError, ArgumentError):
            return False
        return text.rstrip().endswith(self.thought.begin.rstrip())

    @cached_property
    def _takes_system(self) -> bool:
        try:
            text = "" if self._template is None else self._template.render([{"role": "system", "content": "xab"}, _ASK])
        except TemplateError:
            return False
        return "xab" in text


def find_form(template: ChatTemplate | None) -> CallForm | None:
    """How the model of a template calls functions, by what the template makes of a call; None where it knows no tools,
    or writes calls in another form."""
    if template is None:
        return None
    function = {"name": _WORD, "description": "xabout", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    for id_ in ("call00000", f"functions.{_WORD}:0"):
        call = {"id": id_, "type": "function", "function": {"name": _WORD, "arguments": _ARGUMENTS}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "xdone", "tool_call_id": id_, "name": _WORD}
        for turns in ([_ASK, said, result], [_ASK, said, _ASK]):
            try:
                text = template.render(turns, tools=[tool])
            except TemplateError:
                continue
            if "xabout" not in text:
                return None
            if found := next((form for form in FORMS if _writes(form, text, (tool,))), None):
                return found
    return None


def _writes(form: CallForm, text: str, tools: tuple[dict[str, Json], ...]) -> bool:
    """Whether a conversation has the call in this form."""
    starts = [0] if form.mark else [at for at in range(len(text)) if text.startswith('{"name"', at)]
    if form.section[0] and form.section[0].strip() not in text:
        return False
    for start in starts:
        answer = AnswerReader(form, Tools(tools, (), False, True, False))
        calls: dict[int, list[str]] = {}
        for part in answer.push(text[start:], final=True).calls:
            calls.setdefault(part.index, []).extend([part.name or "", part.arguments])
        for name, *arguments in calls.values():
            try:
                if name == _WORD and json.loads("".join(arguments)) == _ARGUMENTS:
                    return True
            except ValueError:
                pass
    return False


def _renamed(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """With ids of calls as the template takes them."""
    if not form.ids:
        return list(messages)
    names: dict[str, str] = {}
    found, count = [], 0
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = []
            for call in calls:
                old, name = str(call.get("id")), call["function"]["name"]
                names[old] = f"functions.{name}:{count}" if form.ids == "numbered" else _short(old)
                message["tool_calls"].append(call | {"id": names[old]})
                count += 1
        elif "tool_call_id" in message:
            old = message["tool_call_id"]
            message["tool_call_id"] = names.get(old, old if form.ids == "numbered" else _short(old))
        found.append(message)
    return found


def _short(id_: str) -> str:
    """Nine letters and digits, which Mistral's templates insist on."""
    return id_ if len(id_) == 9 and id_.isalnum() else hashlib.sha256(id_.encode("utf-8", "replace")).hexdigest()[:9]


def _as_text(message: Message) -> Message:
    """Without fields that only templates with tools read."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [
        HERMES.open + call["name"] + HERMES.middle + json.dumps(call["arguments"], ensure_ascii=False) + HERMES.close
        for call in calls
    ]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {"role": message["role"], "content": content}


def _ahead(messages: list[Message], role: str, text: str, *, replaced: bool = False) -> list[Message]:
    """`text` ahead of the first message of a role, or in its place."""
    found, done = [], False
    for message in messages:
        if message["role"] == role and not done:
            message = message | {"content": text if replaced else f"{text}\n\n{message['content']}"}
            done = True
        found.append(message)
    return found if done else [{"role": role, "content": text}, *found]
