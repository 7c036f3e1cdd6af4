"""The text of an answer -> thoughts, content and calls, as soon as each is certain, wherever the text is cut."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onegraph.api.completion import overlap
from onegraph.serve.call_arguments import JsonReader, Reader, reader
from onegraph.serve.forms import NAME, CallForm, Thought
from onegraph.serve.tools import Tools

Json = Any  # what json.loads gives
MAX_HEAD = 300  # characters between a mark and the arguments


@dataclass(frozen=True)
class CallPart:
    """A piece of a call: its number in the answer, id and name where it begins, and JSON text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Parts:
    """What a piece of an answer's text adds to the answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()


class AnswerReader:
    """Reads one answer.

    A call begins with a mark of the form, a name and the beginning of arguments; without one of them, the mark is
    content. From there on everything up to the end of the arguments belongs to the call, also where the answer ends
    first.

    Args:
        form: how calls are written. tools: that the answer may call; None where no calls are expected.
        thought: the marks of thoughts; None where none are expected. opened: whether the prompt ends within a thought.
    """

    def __init__(
        self, form: CallForm | None, tools: Tools | None, thought: Thought | None = None, opened: bool = False
    ) -> None:
        self._form, self._tools, self._thought = form, tools, thought
        expected = form is not None and tools is not None
        self._calling = tuple(filter(None, (form.mark, *form.marks))) if form and expected else ()
        self._marks = () if form is None else form.all_marks if expected else form.drop
        self._head = re.compile("(?!)" if form is None else form.head)
        self._object = form is not None and expected and form.arguments == "object"
        self._state: Callable[[bool], bool] = self._read_thought if opened else self._read_text
        self._held = ""
        self._begun = opened  # whether there is content, a thought or a call
        self._strip = opened  # whether whitespace that comes next is dropped: it belongs to marks
        self.count = 0  # calls
        self._arguments: Reader = JsonReader()
        self._whole, self._scanned = JsonReader(), 0  # of an object that is a call
        self._closing: list[str] = []  # marks that may follow the arguments
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._parts: list[CallPart] = []

    def push(self, text: str, final: bool) -> Parts:
        self._held += text
        while self._state(final):
            pass
        made = Parts("".join(self._content), "".join(self._reasoning), tuple(self._parts))
        self._content, self._reasoning, self._parts = [], [], []
        return made

    # The states. Each reads from what is held, and returns whether another has more to read.

    def _read_text(self, final: bool) -> bool:
        thought = self._thought if self._thought and (self._thought.anywhere or not self._begun) else None
        bare = self._object and (self.count > 0 or not (self._calling or self._begun))  # an object may be a call
        body = self._held.lstrip(" \t\r\n" + (",;[]" if bare and self.count else ""))
        if self._strip:
            self._held = body
        if (not self._begun or self._strip) and not final and not body:
            return False
        if bare and body.startswith("{") and (not self._begun or self._strip):
            return self._go(self._read_head, body)
        if thought and not self._begun:
            if body.startswith(thought.begin):
                return self._think(body[len(thought.begin) :])
            if thought.begin.startswith(body) and not final:
                return False
        marks = (*self._marks, thought.begin) if thought and thought.anywhere else self._marks
        found = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            keep = 0 if final else max((overlap(self._held, mark) for mark in marks), default=0)
            if final or self._begun or not self._held[: len(self._held) - keep].isspace():
                self._say(len(self._held) - keep)
            return False
        at, _, mark = min(found)
        if self._begun or not self._held[:at].isspace():
            self._say(at)
        self._held = self._held[self._held.index(mark) :]
        if mark in self._calling:
            return self._go(self._read_head, self._held)
        self._strip = True
        rest = self._held[len(mark) :]
        return self._think(rest) if thought and mark == thought.begin else self._go(self._read_text, rest)

    def _read_thought(self, final: bool) -> bool:
        end = "</think>" if self._thought is None else self._thought.end
        if self._strip:
            self._held = self._held.lstrip()
        at = self._held.find(end)
        size = at if at >= 0 else len(self._held) - (0 if final else overlap(self._held, end))
        told = self._held[:size].rstrip()  # whitespace ahead of the end is the mark's
        self._reasoning += [told] if told else []
        self._strip = self._strip and not told
        if at < 0:
            self._held = "" if final else self._held[len(told) :]
            return False
        self._strip = True
        return self._go(self._read_text, self._held[at + len(end) :])

    def _read_head(self, final: bool) -> bool:
        assert self._form is not None
        if found := self._head.match(self._held):
            if self._calling or found["name"] in self._names:
                self._begin(found["name"])
                return self._go(self._read_arguments, self._held[found.end() :])
        elif self._object:
            if (more := self._read_object()) is not None and not (final and not more):
                return more
        elif not final and len(self._held) < MAX_HEAD and not self._ended():
            return False
        size = next((len(mark) for mark in self._calling if self._held.startswith(mark)), 1)
        self._whole, self._scanned = JsonReader(), 0
        self._say(size)
        return self._go(self._read_text, self._held)

    def _read_object(self) -> bool | None:
        """A call whose name and arguments come in another order than usual. False where more text is needed, None where
        it is no call."""
        body = self._held.removeprefix(self._form.mark if self._form else "").lstrip(" \t\r\n[")
        if body[:1] not in ("", "{"):
            return None
        self._whole.push(body[self._scanned :])
        self._scanned = len(body)
        if not self._whole.done:
            return False
        rest = self._whole.rest
        call = parse_object(body[: len(body) - len(rest)])
        self._whole, self._scanned = JsonReader(), 0
        if call is None or not (self._calling or call[0] in self._names):
            return None
        self._begin(call[0])
        self._tell(CallPart(self.count - 1, arguments=call[1]))
        self._whole.done = True
        return self._go(self._read_tail, rest)

    def _read_arguments(self, final: bool) -> bool:
        text = self._arguments.push(self._held, final)
        self._held = ""
        if text:
            self._tell(CallPart(self.count - 1, arguments=text))
        if not self._arguments.done:
            return False
        self._whole, self._scanned = JsonReader(depth=1), 0
        return self._go(self._read_tail, self._arguments.rest)

    def _read_tail(self, final: bool) -> bool:
        """What closes a call, as far as it is there."""
        if self._object and not self._whole.done:
            self._whole.push(self._held)
            if not self._whole.done:
                self._held = ""
                return False
            self._held = self._whole.rest
        while self._closing:
            self._held = self._held.lstrip(" \t\r\n`")
            if self._held.startswith(self._closing[0]):
                self._held = self._held[len(self._closing[0]) :]
            elif self._closing[0].startswith(self._held):
                self._held = "" if final else self._held
                return False
            self._closing.pop(0)
        self._whole = JsonReader()
        return self._go(self._read_text, self._held)

    def _go(self, state: Callable[[bool], bool], held: str) -> bool:
        self._state, self._held = state, held
        return True

    def _think(self, held: str) -> bool:
        self._begun = self._strip = True
        return self._go(self._read_thought, held)

    def _say(self, size: int) -> None:
        """So many characters of what is held are content."""
        said, self._held = self._held[:size], self._held[size:]
        if said:
            self._content.append(said)
            self._begun, self._strip = True, False

    def _begin(self, name: str) -> None:
        assert self._form is not None
        self._begun = self._strip = True
        self.count += 1
        self._tell(CallPart(self.count - 1, f"call_{uuid.uuid4().hex[:24]}", name))
        self._arguments = reader(self._form, self._schema(name))
        self._closing = [mark for part in self._form.close.split("\n") if (mark := part.strip("}` "))]

    def _tell(self, part: CallPart) -> None:
        if part.index == 0 or self._tools is None or self._tools.several:
            self._parts.append(part)

    def _ended(self) -> bool:
        assert self._form is not None
        close = self._form.close.split("\n")[-1]
        return bool(close) and close in self._held

    @property
    def _names(self) -> list[str]:
        return [] if self._tools is None else self._tools.names

    def _schema(self, name: str) -> Json:
        """Of the parameters of a function; None of one that is not among the tools."""
        functions = () if self._tools is None else (tool["function"] for tool in self._tools.defined)
        return next((each.get("parameters") or {} for each in functions if each["name"] == name), None)


def parse_object(text: str) -> tuple[str, str] | None:
    """Name and JSON text of the arguments of a call that is an object; None for what is none."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(name := call.get("name"), str) or not re.fullmatch(NAME, name):
        return None
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
