"""Bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping

from onegraph.api.chat import EFFORT
from onegraph.serve.errors import APIError
from onegraph.serve.fields import FLAG, SAMPLING_FIELDS, Check, check_fields, equal, is_int, read_object
from onegraph.serve.protocol import CHAT_FIELDS, CompletionRequest, request_of


def parse_tokenize(body: bytes) -> tuple[str | None, CompletionRequest, bool]:
    """The model that a body of /tokenize names, its text or conversation, and whether the tokenizer adds its special
    tokens. Raises APIError."""
    fields = read_object(body)
    for name in ("add_generation_prompt", "return_token_strs", "continue_final_message"):
        if equal(fields.get(name, name == "add_generation_prompt"), name == "add_generation_prompt"):
            fields.pop(name, None)
    check_fields(fields, _TOKENIZE)
    chat = "messages" in fields
    if chat == ("prompt" in fields):
        raise APIError("give either prompt or messages", param="messages" if chat else "prompt")
    model, special = fields.pop("model", None), fields.pop("add_special_tokens", True)
    return model, request_of({"model": model or "", **fields}, chat), special


def parse_detokenize(body: bytes) -> tuple[str | None, list[int]]:
    """The model that a body of /detokenize names, and its tokens. Raises APIError."""
    fields = read_object(body)
    check_fields(fields, _DETOKENIZE)
    if "tokens" not in fields:
        raise APIError("tokens is missing", param="tokens")
    return fields.get("model"), fields["tokens"]


_TOKENIZE: Mapping[str, Check] = {
    "model": SAMPLING_FIELDS["model"],
    "prompt": (lambda v: isinstance(v, str), "a text"),
    "add_special_tokens": FLAG,
    **{name: CHAT_FIELDS[name] for name in ("messages", "tools", "chat_template_kwargs", EFFORT)},
}
_DETOKENIZE: Mapping[str, Check] = {
    "model": SAMPLING_FIELDS["model"],
    "tokens": (lambda v: isinstance(v, list) and all(is_int(i) and 0 <= i < 1 << 31 for i in v), "token ids"),
}
