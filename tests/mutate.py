"""Mutation testing: one small change of the source after another, each of which some test should fail on.

    python tests/mutate.py --modules quant runtime/graph.py --sample 200 --jobs 2 --out mutants.jsonl

mutmut makes the changes; this file adds four kinds and runs them. Each worker has a copy of the tree and
forks from a process that has imported torch already, so a mutant costs the import of onegraph and the tests that run
the mutated statement, the fastest first, until one fails. Which tests run what is measured first, by running the tests
of the module (`TESTS`) once.

The outcome of each mutant is a line of `--out`; a run that is started again goes on there. The score is the share of
killed ones among those that a test runs. A line that none runs (`unreached`) is a GPU's, or wants a test. Survivors
that no test can tell from the source stand with their reason in `equal_mutants.toml` and do not count.

Where mutmut is not installed: `--write-mutants FILE` elsewhere, then `--mutants FILE` here. That needs pytest, torch
and what the tests import, nothing else; a test file that cannot be imported is named and left out.
"""

import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent
PACKAGE = Path("src/onegraph")
MODULES = ("engine", "runtime", "quant", "formats", "check/simulate/compare.py")
FOLDERS = ("api", "cli", "engine", "formats", "models", "nn", "ops", "quant", "runtime", "serve")
# The tests of a module are those of the longest prefix of its path; `*` as the glob of pathlib, below tests/.
TESTS: dict[str, tuple[str, ...]] = {
    "": ("test_*.py", *(f"{folder}/test_*.py" for folder in FOLDERS)),
    "check/simulate/compare.py": ("check/test_compare.py", "check/test_simulate.py", "check/test_simulate_corpus.py"),
    "check/simulate/": ("check/test_simulate.py", "check/test_sparse.py", "check/test_simulate_corpus.py"),
    "engine/": (
        "engine/test_engine*.py",
        "engine/test_choice.py",
        "models/test_stream.py",
        "ops/test_sampling.py",
        "models/test_llama.py",
        "engine/test_deepseek_engine.py",
        "engine/test_deepseek_placed.py",
    ),
    "engine/ab.py": ("engine/test_ab.py",),
    "engine/bench.py": ("engine/test_bench.py",),
    "engine/evaluate.py": ("engine/test_evaluate.py",),
    "formats/": (
        *("formats/test_checkpoint.py", "quant/test_llama_quantized.py", "models/test_llama_config.py"),
        "fuzz/test_fuzz.py",
    ),
    "formats/e8p.py": (
        *("formats/test_e8p.py", "nn/test_linear.py", "quant/test_quant.py"),
        "quant/test_llama_quantized.py",
    ),
    "formats/files.py": ("formats/test_files.py", "formats/test_checkpoint.py"),
    "formats/gguf": ("formats/test_gguf*.py", "fuzz/test_fuzz.py"),
    "formats/nvfp4.py": ("formats/test_nvfp4.py", "formats/test_nvfp4_files.py", "formats/test_checkpoint.py"),
    "formats/turboquant": ("*/test_turboquant*.py",),
    "quant/": ("quant/test_quant*.py", "formats/test_e8p.py", "quant/test_llama_quantized.py"),
    "quant/nvfp4.py": ("formats/test_nvfp4.py", "formats/test_nvfp4_files.py"),
    "runtime/": ("runtime/test_graph.py", "runtime/test_prove.py"),
}
UNSEEN = {"device", "pin_memory", "non_blocking", "strict", "stacklevel"}
"""Arguments left alone: without a GPU no device is told from another, and `strict` is an assert."""
SECONDS = 30.0
"""A mutant may take this much longer than its tests did."""
PRELOADED = (
    *("numpy", "torch", "torch._dynamo", "triton", "pytest", "safetensors.torch"),
    *("tokenizers", "transformers", "gguf"),
)


@dataclass(frozen=True)
class Mutant:
    """The text between characters `start` and `end` of a file (relative to the package) becomes `text`."""

    file: str
    digest: str
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def line(self, source: str) -> int:
        return source.count("\n", 0, self.start) + 1

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(asdict(self).values())

    def diff(self, source: str) -> tuple[str, str]:
        """The lines that change, before and after, in one line each."""
        old, new = source.splitlines(), self.apply(source).splitlines()
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        spans = [span for kind, *span in matcher.get_opcodes() if kind != "equal"]
        a, b, c, d = spans[0][0], spans[-1][1], spans[0][2], spans[-1][3]
        return tuple(" ".join(t.strip() for t in lines) for lines in (old[a:b], new[c:d]))


# ------------------------------------------------------------------------------------------------- making mutants


def mutants_of(file: str) -> list[Callable[[], Mutant | None]]:
    """Makers of mutmut's mutants of a file and of ours, without those of messages (`raise`), asserts and annotations.

    A maker gives None for what is no change or no Python.
    """
    import libcst as cst
    from libcst import matchers as m
    from mutmut.mutation import file_mutation, mutators

    def negated(node: cst.If | cst.While) -> Iterator[cst.CSTNode]:
        test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test))

    def always(node: cst.Comparison) -> Iterator[cst.CSTNode]:
        """True of numbers and of tensors alike, in the shape of the left side."""
        if m.matches(node, m.Comparison(comparisons=[m.ComparisonTarget(operator=m.LessThan() | m.GreaterThan())])):
            yield node.with_changes(comparisons=[cst.ComparisonTarget(cst.Equal(), node.left)])

    def dropped(node: cst.Expr) -> Iterator[cst.CSTNode]:
        if m.matches(node, m.Expr(value=m.Call())):
            yield node.with_changes(value=cst.Name("None"))

    def argument(node: cst.Call) -> Iterator[cst.Call]:
        for changed in mutators.operator_arg_removal(node):
            gone = next(a for a in node.args if all(a is not b for b in changed.args))
            if gone.keyword is None or gone.keyword.value not in UNSEEN:
                yield changed

    def marked(node: cst.BaseString) -> Iterator[cst.CSTNode]:
        if isinstance(node, cst.SimpleString) and '"""' not in node.value and len(node.value) > 2:
            yield node.with_changes(value=f"{node.value[:-1]}XX{node.value[-1]}")

    class Visitor(file_mutation.MutationVisitor):
        """Of decorated functions too: mutmut leaves them out because it would have to copy them, as we do not."""

        def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
            if isinstance(node, cst.Raise | cst.Assert | cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom):
                return True
            if isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value in UNSEEN:
                return True
            if m.matches(node, m.If(test=m.Name("TYPE_CHECKING")) | m.AssignTarget(target=m.Name("__all__"))):
                return True
            return not isinstance(node, cst.FunctionDef) and super()._skip_node_and_children(node)

    ours = [((cst.If, cst.While), negated), (cst.Comparison, always), (cst.Expr, dropped)]
    ours += [(cst.BaseString, marked), (cst.Call, argument)]
    replaced = (mutators.operator_string, mutators.operator_arg_removal)
    theirs = [pair for pair in mutators.mutation_operators if pair[1] not in replaced]
    source = (REPO / PACKAGE / file).read_text()
    wrapper = cst.MetadataWrapper(cst.parse_module(source))
    visitor = Visitor([*theirs, *ours], file_mutation.IgnoredCode(set(), set(), set()))
    module = wrapper.visit(visitor)

    def make(mutation: file_mutation.Mutation) -> Mutant | None:
        new = module.deep_replace(mutation.original_node, mutation.mutated_node).code
        return between(file, source, new) if new != source and parses(new) else None

    return [partial(make, mutation) for mutation in visitor.mutations]


def between(file: str, source: str, new: str) -> Mutant:
    def shared(one: str, other: str) -> int:
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    start = shared(source, new)
    rest, new_rest = source[start:], new[start:]
    tail = shared(rest[::-1], new_rest[::-1])
    return Mutant(file, digest_of(source), start, len(source) - tail, new_rest[: len(new_rest) - tail])


def digest_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def parses(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def files_of(modules: list[str]) -> list[str]:
    found: list[str] = []
    for module in modules:
        path = REPO / PACKAGE / module
        if not path.exists():
            raise SystemExit(f"--modules: got {module!r}, allowed a file or folder below {PACKAGE}")
        paths = [path] if path.is_file() else sorted(path.rglob("*.py"))
        found += [str(p.relative_to(REPO / PACKAGE)) for p in paths]
    return list(dict.fromkeys(found))


def tests_of(file: str) -> tuple[str, ...]:
    prefix = max((p for p in TESTS if file.startswith(p)), key=len)
    paths = []
    for pattern in TESTS[prefix]:
        found = sorted((REPO / "tests").glob(pattern))
        if not found:
            raise SystemExit(f"TESTS[{prefix!r}]: no file of tests/ is {pattern!r}; name the tests that replace it")
        paths += found
    return tuple(str(p.relative_to(REPO)) for p in dict.fromkeys(paths))


# ------------------------------------------------------------------------------------------- running tests, forked


class Watch:
    """A pytest plugin: seconds of each test that passes, and the lines of the wanted files that ran in it.

    What ran while a test was set up counts for every test of its file: a shared fixture is made for the first alone.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.paths = {str(root / PACKAGE / file): file for file in files}
        self.now: set[tuple[str, int]] = set()
        self.seconds: dict[str, float] = {}
        self.hits: dict[str, list[tuple[str, int]]] = {}
        self.shared: set[tuple[str, int]] = set()

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        file = self.paths.get(frame.f_code.co_filename)
        if file is None:
            return None
        if event != "return":
            self.now.add((file, frame.f_lineno))
        return self._trace

    def pytest_collection_finish(self) -> None:
        sys.settrace(self._trace)
        threading.settrace(self._trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        sys.settrace(self._trace)  # a test of the tracing itself takes it away
        if report.when == "setup":
            self.shared |= self.now
        elif report.when == "call" and report.passed:
            self.seconds[report.nodeid], self.hits[report.nodeid] = report.duration, sorted(self.now)
        self.now.clear()

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        threading.settrace(None)


class Chosen:
    """A pytest plugin: these tests alone, in this order."""

    def __init__(self, nodes: list[str]) -> None:
        self.order = {node: i for i, node in enumerate(nodes)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])


def forked(tree: Path, arguments: list[str], plugin: Any, seconds: float, done: Path | None = None) -> int | None:
    """pytest's exit status in a fork of this process, in a copy of the tree; None where it ran past `seconds`."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            os.chdir(tree)
            log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            sys.path[:0] = [str(tree / "src")]
            os.environ["PYTHONPATH"] = str(tree / "src")
            import pytest

            status = int(pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *arguments], [plugin]))
            if done is not None:
                done.write_text(json.dumps([plugin.seconds, plugin.hits, sorted(plugin.shared)]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found or time.monotonic() > until:
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests started and left behind, too
    if not found:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def copied(folder: Path) -> Path:
    """A copy of the tree whose pytest needs no plugin and registers no other copy's."""
    leave = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.jsonl")
    shutil.copytree(REPO, folder, ignore=leave)
    markers = "markers =\n  gpu: needs a CUDA GPU\n  slow: more than ten seconds\n  timeout: of pytest-timeout\n"
    shared = " ".join(["tests", *(f"tests/{name}" for name in FOLDERS)])
    ini = f"[pytest]\npythonpath = {shared}\n{markers}filterwarnings = ignore::DeprecationWarning\n"
    (folder / "pytest.ini").write_text(ini)
    return folder


def worker(tree: Path, tasks: list[Any], taken: Any, function: Any) -> None:
    copied(tree)
    while True:
        with taken.get_lock():
            index = taken.value
            taken.value += 1
        if index >= len(tasks):
            return
        function(tree, index, tasks[index])


def spread(jobs: int, folder: Path, tasks: list[Any], function: Any) -> None:
    """`function(tree, index, task)` of every task, in `jobs` processes with a copy of the tree each."""
    context = get_context("fork")
    taken = context.Value("i", 0)
    count = min(jobs, len(tasks))
    running = [context.Process(target=worker, args=(folder / str(i), tasks, taken, function)) for i in range(count)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    for i in range(count):
        shutil.rmtree(folder / str(i), ignore_errors=True)


def statement_at(source: str, line: int) -> tuple[range, bool]:
    """The lines of the innermost statement at a line (of a compound one, its head); whether a call runs them.

    Otherwise an import does: at module level, in a class, in the head of a function there.
    """
    found, called = range(1, 1), False

    def visit(body: Iterable[Any], inside: bool) -> None:
        nonlocal found, called
        for node in body:
            inner = [n for part in ("body", "orelse", "handlers", "finalbody") for n in getattr(node, part, ())]
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            if first <= line <= node.end_lineno:
                head = min((n.lineno for n in inner), default=node.end_lineno + 1)
                found, called = range(first, max(head, first + 1)), inside
                visit(inner, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(source).body, False)
    return found, called


# ------------------------------------------------------------------------------------------------------- the run


class Run:
    def __init__(self, mutants: list[Mutant], jobs: int, out: Path, folder: Path) -> None:
        self.jobs, self.out, self.folder = jobs, out, folder
        self.sources = {f: (REPO / PACKAGE / f).read_text() for f in {mutant.file for mutant in mutants}}
        self.mutants = mutants
        self.seconds: dict[str, float] = {}
        self.callers: dict[tuple[str, int], set[str]] = {}

    def measure(self) -> None:
        """The tests' seconds, and which of them call what."""
        paths = list(dict.fromkeys(path for file in self.sources for path in tests_of(file)))

        def one(tree: Path, index: int, path: str) -> None:
            forked(tree, [path], Watch(tree, self.sources), 3600, self.folder / f"hits{index}")

        spread(self.jobs, self.folder, paths, one)
        for index, path in enumerate(paths):
            found = self.folder / f"hits{index}"
            seconds, hits, shared = json.loads(found.read_text()) if found.exists() else ({}, {}, [])
            if not seconds:
                print(f"{path}: no test of it passes without a mutant: left out", flush=True)
            self.seconds |= seconds
            for node, lines in hits.items():
                for file, line in {*map(tuple, lines), *map(tuple, shared)}:
                    self.callers.setdefault((file, line), set()).add(node)

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that run the mutated statement, the fastest first; where an import runs it, all of the module."""
        source = self.sources[mutant.file]
        lines, called = statement_at(source, mutant.line(source))
        allowed = tests_of(mutant.file)
        nodes = (
            {node for line in lines for node in self.callers.get((mutant.file, line), ())} if called else self.seconds
        )
        return sorted((n for n in nodes if n.split("::")[0] in allowed), key=self.seconds.__getitem__)

    def one(self, tree: Path, index: int, mutant: Mutant) -> None:
        source = self.sources[mutant.file]
        nodes = self.tests(mutant)
        begin, status = time.time(), None
        if nodes:
            target = tree / PACKAGE / mutant.file
            self._write(target, mutant.apply(source))
            limit = SECONDS + 5 * sum(self.seconds[n] for n in nodes)
            status = forked(tree, ["-x", *dict.fromkeys(n.split("::")[0] for n in nodes)], Chosen(nodes), limit)
            self._write(target, source)
        outcome = {0: "survived", None: "timeout"}.get(status, "killed") if nodes else "unreached"
        before, after = mutant.diff(source)
        line = asdict(mutant) | {"line": mutant.line(source), "was": before, "is": after, "outcome": outcome}
        line |= {"tests": len(nodes), "seconds": round(time.time() - begin, 2), "status": status}
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _write(self, target: Path, text: str) -> None:
        """With a time of its own: Python takes a compiled file for that of any source of the same second and size."""
        target.write_text(text)
        self.stamp = getattr(self, "stamp", 10**9) + 1
        os.utime(target, (self.stamp, self.stamp))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[field.name] for field in fields(Mutant))


def summary(lines: list[dict[str, Any]], show: bool) -> str:
    told_why = tomllib.loads((REPO / "tests" / "equal_mutants.toml").read_text())["equal"]
    reasons = {(entry["file"], entry["was"], entry["is"]) for entry in told_why}
    told = []
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        outcome = line["outcome"].replace("timeout", "killed")
        if outcome == "survived" and (line["file"], line["was"], line["is"]) in reasons:
            outcome = "equal"
        for key in (line["file"], "all"):
            counts.setdefault(key, Counter())[outcome] += 1
        if outcome in ("survived", "unreached"):
            told.append(f"{line['file']}:{line['line']} {outcome}\n  - {line['was']}\n  + {line['is']}")
    columns = ("killed", "survived", "equal", "unreached")
    rows = [f"{'module':36}" + "".join(f"{name:>11}" for name in (*columns, "score"))]
    for key, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        judged = count["killed"] + count["survived"]
        score = f"{count['killed'] / judged:11.1%}" if judged else f"{'-':>11}"
        rows.append(f"{key:36}" + "".join(f"{count[name]:11}" for name in columns) + score)
    return "\n".join(([*told, ""] if show else []) + rows)


def preload() -> None:
    """What every mutant would import anew. Nothing of ours, and nothing that a fork would lose: threads, a GPU."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in PRELOADED:
        try:
            __import__(name)
        except ImportError as error:
            print(f"{name} is not installed ({error}); tests that need it are left out", flush=True)
    import torch

    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=list(MODULES), help=f"below {PACKAGE} (default: %(default)s)")
    parser.add_argument("--sample", type=int, default=10**9, help="this many mutants, drawn by --seed; all without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="one line a mutant; gone on with")
    parser.add_argument("--mutants", type=Path, help="run those of a file that --write-mutants made")
    parser.add_argument("--write-mutants", type=Path, help="make the mutants, run nothing")
    parser.add_argument("--show", action="store_true", help="print the survivors, too")
    args = parser.parse_args()
    if args.mutants:
        mutants = [Mutant(**entry) for entry in json.loads(args.mutants.read_text())]
    else:
        makers = [maker for file in files_of(args.modules) for maker in mutants_of(file)]
        print(f"{len(makers)} mutants of {' '.join(args.modules)}", flush=True)
        made = (maker() for maker in random.Random(args.seed).sample(makers, min(args.sample, len(makers))))
        mutants = list(dict.fromkeys(mutant for mutant in made if mutant is not None))
    if args.write_mutants:
        args.write_mutants.write_text(json.dumps([asdict(mutant) for mutant in mutants]))
        print(f"{len(mutants)} mutants")
        return 0
    for file, digest in {(mutant.file, mutant.digest) for mutant in mutants}:
        if digest_of((REPO / PACKAGE / file).read_text()) != digest:
            raise SystemExit(f"{args.mutants}: {file} is not the one that its mutants were made of; make them anew")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.touch()
    done = {key_of(line) for line in read(args.out)}
    left = [mutant for mutant in mutants if mutant.key not in done]
    print(f"{len(mutants)} mutants, {len(left)} to run", flush=True)
    if left:
        preload()
        with tempfile.TemporaryDirectory() as folder:
            run = Run(left, args.jobs, args.out, Path(folder))
            run.measure()
            spread(args.jobs, Path(folder), left, run.one)
    wanted = {mutant.key for mutant in mutants}
    lines = [line for line in read(args.out) if key_of(line) in wanted]
    print(summary(lines, args.show))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
