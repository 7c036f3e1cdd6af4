"""Renders a checkpoint's chat template where it can do no harm.

A template is a program that came with the weights. Jinja's immutable sandbox keeps it from Python's objects, but not
from looping for ever or building a text of a terabyte, so it runs in a child process with bounded time and memory.
This file is the child as well: it is run as a script and must import nothing of onegraph at its top.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 3
MEMORY = 1 << 30  # bytes of address space
MAX_TEMPLATE = 1 << 20  # characters
MAX_OUTPUT = 16 << 20  # characters

# DeepSeek-V4's checkpoints bring a Python file instead of a template: this is what it writes for text without tools,
# in chat mode (the block of thoughts is closed at once). Users' messages in a row are one.
DEEPSEEK_V4 = """\
{{ '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{- m.content }}
    {%- elif m.role == 'user' %}
        {{- '\\n\\n' if loop.previtem is defined and loop.previtem.role == 'user' else '<｜User｜>' }}{{ m.content }}
        {%- if loop.last or loop.nextitem.role == 'assistant' %}{{ '<｜Assistant｜></think>' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {{- m.content }}{{ '<｜end▁of▁sentence｜>' }}
    {%- else %}
        {{- raise_exception('role ' ~ m.role ~ ' is not supported') }}
    {%- endif %}
{%- endfor %}"""


class TemplateError(ValueError):
    """A chat template that is not there, or does not render."""


def render(template: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str:
    """The conversation as the template writes it, ready for the answer. Raises TemplateError where it cannot."""
    request = json.dumps({"template": template, "messages": list(messages), "variables": dict(variables)})
    try:
        # -P: the folder of this file holds modules whose names would shadow installed packages
        child = subprocess.run(
            [sys.executable, "-P", __file__], input=request.encode(), capture_output=True, timeout=2 * SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TemplateError(f"the checkpoint's chat template ran longer than {2 * SECONDS} s") from None
    if child.returncode == 0:
        return child.stdout.decode()
    if child.returncode == 3:
        raise TemplateError(f"the checkpoint's chat template failed: {child.stderr.decode(errors='replace')}")
    raise TemplateError(f"the checkpoint's chat template ran out of its {SECONDS} s or {MEMORY >> 20} MiB")


def _child() -> int:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        request = json.load(sys.stdin)
        sys.stdout.buffer.write(_render(**request).encode())
    except MemoryError:
        return 4
    except Exception as error:  # the template is untrusted: whatever it raises is its failure
        sys.stderr.write(f"{type(error).__name__}: {error}"[:300])
        return 3
    return 0


def _render(template: str, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
    import datetime

    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(template) > MAX_TEMPLATE:
        raise ValueError(f"template of {len(template)} characters, at most {MAX_TEMPLATE} are allowed")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    # Set up as in transformers, so that published templates render the same
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    text = sandbox.from_string(template).render(messages=messages, add_generation_prompt=True, **variables)
    if len(text) > MAX_OUTPUT:
        raise ValueError(f"output of {len(text)} characters, at most {MAX_OUTPUT} are allowed")
    return text


if __name__ == "__main__":
    sys.exit(_child())
