"""Measures what the corpus really does on a GPU: does capture fail, does a replay differ from eager?

Independent of onegraph.check: it captures with torch alone. Each case has a process of its own. Writes truth.json.

    python tests/check/measure_truth.py --workers 8
    python tests/check/measure_truth.py --keep --cases heldout2/ h23_devices    # these alone; the other rows stay
"""

import argparse
import contextlib
import copy
import gc
import io
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import corpus_tools
import lanes


def measure(folder: str, name: str) -> dict[str, Any]:
    """{"eager": "ok" or the error, "capture": the same, "replay": "equal", "differs" or an error, "worst": float}"""
    import torch

    warnings.filterwarnings("ignore")
    case = next(c for c in corpus_tools.cases(folder) if c.name == name)
    if torch.cuda.device_count() < case.gpus:
        return {"skipped": f"needs {case.gpus} GPUs"}
    found: dict[str, Any] = {"eager": "ok"}
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            eager = _eager(torch, case)
        except Exception as error:
            return {"eager": _line(error)}
        torch.cuda.synchronize()
        try:
            found.update(_captured(torch, case, eager))
        except Exception as error:
            found["replay"] = _line(error)
    return found


def _eager(torch: Any, case: Any) -> list[list[Any]]:
    torch.manual_seed(0)
    step, inputs = case.factory()
    results = []
    for index in range(case.steps):
        out = step(*inputs(index))
        torch.cuda.synchronize()
        results.append([o.detach().clone() for o in _tensors(torch, out)])
    return results


def _captured(torch: Any, case: Any, eager: list[list[Any]]) -> dict[str, Any]:
    torch.manual_seed(0)
    step, inputs = case.factory()
    stream = torch.cuda.Stream()
    arguments = inputs(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step(*arguments)
    torch.cuda.synchronize()
    arguments = inputs(1)
    static = _map(lambda v: _static(torch, v), arguments)
    del arguments
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # No stream=, as most people write it, where a case has several GPUs: that is its hazard.
        with torch.cuda.graph(graph, stream=stream) if case.gpus == 1 else torch.cuda.graph(graph):
            out = step(*static)
    except Exception as error:
        return {"capture": _line(error), "replay": "not captured", "at": _lines(error)}
    found: dict[str, Any] = {"capture": "ok", "replay": "equal", "worst": 0.0}
    outputs = _tensors(torch, out)
    made = [output for output in outputs if output.is_floating_point() and _of_pool(torch, output, graph)]
    for index in range(1, case.steps):
        if index > 1:
            fresh = inputs(index)
            try:
                for held, new in zip(_tensors(torch, static), _tensors(torch, fresh), strict=True):
                    _copy(held, new)
            except Exception as error:
                return found | {"replay": f"differs: inputs do not fit ({_line(error)})"}
            del fresh
        gc.collect()
        torch.cuda.synchronize()
        junk = [torch.full((n,), float("nan"), device="cuda") for n in (4, 16, 64, 256, 1024, 65536) for _ in range(8)]
        pinned = [torch.full((n,), float("nan")).pin_memory() for n in (1, 4, 64, 1024) for _ in range(4)]
        for output in made:
            with torch.inference_mode():  # which may write tensors made in that mode, and all others
                output.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        del junk, pinned
        for ours, theirs in zip(outputs, eager[index], strict=False):
            apart = _difference(torch, ours, theirs)
            found["worst"] = max(found["worst"], apart)
            if apart > 1e-3 and found["replay"] == "equal":
                found["replay"] = f"differs from step {index}"
    return found


def _static(torch: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone().pin_memory() if value.device.type == "cpu" and value.is_pinned() else value.clone()


def _copy(static: Any, fresh: Any) -> None:
    if static.shape != fresh.shape:
        raise ValueError(f"{tuple(fresh.shape)} into {tuple(static.shape)}")
    static.copy_(fresh)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with every leaf changed: through tuples, lists, dicts and objects that hold values."""
    if isinstance(value, list | tuple):
        parts = [_map(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return type(value)({key: _map(change, part) for key, part in value.items()})
    if _holds(value):
        made = copy.copy(value)
        for key, part in vars(value).items():
            object.__setattr__(made, key, _map(change, part))
        return made
    return change(value)


def _tensors(torch: Any, value: Any) -> list[Any]:
    """The tensors in a step's result or arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        parts = list(vars(value).values()) if _holds(value) else []
    return [tensor for part in parts for tensor in _tensors(torch, part)]


def _holds(value: Any) -> bool:
    """Whether it is a plain object that carries values, as a dataclass or a batch of the user's own."""
    ours = type(value).__module__.split(".")[0] not in ("builtins", "torch", "transformers", "numpy")
    return hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value) and ours


def _of_pool(torch: Any, tensor: Any, graph: Any) -> bool:
    """Whether the graph made the tensor: it lies in its memory pool, and is no buffer of the step's."""
    address = tensor.data_ptr()
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(graph.pool())
    )


def _difference(torch: Any, ours: Any, theirs: Any) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = ours.detach().double().cpu(), theirs.double().cpu()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) if a.numel() else 0.0


def _lines(error: BaseException) -> list[list[Any]]:
    """[short path, line] of the calls, torch's left out, that led to the first error; ending a capture raises more."""
    while error.__context__ is not None:
        error = error.__context__
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    return [[short(p), line] for p, line in frames if "site-packages/torch/" not in p and p != __file__]


def short(path: str) -> str:
    """A path as two machines write it: below site-packages, or its end."""
    return path.rsplit("site-packages/", 1)[-1][-60:]


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def _measured(folder: str, name: str) -> dict[str, Any]:
    import torch

    return {"row": measure(folder, name), "device": torch.cuda.get_device_name(0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--folders", nargs="+", default=list(corpus_tools.FOLDERS))
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of the cases to measure")
    parser.add_argument("--out", default=str(Path(__file__).parent / "truth.json"))
    parser.add_argument("--keep", action="store_true", help="rows of truth.json stay where this run measures none")
    arguments = parser.parse_args()
    import torch

    todo = [(folder, case.name) for folder in arguments.folders for case in corpus_tools.cases(folder)]
    todo = [(folder, name) for folder, name in todo if any(part in f"{folder}/{name}" for part in arguments.cases)]
    cases: dict[str, Any] = corpus_tools.truth() if arguments.keep else {}
    body: dict[str, Any] = {"command": "python tests/check/measure_truth.py", "torch": torch.__version__}
    alone = lanes.answers(_measured, todo, workers=arguments.workers, fit=lambda: False, patience=90.0)
    for (folder, name), answer in alone:
        row = answer.get("row", {"capture": "ok", "replay": answer.get("error")})
        if "skipped" not in row:
            cases[f"{folder}/{name}"] = row
        body |= {"device": answer.get("device", body.get("device")), "cases": cases}
        Path(arguments.out).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    broken = sum(row.get("capture") != "ok" or row.get("replay") != "equal" for row in cases.values())
    print(f"{len(cases)} cases, {broken} do not replay as eager")


if __name__ == "__main__":
    main()
