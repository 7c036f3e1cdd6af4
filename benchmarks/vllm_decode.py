"""Tokens per second of decoding inside vLLM: E8P weights beside vLLM's own bfloat16, on one model shape, in one run.

    PYTHONPATH=src python3 benchmarks/vllm_decode.py --shape llama-3-8b --out benchmarks/results/vllm-decode-h200.jsonl
    PYTHONPATH=src python3 benchmarks/vllm_decode.py --shape qwen3.5-27b --batch 1 4 8 16 --context 1024 --variants \\
        e8p-4-head-4,e8p-4-head-4+kv=turboquant:4,e8p-4-head-4+draft=mtp:3,e8p-4-head-4+kv=turboquant:4+draft=mtp:3

Each variant is a process of its own with vLLM's default graphs (FULL_AND_PIECEWISE), and random weights: the time of a
step does not depend on them. All load and compile at once, then they are timed one at a time, while the others wait.
The time of a step is the slope between two output lengths, medians of several, so that prefill and start-up drop out.
Variants: bf16, or e8p-BITS[-head-BITS], each with [+kv=DTYPE], [+layers=vllm], which leaves norms and sums outside of
the linears, [+attention=vllm], which leaves steps of single tokens to FlashAttention, [+exchange], which sums over
--ranks through our own inboxes, and [+draft=ngram:K], [+draft=mtp:K] (a hybrid's own draft layer, random),
[+draft=eagle3:K] (a random head) or [+draft=SHAPE/WEIGHTS:K], K
drafts a round by vLLM's drafters; a step is then one token's share of a round, and `tokens_per_round` says how many a
round gave. With --accept A each draft is taken with probability A if those before it were, whatever it is (vLLM's
synthetic acceptance), since random weights agree with nobody.
--context is the length of the prompts; long ones are computed once and found in the prefix cache.
--profile adds a line that names the launches of a step: how many, and the microseconds of each. A launch that may start
before the one in front of it has ended (PDL) counts the time that it waits there, so they add up to more than the step.
"""

import argparse
import fcntl
import gzip
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from step import SHAPES

from onegraph.formats.e8p import E8PConfig
from onegraph.formats.rotated import KEEP
from onegraph.models.config import LlamaConfig
from onegraph.models.eagle_net import head_config

VARIANTS = "bf16,e8p-2,e8p-4,e8p-2-head-4,e8p-4-head-4"
LONG = 4096  # tokens of a prompt that is not computed again for each sample
OUTPUTS = 16, 144  # tokens; a step's time is the slope between them
PROFILED, STEPS = 32, 8  # tokens that are traced, and the last steps of them that are counted


def config_of(variant: str, shape: dict[str, Any], length: int) -> dict[str, Any]:
    """config.json of a variant's model, for texts of `length` tokens."""
    weights = variant.partition("+")[0]
    config = shape | {"dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None}
    config |= {"mtp_num_hidden_layers": 1} if "+draft=mtp" in variant else {}
    config["max_position_embeddings"] = max(config["max_position_embeddings"], length)
    if weights != "bf16":
        bits, *head = weights.removeprefix("e8p-").split("-head-")
        kept = dict.fromkeys(LlamaConfig.from_dict(shape).steady, KEEP)
        e8p = E8PConfig(bits=int(bits), layers=kept, lm_head=int(head[0]) if head else None)
        config["quantization_config"] = e8p.to_dict()
    return config


def written(folder: Path, config: dict[str, Any]) -> None:
    """A model of random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def drafts_of(variant: str, args: argparse.Namespace, folder: Path, length: int) -> dict[str, Any] | None:
    """vLLM's `speculative_config` of a variant that drafts; a drafting model is written below `folder`."""
    option = next((o.removeprefix("draft=") for o in variant.split("+") if o.startswith("draft=")), None)
    if option is None:
        return None
    drafter, count = option.rsplit(":", 1)
    settings: dict[str, Any] = {"num_speculative_tokens": int(count)}
    path = folder / "draft"
    if drafter == "ngram":
        settings |= {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    elif drafter == "mtp":
        settings |= {"method": "mtp"}
    elif drafter == "eagle3":
        model = LlamaConfig.from_dict(config_of("bf16", SHAPES[args.shape], length))
        layers = 2, model.layers // 2, model.layers - 3
        written(path, head_config(model, layers, model.vocab_size, "random"))
        settings |= {"method": "eagle3", "model": str(path)}
    else:
        shape, weights = drafter.split("/")
        written(path, config_of(weights, SHAPES[shape], length))
        settings |= {"method": "draft_model", "model": str(path)}
    if args.accept is not None:
        rates = [args.accept ** (i + 1) for i in range(int(count))]
        settings |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return settings


def rounds(llm: Any) -> tuple[float, float]:
    """Rounds with drafts so far, and drafts that they kept, as vLLM counts them."""
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
    return counted[names[0]], counted[names[1]]


def launches(folder: Path) -> dict[str, Any]:
    """What a decode step launches, from a trace of torch's profiler: of the last STEPS steps, told apart by a kernel
    that each launches once."""
    with gzip.open(next(folder.rglob("*.json.gz")), "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]
    kernels = sorted((event["ts"], event["dur"], event["name"]) for event in events)
    count = Counter(name for _, _, name in kernels)
    mark = next(name for _, _, name in reversed(kernels) if abs(count[name] - PROFILED) <= 1)
    begins = [i for i, (_, _, name) in enumerate(kernels) if name == mark][-STEPS - 1 :]
    spent: Counter[str] = Counter()
    for _, duration, name in kernels[begins[0] : begins[-1]]:
        spent[name] += duration
    count = Counter(name for _, _, name in kernels[begins[0] : begins[-1]])
    return {
        "launches": round((begins[-1] - begins[0]) / STEPS),
        "step_us": round((kernels[begins[-1]][0] - kernels[begins[0]][0]) / STEPS, 1),
        "profile": [
            {"kernel": name[:80], "launches": round(count[name] / STEPS, 1), "us": round(total / count[name], 2)}
            for name, total in spent.most_common()
        ],
    }


def measure(variant: str, args: argparse.Namespace, turn: Path) -> Iterator[dict[str, Any]]:
    """One variant, in this process: loads, waits for its turn, and times every batch size."""
    import vllm
    from vllm import LLM, SamplingParams

    from onegraph.engine.record import machine
    from onegraph.integrations.vllm import FUSED

    _, *options = variant.split("+")
    kv = next((option.removeprefix("kv=") for option in options if option.startswith("kv=")), "auto")
    if "layers=vllm" in options:
        FUSED.clear()
    if "attention=vllm" in options:
        from onegraph.integrations.vllm import flash

        flash.take_over = lambda attention, table: None
    length = args.context + OUTPUTS[1] + 16
    # vLLM takes FlashInfer's kernels for prompts of gated delta nets and for sampling, whether it is installed or not.
    prefill = {}
    if importlib.util.find_spec("flashinfer") is None:
        prefill = {"gdn_prefill_backend": "triton"}
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    traces = tempfile.mkdtemp()
    profiler: dict[str, Any] = {"profiler": "torch", "torch_profiler_dir": traces}
    profiler |= {"torch_profiler_activities": ["CUDA"], "torch_profiler_dump_cuda_time_total": False}
    with tempfile.TemporaryDirectory() as folder:
        drafts = drafts_of(variant, args, Path(folder), length)
        sizes = [count * (1 + drafts["num_speculative_tokens"] if drafts else 1) for count in sorted(args.batch)]
        (Path(folder) / "config.json").write_text(json.dumps(config_of(variant, SHAPES[args.shape], length)))
        started = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=length,
            max_num_seqs=max(args.batch),
            max_num_batched_tokens=max(2048, max(args.batch), args.context),  # a prompt is one chunk
            gpu_memory_utilization=0.05,  # only checked: the line below says how much
            kv_cache_memory_bytes=int(args.kv_gib * 2**30),
            enable_prefix_caching=args.context >= LONG,
            compilation_config={"cudagraph_capture_sizes": sizes},
            tensor_parallel_size=args.ranks,
            additional_config={"onegraph_exchange": "exchange" in options} | prefill,
            kv_cache_dtype=kv,
            **({"attention_config": {"backend": "CUSTOM"}} if kv.startswith("turboquant") else {}),
            **({"profiler_config": profiler} if args.profile else {}),
            **({"speculative_config": drafts, "disable_log_stats": False} if drafts else {}),
        )
    print(f"{variant}: ready after {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    (turn / variant.replace("/", " ")).touch()
    while len(list(turn.iterdir())) < len(args.variants.split(",")) + 1:
        time.sleep(0.1)

    about = {"name": variant, "shape": args.shape, "context": args.context, "ranks": args.ranks}
    about |= machine("cuda") | {"vllm": vllm.__version__}
    cache = llm.llm_engine.vllm_config.cache_config
    about |= {"kv_gib": args.kv_gib, "kv_blocks": cache.num_gpu_blocks, "block_size": cache.block_size}
    about |= {"command": "PYTHONPATH=src python3 " + shlex.join([sys.argv[0], *args.shown])}
    with (turn / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def seconds(batch: int, tokens: int) -> float:
            prompts = [{"prompt_token_ids": [17 + i] * args.context} for i in range(batch)]
            begin = time.perf_counter()
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begin

        for batch in args.batch:
            seconds(batch, OUTPUTS[0])
            before = rounds(llm) if drafts else (0, 0)
            short, long = ([seconds(batch, tokens) for _ in range(args.repeats)] for tokens in OUTPUTS)
            step = (statistics.median(long) - statistics.median(short)) / (OUTPUTS[1] - OUTPUTS[0])
            timed = {"ms_per_step": round(step * 1e3, 4), "tokens_per_second": round(batch / step, 1)}
            if drafts:
                made, kept = (after - b for after, b in zip(rounds(llm), before, strict=True))
                timed |= {"accept": args.accept, "tokens_per_round": round(1 + kept / made, 3)}
            yield {"bench": "vllm_decode", "batch": batch} | timed | about
        for batch in args.batch if args.profile else ():  # last, since what traces may stay attached
            llm.start_profile()
            seconds(batch, PROFILED)
            llm.stop_profile()
            yield {"bench": "vllm_profile", "batch": batch} | launches(Path(traces)) | about
            shutil.rmtree(traces)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--variants", default=VARIANTS, help=f"separated by commas (default: {VARIANTS})")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--accept", type=float, help="probability that a draft is kept (default: as the models agree)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=4.0, help="size of each variant's KV cache")
    parser.add_argument("--profile", action="store_true", help="also name the launches of each step")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    hidden = {"--one", "--turn", "--out"}
    args.shown = [word for before, word in pairwise(sys.argv) if not {before, word} & hidden]
    if args.one:
        from onegraph.engine.record import emit

        for row in measure(args.one, args, args.turn):
            emit(row, args.out)
        return 0

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as turn:
        (Path(turn) / "lock").touch()
        command = [sys.executable, *sys.argv, "--turn", turn, "--one"]
        running = {variant: subprocess.Popen([*command, variant]) for variant in args.variants.split(",")}
        while any(process.poll() is None for process in running.values()):
            for variant, process in running.items():
                if process.poll() is not None:  # the others need not wait for one that failed
                    (Path(turn) / variant.replace("/", " ")).touch()
            time.sleep(0.2)
        return max(abs(process.returncode) for process in running.values())


if __name__ == "__main__":
    sys.exit(main())
