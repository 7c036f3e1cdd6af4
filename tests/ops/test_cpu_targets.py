"""The C kernels of ops/cpu built for other CPUs: the levels of x86-64, and AArch64 in an emulator where there is one.

Without fused multiply-add a sum may differ in its last bit, so a near tie may be rounded to another code.
"""

import ctypes
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from on_cpu import flags, made
from onegraph.ops.calls import TurboQuantDecode
from onegraph.ops.cpu import e8p_encode
from onegraph.ops.cpu import turboquant as cpu
from onegraph.ops.cpu import turboquant_native as in_c
from onegraph.quant.e8p import constants
from test_cpu_turboquant import SETTINGS, sequence

DRIVER = Path(__file__).with_name("cpu_targets") / "driver.c"
NEAREST = e8p_encode.SOURCE.parents[1] / "cuda" / "e8p_nearest.cuh"
X86 = {f"x86-64-v{level}": ("gcc", f"-march=x86-64-v{level}") for level in (2, 3, 4)}
TARGETS = {"native": ("gcc", "-march=native"), **X86, "aarch64": ("aarch64-linux-gnu-gcc", "-static")}
EMULATORS = {"aarch64": ["qemu-aarch64"], "x86-64-v4": []}


def runs_here(target: str) -> bool:
    if target == "aarch64":
        return all(map(shutil.which, (TARGETS[target][0], *EMULATORS[target])))
    flags = Path("/proc/cpuinfo").read_text()
    needed = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}.get(target, "")
    return (
        shutil.which("gcc") is not None and (target == "native" or platform.machine() == "x86_64") and needed in flags
    )


each_target = pytest.mark.parametrize(
    "target",
    [pytest.param(t, marks=pytest.mark.skipif(not runs_here(t), reason=f"{t} cannot run here")) for t in TARGETS],
)


def results(target: str, source: Path, defines: dict[str, int], sections: list[bytes]) -> list[bytes]:
    """What the kernel for `target` gives."""
    command = [*TARGETS[target], "-O3", f'-DSOURCE="{source}"', *flags(defines)]
    name = platform.node() if target == "native" else target  # it is this machine's
    program = made(command, [source, NEAREST, DRIVER], DRIVER, name, "-lm")
    sent = b"".join(len(section).to_bytes(8, "little") + section for section in sections)
    emulator = EMULATORS.get(target, [])
    out = subprocess.run([*emulator, program], input=sent, stdout=subprocess.PIPE, check=True, timeout=300).stdout
    found = []
    while out:
        size = int.from_bytes(out[:8], "little")
        found.append(out[8 : 8 + size])
        out = out[8 + size :]
    return found


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def read(data: bytes, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


@each_target
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_encoding_is_as_close_on_every_cpu(target: str, bits: int) -> None:
    g = torch.Generator().manual_seed(bits)
    x, mix = torch.randn(8, 2048, generator=g), torch.randn(8, 8, generator=g)
    factor = torch.linalg.cholesky(mix @ mix.T + torch.eye(8))
    tables = constants(torch.device("cpu"))
    for candidates in (2, 8):
        want = e8p_encode.native(bits, tables)(x, factor, candidates)
        numbers = torch.tensor([x.shape[1], x.shape[1], candidates])
        sections = [*map(raw, tables), raw(x), raw(factor.mT), raw(numbers)]
        found = results(target, e8p_encode.SOURCE, {"BITS": bits}, sections)
        codes, residual = (read(data, torch.int32, x.shape[1]) for data in found[:2])
        value = read(found[2], torch.float32, *x.shape)
        same = (codes == want[0]) & (residual == want[1])
        assert float(same.float().mean()) > 0.998
        torch.testing.assert_close(value[:, same], want[2][:, same])
        far, best = ((factor.mT @ (x - one)).square().sum(0) for one in (value, want[2]))
        assert float((far - best).abs().max()) < 1e-4 * float(best.max()), "another code is as close"


@cache
def last_step(setting: str) -> tuple[list[bytes], list[bytes]]:
    """Past the window, so that tokens come from codes: what the kernel of a decode step is given on this CPU, and what
    it leaves in the ring, in the cache and as the output."""
    args = sequence(**SETTINGS[setting])
    seen: list[tuple[list[bytes], list[bytes]]] = []
    build = in_c.native

    def recorded(call: TurboQuantDecode, *given: Any) -> in_c.Native | None:
        made = build(call, *given)
        assert made is not None
        dim, heads = call.turn.shape[0], call.heads

        def function(common: int, row: int, vectors: int, ring: int, cache: int, out: int) -> int:
            pages = in_c._Row.from_address(row).pages
            count = in_c._Row.from_address(row).at // in_c._Common.from_address(common).page_size + 1
            across = heads + 2 * call.cache.shape[1]
            before = [
                ctypes.string_at(common, ctypes.sizeof(in_c._Common)), raw(given[0]),
                ctypes.string_at(row, ctypes.sizeof(in_c._Row)), ctypes.string_at(pages, 4 * count),
                ctypes.string_at(vectors, 4 * across * dim), raw(call.ring), raw(call.cache),
            ]  # fmt: skip
            status: int = made.function(common, row, vectors, ring, cache, out)
            seen[:] = [(before, [raw(call.ring), raw(call.cache), ctypes.string_at(out, 4 * heads * dim)])]
            return status

        return made._replace(function=function)

    g = torch.Generator().manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "native", recorded)
        for at in range(150):
            args["qkv"] = torch.randn(args["qkv"].shape, generator=g)
            args["positions"] = torch.tensor([at], dtype=torch.int32)
            cpu._LOCAL.plan = None
            cpu.turboquant_decode(TurboQuantDecode(**args))
    cpu._LOCAL.plan = None
    return seen[0]


@each_target
@pytest.mark.parametrize("setting", ["smollm2", "llama"])
def test_a_decode_step_is_alike_on_every_cpu(target: str, setting: str) -> None:
    before, (ring, cached, out) = last_step(setting)
    args = sequence(**SETTINGS[setting])
    defines = {"DIM": args["turn"].shape[0], "GROUP": args["heads"] // args["cache"].shape[1]}
    got = results(target, in_c.SOURCE, defines, before)
    assert got[0] == ring, "a token is kept as it is"
    written = read(got[1], torch.uint8, -1) != read(cached, torch.uint8, -1)
    assert int(written.sum()) <= 2, "norms and codes but at ties of roundings"
    want, found = (read(data, torch.float32, -1) for data in (out, got[2]))
    assert float((found - want).norm()) < 2e-5 * float(want.norm())
