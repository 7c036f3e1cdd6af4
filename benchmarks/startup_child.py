"""The process that `startup.py` measures: a command of `onegraph`, which writes down when its stages end.

    python3 benchmarks/startup_child.py FD [--profile] [--one-by-one] generate MODEL ...

FD is the pipe that takes one JSON object: `stages` (the end of each by the clock and in CPU seconds), `spans` (seconds
and calls of what runs inside of the stages, without the spans within them; those of other threads are named "beside"),
`compiled` (each kernel that was compiled, with its seconds), and `events` (begin by the clock, seconds, thread and name
of each span of 10 ms and more).
"""

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# (module, attribute, span): of what is imported once the engine is
SPANNED = (
    ("torch.cuda", "_lazy_init", "cuda_init"),
    ("torch.cuda", "mem_get_info", "cuda_memory"),
    ("onegraph.formats.checkpoint", "Checkpoint.open", "open_checkpoint"),
    ("onegraph.api.tokenizer", "Tokenizer.__init__", "tokenizer"),
    ("onegraph.api.tokenizer", "Tokenizer.chat", "chat_template"),
    ("onegraph.api.llm", "plan_load", "plan_memory"),
    ("onegraph.api.llm", "load_decoder", "load_weights"),
    ("onegraph.engine.engine", "Engine.__init__", "engine"),
    ("onegraph.engine.executor", "Executor.step", "build_step"),
    ("onegraph.runtime.graph", "Runner._capture", "warm_up"),
    ("onegraph.runtime.graph", "_Recorder.record", "capture"),
    ("onegraph.ops.cuda.build", "load", "load_cubin"),
    ("onegraph.ops.cuda.build", "bindings", "import_bindings"),
    ("onegraph.ops.cuda.build", "compile_cubin", "find_cubin"),
    ("onegraph.ops.cuda.build", "_compile", "nvrtc"),
    ("triton.runtime.jit", "JITFunction._do_compile", "triton"),
    ("triton.runtime.build", "_build", "triton_host"),
    ("triton.compiler.compiler", "CompiledKernel._init_handles", "triton_load"),
    ("onegraph.api.llm", "LLM.close", "free_model"),
)


class Timeline:
    def __init__(self) -> None:
        self.stages: dict[str, tuple[float, float]] = {}
        self.spans: dict[str, list[float]] = {}
        self.compiled: list[tuple[str, float]] = []
        self.events: list[tuple[float, float, int, str]] = []
        self._patched: set[tuple[str, str]] = set()
        self._main, self._local, self._lock = threading.get_ident(), threading.local(), threading.Lock()

    def mark(self, stage: str) -> None:
        self.stages.setdefault(stage, (time.monotonic(), time.process_time()))

    def spanned(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nested, self._local.nested = getattr(self._local, "nested", 0.0), 0.0
            begun = time.monotonic()
            try:
                return call(*args, **options)
            finally:
                spent = time.monotonic() - begun
                with self._lock:
                    key = name if threading.get_ident() == self._main else f"beside_{name}"
                    total = self.spans.setdefault(key, [0.0, 0])
                    total[0] += spent - self._local.nested
                    total[1] += 1
                    if spent >= 0.01:
                        self.events.append((begun, round(spent, 3), threading.get_native_id(), name))
                    if name == "nvrtc":
                        self.compiled.append((args[2], round(spent, 2)))
                    elif name == "triton":
                        self.compiled.append((args[0].__name__, round(spent, 2)))
                self._local.nested = nested + spent

        return run

    def patch(self) -> None:
        """Puts spans around what `SPANNED` names, as far as it is imported; of kernels, as soon as they are."""
        found = importlib.import_module

        def import_module(module: str, package: str | None = None) -> Any:
            made = found(module, package)
            if module.startswith("onegraph.ops.triton"):
                self._patch("triton")
            return made

        importlib.import_module = self.spanned("import_kernels", import_module)
        for name in "torch", "onegraph", "triton":
            self._patch(name)

    def _patch(self, package: str) -> None:
        for module, path, name in SPANNED:
            if module.partition(".")[0] != package or (module, path) in self._patched:
                continue
            try:
                owner: Any = sys.modules.get(module)
                *parts, last = path.split(".")
                for part in parts:
                    owner = getattr(owner, part)
                found = vars(owner)[last]
            except (AttributeError, KeyError, TypeError):  # not imported, or another version
                continue
            self._patched.add((module, path))
            if isinstance(found, classmethod):
                setattr(owner, last, classmethod(self.spanned(name, found.__func__)))
            else:
                setattr(owner, last, self.spanned(name, found))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """A finder of modules, which finds none: it marks when torch is imported, and when what needs it is."""
        if name == "torch":
            self.mark("parser")
        elif name.startswith("onegraph.") and "parser" in self.stages:
            self.mark("torch")


def first_marked(pieces: Iterable[str], mark: Callable[[str], None]) -> Iterator[str]:
    for piece in pieces:
        mark("first")
        yield piece


def main() -> int:
    out = int(sys.argv.pop(1))
    profile = sys.argv[1] == "--profile" and bool(sys.argv.pop(1))
    one_by_one = sys.argv[1] == "--one-by-one" and bool(sys.argv.pop(1))
    times = Timeline()
    sys.meta_path.insert(0, times)
    from onegraph.cli import generate
    from onegraph.cli import main as command

    load, show, import_engine = generate.load, generate.show, generate.import_engine

    def marked_import(*given: Any) -> None:
        import_engine(*given)
        times.mark("imports")
        if one_by_one:
            executor = importlib.import_module("onegraph.engine.executor").Executor
            executor._compiled_ahead = lambda *_: contextlib.nullcontext()
        times.patch()

    def marked_load(*args: Any, **options: Any) -> Any:
        times.mark("prepare")
        made = load(*args, **options)
        times.mark("load")
        return made

    def marked_show(pieces: Iterable[str]) -> str:
        text = show(first_marked(pieces, times.mark))
        times.mark("text")
        return text

    generate.import_engine, generate.load, generate.show = marked_import, marked_load, marked_show
    if profile:
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        status = profiler.runcall(command)
        for order in "cumulative", "tottime":
            pstats.Stats(profiler, stream=sys.stderr).sort_stats(order).print_stats(60)
    else:
        status = command()
    times.mark("close")
    told = {"stages": times.stages, "spans": times.spans, "compiled": times.compiled, "events": times.events}
    os.write(out, json.dumps(told).encode())
    return status


if __name__ == "__main__":
    sys.exit(main())
