"""What `onegraph generate` does from its first instruction to its last: seconds of each stage.

    PYTHONPATH=src python3 benchmarks/startup.py .demo/SmolLM2-135M-Instruct-4bit
    PYTHONPATH=src python3 benchmarks/startup.py MODEL --device cuda

Each run is a process of its own (`startup_child.py`). `cpu_s` is its CPU time with that of its children, `wall_s` its
time by the clock. `STAGE_cpu_s` is the CPU time of the process itself in a stage, `STAGE_s` the time by the clock:
"parser" until torch is imported, "torch" its import, "imports" our modules, "prepare" tokenizer and prompt, "load" the
model and its cache, "first" until the first text (building the steps, prefill), "text" the rest of it, "close", and
"end" the end of the process, of which CPU seconds include the children. `SPAN_s` are parts of these by the clock,
without the parts within them, and `SPAN_calls` how often; those named "beside" ran in other threads.

A row is of runs with one state of the caches of kernels (`cache`): of "cold" ones each has empty folders, and one of
them compiles one kernel after the other; "warm" ones have the folders of the last cold one. On a CPU all are warm. Each
figure is the least of the repeats. --serve adds rows of `onegraph serve`: seconds until it is ready, and until its
first answer. Behind the rows come what runs did one after the other, from 30 ms on (begin, seconds, thread, span), and
what Python imports: own seconds by package (`-X importtime`, slower than without). Prints JSON lines; --out appends the
rows.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from onegraph.engine.record import Row, emit, machine

STAGES = "parser", "torch", "imports", "prepare", "load", "first", "text", "close"
CACHES = {"XDG_CACHE_HOME": "", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "driver"}  # folders in one
CHILD = Path(__file__).with_name("startup_child.py")
IMPORTED = re.compile(r"^import time: +(\d+) \| +\d+ \| *(\S+)$", re.MULTILINE)  # own microseconds, module


def environment(cache: Path | None) -> dict[str, str]:
    """Of a process that keeps its kernels in the folder `cache`."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return found if cache is None else found | {name: str(cache / folder) for name, folder in CACHES.items()}


def run(words: list[str], cache: Path | None, options: tuple[str, ...] = (), stderr: Path | None = None) -> Row:
    """Seconds of one process. stderr: the file that takes what it says there."""
    source, target = os.pipe()
    os.set_inheritable(target, True)
    files = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    if stderr is not None:
        files.append((os.POSIX_SPAWN_OPEN, 2, str(stderr), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    command = [sys.executable, *options, str(CHILD), str(target), *words]
    begun = time.monotonic()
    child = os.posix_spawn(sys.executable, command, environment(cache), file_actions=files)
    os.close(target)
    with os.fdopen(source) as pipe:
        told = pipe.read()
    _, status, used = os.wait4(child, 0)
    ended = time.monotonic()
    if status:
        raise SystemExit(f"the command failed: {' '.join(words)}")
    found: dict[str, Any] = json.loads(told)
    row = {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": ended - begun}
    clock, spent = begun, 0.0
    for stage in STAGES:
        at, cpu = found["stages"][stage]
        row |= {f"{stage}_s": at - clock, f"{stage}_cpu_s": cpu - spent}
        clock, spent = at, cpu
    row |= {"end_s": ended - clock, "end_cpu_s": row["cpu_s"] - spent}
    for name, (seconds, calls) in sorted(found["spans"].items()):
        row |= {f"{name}_s": seconds, f"{name}_calls": calls}
    events = [[round(at - begun, 3), *rest] for at, *rest in sorted(found["events"])]
    return row | {"compiled": found["compiled"], "events": events}


def least(runs: list[Row]) -> Row:
    """Of each figure of runs; what was compiled in the first of them."""
    row: Row = {}
    for name in runs[0]:
        if name not in ("compiled", "events"):
            row[name] = round(min(each[name] for each in runs if name in each), 3)
    return row | ({"compiled": runs[0]["compiled"]} if runs[0].get("compiled") else {})


def imports(words: list[str], cache: Path | None, folder: Path) -> Row:
    """Own seconds of importing each package, and of the modules that take most."""
    log = folder / "imports"
    run(words, cache, ("-X", "importtime"), log)
    own = {name: int(spent) for spent, name in IMPORTED.findall(log.read_text())}
    packages: Counter[str] = Counter()
    for name, spent in own.items():
        packages[name.partition(".")[0]] += spent
    shown = (packages.most_common(25), Counter(own).most_common(25))
    by_package, by_module = ({name: round(spent / 1e6, 3) for name, spent in each} for each in shown)
    return {"modules": len(own), "packages_s": by_package, "modules_s": by_module}


def serve(model: str, device: str, cache: Path | None) -> Row:
    """Seconds by the clock until a server says that it is ready, and until it has answered with 8 tokens."""
    command = [sys.executable, "-m", "onegraph", "serve", model, "--device", device, "--port", "0"]
    begun = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(cache)) as child:
        assert child.stderr is not None
        said: list[str] = []
        for line in child.stderr:
            said.append(line)
            if found := re.search(r"serving (\S+) at (\S+)", line):
                break
        else:
            raise SystemExit(f"the server ended: {''.join(said)}")
        ready = time.monotonic() - begun
        asked = {"model": found[1], "prompt": "The capital of Japan is", "max_tokens": 8}
        request = urllib.request.Request(f"{found[2]}/completions", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
        row = {"ready_s": ready, "answer_s": time.monotonic() - begun}
        child.terminate()
        child.stderr.read()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", default="What is the capital of Japan?")
    parser.add_argument("--max-tokens", default="8")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument("--repeats", type=int, help="warm runs [5, on a GPU 3]")
    parser.add_argument("--cold", type=int, default=1, help="cold runs, on a GPU [1]")
    parser.add_argument("--profile", action="store_true", help="print cProfile's figures of one more run on stderr")
    parser.add_argument("--serve", action="store_true", help="also start a server, which needs the extra 'serve'")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    words = ["generate", args.model, "--prompt", args.prompt, "--max-tokens", args.max_tokens]
    words += ["--device", args.device]
    on_gpu = args.device != "cpu"
    repeats = args.repeats or (3 if on_gpu else 5)
    about = {"bench": "startup", "run": "generate", "name": Path(args.model).name}
    with tempfile.TemporaryDirectory() as folder:
        cache, cold = None, []
        if on_gpu:
            apart = run(["--one-by-one", *words], Path(folder, "apart"))
            emit(about | {"cache": "cold, one by one", "repeats": 1} | least([apart]) | machine(args.device), args.out)
            for number in range(args.cold):
                cache = Path(folder, str(number))
                cold.append(run(words, cache))
            emit(about | {"cache": "cold", "repeats": args.cold} | least(cold) | machine(args.device), args.out)
        warm = [run(words, cache) for _ in range(repeats)]
        emit(about | {"cache": "warm", "repeats": repeats} | least(warm) | machine(args.device), args.out)
        for each in cold[-1:] + warm[-1:]:
            print(json.dumps([event for event in each["events"] if event[1] >= 0.03]), flush=True)
        print(json.dumps(imports(words, cache, Path(folder))), flush=True)
        if args.profile:
            run(["--profile", *words], cache)
        if args.serve:
            kinds = (("cold", Path(folder, "served"), 1),) if on_gpu else ()
            for kind, kept, count in (*kinds, ("warm", Path(folder, "served") if on_gpu else None, repeats)):
                served = [serve(args.model, args.device, kept) for _ in range(count)]
                row = about | {"run": "serve", "cache": kind, "repeats": count} | least(served)
                emit(row | machine(args.device), args.out)


if __name__ == "__main__":
    main()
