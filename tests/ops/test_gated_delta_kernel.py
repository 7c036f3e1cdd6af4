"""The decode step of gated delta layers on a CPU: the kernel's own source, each thread a fiber (`hyper_on_cpu`).

What this proves: every index, mask and shuffle, and that the order of blocks changes no bit. What it cannot: that the
GPU's instructions do what `ptx.cuh` says, and that no block of a launch reads what another one writes while both run.
"""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h200 import PLAIN
from on_cpu import compile_run, flags, launch_on_cpu
from onegraph.ops.calls import MAX_TOKENS, GatedDelta, Mamba2
from onegraph.ops.cuda import build
from onegraph.ops.cuda import gated_delta as launcher
from onegraph.ops.gated_delta import gated_delta, on_gpu
from onegraph.ops.mamba2 import mamba2
from test_gated_delta import Layer
from test_ops import clone, error, make, widen

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CASES = [case for case in gated_delta.cases if "chunk" not in case.name and case.name not in ("small", "rates_prompt")]


class Kernel:
    backwards = False
    sms = 132

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, cluster: int, stream: int, arguments: bytes
    ) -> None:
        assert shared <= 16 * 128 * 96
        self.run(ctypes.c_char_p(arguments), grid[0], grid[1], threads, int(Kernel.backwards))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Kernel]]:
    folder = tmp_path_factory.mktemp("gated_delta")
    for file in (
        launcher.KERNEL.path, *(launcher.KERNEL.path.with_name(f"{name}.cuh") for name in ("linear_state", "numbers")),
        *(HERE / "gated_delta_on_cpu").iterdir(),
    ):  # fmt: skip
        shutil.copy(file, folder)
    shutil.copy(HERE / "hyper_on_cpu" / "ptx.cuh", folder / "fibers.cuh")

    @cache
    def made(_: build.Source, device: None, *defines: tuple[str, int]) -> dict[str, Kernel]:
        path = folder / f"{abs(hash(defines))}.so"
        compile_run(folder, flags(dict(defines)), path, "-shared")
        return {"gated_delta": Kernel(ctypes.CDLL(str(path)).run)}

    return made


@pytest.fixture
def step(kernels: Callable[..., dict[str, Kernel]], monkeypatch: pytest.MonkeyPatch) -> Callable[[GatedDelta], Tensor]:
    launch_on_cpu(kernels, monkeypatch.setattr)
    monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=Kernel.sms))
    monkeypatch.setattr(build.Source, "is_built", lambda source, device: True)
    return lambda call: launcher.step(call) if isinstance(call, Mamba2) else on_gpu(call)


def state(call: GatedDelta | Mamba2) -> list[Tensor]:
    return [call.ring, call.state, call.base, call.keys, call.deltas, call.decays]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [(CASES[0], torch.float16), (CASES[1], torch.bfloat16), (CASES[-1], torch.bfloat16)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_kernel_is_the_reference(
    case: object, dtype: torch.dtype, step: Callable[[GatedDelta], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make(case, dtype)
    truth = GatedDelta(*clone(args, widen(dtype)))
    want = [gated_delta.reference(*truth), *state(truth)]
    found = []
    for backwards, sms in ((False, 132), (True, 1)):  # more blocks than run at once read in another order
        monkeypatch.setattr(Kernel, "backwards", backwards)
        monkeypatch.setattr(Kernel, "sms", sms)
        call = GatedDelta(*clone(args))
        found.append([step(call), *state(call)])
    for got, again, true in zip(*found, want, strict=True):
        assert torch.equal(got, again), "the order of blocks shows"
        assert error(got, true) <= gated_delta.tolerance[dtype]


@pytest.mark.parametrize("case", mamba2.cases[:2], ids=lambda case: case.name)
def test_mamba2_is_the_reference_before_its_norm(
    case: object, step: Callable[[GatedDelta | Mamba2], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make(case, torch.bfloat16)
    truth, call = Mamba2(*clone(args, widen(torch.bfloat16))), Mamba2(*clone(args))
    want = mamba2.reference(*truth)
    y = step(call).unflatten(2, (call.keys.shape[2], -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + call.eps)).flatten(2) * call.norm.float()
    for got, true in zip((y, *state(call)), (want, *state(truth)), strict=True):
        assert error(got, true) <= 1e-5


class Stepped(Layer):
    """A layer whose steps the kernel computes, on a GPU or, as `on_cpu`, here."""

    def __init__(self, on_cpu: Callable[[GatedDelta], Tensor] | None = None, **options: Any) -> None:
        super().__init__(heads=(1, 2), dims=(128, 128), **options)
        self.on_cpu = on_cpu

    def step(self, call: GatedDelta) -> Tensor:
        if self.on_cpu is None or call.qkv.shape[1] > MAX_TOKENS:
            return super().step(call)
        return self.on_cpu(call)


def compare(plain: Layer, other: Layer) -> None:
    """One token a step, and steps of several of which drafts are taken back: the same bits."""
    text, wrong = plain.text(16), plain.text(16)
    want = plain.read(text, list(range(1, 17)))
    outs, at = [], 0
    for tokens, kept in ((1, 1), (4, 2), (4, 4), (8, 1), (2, 2), (4, 1), (1, 1), (4, 4)):
        drafted = tuple(torch.cat((x[at : at + kept], y[: tokens - kept])) for x, y in zip(text, wrong, strict=True))
        outs.append(other.run((1, at, drafted))[0][:kept])
        at += kept
    assert at == 16
    assert torch.equal(torch.cat(outs), want)
    assert error(other.applied(1, 16), plain.applied(1, 16)) < 1e-6
    assert error(other.applied(1, 16), plain.truth(text)[1]) < 1e-5


@pytest.mark.parametrize("channels", [False, True])
def test_how_many_tokens_a_step_has_and_when_s_is_written_change_no_bit(
    step: Callable[[GatedDelta], Tensor], channels: bool
) -> None:
    compare(*(Stepped(step, limit=limit, channels=channels) for limit in (0, 7)))


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("channels", [False, True])
def test_the_same_on_a_gpu(channels: bool) -> None:
    compare(*(Stepped(limit=limit, channels=channels).to("cuda") for limit in (0, 7)))


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("rows", [1, 67])
def test_a_captured_step_goes_on_from_replay_to_replay(rows: int) -> None:
    """One graph, whose positions move on the device; recycled slots, a batch beyond what runs at once."""
    g = torch.Generator().manual_seed(2)
    layer = Layer(heads=(2, 6), dims=(128, 128), limit=4)
    texts = [layer.text(12) for _ in range(rows)]
    for name in ("ring", "state", "base", "keys", "deltas", "decays"):
        kept = getattr(layer, name)
        setattr(layer, name, kept[:1].expand(rows + 1, *kept.shape[1:]).contiguous())
    layer.to("cuda")
    call = layer.call([(i + 1, 0, tuple(x[:3] for x in text)) for i, text in enumerate(texts)])
    gated_delta(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta(*call)
        call.positions.add_(call.counts)
    call.positions.zero_()
    many = torch.randint(1, 4, (4, rows), generator=g, dtype=torch.int32)
    got: list[list[Tensor]] = [[] for _ in texts]
    at = [0] * rows
    for counts in many.tolist():
        for i, name in enumerate(("qkv", "z", "b", "a")):
            x = torch.full((rows, 3, layer.columns[i]), torch.nan)
            for row, count in enumerate(counts):
                x[row, :count] = texts[row][i][at[row] : at[row] + count]
            getattr(call, name).copy_(x)
        call.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        host = out.cpu()
        for row, count in enumerate(counts):
            got[row].append(host[row, :count])
            at[row] += count
    for row in range(0, rows, 11):
        truth = layer.truth(tuple(x[: at[row]] for x in texts[row]))[0]
        assert error(torch.cat(got[row]), truth) < 1e-5


def together_and_alone(device: str, dtype: torch.dtype, step: Callable[[GatedDelta], Tensor]) -> None:
    """Rates inside the launch: rows of four tokens at once, and token by token and row by row: the same bits."""
    joint = GatedDelta(*make(CASES[-1], dtype, device))
    single = GatedDelta(*clone(tuple(joint)))
    want = step(joint)
    for row, (position, count) in enumerate(zip(single.positions.tolist(), single.counts.tolist(), strict=True)):
        for token in range(count):
            found = {name: getattr(single, name)[row : row + 1, token : token + 1] for name in ("qkv", "z", "x")}
            found |= {"slots": single.slots[row : row + 1]}
            for name, number in (("positions", position + token), ("counts", 1)):
                found[name] = torch.tensor([number], dtype=torch.int32, device=device)
            assert torch.equal(step(replace(single, **found))[0, 0], want[row, token]), (row, token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_have_the_same_bits_in_any_step(dtype: torch.dtype, step: Callable[[GatedDelta], Tensor]) -> None:
    together_and_alone("cpu", dtype, step)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_have_the_same_bits_in_any_step_on_a_gpu(dtype: torch.dtype) -> None:
    together_and_alone("cuda", dtype, lambda call: gated_delta(*call))


def test_rates_of_odd_sizes_are_computed_before(step: Callable[[GatedDelta], Tensor]) -> None:
    """Weights that are not aligned, or that shared memory has no room for."""
    call = GatedDelta(*make(CASES[-1], torch.bfloat16))
    assert call.rates is not None
    assert launcher.weight_bytes(call) == (2 + 2 + 4) * 1056
    odd = torch.zeros(call.rates.numel() + 1, dtype=torch.bfloat16)[1:].view_as(call.rates).copy_(call.rates)
    shifted = replace(GatedDelta(*clone(tuple(call))), rates=odd)
    assert launcher.weight_bytes(shifted) == 0
    assert error(step(shifted), step(call)) < 8e-3
    assert launcher.weight_bytes(replace(call, rates=torch.zeros(8, 8192, dtype=torch.bfloat16))) == 0


def test_padding_touches_no_state(step: Callable[[GatedDelta], Tensor]) -> None:
    layer = Stepped(step)
    text = layer.text(12)
    layer.read(text, [9, 10])
    before = [t.clone() for t in layer.written]
    none = tuple(x[:0] for x in text)
    layer.run((0, 0, tuple(x[:2] for x in text)), (1, 10, none), (0, 7, none), tokens=2)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, layer.written, strict=True))


def test_what_is_not_aligned_is_copied(step: Callable[[GatedDelta], Tensor]) -> None:
    call = GatedDelta(*make(CASES[0], torch.bfloat16))
    wide = torch.zeros(*call.qkv.shape[:2], call.qkv.shape[2] + 2, dtype=torch.bfloat16)
    wide[..., 2:] = call.qkv
    shifted = replace(GatedDelta(*clone(tuple(call))), qkv=wide[..., 2:])
    assert torch.equal(step(call), step(shifted))
