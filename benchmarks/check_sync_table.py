"""Makes src/onegraph/check/data/sync_ops.json: what each aten overload does to a capture, measured on this GPU.

Every op of torch's own op database runs on sample inputs; each aten overload that it dispatches is run once to warm up,
once under torch's sync debug mode and once inside a capture. A process that a failed capture left unable to capture
again measures nothing more: what it was given is measured by a fresh one.

    python benchmarks/check_sync_table.py --out src/onegraph/check/data/sync_ops.json --workers 12
"""

import argparse
import importlib.util
import json
import multiprocessing
import sys
import types
import unittest
import warnings
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


def _prepare() -> None:
    global _OPS
    _OPS = _op_db()


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

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal healthy
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            name = str(func)
            on_gpu = any(isinstance(t, torch.Tensor) and t.is_cuda for t in _leaves((args, kwargs, out)))
            if not on_gpu or not healthy or name.startswith(_SKIP):
                return out
            row = rows.setdefault(name, {"runs": 0, "sync": 0, "fails": 0, "error": ""})
            row["runs"] += 1
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                func(*args, **kwargs)
            except RuntimeError as error:
                row["sync"] += "synchronizing" in str(error)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    func(*args, **kwargs)
            except RuntimeError as error:
                row["fails"] += 1
                row["error"] = str(error).splitlines()[0][:160]
                healthy = _can_capture(torch, stream)
            return out

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
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one op")
    arguments = parser.parse_args()
    import torch

    names = [info.name for info in _op_db()]
    todo = list(range(arguments.limit or len(names)))
    context = multiprocessing.get_context("spawn")
    rows: dict[str, dict[str, Any]] = {}
    failed = []
    for _ in range(_ROUNDS):
        again = []
        with context.Pool(arguments.workers, initializer=_prepare) as pool:
            pending = [(i, pool.apply_async(measure, (i,))) for i in todo]
            for index, result in pending:
                try:
                    answer = result.get(timeout=arguments.timeout)
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
    ops = {
        name: {"sync": row["fails"] / row["runs"], "runs": row["runs"], "error": row["error"]}
        for name, row in sorted(rows.items())
        if row["fails"]
    }
    body = {
        "command": "python benchmarks/check_sync_table.py",
        "torch": torch.__version__,
        "device": _device_name(),
        "ops": ops,
        "debug mode saw, capture did not": sorted(n for n, r in rows.items() if r["sync"] and not r["fails"]),
        "clean": sorted(name for name, row in rows.items() if not row["fails"]),
        "not measured": failed,
    }
    with open(arguments.out, "w") as file:
        json.dump(body, file, indent=1)
        file.write("\n")
    print(f"{len(rows)} overloads, {len(ops)} break a capture, {len(failed)} ops not measured")


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    main()
