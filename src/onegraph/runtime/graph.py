"""Capture any callable as CUDA graphs over static buffers and replay it; on a CPU run it over the same buffers.

A `Runner` knows tensors and buckets, never a model. What it needs of the step is the capture contract
(docs/how-it-works/decode-step.md);
`onegraph check` finds what breaks it, and `onegraph.runtime.prove` shows on a GPU that a replay equals the eager step.
"""

import gc
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from onegraph.ops.registry import seen_before
from onegraph.runtime.transfer import Upload

Step = Callable[..., Any]

_RECORDER: ContextVar["_Recorder | None"] = ContextVar("onegraph_recorder", default=None)


class CaptureError(RuntimeError):
    """A step could not be captured; the message says where it stopped and what to do."""


class GraphPool:
    """The stream and the memory pool that the graphs of one device share.

    The stream is explicit: `torch.cuda.graph` without one captures on a stream that belongs to whichever device was
    current first in the process, and on any other device records an empty graph. Graphs of one pool reuse each other's
    memory, so they run one after another, and an output is valid until the next replay of *any* graph of the pool.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise ValueError(
                f"capture: got device {str(self.device)!r}"
                + ("" if self.device.type != "cuda" else ", and this machine has no GPU that torch can use")
                + "; allowed is a CUDA device: pass capture=False (or leave it out) to run the same step eagerly"
            )
        with torch.cuda.device(self.device):
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.stream = torch.cuda.Stream(self.device)
            self.handle = torch.cuda.graph_pool_handle()

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work inside goes to the pool's stream: after the caller's work so far, before the caller's work to come."""
        outer = torch.cuda.current_stream(self.device)
        if outer == self.stream:  # joining costs about 10 us a step: who loops stays inside
            with torch.cuda.device(self.device):  # several pools may be entered: the current device is the last one's
                yield
            return
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # also after an error: the caller may free or clear what is still being written
            outer.wait_stream(self.stream)


def split_point(name: str, fn: Step, *args: Any) -> Any:
    """`fn(*args)`; under a Runner that splits at `name`, a break between two graphs with `fn` run eagerly at replay.

    For what cannot be captured, or is to be watched or exchanged. In split mode the tensors in `args` keep their
    addresses, everything else in `args` is frozen, and tensors that `fn` returns are copied into static buffers; they
    must come out with the same shape each time. Elsewhere it is a plain call.
    """
    recorder = _RECORDER.get()
    return fn(*args) if recorder is None else recorder.split(name, fn, args)


@dataclass(frozen=True)
class _EagerCall:
    """What a split mode runs between two graphs: the next graph reads `result`, so each call lands there."""

    name: str
    fn: Step
    args: tuple[Any, ...]
    result: Any

    def __call__(self) -> None:
        static, _ = tree_flatten(self.result)
        fresh, _ = tree_flatten(self.fn(*self.args))
        described = [_describe(leaf) for leaf in fresh]
        if described != (expected := [_describe(leaf) for leaf in static]):
            raise RuntimeError(
                f"split_point {self.name!r}: got {described}; the capture saw {expected}, and the graph behind it has "
                "these baked in: return tensors of fixed shape, and nothing else that changes from step to step"
            )
        for old, new in zip(static, fresh, strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


def _describe(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape), str(leaf.device)) if isinstance(leaf, Tensor) else leaf


class _Recorder:
    """Turns one run of a step into a program: graphs, with eager calls between them in split mode."""

    def __init__(self, pool: GraphPool, split: frozenset[str]):
        self.pool = pool
        self.names = split
        self.met: set[str] = set()
        self.program: list[Callable[[], None]] = []
        self.graph: Any = None

    def begin(self) -> None:
        self.graph = self.pool.graph()
        # "thread_local": another thread's allocation must not void this capture; our own thread's mistakes still do.
        self.graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")

    def end(self) -> None:
        """Close the graph; one without work is dropped, which is where two split points meet."""
        graph, self.graph = self.graph, None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        if not any("Graph is empty" in str(w.message) for w in caught):
            self.program.append(graph.replay)

    def split(self, name: str, fn: Step, args: tuple[Any, ...]) -> Any:
        self.met.add(name)
        if name not in self.names:
            return fn(*args)
        done = len(self.program)
        self.end()
        for replay in self.program[done:]:
            replay()  # a capture runs nothing: without this, fn would read memory that no kernel has written
        token = _RECORDER.set(None)
        try:
            result = fn(*args)
        finally:
            _RECORDER.reset(token)
        self.program.append(_EagerCall(name, fn, args, result))
        self.begin()
        return result

    def record(self, step: Step, inputs: Mapping[str, Tensor]) -> Any:
        token = _RECORDER.set(self if self.names else None)
        collecting = gc.isenabled()
        gc.disable()  # a graph that a collection destroys inside the capture would void it
        try:
            self.begin()
            outputs = step(**inputs)
            self.end()
        except BaseException:
            if self.graph is not None:
                with warnings.catch_warnings():  # an invalidated capture must still be ended, and says so again
                    warnings.simplefilter("ignore")
                    with suppress(RuntimeError):
                        self.graph.capture_end()
            raise
        finally:
            if collecting:
                gc.enable()
            _RECORDER.reset(token)
        return outputs


class Runner:
    """Runs `step(**inputs)` from static buffers: captured and replayed on a GPU, eagerly on a CPU.

    Args:
        step: any callable that obeys the capture contract, called with the buffers of `inputs` by name. It may read
            and write other tensors that it holds, as long as their addresses stay.
        inputs: one tensor for each argument of the step. The Runner works in these very tensors. Their content at
            construction is what rows without a value hold, so make it harmless: warm-up runs the step on it for real.
        buckets: batch sizes to prepare. The first dimension of every input is the batch and at least the largest
            bucket; n rows run in the smallest bucket that holds them. None: one shape, that of `inputs`.
        capture: None captures where the inputs are on a GPU.
        split: names of the `split_point`s at which to break the graph and run eagerly.
        pool: share one GraphPool among Runners that run one after another.
        warmup: runs before each capture, on the capture stream: compilation, autotuning, handles and workspaces are
            made there and not inside the graph.
        reset: called after warm-up and capture of each bucket, to undo what these runs did to state other than
            `inputs` (which the Runner puts back itself). A capture in split mode runs the step once as well.

    Outputs are static: valid until the next replay of any Runner of the pool. Clone what must live longer.
    """

    def __init__(
        self,
        step: Step,
        inputs: Mapping[str, Tensor],
        buckets: Sequence[int] | None = None,
        *,
        capture: bool | None = None,
        split: str | Collection[str] = (),
        pool: GraphPool | None = None,
        warmup: int = 2,
        reset: Callable[[], None] | None = None,
    ):
        self.step = step
        self.inputs = dict(inputs)
        self.buckets = _check_buckets(self.inputs, buckets)
        self.device = next(iter(self.inputs.values())).device
        self.warmup = warmup
        self.reset = reset
        self.split = frozenset((split,) if isinstance(split, str) else split)
        self.padding = {name: tensor.clone() for name, tensor in self.inputs.items()}
        self._uploads = {name: Upload(tensor) for name, tensor in self.inputs.items()}
        self._ran: set[int | None] = set()  # buckets whose step has run on the buffers, eagerly
        self._programs: dict[int | None, tuple[list[Callable[[], None]], Any]] = {}
        self.pool = pool
        if capture or (capture is None and (pool is not None or self.device.type == "cuda")):
            self.pool = pool or GraphPool(self.device)
            if self.device.type == "cuda":
                gc.collect()  # what earlier captures left in cycles gives its memory back first
            for bucket in reversed(self.buckets or (None,)):  # the largest first: the others fit into its memory
                self._programs[bucket] = self._capture(self.pool, bucket)

    @property
    def mode(self) -> str:
        return "eager" if not self._programs else "split" if self.split else "captured"

    def running(self) -> AbstractContextManager[None]:
        """The Runner's stream; wrap a loop over `replay` in it once."""
        return self.pool.running() if self.pool is not None else nullcontext()

    def __call__(self, **values: Tensor) -> Any:
        """Copy `values` in, run, and return the outputs cut to the rows given, valid until the next replay."""
        with self.running():
            rows, bucket = self.load(**values)
            outputs = self.replay(bucket)
        return cut(outputs, rows, bucket)

    def load(self, **values: Tensor) -> tuple[int, int | None]:
        """Copy `values` into the buffers and padding into the rest of the bucket; returns (rows, bucket)."""
        rows, bucket = self._fit(values)
        for name, value in values.items():
            self._uploads[name](value)
            if bucket is not None and rows < bucket:
                self.inputs[name][rows:bucket].copy_(self.padding[name][rows:bucket])
        return rows, bucket

    def replay(self, bucket: int | None = None) -> Any:
        """Run the step on what the buffers hold, on the current stream, and return its outputs at the bucket's size."""
        if not self._programs:
            with torch.no_grad(), seen_before(self.device) if bucket in self._ran else nullcontext():
                outputs = self.step(**self.views(bucket))
            self._ran.add(bucket)
            return outputs
        program, outputs = self._programs[bucket]
        for part in program:
            part()
        return outputs

    def outputs(self, bucket: int | None = None) -> Any:
        """The static outputs of a captured bucket, None where the Runner is eager."""
        return self._programs[bucket][1] if self._programs else None

    def views(self, bucket: int | None) -> dict[str, Tensor]:
        """The arguments that the step sees: leading rows of the input buffers, so that all buckets share them."""
        return self.inputs if bucket is None else {name: tensor[:bucket] for name, tensor in self.inputs.items()}

    def bucket_for(self, rows: int) -> int:
        """The smallest bucket that holds `rows`."""
        if self.buckets and 1 <= rows <= self.buckets[-1]:
            return next(b for b in self.buckets if b >= rows)
        raise ValueError(
            f"rows: got {rows}; the buckets are {list(self.buckets)}: split the batch, or make a Runner with a larger "
            "bucket"
        )

    def _fit(self, values: Mapping[str, Tensor]) -> tuple[int, int | None]:
        if values.keys() != self.inputs.keys():
            raise ValueError(f"inputs: got {sorted(values)}; the step takes {sorted(self.inputs)}")
        counts = {name: value.shape[0] if value.dim() else 0 for name, value in values.items()}
        for name, value in values.items():
            buffer = self.inputs[name]
            skip = 1 if self.buckets else 0
            if value.dtype != buffer.dtype or value.shape[skip:] != buffer.shape[skip:] or value.dim() != buffer.dim():
                shape = ["rows" if self.buckets and not i else n for i, n in enumerate(buffer.shape)]
                raise ValueError(
                    f"{name}: got {value.dtype} {list(value.shape)}; allowed is {buffer.dtype} {shape}: the graph "
                    "reads a buffer of that type and shape"
                )
        if not self.buckets:
            return 0, None
        if len(set(counts.values())) > 1:
            raise ValueError(f"inputs: got a different number of rows {counts}; all inputs of a step have the same")
        rows = next(iter(counts.values()))
        return rows, self.bucket_for(rows)

    def _restore(self) -> None:
        for name, tensor in self.inputs.items():
            tensor.copy_(self.padding[name])
        if self.reset is not None:
            self.reset()

    def _capture(self, pool: GraphPool, bucket: int | None) -> tuple[list[Callable[[], None]], Any]:
        views = self.views(bucket)
        recorder = _Recorder(pool, self.split)
        with torch.no_grad(), pool.running():
            try:
                for _ in range(self.warmup):
                    self.step(**views)
                self._restore()
                pool.synchronize()
                outputs = recorder.record(self.step, views)
            except Exception as error:
                raise CaptureError(_explain(self.step, bucket, error)) from error
            self._restore()
            pool.synchronize()
        if missing := self.split - recorder.met:
            raise ValueError(f"split: got {sorted(missing)}; the step has the split points {sorted(recorder.met)}")
        if not recorder.program:
            raise CaptureError(
                f"the graph of {_name(self.step)} is empty: the step launched no work on {pool.device}. Its tensors "
                "are on another device, or it launches on a stream of its own that never joins the current one"
            )
        return recorder.program, outputs


def cut(outputs: Any, rows: int, bucket: int | None) -> Any:
    """The part of a bucket's outputs that belongs to the rows given; what lies beyond comes from padding."""
    return tree_map(lambda t: t[:rows] if isinstance(t, Tensor) and t.dim() and len(t) == bucket else t, outputs)


def _check_buckets(inputs: Mapping[str, Tensor], buckets: Sequence[int] | None) -> tuple[int, ...]:
    if not inputs or len(devices := {str(t.device) for t in inputs.values()}) != 1:
        raise ValueError(f"inputs: got {len(inputs)} tensors on {sorted(devices) if inputs else 'no device'}; allowed "
                         "are one or more tensors of one device")  # fmt: skip
    if buckets is None:
        return ()
    if not buckets or any(not isinstance(b, int) or b < 1 for b in buckets):
        raise ValueError(f"buckets: got {list(buckets)}; allowed are batch sizes of 1 and more, e.g. [1, 2, 4, 8]")
    for name, tensor in inputs.items():
        if tensor.dim() == 0 or tensor.shape[0] < max(buckets):
            raise ValueError(
                f"{name}: got a buffer of shape {list(tensor.shape)}; the largest bucket needs {max(buckets)} rows or "
                "more"
            )
    return tuple(sorted(set(buckets)))


def _name(step: Step) -> str:
    return getattr(step, "__qualname__", type(step).__qualname__)


def _explain(step: Step, bucket: int | None, error: Exception) -> str:
    """What stopped the capture and at which line of the user's code, which torch's own message does not say."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{torch.__path__[0]}/" not in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"
    what = str(error).strip().split("\n")[0] or type(error).__name__
    at = "" if bucket is None else f" at bucket {bucket}"
    return (
        f"{_name(step)} cannot be captured{at}: {what}, at {where}. `onegraph check` lists everything that breaks "
        "capture in a step, without a GPU; split_point() runs one part eagerly"
    )
