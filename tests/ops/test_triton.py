"""Every Triton kernel against the float32 truth of its op's record: on a GPU compiled, elsewhere interpreted.

The interpreter runs the kernel's own code program by program in numpy, so masks, indices and arithmetic are tested on a
machine without a GPU; what it cannot see (layouts, races, PDL) is what the runs marked `gpu` are for.
"""

import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
pytest.importorskip("triton")
if not GPU:
    import interpreter_fixes  # noqa: F401

from onegraph.formats.e8p import BITS  # noqa: E402
from onegraph.formats.turboquant_layout import unpack_pages  # noqa: E402
from onegraph.ops import (  # noqa: E402, F401
    activation,
    attention,
    decode_attention,
    deepseek_attention,
    deepseek_compress,
    deepseek_hyper,
    deepseek_index,
    deepseek_moe,
    deepseek_prepare,
    e8p,
    e8p_experts,
    embedding,
    hadamard,
    latent_attention,
    linear,
    norm,
    qk_norm,
    recent_attention,
    route,
    sampling,
    shaping,
    short_conv,
    step,
    turboquant,
)
from onegraph.ops.calls import DeepseekIndex  # noqa: E402
from onegraph.ops.registry import OPS, Case, Op  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# CUDA's kernel takes what it can, Triton's the rest; test_ops.py runs whichever it is. An index's scores are Triton's.
TWINS = {"paged_decode", "e8p_linear", "e8p_experts", "linear", "turboquant_write", "deepseek_index"}
TWINS |= {"hyper_update_mix", "linear_beside_norm"}
KERNELS = [op for op in OPS.values() if op.kernel is not None and (".ops.triton." in op.kernel or op.name in TWINS)]
# Shapes that no record has: more tokens than one tile takes (decode once, then a dense product), 16 and 17 tokens.
EXTRA = {
    "e8p_linear": (
        e8p._linear_case((70,), 192, 136, 3, "bias"),
        e8p._linear_case((16,), 64, 256, 4),
        e8p._linear_case((2, 9), 72, 64, 2),
        e8p._linear_case((1,), 1, 8, 4, "bias"),
        e8p._linear_case((3,), 40, 24, 3),
        # Programs that walk several tiles of k: in slices, and alone with the output's rotation.
        *(e8p._linear_case((2,), 16384, 1024, b) for b in BITS),
        e8p._linear_case((1,), 40960, 192, 4, "bias"),
    )
}
# The interpreter takes seconds on these; a GPU runs them all.
HEAVY = {"2x3x11008/128", "1x11008->256@4", "smollm2_chunk", "2x1x28672", "130x11008@4", "long_context", "many_rows"}
HEAVY |= {"llama3-vocabulary"}
HEAVY |= {"2x1024->16384@2", "2x1024->16384@3", "2x1024->16384@4", "1x192->40960@4+bias"}
HEAVY |= {"flash_window", "flash_csa", "flash_hca", "flash_index", "v3", "v3_long"}
HEAVY |= {"fp8_v3_long", "4_bits_v3_long", "3_bits_v3_long"}
HEAVY |= {"1x576->576@2", "1x576->576@3", "4x192->1536@4"}
HEAVY |= {"1 tokens, 2 of 4, 1088x640@2 with biases", "3 tokens, 2 of 5, 576x256@3"}
HEAVY |= {"5x576->3072@4+bias", "3x576->1000@2+bias", "3x576->1000@3+bias", "3x576->1000@4+bias"}


def kernel_of(op: Op):
    assert op.kernel is not None
    if op.name == "deepseek_index":
        return op.unpacked(index_by_scores)
    module, _, name = op.kernel.replace(".ops.cuda.", ".ops.triton.").partition(":")
    return op.unpacked(getattr(importlib.import_module(module), name))


def best_places(scores: Tensor, positions: Tensor, counts: Tensor, table: Tensor, ratio: int, top_k: int) -> Tensor:
    per_page, length = scores.shape[1] // table.shape[1], scores.shape[0] // len(positions)
    found = torch.full((len(positions), length, top_k), -1, dtype=torch.int32)
    for row, at in itertools.product(range(len(positions)), range(length)):
        ready = min(int(positions[row] + at + 1) // ratio, scores.shape[1]) if at < counts[row] else 0
        order = scores[row * length + at, :ready].sort(descending=True, stable=True).indices[:top_k].sort().values
        found[row, at, : len(order)] = table[row, order // per_page] * per_page + order % per_page
    return found


def index_by_scores(call: DeepseekIndex) -> Tensor:
    """Triton's scores, and a selection among them."""
    from onegraph.ops.triton.deepseek_index import score

    rows = (each.cpu() for each in (score(call), call.positions, call.counts, call.block_table))
    return best_places(*rows, call.ratio, call.top_k).to(DEVICE)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory comes as NaN and as the largest integer (torch fills it in its deterministic mode)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def written(op: Op, args: tuple, result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """The results and what the op wrote into its arguments; of a cache not the sentinel page, which is unspecified."""
    schema = op.overload._schema
    pairs = zip(args, schema.arguments, strict=True)
    mutated = [a for a, s in pairs if a is not None and s.alias_info and s.alias_info.is_write]
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return [*results, *(t[1:] if t.dim() == 4 else t for t in mutated)]


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = (t.double().cpu().nan_to_num(nan=torch.nan, posinf=1e30, neginf=-1e30) for t in (got, want))
    if want.norm() == 0:
        return float((got - want).norm())
    return float((got - want).norm() / want.norm())


def real_tokens(op: Op, args: tuple, outputs: list[Tensor]) -> list[Tensor]:
    """Drops what the op leaves unspecified: what padding gets. A TurboQuant cache is read: ties fall either way."""
    if op.name == "turboquant_write":
        call = op.call(*args)
        layout = turboquant.layout_in(op.name, call, call.turn.shape[0])
        coded = unpack_pages(layout, outputs[2][1:].cpu())
        books = (call.k_codebook.cpu(), call.v_codebook.cpu())
        vectors = [turboquant.dequantize(part, table) for part, table in zip(coded, books, strict=True)]
        real = torch.arange(args[0].shape[1]) < args[7].cpu().unsqueeze(1)
        kept = outputs[1][real] if len(outputs[1]) else outputs[1]
        return [outputs[0][real], kept, *vectors, *(ring[1:] for ring in outputs[3:])]
    if op.name == "latent_write" and outputs[1].dtype == torch.uint8:
        call = op.call(*args)
        levels = None if call.curve is None else call.curve.cpu()
        rows = latent_attention.held(outputs[1].cpu(), call.norm.shape[0], 2 * call.cos.shape[1], call.bits, levels)
        return [outputs[0], rows]
    if op.name not in ("rope_cache_write", "paged_decode") or args[7] is None or args[0].shape[1] == 1:
        return outputs
    counts = args[7].cpu()
    rows = [outputs[0][b, :c] for b, c in enumerate(counts.tolist())]
    assert outputs[0].isfinite().all(), "what padding gets must be finite"
    return [torch.cat(rows), *outputs[1:]]


def clone(args: tuple, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> tuple:
    def one(a):
        if not isinstance(a, Tensor):
            return a
        a = a.clone().to(device or a.device)
        return a.to(dtype) if dtype is not None and a.is_floating_point() else a

    return tuple(one(a) for a in args)


def check(op: Op, case: Case, dtype: torch.dtype) -> None:
    args = case.make(DEVICE, dtype, torch.Generator().manual_seed(7))
    truth_args = clone(args, torch.float32)
    truth = written(op, truth_args, op.reference(*truth_args))
    mine = clone(args)
    with poisoned_memory():
        got = written(op, mine, kernel_of(op)(*mine))
    if GPU or case is op.cases[0]:  # the interpreter has one order of programs: once shows whether one leaves a trace
        again = clone(args)
        repeated = written(op, again, kernel_of(op)(*again))
        for one, two in zip(real_tokens(op, args, got), real_tokens(op, args, repeated), strict=True):
            assert torch.equal(one, two), "two runs on the same input differ"
    for g, declared in zip(got, written(op, mine, op.fake(*mine)), strict=True):
        assert (g.dtype, g.shape) == (declared.dtype, declared.shape)
    for g, t in zip(real_tokens(op, args, got), real_tokens(op, truth_args, truth), strict=True):
        assert g.shape == t.shape
        error = relative_error(g, t)
        assert error <= op.tolerance[dtype], f"{op.name} {case.name} {dtype}: relative error {error:.2e}"  # NaN fails


def cases(op: Op, interpreted: bool) -> list[Case]:
    return [c for c in (*op.cases, *EXTRA.get(op.name, ())) if not (interpreted and c.name in HEAVY)]


def in_turn(op: Op, case: Case) -> list[torch.dtype]:
    """What the interpreter runs of a case: float32 and one of the narrow dtypes in turn, all if it is the only one."""
    of = cases(op, interpreted=True)
    narrow = [dtype for dtype in dtypes(op) if dtype != torch.float32]
    chosen = narrow if len(of) == 1 else narrow[of.index(case) % len(narrow) :][:1] if narrow else []
    slow = op.name == "e8p_linear" and case.name not in ("2x1536->192@4", "70x136->192@3+bias")
    return [dtype for dtype in dtypes(op) if dtype in chosen or (dtype == torch.float32 and not slow)]


def dtypes(op: Op) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES[: 1 if op.name == "e8p_decode" else None] if dtype in op.tolerance]


def parameters(interpreted: bool) -> list:
    return [
        pytest.param(
            op, case, dtype, id=f"{op.name}-{case.name}-{str(dtype).removeprefix('torch.')}",
            marks=pytest.mark.xdist_group(f"{op.name}-own"),  # as in test_ops.py, which runs many of the same kernels
        )
        for op in KERNELS
        for case in cases(op, interpreted)
        for dtype in (in_turn(op, case) if interpreted else dtypes(op))
    ]  # fmt: skip


@pytest.mark.skipif(GPU, reason="compiled on this machine, see test_compiled")
@pytest.mark.parametrize(("op", "case", "dtype"), parameters(interpreted=True))
def test_interpreted(op: Op, case: Case, dtype: torch.dtype) -> None:
    check(op, case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case", "dtype"), parameters(interpreted=False))
def test_compiled(op: Op, case: Case, dtype: torch.dtype) -> None:
    check(op, case, dtype)


@pytest.mark.skipif(GPU, reason="the compiled kernels walk several tiles in test_compiled")
@pytest.mark.parametrize("programs", [1, 3])
def test_walks_of_several_tiles(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs: each walks many Hadamard blocks of k, the last one of a slice cut short."""
    from onegraph.ops.triton import e8p as kernels

    monkeypatch.setattr(kernels, "WANTED_PROGRAMS", programs)
    monkeypatch.setattr(kernels, "MAX_TILES", 5)
    assert kernels.plan(64, 448)[2] > 1
    for case in (e8p._linear_case((3,), 64, 448, 4, "bias"), e8p._linear_case((2,), 72, 136, 3)):
        check(OPS["e8p_linear"], case, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [0, 5, 1])
def test_selection(levels: int) -> None:
    """Against a stable sort: distinct scores, ties, all equal; few entries and many."""
    from onegraph.ops.cuda.deepseek_index import select

    g = torch.Generator().manual_seed(levels)
    for columns, top_k, length in ((5, 48, 1), (5, 16, 3), (160, 512, 1)):
        positions = torch.tensor([columns * 128 - 4, 70, 3, 0, 90], dtype=torch.int32)
        counts = torch.tensor([length, length, 1, 1, 0], dtype=torch.int32)
        table = torch.randperm(5 * columns, generator=g).view(5, columns).to(torch.int32) + 1
        scores = torch.randn(5 * length, 32 * columns, generator=g)
        scores = (scores * levels).round() / levels if levels else scores  # -0 is below 0, and equal to it in torch
        scores = scores + 0.0 if levels != 1 else scores * 0.0 + 3.0
        args = (positions, counts, table)
        got = select(scores.to(DEVICE), *(t.to(DEVICE) for t in args), 5 * columns + 1, 4, top_k)
        assert torch.equal(got.cpu(), best_places(scores, *args, 4, top_k))


def test_a_nan_in_the_logits_is_reported() -> None:
    """The records compare bits, and a NaN equals none."""
    op = OPS["finish_step"]
    for run in (op.reference, kernel_of(op)):
        tokens, logits, after, drawn, positions = op.cases[1].make(DEVICE, torch.float32, torch.Generator())
        logits[2] = float("nan")
        report = run(tokens, logits, after, drawn, positions)
        assert report.tolist() == [-1 if row == 2 else token for row, token in enumerate(tokens.tolist())]
        assert drawn.equal(tokens)
        assert positions.equal(after)


@pytest.mark.parametrize("iterations", [1, 20])
def test_sinkhorn_is_no_launch_of_its_own(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from onegraph.ops.triton import deepseek_hyper as kernels

    launched = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(kernels, name)

        def __getitem__(self, grid: tuple[int, ...]):
            launched.append(self.name)
            return self.kernel[grid]

    for name in ("_dots", "_mix"):
        monkeypatch.setattr(kernels, name, Counted(name))
    args = OPS["hyper_mix"].cases[0].make(DEVICE, torch.float32, torch.Generator().manual_seed(0))
    kernels.hyper_mix(*args[:-1], iterations)
    assert launched == ["_dots", "_mix"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_comes_and_goes_as_logits(dtype: torch.dtype) -> None:
    """What stands behind an exchange of its own, where `hyper_all_reduce` has no kernel."""
    from onegraph.ops.triton import deepseek_hyper as kernels

    g = torch.Generator().manual_seed(0)
    streams, x, post, _, *weights = deepseek_hyper.mix_arguments((3,), 4, 80, False, DEVICE, dtype, g)
    logits = torch.randn(3, 4, 4, generator=g).to(DEVICE)
    truth = streams.float().clone()
    deepseek_hyper.hyper_update.reference(truth, x.float(), post, logits, *weights[-2:])
    rounded = truth.to(dtype)
    want = *OPS["hyper_mix"].reference(rounded.float(), *(w.float() for w in weights[:4]), *weights[4:6], 0), truth
    got = kernels.hyper_update_mix(streams, x, post, logits, *weights, logits=True)
    for mine, right in zip((*got, streams), want, strict=True):
        assert float((mine.float() - right).norm() / right.norm()) <= OPS["hyper_update_mix"].tolerance[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [48, 512])
@pytest.mark.parametrize("name", ["hyper_update", "hyper_update_mix"])
def test_streams_are_overwritten_when_all_warps_have_read_them(name: str, dim: int) -> None:
    """Thousands of tokens at once, each of them right: a race shows in some."""
    op = OPS[name]
    case = deepseek_hyper._case(name.removeprefix("hyper_"), (4096,), 4, dim)
    for dtype in (torch.float32, torch.bfloat16):
        args = case.make(DEVICE, dtype, torch.Generator().manual_seed(0))
        mine = [a.clone() if isinstance(a, Tensor) else a for a in args]
        truth = [a.clone() if isinstance(a, Tensor) else a for a in args]
        got, want = kernel_of(op)(*mine) or (), op.reference(*truth) or ()
        for a, b in zip((mine[0], *got), (truth[0], *want), strict=True):
            worst = (a.float() - b.float()).flatten(1).norm(dim=1) / b.float().flatten(1).norm(dim=1)
            assert float(worst.max()) <= (1e-4 if dtype == torch.float32 else 3e-2)
