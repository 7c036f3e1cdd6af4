"""What `onegraph generate` does from its first instruction to its last: seconds of each stage.

    PYTHONPATH=src python3 benchmarks/startup.py .demo/SmolLM2-135M-Instruct-4bit

Each run is a process of its own. `cpu_s` is its CPU time with that of its children, `wall_s` its time by the clock.
`STAGE_cpu_s` is the CPU time of the process itself in a stage: "parser" until torch is imported, "torch" its import,
"prepare" until the model is loaded (our modules, tokenizer, prompt), "load", "text" (prefill and decoding), and "end"
the rest with the children. Each figure is the least of the repeats. Prints a JSON line; --out appends it.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from onegraph.engine.record import emit, machine

STAGES = "parser", "torch", "prepare", "load", "text"

CHILD = """
import os, sys, time
out = int(sys.argv.pop(1))

def mark(name):
    os.write(out, f"{name} {time.process_time()}\\n".encode())

class Finder:
    seen = 0

    def find_spec(self, name, path=None, target=None):
        if name == "torch" and self.seen == 0 or name.startswith("onegraph.") and self.seen == 1:
            mark(("parser", "torch")[self.seen])
            self.seen += 1

def marked(call, before, after):
    def run(*args, **options):
        if before:
            mark(before)
        made = call(*args, **options)
        mark(after)
        return made
    return run

sys.meta_path.insert(0, Finder())
from onegraph.cli import generate, main
generate.load = marked(generate.load, "prepare", "load")
generate.show = marked(generate.show, None, "text")
sys.exit(main())
"""


def run(words: list[str]) -> dict[str, float]:
    source, target = os.pipe()
    os.set_inheritable(target, True)
    begun = time.monotonic()
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    command = [sys.executable, "-c", CHILD, str(target), *words]
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet)
    os.close(target)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"the command failed: {' '.join(words)}")
    found = {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": time.monotonic() - begun}
    with os.fdopen(source) as pipe:
        marks = {name: float(seconds) for name, seconds in map(str.split, pipe)}
    last = 0.0
    for stage in STAGES:
        found[f"{stage}_cpu_s"], last = marks[stage] - last, marks[stage]
    return found | {"end_cpu_s": found["cpu_s"] - last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", default="What is the capital of Japan?")
    parser.add_argument("--max-tokens", default="8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    words = ["generate", args.model, "--prompt", args.prompt, "--max-tokens", args.max_tokens, "--device", "cpu"]
    runs = [run(words) for _ in range(args.repeats)]
    least = {name: round(min(each[name] for each in runs), 2) for name in runs[0]}
    row = {"bench": "startup", "run": "generate", "name": Path(args.model).name, "repeats": args.repeats}
    emit(row | least | machine("cpu"), args.out)


if __name__ == "__main__":
    main()
