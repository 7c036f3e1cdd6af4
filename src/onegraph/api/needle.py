"""Needle retrieval: a sentence hidden at several depths of a long text, and whether the model can still repeat it."""

from __future__ import annotations

from typing import Any

from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams

ROOM = 16  # tokens of context behind the question
DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.95)
PLACES = ("lighthouse", "garden", "harbour", "library", "mill")
CODES = ("48213", "90657", "31748", "62094", "57381")
SENTENCE = "\n\nThe secret code of the {place} is {code}.\n\n"
QUESTION = "\n\nRemember the sentence above: the secret code of the {place} is"


def needle_prompt(tokenizer: Any, text: str, context: int, depth: float, which: int) -> tuple[list[int], str]:
    """Tokens of a prompt of `context` tokens with the needle at `depth` (0 the beginning), and the code in it."""
    place, code = PLACES[which], CODES[which]
    needle = tokenizer.encode(SENTENCE.format(place=place, code=code))
    question = tokenizer.encode(QUESTION.format(place=place))
    space = context - len(needle) - len(question)
    if space < 32:
        raise ValueError(f"needle {context}: needs {32 - space} tokens more to hide a sentence in")
    hay = tokenizer.encode(text)[:space]
    if len(hay) < space:
        raise ValueError(f"needle {context}: needs {space} tokens of text; the text has {len(hay)}")
    at = int(depth * space)
    return [*hay[:at], *needle, *hay[at:], *question], code


def retrieve(
    model: Any, tokenizer: Any, text: str, context: int, kv: Any, needles: int = len(CODES)
) -> list[list[bool]]:
    """[depth][needle]: whether greedy decoding after the question gives the code. Raises ValueError."""
    engine = Engine(model, max_batch=1, max_context=context + ROOM, kv=kv)
    found = []
    for depth in DEPTHS:
        row = []
        for which in range(needles):
            prompt, code = needle_prompt(tokenizer, text, context, depth, which)
            (tokens,) = engine.generate([prompt], SamplingParams(max_tokens=8))
            row.append(tokenizer.decode(tokens).strip().startswith(code))
        found.append(row)
    return found
