"""Calls as a constraint: a Lark grammar, in llguidance's dialect, of answers that call tools in a form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onegraph.api.constraint import TOO_DEEP
from onegraph.engine.arguments import ArgumentError
from onegraph.serve.forms import CallForm, Fields, Thought
from onegraph.serve.schemas import resolve, types_of
from onegraph.serve.tools import NO_ARGUMENTS

Json = Any  # what json.loads gives
MAX_CALLS = 16  # of one answer, where a call is forced
MAX_SHARED = 1 << 20  # characters of a grammar for definitions, which each value between marks repeats
# JSON in a line, as templates write it: of whitespace without a limit some models write no end
_JSON = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}}
_ANY, EMPTY = r"/(.|\n)*/", '""'
# Keys of a schema for texts that a text between marks holds without further checks
_FREE = {"type", "title", "description", "default", "examples"}


class CallGrammar:
    """Writes grammars for one form.

    control: the ids of control tokens by their text. A grammar takes those only by id; other marks are text.
    """

    def __init__(self, form: CallForm, control: Mapping[str, int], thought: Thought | None = None) -> None:
        self._form, self._thought, self._rules = form, thought, list[str]()
        names = sorted(control, key=len, reverse=True)
        self._control = control
        self._split = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def forced(
        self, functions: Sequence[Mapping[str, Json]], *, several: bool, opened: bool, thinking: bool
    ) -> str | None:
        """One call or more to `functions`, after a thought where the prompt has `opened` one or `thinking` may begin.
        None where the form cannot hold a schema exactly."""
        call = self._calls(functions)
        if call is None:
            return None
        joined = self._literal(self._form.joined or "")
        more = f" ({joined} call){{0,{MAX_CALLS - 1}}}" if several and self._form.joined is not None else ""
        section = [self._literal(each) for each in self._form.section]
        return self._written(f"{self._thoughts(opened, thinking)} {section[0]} call{more} {section[1]}", call)

    def allowed(self, functions: Sequence[Mapping[str, Json]], *, several: bool) -> str | None:
        """Any text, in which calls hold the schemas of `functions`. None as `forced`."""
        call = self._calls(functions)
        if call is None:
            return None
        form, section = self._form, self._form.section
        joined = self._literal(form.joined or "")
        more = f" ({joined} call)*" if several and form.joined is not None else ""
        marks = [*form.drop, *((self._thought.begin, self._thought.end) if self._thought else ())]
        ids = dict.fromkeys(self._control[name] for mark in marks for name in self._split.findall(mark))
        if not form.mark:  # an answer that begins as an object is a call
            begins = " | ".join(f"<[{i}]>" for i in ids)
            ahead = f"({begins})? " if begins else ""
            return self._written(rf"{ahead}call{more} | /\s*[^\s{{](.|\n)*/", call)
        begin = section[0] or form.open
        mark = section[0].strip() or form.mark
        rest = begin[len(mark) :] if section[0] else ""
        token = self._split.search(mark)
        word = mark[token.end() :] if token else mark
        behind = f"{self._literal(rest)} call{more} {self._literal(section[1])}" if section[0] else f"tail{more}"
        if not section[0]:
            call = [*call, *self._tails(functions)]
        own = self._control[token.group()] if token else None
        others = [f"<[{i}]>" for i in ids if i != own or word]
        told_by_text = bool(word) and (own is None or f"<[{own}]>" in others)
        excluded = rf" & ~/(.|\n)*{_regex(word)}(.|\n)*/" if told_by_text else ""
        self._rules.append(rf"TEXT: /(.|\n)+/{excluded}")
        free = f"TEXT? (({' | '.join(others)}) TEXT?)*" if others else "TEXT?"
        if token is None:
            self._rules.append(rf"trigger[lazy]: /(.|\n)*{_regex(word)}/")
            ahead = f"(TEXT? ({' | '.join(others)}))* trigger" if others else "trigger"
        else:
            ahead = f"{free} {self._literal(mark[token.start() :])}"  # text ahead of the token is TEXT's
        return self._written(f"{free} | {ahead} {behind}", call)

    def after_thought(self, constraint: Mapping[str, Json]) -> str:
        """A "json_schema" or "regex" behind the end of a thought that the prompt has opened. Raises ValueError for a
        schema that is no JSON, or is nested too deeply to be read or written."""
        if "regex" in constraint:
            # Between slashes: a slash or a line feed in it, escaped or not, gets another name
            regex = re.sub(r"\\.|/|\n", _named, constraint["regex"], flags=re.DOTALL)
            body = f"/{regex}/"
        else:
            schema = constraint["json_schema"]
            try:
                body = _json(json.loads(schema) if isinstance(schema, str) else schema)
            except RecursionError:
                raise ArgumentError("json_schema", TOO_DEEP) from None
        return self._written(f"{self._thoughts(True, False)} {body}", [])

    # ------------------------------------------------------------------------------------------------------------ calls

    def _calls(self, functions: Sequence[Mapping[str, Json]]) -> list[str] | None:
        """The rule `call` and what it needs."""
        bodies = [self._arguments(i, function) for i, function in enumerate(functions)]
        if any(body is None for body in bodies):
            return None
        form = self._form
        heads = [self._literal(form.open + function["name"]) + self._middle() for function in functions]
        close = self._literal(form.close)
        rules = [f"call_{i}: {head} args_{i} {close}" for i, head in enumerate(heads)]
        return [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}", *rules]

    def _tails(self, functions: Sequence[Mapping[str, Json]]) -> list[str]:
        """The rule `tail`: a call without the mark that it begins with."""
        form = self._form
        open_ = form.open[len(form.mark) :]
        heads = [self._literal(open_ + function["name"]) + self._middle() for function in functions]
        close = self._literal(form.close)
        return ["tail: " + " | ".join(f"{head} args_{i} {close}" for i, head in enumerate(heads))]

    def _middle(self) -> str:
        number = " /[0-9]{1,4}/ "
        return " " + number.join(map(self._literal, self._form.middle.split("{n}")))

    def _arguments(self, index: int, function: Mapping[str, Json]) -> str | None:
        """Writes the rule args_{index}; None where the form cannot hold the schema."""
        schema = dict(function.get("parameters") or NO_ARGUMENTS)
        if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}:
            schema["type"] = "object"
        fields = self._form.arguments
        if fields == "dict":
            return None
        if not isinstance(fields, Fields):
            self._rules.append(f"args_{index}: {_json(schema)}")
            return ""
        return self._fields(index, fields, resolve(schema, schema), schema)

    def _fields(self, index: int, fields: Fields, schema: Json, root: Json) -> str | None:
        known = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "$schema",
                 "definitions", "strict"}  # fmt: skip
        if not isinstance(schema, dict) or schema.get("type") != "object" or schema.keys() - known:
            return None
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        properties = schema.get("properties") or {}
        if len(properties) * len(json.dumps(shared)) > MAX_SHARED:
            return None
        body = []
        for number, (name, own) in enumerate(properties.items()):
            value = self._value(f"value_{index}_{number}", fields, own, root, shared)
            if value is None:
                return None
            field = f"{self._literal(fields.key + name)} {value}"
            body.append(field if name in (schema.get("required") or ()) else f"({field})?")
        self._rules.append(f"args_{index}: {' '.join(body) or EMPTY}")
        return ""

    def _value(self, rule: str, fields: Fields, own: Json, root: Json, shared: Json) -> str | None:
        types, plain = types_of(own, root), resolve(own, root)
        if types is None or not isinstance(plain, dict):
            return None
        if "string" not in types:
            body = _json({**own, **shared})
            return f"{self._literal(fields.other)} {body} {self._literal(fields.end)}"
        if types != {"string"}:
            return None
        words = plain.get("enum") or ([plain["const"]] if "const" in plain else None)
        if words is not None and not plain.keys() - _FREE - {"enum", "const"}:
            texts = [word for word in words if isinstance(word, str)]  # others are not of the type
            if not texts:
                return None
            body = " | ".join(self._literal(text) or EMPTY for text in texts)
            return f"{self._literal(fields.text)} ({body}) {self._literal(fields.end)}"
        if plain.keys() - _FREE:
            return None
        return f"{self._literal(fields.text)} {self._until(rule, fields.end)}"

    # ------------------------------------------------------------------------------------------------------------ parts

    def _thoughts(self, opened: bool, thinking: bool) -> str:
        if self._thought is None or not (opened or thinking):
            return ""
        blanks = r"/[ \n]{0,4}/" if not self._thought.after else ""
        end = f"{self._until('thought', self._thought.end)} {self._literal(self._thought.after)} {blanks}"
        return end if opened else f"({self._literal(self._thought.begin)} {end})?"

    def _until(self, rule: str, end: str) -> str:
        """Any text up to and with `end`."""
        token = self._split.search(end)
        if token is not None and token.start() == 0:
            return f"{_ANY} {self._literal(end)}"
        words = (end[: token.start()] if token else end).rstrip() or end
        self._rules.append(f"{rule}[suffix={json.dumps(words, ensure_ascii=False)}]: {_ANY}")
        return f"{rule} {self._literal(end[len(words) :])}"

    def _literal(self, text: str) -> str:
        found, at = [], 0
        for token in self._split.finditer(text):
            found += [_quoted(text[at : token.start()]), f"<[{self._control[token.group()]}]>"]
            at = token.end()
        return " ".join(filter(None, [*found, _quoted(text[at:])]))

    def _written(self, start: str, rules: Sequence[str]) -> str:
        return "\n".join([f"start: {start}", *rules, *self._rules, ""])


def _json(schema: Json) -> str:
    """A JSON schema as part of a rule."""
    return f"%json {json.dumps(schema | _JSON if isinstance(schema, dict) else schema)}"


def _named(found: re.Match[str]) -> str:
    return {"/": r"\x2f", "\n": r"\n"}.get(found[0][-1], found[0])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex(text: str) -> str:
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)
