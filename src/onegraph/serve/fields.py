"""Fields of requests: what each may hold, and which of other servers' fields ask for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from typing import Any

from onegraph.api.chat import EFFORT, EFFORTS, THINKING
from onegraph.engine.params import MAX_BIASES, MAX_LOGPROBS
from onegraph.serve.errors import APIError

Json = Any  # what json.loads gives
MAX_CHOICES, MAX_STOPS, MAX_STOP = 128, 16, 1024  # answers and stop strings of a request, characters of one
MAX_DIGITS = 1000  # of an integer
MAX_SEED = (1 << 63) - 1 - MAX_CHOICES  # the i-th answer draws with seed + i


def read_object(body: bytes) -> dict[str, Json]:
    """A JSON object without its fields that are null."""
    try:
        fields = json.loads(body, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise APIError(f"the body is not JSON: {what}") from None
    if not isinstance(fields, dict):
        raise APIError(f"the body is {shown(fields)}; a JSON object is expected")
    return {name: value for name, value in fields.items() if value is not None}


def listed(fields: Mapping[str, Json], name: str) -> list[Json]:
    """The field, which is a list. Raises APIError."""
    value = fields[name]
    if not isinstance(value, list):
        raise APIError(f"{name}: got {shown(value)}; allowed is a list", param=name)
    return value


def check_fields(fields: Mapping[str, Json], known: Mapping[str, Check]) -> None:
    if unknown := sorted(fields.keys() - known.keys()):
        raise APIError(f"{unknown[0]} is not known here; allowed are {', '.join(sorted(known))}", param=unknown[0])
    for name, value in fields.items():
        fine, allowed = known[name]
        if not fine(value):
            raise APIError(f"{name}: got {shown(value)}; allowed is {allowed}", param=name)


def check_names(fields: Mapping[str, Json], known: Set[str], others: Mapping[str, str]) -> None:
    """Raises APIError for a name that is not `known` or that only a chat has. others: of those, the name of the field
    here, "" where there is none."""
    for name in sorted(fields.keys() - (known - others.keys())):
        cure = f"; use {others[name]}" if others.get(name) else ""
        raise APIError(f"{name} is not known here{cure}", param=name)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; allowed are {MAX_DIGITS}")
    return int(text)


def equal(a: Json, b: Json) -> bool:
    """As JSON has it, where 0 is not false."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def is_int(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e308 < value < 1e308


def is_ids(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_int, value))


def is_prompt(value: Json) -> bool:
    if isinstance(value, str) or is_ids(value):
        return True
    several = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    return several and all(isinstance(each, str) or is_ids(each) for each in value)


def _is_stop(value: Json) -> bool:
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= MAX_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP for stop in stops)
    )


def _is_format(value: Json) -> bool:
    if not isinstance(value, dict):
        return False
    if value.get("type") != "json_schema":
        return value in ({"type": "text"}, {"type": "json_object"})
    return isinstance(value.get("json_schema"), dict) and isinstance(value["json_schema"].get("schema"), dict)


GUIDED: Mapping[str, Callable[[Json], bool]] = {
    "json": lambda v: isinstance(v, dict | str),
    "regex": lambda v: isinstance(v, str),
    "choice": lambda v: isinstance(v, list) and 0 < len(v) <= 1000 and all(isinstance(each, str) for each in v),
}


def _is_bias(value: Json) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_BIASES
        and all(token.isascii() and token.isdecimal() and len(token) < 10 for token in value)
        and all(is_number(bias) and -100 <= bias <= 100 for bias in value.values())
    )


def _is_guided(value: Json) -> bool:
    return (
        isinstance(value, dict)
        and len(value) == 1
        and all(name in GUIDED and GUIDED[name](each) for name, each in value.items())
    )


def is_thinking(value: Json) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((name, how),) = value.items()
    return is_effort(how) if name == EFFORT else name in THINKING and is_flag(how)


def is_effort(value: Json) -> bool:
    return isinstance(value, str) and value in EFFORTS


def is_flag(value: Json) -> bool:
    return isinstance(value, bool)


def shown(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."


Check = tuple[Callable[[Json], bool], str]
COUNT: Check = (lambda v: is_int(v) and 1 <= v < 1 << 31, "a whole number from 1 to 2147483647")
_NUMBER: Check = (is_number, "a number")
FLAG: Check = (is_flag, "true or false")
SAMPLING_FIELDS: Mapping[str, Check] = {
    "model": (lambda v: isinstance(v, str), "a text"),
    "max_tokens": COUNT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "response_format": (_is_format, "an object with type text, json_object or json_schema (and its schema)"),
    "regex": (lambda v: isinstance(v, str), "a regular expression"),
    "top_k": (lambda v: is_int(v) and -1 <= v < 1 << 31, "a whole number up to 2147483647, 0 or -1 for all tokens"),
    "seed": (lambda v: is_int(v) and -(1 << 63) <= v <= MAX_SEED, f"a whole number from {-(1 << 63)} to {MAX_SEED}"),
    "logit_bias": (_is_bias, f"an object of up to {MAX_BIASES} token ids with a number from -100 to 100 each"),
    "min_tokens": (lambda v: is_int(v) and 0 <= v < 1 << 31, "a whole number from 0 on"),
    "priority": (lambda v: is_int(v) and abs(v) < 1 << 31, "a whole number; the lowest go first"),
    "cache_salt": (lambda v: isinstance(v, str) and v != "", "a text"),
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "ignore_eos": FLAG,
    "stop_token_ids": (lambda v: isinstance(v, list) and len(v) <= 64 and all(map(is_int, v)), "up to 64 token ids"),
    "truncate_prompt_tokens": (
        lambda v: is_int(v) and (v == -1 or 1 <= v < 1 << 31),
        "a whole number from 1 on, or -1 for what fits the context",
    ),
    "guided_json": (GUIDED["json"], "a JSON schema"),
    "guided_regex": (GUIDED["regex"], "a regular expression"),
    "guided_choice": (GUIDED["choice"], "a list of up to 1000 texts"),
    "structured_outputs": (_is_guided, "an object with json, regex or choice"),
    "stop": (_is_stop, f"a text, or up to {MAX_STOPS} texts of at most {MAX_STOP} characters"),
    "n": (lambda v: is_int(v) and 1 <= v <= MAX_CHOICES, f"1 to {MAX_CHOICES}"),
    "stream": FLAG,
    "stream_options": (lambda v: isinstance(v, dict), "an object"),
}
TOP: Check = (lambda v: is_int(v) and 0 <= v <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
# What is not supported, and the values that ask for nothing; clients send those of their own accord.
NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "modalities": (["text"],),
    "store": (False,),
    # vLLM's and others'
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_logprobs": (False,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "repeat_penalty": (1,),
}
IGNORED = {
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "cache_prompt",
    "guided_decoding_backend",
}  # fmt: skip
