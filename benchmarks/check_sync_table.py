"""Makes src/onegraph/check/data/sync_ops.json: what torch's functions and ops do to a capture, measured on this GPU.

Every public function that takes tensors runs on the sample inputs of torch's op database, or, where that lacks it, on
arguments guessed from its signature; it and each aten overload that it dispatches are run once to warm up, once under
torch's sync debug mode and once inside a capture. A process that a failed capture left unable to capture again measures
nothing more: what it was given is measured by a fresh one.

    python benchmarks/check_sync_table.py --out src/onegraph/check/data/sync_ops.json --workers 12
    python benchmarks/check_sync_table.py --out table.json --only own     # the ops of `_own` alone
"""

import argparse
import importlib.util
import json
import multiprocessing
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

warnings.filterwarnings("ignore")
_SAMPLES = 8
_ROUNDS = 6
_OPS: list[Any] = []
_SPOILED = False
_SKIP = ("aten.set_.", "aten.resize_.", "prim.", "aten.detach.", "aten.record_stream", "aten.is_pinned")


def _op_db() -> list[Any]:
    """torch's op database. `expecttest` is imported by torch's test helpers and used by none of what we call."""
    if importlib.util.find_spec("expecttest") is None:
        stub = types.ModuleType("expecttest")
        vars(stub).update(TestCase=unittest.TestCase, assert_expected_inline=None)
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


@dataclass(frozen=True)
class _Own:
    """An op that torch's database lacks, as an entry of it: `samples()` gives argument lists for `op`."""

    name: str
    op: Callable[..., Any]
    samples: Callable[[], list[tuple[Any, ...]]]

    @property
    def dtypes(self) -> list[Any]:
        import torch

        return [torch.float32]

    def sample_inputs(self, device: Any, dtype: Any, requires_grad: bool) -> Iterator[Any]:
        for first, *rest in self.samples():
            yield types.SimpleNamespace(input=first, args=tuple(rest), kwargs={})


def _own() -> list[_Own]:
    """Ops with host code of their own that no entry of torch's database reaches, each on sizes of several kinds."""
    import torch

    aten = torch.ops.aten

    def x(*shape: int) -> Any:
        return torch.rand(*shape, device="cuda")

    def one(value: float) -> Any:
        return torch.full((), value, device="cuda")

    def ids(n: int, below: int = 100) -> Any:
        return torch.arange(n, device="cuda").remainder(below)

    def padded(n: int) -> tuple[Any, Any]:
        return x(2, n, 8), torch.arange(n, device="cuda") < torch.tensor([[n], [n // 2]]).to("cuda")

    def jagged(n: int) -> Any:
        return torch._nested_tensor_from_mask(*padded(n))

    def experts(n: int) -> tuple[Any, Any, Any]:
        return x(8 * n, 16), x(n, 16, 16), torch.arange(8, 8 * n + 1, 8, device="cuda", dtype=torch.int32)

    def bytes_(n: int) -> Any:
        return torch.ones(n, n, dtype=torch.int8, device="cuda")

    few, lengths = [(8,), (800,)], [(4,), (64,)]
    made: dict[str, tuple[Callable[..., Any], Callable[[], list[tuple[Any, ...]]]]] = {
        "embedding_renorm_": (aten.embedding_renorm_, lambda: [(x(100, 8), ids(n), 0.1, 2.0) for n in (1, 12, 5000)]),
        "embedding_dense_backward": (
            aten.embedding_dense_backward,
            lambda: [(x(n, 8), ids(n), 100, -1, f) for n in (12, 5000) for f in (False, True)],
        ),
        "embedding_bag": (aten._embedding_bag, lambda: [(x(100, 8), ids(12), ids(3) * 2, False, m) for m in (0, 1, 2)]),
        "nested": (aten._nested_tensor_from_mask, lambda: [padded(n) for n in (4, 64)]),
        "nested left": (aten._nested_tensor_from_mask_left_aligned, lambda: [padded(n) for n in (4, 64)]),
        "nested padded": (lambda n: jagged(n).to_padded_tensor(0.0), lambda: lengths),
        "nested linear": (lambda n: torch.nn.functional.linear(jagged(n), x(8, 8), x(8)), lambda: lengths),
        "linspace end": (aten.linspace.Scalar_Tensor, lambda: [(0, one(2), n) for n in (5, 500)]),
        "linspace start": (aten.linspace.Tensor_Scalar, lambda: [(one(0), 2, n) for n in (5, 500)]),
        "linspace": (aten.linspace.Tensor_Tensor, lambda: [(one(0), one(2), n) for n in (5, 500)]),
        "logspace end": (aten.logspace.Scalar_Tensor, lambda: [(0, one(2), n) for n in (5, 500)]),
        "randperm": (lambda n: torch.randperm(n, device="cuda"), lambda: [(4,), (4000,), (400000,)]),
        "multinomial": (
            torch.multinomial,
            lambda: [(x(4, n), *draw) for n in (8, 4000) for draw in ((1, False), (2, False), (2, True))],
        ),
        "poisson": (torch.poisson, lambda: [(x(n),) for n in (8, 800)]),
        "binomial": (torch.binomial, lambda: [(x(n) * 8, x(n)) for n in (8, 800)]),
        "geometric": (lambda n: x(n).geometric_(0.5), lambda: few),
        "assert": (torch._assert_async, lambda: [(one(1) > 0,), (x(8).sum() > -1,)]),
        "learnable fake quantize": (
            aten._fake_quantize_learnable_per_tensor_affine,
            lambda: [(x(n), x(1), x(1).floor(), 0, 255) for n in (8, 800)],
        ),
        "fake quantize": (
            aten.fake_quantize_per_tensor_affine.tensor_qparams,
            lambda: [(x(n), one(0.1), one(0).int(), 0, 255) for n in (8, 800)],
        ),
        "to_sparse": (lambda n: x(n, n).to_sparse(), lambda: lengths),
        "coalesce": (
            lambda n: torch.sparse_coo_tensor(ids(2 * n, n).view(2, n), x(n), (n, n)).coalesce(),
            lambda: lengths,
        ),
        "sparse product": (lambda n: torch.sparse.mm(x(n, n).to_sparse_csr(), x(n, 4)), lambda: lengths),
        "segment_reduce": (
            lambda n: torch.segment_reduce(x(n), "sum", lengths=torch.full((2,), n // 2, device="cuda")),
            lambda: lengths,
        ),
        "gru": (lambda n: torch.nn.GRU(8, 8).to("cuda")(x(n, 2, 8)), lambda: lengths),
        "lstm": (lambda n: torch.nn.LSTM(8, 8, bidirectional=True).to("cuda")(x(n, 2, 8)), lambda: lengths),
        "grouped_mm": (torch._grouped_mm, lambda: [experts(2), experts(8)]),
        "grouped_mm bfloat16": (
            lambda a, b, ends: torch._grouped_mm(a.bfloat16(), b.bfloat16(), ends),
            lambda: [experts(2), experts(8)],
        ),
        "int_mm": (torch._int_mm, lambda: [(bytes_(n), bytes_(n)) for n in (32, 256)]),
    }
    return [_Own(f"own {name}", op, samples) for name, (op, samples) in made.items()]


def _public() -> dict[str, Callable[..., Any]]:
    """Public functions and methods that take tensors, by the name that people call them by."""
    import torch

    found = {}
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            name = torch.overrides.resolve_name(function) or ""
            parts = name.split(".")
            if name.startswith("torch.") and not any(p.startswith("_") for p in parts) and parts[1] not in _NO_WORK:
                found[name] = function
    return found


_NO_WORK = ("distributed", "functional")
"""Modules of collectives, and of other names for the same functions."""


def _names_of(info: Any) -> set[str]:
    """The public functions that an entry of the database is, under all of their names."""
    import torch

    forms = [info.op, *(getattr(info, f"{kind}_variant", None) for kind in ("method", "inplace"))]
    return {torch.overrides.resolve_name(form) or "" for form in forms if form is not None} - {""}


def _guessed(known: set[str]) -> list[_Own]:
    """Public functions that the database lacks, on arguments guessed from the names of their parameters."""
    import inspect

    import torch

    signatures = torch.overrides.get_testing_overrides()
    made = []
    for name, function in sorted(_public().items()):
        if name in known:
            continue
        try:
            parameters = inspect.signature(signatures[function]).parameters.values()
        except (KeyError, TypeError, ValueError):
            continue
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        made.append(_Own(name, function, lambda needed=needed: [_arguments(needed, k) for k in range(4)]))  # type: ignore[misc]
    return made


def _arguments(names: list[str], kind: int) -> tuple[Any, ...]:
    """A value for each parameter: of `kind` 0 matrices, 1 vectors, 2 matrices of integers, 3 one number."""
    import torch

    x = torch.rand(4, 4, device="cuda") if kind == 0 else torch.rand(4, device="cuda")
    if kind >= 2:
        x = torch.arange(16, device="cuda").view(4, 4) if kind == 2 else torch.ones((), device="cuda")
    ids = torch.zeros(4, dtype=torch.int64, device="cuda")
    values: dict[str, Any] = {
        "dim": 0, "dim0": 0, "dim1": 0, "dims": (0,), "axis": 0, "axis0": 0, "axis1": 0, "n": 2, "k": 1, "p": 2.0,
        "N": 4, "size": (4,), "shape": (4,), "sizes": (4,), "length": 2, "start": 0, "end": 4, "step": 1,
        "diagonal": 0, "index": ids, "indices": ids, "idx": ids, "mask": x > 0, "condition": x > 0,
        "boundaries": x.flatten().sort()[0], "dtype": torch.float32,
        "repeats": 2, "split_size_or_sections": 2, "indices_or_sections": 2, "tensors": (x, x), "exponent": 2,
        "value": 1.0, "fill_value": 1.0, "min": 0.0, "max": 1.0, "training": False, "eps": 1e-5,
        "equation": "i...->i", "high": 4, "low": 0, "device": "cuda", "kernel_size": 2, "padding": 0, "groups": 1,
        "normalized_shape": (4,), "num_groups": 2, "output_size": (2, 2), "scale_factor": 2, "func": torch.abs,
    }  # fmt: skip
    return tuple(values.get(name, x) for name in names)


def _prepare(only: str) -> None:
    global _OPS
    infos = _own() if only.startswith("own") else [*_op_db(), *_own()]  # the database takes seconds to import
    if not only:
        infos += _guessed({name for info in infos if not isinstance(info, _Own) for name in _names_of(info)})
    _OPS = [info for info in infos if info.name.startswith(only)]


def measure(index: int) -> dict[str, dict[str, Any]] | None:
    """overload -> {"runs", "sync", "fails", "error"} for op number `index`; None from a process that cannot capture."""
    global _SPOILED
    if _SPOILED:
        return None
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    warnings.filterwarnings("ignore")
    info = _OPS[index]
    rows: dict[str, dict[str, Any]] = {}
    healthy = True
    stream = torch.cuda.Stream()

    def look(name: str, call: Callable[[], Any]) -> None:
        """What a call that has been made before does under sync debug mode, and in a capture."""
        nonlocal healthy
        row = rows.setdefault(name, {"runs": 0, "sync": 0, "fails": 0, "error": ""})
        row["runs"] += 1
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            row["sync"] += "synchronizing" in str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                call()
        except RuntimeError as error:
            row["fails"] += 1
            row["error"] = str(error).splitlines()[0][:160]
            healthy = _can_capture(torch, stream)

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            on_gpu = any(isinstance(t, torch.Tensor) and t.is_cuda for t in _leaves((args, kwargs, out)))
            if on_gpu and healthy and not str(func).startswith(_SKIP):
                look(str(func), lambda: func(*args, **kwargs))
            return out

    public = [] if info.name.startswith("own") else [info.name] if isinstance(info, _Own) else _names_of(info)
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        if dtype not in info.dtypesIfCUDA if hasattr(info, "dtypesIfCUDA") else dtype not in info.dtypes:
            continue
        try:
            samples = list(info.sample_inputs(torch.device("cuda"), dtype, requires_grad=False))
        except Exception:
            continue
        step = max(1, len(samples) // _SAMPLES)
        for sample in samples[::step][:_SAMPLES]:
            try:
                with Probe(), torch.no_grad():
                    info.op(sample.input, *sample.args, **sample.kwargs)
                with torch.no_grad():
                    for name in public if healthy else ():  # forms of one function: they differ in where results go
                        look(name, lambda sample=sample: info.op(sample.input, *sample.args, **sample.kwargs))  # type: ignore[misc]
            except Exception:
                continue  # some samples are errors on purpose
        if rows:
            break
    _SPOILED = not healthy
    return rows


def _can_capture(torch: Any, stream: Any) -> bool:
    try:
        torch.cuda.synchronize()
        x = torch.zeros(4, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            x + 1
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False


def _leaves(tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit", type=int, default=0, help="only the first N ops, to try the script")
    parser.add_argument("--only", default="", help="ops whose names begin so")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all of it: what is left then is not measured")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one op")
    arguments = parser.parse_args()
    import torch

    _prepare(arguments.only)
    names = [info.name for info in _OPS]
    todo = list(range(arguments.limit or len(names)))
    context = multiprocessing.get_context("spawn")
    rows: dict[str, dict[str, Any]] = {}
    failed = []
    began = time.monotonic()
    for _ in range(_ROUNDS):
        again = []
        with context.Pool(arguments.workers, initializer=_prepare, initargs=(arguments.only,)) as pool:
            pending = [(i, pool.apply_async(measure, (i,))) for i in todo]
            for index, result in pending:
                try:
                    left = began + arguments.seconds - time.monotonic()
                    answer = result.get(timeout=max(0.01, min(arguments.timeout, left)))
                except Exception as error:
                    failed.append(f"{names[index]}: {type(error).__name__} {str(error)[:80]}")
                    continue
                if answer is None:
                    again.append(index)
                    continue
                for name, row in answer.items():
                    known = rows.setdefault(name, {"runs": 0, "sync": 0, "fails": 0, "error": ""})
                    for key in ("runs", "sync", "fails"):
                        known[key] += row[key]
                    known["error"] = known["error"] or row["error"]
        if not again or len(again) == len(todo):
            failed += [names[i] + ": not reached" for i in again]
            break
        todo = again
    ops, functions = _rows(rows, "aten"), _rows(rows, "torch.")
    clean = sorted(name for name, row in rows.items() if not row["fails"])
    body = {
        "command": "python benchmarks/check_sync_table.py",
        "torch": torch.__version__,
        "device": _device_name(),
        "ops": ops,
        "functions": functions,
        "debug mode saw, capture did not": sorted(n for n, r in rows.items() if r["sync"] and not r["fails"]),
        "clean": [name for name in clean if not name.startswith("torch.")],
        "clean functions": [name.removeprefix("torch.") for name in clean if name.startswith("torch.")],
        "not run": [name.removeprefix("torch.") for name in sorted(_public().keys() - rows.keys())],
        "not measured": failed,
    }
    with open(arguments.out, "w") as file:
        json.dump(body, file, indent=1)
        file.write("\n")
    said = f"{len(ops)} overloads and {len(functions)} functions break a capture"
    print(f"{len(rows)} rows, {said}, {len(failed)} not measured, {time.monotonic() - began:.0f} s")


def _rows(rows: dict[str, dict[str, Any]], begin: str) -> dict[str, dict[str, Any]]:
    """Those that broke a capture: the share of samples that did, how many samples there were, the first error."""
    return {
        name: {"sync": row["fails"] / row["runs"], "runs": row["runs"], "error": row["error"]}
        for name, row in sorted(rows.items())
        if row["fails"] and name.startswith(begin)
    }


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    main()
