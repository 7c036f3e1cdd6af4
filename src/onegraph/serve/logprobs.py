"""Log-probabilities as OpenAI's JSON has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onegraph.api.token_text import PARTIAL, TokenText


def chat_logprobs(tokens: Sequence[TokenText]) -> Any:
    """As a choice of a chat has them."""
    return {"content": [told.to_openai() for told in tokens]}


def completion_logprobs(tokens: Sequence[TokenText]) -> Any:
    """As a choice of /v1/completions has them: the drawn token is among the likeliest, under the name it has beside. A
    prompt's first token has neither."""
    named = [_named(told) for told in tokens]
    return {
        "tokens": [names[told.token] for names, told in zip(named, tokens, strict=True)],
        "token_logprobs": [told.logprob for told in tokens],
        "top_logprobs": [
            None if told.logprob is None else {names[each.token]: each.logprob for each in (*told.top, told)}
            for names, told in zip(named, tokens, strict=True)
        ],
        "text_offset": [told.offset for told in tokens],
    }


def _named(told: TokenText) -> dict[int, str]:
    """A name of its own for a token and for each of the likeliest in its place: the text, where no other has it and it
    is no part of a character."""
    names: dict[int, str] = {}
    for each in (told, *told.top):
        if each.token not in names:
            clear = PARTIAL not in each.text and each.text not in names.values()
            names[each.token] = each.text if clear else f"token_id:{each.token}"
    return names
