"""Routed experts from the tensors of a checkpoint: one by one, or all of a layer in one tensor each."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from onegraph.formats.dense import DENSE
from onegraph.formats.files import CheckpointError
from onegraph.formats.int8 import INT8
from onegraph.formats.weight import WHOLE, Part, Tensors, WeightFormat
from onegraph.models.loader import Loader
from onegraph.models.shares import ALL, TPShard
from onegraph.nn.experts import Experts
from onegraph.nn.linear import Weight
from onegraph.ops.activation import Gate, parts_of
from onegraph.ops.weight import weight_ops

# Both matrices of an expert: gate rows and up rows behind them (`ReLU2`: up alone), and down.
ExpertTensors = tuple[Tensors, Tensors]


def read_expert(
    loader: Loader,
    format: WeightFormat,
    gate_up: Sequence[str],
    down: str,
    device: torch.device,
    share: TPShard = ALL,
) -> ExpertTensors | None:
    """An expert from its names as one more of routed ones that are stored as `format`. None where it is none: not in
    such codes, not one layer of them, not run in them, adapters add to it, or the others stay in host memory.

    share: of its hidden units, those of a rank.
    """
    names = [*gate_up, down]
    if loader.expert_memory is not None or _held(loader, format) is not format:
        return None
    if not all(loader.format_of(name) is format and loader.runs_as_stored(name) for name in names):
        return None
    rows, columns = _parts(loader, gate_up[0], share)
    both = format.join([loader.weight(name, device, rows)[1] for name in gate_up])
    return None if both is None else (both, loader.weight(down, device, columns)[1])


def _parts(loader: Loader, front: str, share: TPShard) -> tuple[Part, Part]:
    """Rows of the linears `front`, and columns of those behind."""
    if share.whole:
        return WHOLE, WHOLE
    rows = share.span(loader.layers()[front][0])
    return Part(rows=rows), Part(columns=rows)


def read_experts(
    loader: Loader,
    gate_up: Sequence[tuple[str, ...]],
    down: Sequence[str],
    gate: Gate,
    device: torch.device,
    share: TPShard = ALL,
    last: ExpertTensors | None = None,
) -> Experts:
    """Routed experts from the names of each one's gate and up (`ReLU2`: up alone), and down; of one format, each put in
    place as it comes.

    share: of each expert's hidden units, those of a rank. last: one more behind them, of the same format. Raises
    CheckpointError that names the first expert of another one.
    """
    format = loader.format_of(down[0])
    if weight_ops(format).experts is None:
        raise CheckpointError(f"{down[0]} is {format}, which routed experts cannot be run in; load another form of it")
    for layer in (name for front, last in zip(gate_up, down, strict=True) for name in (*front, last)):
        if loader.format_of(layer) is not format:
            raise CheckpointError(
                f"{layer} is {loader.format_of(layer)} and other experts of its layer are {format}; they must be of "
                "one kind"
            )
        if loader.is_padded(layer):
            raise CheckpointError(
                f"{layer} is padded in the file; padded experts are not read, load another form of it"
            )
    rows, columns = _parts(loader, gate_up[0][0], share)
    front, behind = last or (None, None)
    return Experts(
        _stacked(loader, format, [list(names) for names in gate_up], device, rows, front),
        _stacked(loader, format, [[name] for name in down], device, columns, behind),
        gate,
    )


def read_stacks(
    loader: Loader,
    gate_up: str,
    down: str,
    gate: Gate,
    device: torch.device,
    *,
    interleaved: bool = False,
    transposed: bool = False,
    share: TPShard = ALL,
    last: ExpertTensors | None = None,
) -> Experts:
    """Routed experts that a file holds in one tensor each (`formats/fused.py`), read expert by expert.

    gate_up, down: names without `_blocks`; biases are beside both or neither. interleaved: rows of gate_up are
    gate, up, gate, up and so on, as gpt-oss has them, unless the format mixes rows; otherwise all gate rows come
    first. transposed: dense ones lie [E, k, n]. share: of each expert's hidden units, those of a rank.
    last: as in `read_experts`. Raises CheckpointError that names what is missing, or stored in another way than its
    partner.
    """
    kinds = {name: loader.stack(name)[0] for name in (gate_up, down)}
    biased = [f"{name}_bias" in loader for name in kinds]
    if len(set(kinds.values())) > 1 or len(set(biased)) > 1:
        kind = [f"{f} {'with' if b else 'without'} biases" for f, b in zip(kinds.values(), biased, strict=True)]
        raise CheckpointError(f"{gate_up} is {kind[0]} and {down} {kind[1]}; experts must be of one kind")
    biases = None
    if all(biased):
        first, second = (loader.float32(f"{name}_bias", device) for name in kinds)
        biases = _gate_first(first, 1) if interleaved else first, second
    rows, columns = list[Part](), list[Part]()
    if not share.whole:
        size = loader.parts.stacks[down].k
        rows = [Part(rows=span) for span in share.pieces(*[size] * parts_of(gate.alpha))]
        columns = [Part(columns=share.span(size))]
    if biases is not None and rows:
        first, second = biases
        first = torch.cat([first[:, slice(*part.rows)] for part in rows if part.rows is not None], dim=1)
        biases = first, second if share.rank == 0 else torch.zeros_like(second)  # which is added once
    front, behind = last or (None, None)
    both = (
        _fused(loader, gate_up, device, interleaved, transposed, rows, front),
        _fused(loader, down, device, False, transposed, columns, behind),
    )
    return Experts(*both, gate, biases)


def _fused(
    loader: Loader, name: str, device: torch.device, interleaved: bool, transposed: bool, parts: Sequence[Part],
    last: Tensors | None,
) -> Weight:  # fmt: skip
    """One weight [E, n, k]; of each matrix these parts, one behind the other, or all of it."""
    format, names = loader.stack(name)
    matrices = loader.matrices(name, device, transposed)
    made = _held(loader, format)
    if interleaved and not format.mixes_rows:
        matrices = ({key: _gate_first(tensor, 0) for key, tensor in one.items()} for one in matrices)
    if parts:
        matrices = (_joined(format, name, [format.part(one, part) for part in parts]) for one in matrices)
    matrices = (_as(made, loader, format, one) for one in matrices)
    return _stack(loader, made, min(loader.info(stored).shape[0] for stored in names.values()), matrices, last)


def _held(loader: Loader, format: WeightFormat) -> WeightFormat:
    """What experts are held in that are stored as `format`."""
    return INT8 if loader.held == "int8" else DENSE if loader.decode_experts else format


def _as(made: WeightFormat, loader: Loader, format: WeightFormat, tensors: Tensors) -> Tensors:
    """One expert's matrix in the format `made`."""
    if made is format:
        return tensors
    given = tensors | format.constants(next(iter(tensors.values())).device)
    weight = weight_ops(format).decode(format, given)
    return INT8.encode(weight) if made is INT8 else {"weight": weight.to(loader.dtype)}


def _stacked(
    loader: Loader, format: WeightFormat, layers: Sequence[Sequence[str]], device: torch.device, part: Part,
    last: Tensors | None,
) -> Weight:  # fmt: skip
    """One weight [E, n, k] whose matrices are the joined `layers` of each expert, a part of each."""

    def matrices() -> Iterator[Tensors]:
        for names in layers:
            each = [loader.weight(name, device, part)[1] for name in names]
            yield _as(made, loader, format, _joined(format, " and ".join(names), each))

    made = INT8 if loader.held == "int8" else format
    return _stack(loader, made, len(layers), matrices(), last)


def _joined(format: WeightFormat, name: str, parts: Sequence[Tensors]) -> Tensors:
    one = format.join(parts) or format.paired(parts)
    if one is None:
        raise CheckpointError(
            f"{name} cannot be one layer of {format}: the parts differ in what its rows share, or one ends within a "
            "block"
        )
    return one


def _stack(
    loader: Loader, format: WeightFormat, count: int, matrices: Iterator[Tensors], last: Tensors | None
) -> Weight:
    """One weight of `count` matrices, each put in place as it comes, and `last` behind them."""
    more = [] if last is None else [last]
    count += len(more)

    def empty(one: Tensors) -> Tensors:
        if loader.expert_memory is not None:
            return loader.expert_memory.empty(count, one)
        return {key: tensor.new_empty((count, *tensor.shape)) for key, tensor in one.items()}

    whole: Tensors = {}
    for i, one in enumerate(chain(matrices, more)):
        whole = whole or empty(one)
        for key, tensor in one.items():
            whole[key][i] = tensor
    return Weight(format, whole)


def _gate_first(tensor: Tensor, dim: int) -> Tensor:
    """Rows gate, up, gate, up .. -> all gate rows, then all up rows."""
    result: Tensor = tensor.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return result
