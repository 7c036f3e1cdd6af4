"""Options of `vllm serve` that onegraph does not have, and what to do in their place."""

import re
from collections.abc import Container

_CALLS = "leave it out: the chat template says how the model writes calls"
_QUIET = "leave it out: requests are logged with --log-level debug alone"
CURES = {
    "--model": "give MODEL without an option",
    "--revision": "give ORG/NAME@REVISION as MODEL",
    "--tokenizer": "leave it out: it is the model's own",
    "--quantization": "leave it out: the checkpoint says how it is quantized",
    "--trust-remote-code": "leave it out: no code of a checkpoint is run",
    "--enforce-eager": "use --capture off",
    "--kv-cache-memory-bytes": "use --gpu-memory-utilization",
    "--cpu-offload-gb": "use --expert-memory, for routed experts",
    "--speculative-config": "use --speculative METHOD",
    "--enable-prefix-caching": "leave it out: prefixes are cached",
    "--enable-chunked-prefill": "leave it out: prompts are read in chunks",
    "--enable-lora": "leave it out: --lora-modules is enough",
    "--enable-auto-tool-choice": _CALLS,
    "--tool-call-parser": _CALLS,
    "--reasoning-parser": "leave it out: the chat template says how the model writes thoughts",
    "--uvicorn-log-level": "use --log-level",
    "--disable-uvicorn-access-log": _QUIET,
    "--no-enable-log-requests": _QUIET,
    "--disable-log-requests": _QUIET,
    "--allowed-origins": "use --allow-origin URL",
}


def cure(option: str, known: Container[str]) -> str:
    """ "; use ...", "" where there is none. known: the options of the command, which runs a model with --speculative
    and must have those that are named."""
    found = CURES.get(option.replace("_", "-"), "")
    needed = ["--speculative", *re.findall(r"--[\w-]+", found)]
    return f"; {found}" if found and all(name in known for name in needed) else ""
