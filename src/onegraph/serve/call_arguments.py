"""The arguments of a call as a model writes them -> JSON text, piece by piece.

Each reader takes text with `push(text, final)` and returns what that adds to the JSON. It is `done` behind the last
character of the arguments; `rest` is the text from there on.
"""

from __future__ import annotations

import json
import re
from typing import Any

from onegraph.api.completion import overlap
from onegraph.serve.forms import CallForm, Fields, loose
from onegraph.serve.schemas import property_of, type_name, types_of

Json = Any  # what json.loads gives
_CONSTANTS = {"True": True, "False": False, "None": None}  # some templates write Python's


class JsonReader:
    """An object in JSON, passed on as it is."""

    def __init__(self, depth: int = 0) -> None:
        """depth: braces that are open already, where the beginning of the object is read."""
        self.done, self.rest = False, ""
        self._depth, self._string, self._escaped = depth, False, False

    def push(self, text: str, final: bool = False) -> str:
        for at, c in enumerate(text):
            if self._string:
                self._string = self._escaped or c != '"'
                self._escaped = not self._escaped and c == "\\"
            elif c == '"':
                self._string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done, self.rest = True, text[at + 1 :]
                    return text[: at + 1]
        return text


class DictReader:
    """An object with bare keys, and texts between quotes of their own: {key:<|"|>text<|"|>,count:3}."""

    def __init__(self, quote: str) -> None:
        self.done, self.rest = False, ""
        self._quote, self._held, self._word, self._depth, self._string = quote, "", "", 0, False

    def push(self, text: str, final: bool = False) -> str:
        self._held += text
        out = []
        while self._held and not self.done:
            if self._string:
                at = self._held.find(self._quote)
                size = at if at >= 0 else len(self._held) - overlap(self._held, self._quote)
                out.append(json.dumps(self._held[:size], ensure_ascii=False)[1:-1])
                self._held = self._held[size:]
                if at < 0:
                    break
                self._close(out)
            elif self._held.startswith(self._quote):
                self._close(out)
            elif self._quote.startswith(self._held) and not final:
                break
            else:
                self._bare(out)
        if self.done:
            self.rest, self._held = self._held, ""
        return "".join(out)

    def _close(self, out: list[str]) -> None:
        self._held, self._string = self._held[len(self._quote) :], not self._string
        out.append('"')

    def _bare(self, out: list[str]) -> None:
        c, self._held = self._held[0], self._held[1:]
        if c not in "{}[]:,":
            self._word += c
            return
        if word := self._word.strip():
            out.append(json.dumps(word, ensure_ascii=False) if c == ":" or _parsed(word) is None else word)
        self._word = ""
        out.append(c)
        self._depth += (c in "{[") - (c in "}]")
        self.done = self._depth == 0


class FieldReader:
    """Keys and values between marks. A value is text where the schema allows nothing else, or the mark says so; other
    values are JSON where the schema allows that, and text otherwise."""

    def __init__(self, fields: Fields, close: str, schema: Json) -> None:
        self.done, self.rest = False, ""
        self._fields, self._schema = fields, schema
        self._close = close.split("\n")[0]
        values = "|".join(loose(each.strip()) for each in dict.fromkeys((fields.text, fields.other)))
        self._key = re.compile(rf"{re.escape(fields.key)}\s*(.*?)\s*({values})", re.DOTALL)
        self._end, self._trim = fields.end.strip(), fields.text.endswith("\n")
        self._held, self._seen = "", 0
        self._types: set[str] | None = None
        self._value: str | None = None  # "text" that is passed on, "open" that waits for its end; None between fields

    def push(self, text: str, final: bool = False) -> str:
        self._held += text
        out: list[str] = []
        while not self.done and (self._between(out) if self._value is None else self._within(out, final)):
            pass
        return "".join(out)

    def _between(self, out: list[str]) -> bool:
        key, close = self._held.find(self._fields.key), self._held.find(self._close)
        if close >= 0 and not 0 <= key < close:
            self.done, self.rest, self._held = True, self._held[close:], ""
            out.append("}" if self._seen else "{}")
            return False
        found = self._key.search(self._held)
        if key < 0 or found is None:
            return False
        name = found[1]
        self._types = None if self._schema is None else types_of(property_of(self._schema, name), self._schema)
        if self._fields.text != self._fields.other:  # the mark says which
            if re.sub(r"\s", "", found[2]) == re.sub(r"\s", "", self._fields.text):
                self._types = {"string"}
            elif self._types is not None:
                self._types = self._types - {"string"} or None
        out.append(("{" if self._seen == 0 else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._seen += 1
        self._held = self._held[found.end() :]
        self._value = "begin"
        return True

    def _within(self, out: list[str], final: bool) -> bool:
        at = self._held.find(self._end)
        if self._value == "begin":  # the newline behind the mark is the mark's
            if self._trim and not self._held and not final:
                return False
            self._held = self._held.removeprefix("\n") if self._trim else self._held
            self._value = "text" if self._types == {"string"} else "open"
            out.append('"' if self._value == "text" else "")
            return True
        if at >= 0:
            value = self._held[:at].removesuffix("\n") if self._trim else self._held[:at]
            text = json.dumps(value, ensure_ascii=False)
            out.append(text[1:] if self._value == "text" else _written(value, self._types))
            self._held, self._value = self._held[at + len(self._end) :], None
            return True
        if self._value == "text":
            keep = overlap(self._held, "\n" + self._end) if self._trim else 0
            size = len(self._held) - max(keep, overlap(self._held, self._end))
            out.append(json.dumps(self._held[:size], ensure_ascii=False)[1:-1])
            self._held = self._held[size:]
        return False


Reader = JsonReader | DictReader | FieldReader


def reader(form: CallForm, schema: Json) -> Reader:
    """schema: of the function's parameters; None where it is not known."""
    if isinstance(form.arguments, Fields):
        return FieldReader(form.arguments, form.close, schema)
    return DictReader(form.quote) if form.arguments == "dict" else JsonReader()


def _parsed(text: str) -> tuple[Json] | None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return (json.loads(text, parse_constant=refuse),)  # NaN and Infinity are not JSON
    except (ValueError, RecursionError):
        return None


def _written(value: str, types: set[str] | None) -> str:
    """JSON text of a value that may be more than text."""
    found = _parsed(value.strip())
    if found is None and value.strip() in _CONSTANTS:
        found = (_CONSTANTS[value.strip()],)
    if found is not None:
        kind = type_name(found[0])
        fits = types is None or kind in types or (kind == "integer" and "number" in types)
        if fits and kind != "string":
            return json.dumps(found[0], ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
