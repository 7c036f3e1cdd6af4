"""Proof that a replay equals the eager step: other inputs than the captured ones, outputs poisoned first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from onegraph.runtime.graph import Runner, cut


@dataclass(frozen=True)
class Difference:
    """One place where a replay and the eager step disagree; `str()` is a sentence for people."""

    case: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"case {self.case}: {self.what}: {self.why}"


def prove(
    runner: Runner,
    cases: Sequence[Mapping[str, Tensor]],
    *,
    reset: Callable[[], None] | None = None,
    state: Mapping[str, Tensor] | None = None,
    tolerance: float = 0.0,
) -> list[Difference]:
    """Run each case eagerly and by replay, from the same state; return where they differ: an empty list is the proof.

    Args:
        cases: values for the step's inputs; at least one must differ from what the graphs were captured with, or a
            graph that ignores its inputs would pass.
        reset: puts state other than the inputs to where every run shall begin (default: the Runner's own `reset`).
        state: other tensors that the step writes, by name; compared as well.
        tolerance: allowed relative error ‖replay − eager‖ / ‖eager‖ of floating point results; 0 means the same bits.
    """
    reset = reset or runner.reset or (lambda: None)
    _require_news(runner, cases)
    found: list[Difference] = []
    with torch.no_grad(), runner.running():
        for i, case in enumerate(cases):
            reset()
            rows, bucket = runner.load(**case)
            eager = _observe(runner, runner.step(**runner.views(bucket)), rows, bucket, state)
            _poison(cut(runner.outputs(bucket), rows, bucket), eager)
            reset()
            runner.load(**case)
            replayed = _observe(runner, runner.replay(bucket), rows, bucket, state)
            found += _compare(i, eager, replayed, tolerance)
    return found


def _require_news(runner: Runner, cases: Sequence[Mapping[str, Tensor]]) -> None:
    for case in cases:
        rows, _ = runner._fit(case)
        for name, value in case.items():
            captured = runner.padding[name]
            captured = captured[:rows] if runner.buckets else captured
            if not torch.equal(captured, value.to(captured.device)):
                return
    raise ValueError(
        f"cases: got {len(cases)}, all equal to what was captured; allowed is a list in which at least one differs: a "
        "graph that ignores its inputs would pass"
    )


def _observe(
    runner: Runner, outputs: Any, rows: int, bucket: int | None, state: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """Copies of all that a run left behind for the rows given; padding rows are nobody's business."""
    leaves, _ = tree_flatten(cut(outputs, rows, bucket))
    seen = {f"output {n}": leaf for n, leaf in enumerate(leaves)}
    seen |= {f"input buffer {name!r}": tensor for name, tensor in cut(runner.views(bucket), rows, bucket).items()}
    seen |= {f"state {name!r}": tensor for name, tensor in (state or {}).items()}
    result: dict[str, Any] = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, seen)
    return result


def _poison(outputs: Any, truth: Mapping[str, Any]) -> None:
    """Make every element of the static outputs wrong, so that one which the replay does not write cannot pass."""
    for n, leaf in enumerate(tree_flatten(outputs)[0]):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                leaf.fill_(torch.nan)
            elif (expected := truth.get(f"output {n}")) is not None and expected.shape == leaf.shape:
                leaf.copy_(expected.bitwise_not())


def _compare(case: int, eager: dict[str, Any], replayed: dict[str, Any], tolerance: float) -> list[Difference]:
    if eager.keys() != replayed.keys():
        return [Difference(case, "outputs", f"eager gives {len(eager)} values, the replay {len(replayed)}")]
    found = []
    for what, a in eager.items():
        b = replayed[what]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if isinstance(a, Tensor) or isinstance(b, Tensor) or (a is not b and a != b):
                found.append(Difference(case, what, f"eager gives {a!r}, the replay {b!r}"))
        elif a.shape != b.shape or a.dtype != b.dtype:
            found.append(
                Difference(case, what, f"eager gives {a.dtype} {list(a.shape)}, the replay {b.dtype} {list(b.shape)}")
            )
        elif a.is_floating_point() and (a.isnan().any() or b.isnan().any()):
            side = "the eager step itself" if a.isnan().any() else "the replay, which left it unwritten or read poison,"
            found.append(Difference(case, what, f"{side} gives NaN"))
        elif not torch.equal(a, b) and (error := _error(a, b)) > (tolerance if a.is_floating_point() else 0.0):
            wrong = int((a != b).sum())
            found.append(Difference(case, what, f"{wrong} of {a.numel()} values differ, relative error {error:.2e}"))
    return found


def _error(truth: Tensor, other: Tensor) -> float:
    """‖other − truth‖ / ‖truth‖ over the finite part; infinite where the infinities disagree."""
    a, b = truth.double(), other.double()
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a[~finite], b[~finite]):
        return float("inf")
    size = a[finite].norm().item()
    distance = (b[finite] - a[finite]).norm().item()
    return distance / size if size else (float("inf") if distance else 0.0)
