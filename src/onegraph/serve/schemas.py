"""JSON schemas of functions' parameters: their shape, references, and the types that a value may have.

Schemas come from clients, and references may form cycles or share parts: each search follows MAX_PARTS of them at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Json = Any  # what json.loads gives
MAX_PARTS = 256  # schemas that a search for a type follows, and names in the path of a $ref
_NAMES: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip
_SCHEMA: tuple[Callable[[Json], bool], str] = (lambda v: isinstance(v, dict | bool), "a schema")
_SCHEMAS: tuple[Callable[[Json], bool], str] = (
    lambda v: isinstance(v, list) and all(isinstance(each, dict | bool) for each in v),
    "a list of schemas",
)
_NAMED: tuple[Callable[[Json], bool], str] = (
    lambda v: isinstance(v, dict) and all(isinstance(each, dict | bool) for each in v.values()),
    "an object of schemas",
)
_TEXTS: tuple[Callable[[Json], bool], str] = (lambda v: _is_texts(v), "a list of texts")
_SHAPES: Mapping[str, tuple[Callable[[Json], bool], str]] = {
    "type": (lambda v: isinstance(v, str) or _is_texts(v), "a text or a list of texts"),
    "$ref": (lambda v: isinstance(v, str), "a text"),
    "enum": (lambda v: isinstance(v, list), "a list"),
    "required": _TEXTS,
    "properties": _NAMED,
    "$defs": _NAMED,
    "definitions": _NAMED,
    "anyOf": _SCHEMAS,
    "oneOf": _SCHEMAS,
    "allOf": _SCHEMAS,
    "items": (lambda v: _SCHEMA[0](v) or _SCHEMAS[0](v), "a schema"),
    "additionalProperties": _SCHEMA,
}


def check_schema(root: Mapping[str, Json]) -> None:
    """Raises ValueError where a keyword that this package reads has another shape than JSON Schema's. Null is absent,
    as some clients write it."""
    seen, waiting = set[int](), [root]
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        for name, (fine, allowed) in _SHAPES.items():
            if schema.get(name) is not None and not fine(schema[name]):
                raise ValueError(f"{name}: allowed is {allowed}")
        waiting += (each for each in (*_parts(schema), target(schema, root)) if isinstance(each, dict))


def _parts(schema: Mapping[str, Json]) -> Iterator[Json]:
    """The schemas right within one."""
    for name in ("properties", "$defs", "definitions"):
        yield from (schema.get(name) or {}).values()
    for name in ("anyOf", "oneOf", "allOf"):
        yield from schema.get(name) or ()
    items = schema.get("items")
    yield from items if isinstance(items, list) else [items]
    yield schema.get("additionalProperties")


def property_of(schema: Json, name: str) -> Json:
    """The schema of one parameter."""
    schema = resolve(schema, schema)
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found.get(name) if isinstance(found, dict) else None


def target(schema: Json, root: Json) -> Json:
    """What the `$ref` of a schema names within the same document; the schema itself where it has none."""
    path = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(path, str) or not path.startswith("#/"):
        return schema
    found, names = root, path[2:].split("/", MAX_PARTS)
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def resolve(schema: Json, root: Json) -> Json:
    """Without a `$ref` within the same document."""
    for _ in range(MAX_PARTS):
        if (found := target(schema, root)) is schema:
            break
        schema = found
    return schema


def types_of(schema: Json, root: Json) -> set[str] | None:
    """JSON types that a schema allows; None where that is not plain."""
    found, seen, waiting = set[str](), set[int](), [schema]
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if not isinstance(schema, dict) or len(seen) > MAX_PARTS:
            return None
        if (named := target(schema, root)) is not schema:
            waiting.append(named)
        elif isinstance(types := schema.get("type"), str):
            found.add(types)
        elif types:
            found.update(types)
        elif values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            found.update(map(type_name, values))
        elif some := [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
            waiting += some
        else:
            return None
    return found or None


def type_name(value: Json) -> str:
    return _NAMES.get(type(value), "null")


def _is_texts(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
