"""Results that do not depend on what runs beside them: `batch_invariant`, which an engine sets around the model's part
of decode steps on a GPU.

A kernel that is quick for one token adds up in another order than one for eight, or cuts k and a row's keys in other
parts. Inside `batch_invariant` a token's sums are made in one order, however many tokens and rows a pass has. Four
places ask `on`:

    nn.linear            runs tokens in passes of one size: `in_passes`
    ops.cuda.e8p         takes the kernel and the cut of AT_ONCE tokens, whose sums are the same for fewer
    models.chain         runs any number of tokens through chains, which give each its own sums
    paged_decode         shares a row's keys by their places alone; where a kernel knows no rounds, token by token

Norms, gates, embeddings, logits and draws take each token by itself anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 16  # tokens of a pass

_ON: ContextVar[bool] = ContextVar("onegraph_batch_invariant", default=False)


def on() -> bool:
    """Whether results must not depend on what runs beside them. Asked while a step is captured, or run eagerly; who
    compiles a model, whose tracer follows no context variable, has no such step."""
    return not torch.compiler.is_compiling() and _ON.get()


@contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Inside this context, where `wanted`, `on` holds."""
    token = _ON.set(wanted)
    try:
        yield
    finally:
        _ON.reset(token)


def kept(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run`, for which `on` holds as it does now whenever it is called: of what a graph breaks at, each replay."""
    wanted = on()

    def call(*args: Any) -> Tensor:
        with batch_invariant(wanted):
            return run(*args)

    return call


def in_passes(run: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, add: Tensor | None, *, steady: bool) -> Tensor:
    """run(x [T, k], add [T, n] or None) -> [T, n] of x [..., k] and add [..., n], in passes of one shape.

    A pass that is not full is padded with zeros, since a library chooses its kernel by shape; not where `run` is
    `steady`: its bits are the same for any T up to AT_ONCE.
    """
    tokens, more = x.flatten(0, -2), None if add is None else add.flatten(0, -2)
    found = []
    for first in range(0, len(tokens), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        given = tokens[part], None if more is None else more[part]
        count = len(given[0])
        if not steady:
            given = _padded(given[0]), None if given[1] is None else _padded(given[1])
        found.append(run(*given)[:count])
    made = found[0] if len(found) == 1 else torch.cat(found)
    out: Tensor = made.unflatten(0, x.shape[:-1])
    return out


def _padded(x: Tensor) -> Tensor:
    """[T, n] -> [AT_ONCE, n] in memory of its own: where it begins may choose a kernel too."""
    return torch.nn.functional.pad(x, (0, 0, 0, AT_ONCE - len(x))) if len(x) < AT_ONCE else x.clone()
