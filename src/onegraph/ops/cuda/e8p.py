"""E8P linear for few tokens: how `e8p.cu` is cut over the GPU, and which calls it takes.

Which kernel a call runs follows from its shape, dtype and device alone. What `e8p.cu` does not take (float32, more
than `MAX_TOKENS` tokens, dimensions that are no multiples of 64) runs on Triton's; so does everything where it cannot
be built, after one warning.
"""

import struct
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.triton import e8p as fallback

SOURCE = Path(__file__).with_name("e8p.cu")
MAX_TOKENS = 64  # above, Triton's path: decode once, multiply by cuBLAS
SLICE, ROWS, PARTS = 256, 128, 8  # as in e8p.cu; PARTS is row tiles of 16 in ROWS
GPC = 16  # SMs that a cluster can be placed in, at least
SM_SHARED = 228 * 1024  # bytes of an SM, 1024 of them reserved for each block
SHARED_LIMIT = 227 * 1024  # bytes that a block can have on Hopper; later GPUs have as much or more
ALIGNMENT = 16  # bytes, of every pointer
# (bits, tokens in one pass) -> DEPTH, WARPS, BLOCKS: row tiles fetched ahead, warps of a block, blocks an SM can hold
VARIANTS = {(bits, most): (2, 16, 1) for bits in (2, 3, 4) for most in (4, 8, 16)}
TRIGGER = 1


@dataclass(frozen=True)
class Plan:
    """How one shape is cut: each of `tiles` clusters of `cluster` blocks owns `blocks` times 128 rows. A block owns
    `per_block` slices of k, one for each of `across` warps at a time; `down` such rows of warps share the rows."""

    tiles: int
    cluster: int
    blocks: int
    slices: int
    per_block: int
    across: int
    down: int

    def shared(self, bits: int, tokens: int) -> int:
        """Bytes of shared memory of a block that serves `tokens` at a time."""
        tables = 98304 if bits == 3 else 65536
        partial = self.across * tokens * (self.blocks * ROWS + (8 if tokens <= 4 else 4)) * 4
        received = (tokens * self.blocks + self.cluster) * ROWS * 4 if self.cluster > 1 else 0
        exchange = 512 * self.across * self.down if tokens <= 4 else 0
        return tables + partial + received + exchange


def cuts(n: int, k: int, bits: int, tokens: int, sms: int) -> list[tuple[float, Plan]]:
    """Every cut that fits, with what it costs the busiest SM: 1 for a slice of 128 rows."""
    _, warps, blocks_per_sm = VARIANTS[bits, _pass(tokens)]
    slices, whole = -(-k // SLICE), -(-n // ROWS)
    room = min(SHARED_LIMIT, SM_SHARED // blocks_per_sm - 1024)
    found = []
    for cluster in range(1, 9):
        per_block = -(-slices // cluster)
        if (cluster - 1) * per_block >= slices:
            continue  # a block would have nothing to do
        at_once = sms // cluster if cluster <= 2 else sms // GPC * (GPC // cluster)
        across = -(-per_block // -(-per_block // warps))
        down = max(d for d in (1, 2, 4, 8) if d == 1 or d * across <= warps)
        for blocks in {1, -(-whole // at_once)}:
            cut = Plan(-(-whole // blocks), cluster, blocks, slices, per_block, across, down)
            turns = -(-blocks * PARTS // down) * -(-per_block // across)
            waves = -(-cut.tiles // at_once)
            cost = waves * (turns * across * down / PARTS + 0.25 * tokens * -(-per_block // across) * down / 4)
            cost += 2.0 * waves + (1.0 if cluster > 1 else 0.0)
            if cut.shared(bits, tokens) <= room:
                found.append((cost, cut))
    return found


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, tokens: int, sms: int) -> Plan:
    """The cut that gives the busiest SM least to do."""
    return min(cuts(n, k, bits, tokens, sms), key=lambda found: found[0])[1]


def _pass(tokens: int) -> int:
    """Tokens that one pass over the codes takes."""
    return 4 if tokens <= 4 else 8 if tokens <= 8 else 16


def takes(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether `e8p.cu` computes this shape."""
    return 0 < tokens <= MAX_TOKENS and n % 64 == 0 and k % 64 == 0 and dtype in (torch.bfloat16, torch.float16)


@cache
def _kernels(bits: int, most: int, half: bool, device: int) -> tuple[build.Kernel, ...]:
    depth, warps, blocks = VARIANTS[bits, most]
    defines = {"BITS": bits, "TOKENS": most, "HALF": int(half), "DEPTH": depth, "WARPS": warps, "BLOCKS": blocks}
    return build.load(SOURCE, defines | {"TRIGGER": TRIGGER}, ("e8p_linear", "e8p_rotate"), device)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    try:
        _kernels(2, 4, False, device)
    except build.BuildError as error:
        warnings.warn(f"the CUDA kernels of onegraph cannot be built, Triton's are used: {error}", stacklevel=2)
        return False
    return True


@cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def linear(
    x: Tensor,
    codes: Tensor,
    residual: Tensor | None,
    codebook: Tensor,
    in_scale: Tensor,
    out_scale: Tensor,
    bias: Tensor | None,
    bits: int,
) -> Tensor:
    """See `onegraph.ops.e8p.e8p_linear`."""
    n, k = codes.shape[0], codes.shape[1] * 8
    tokens = x.numel() // k
    if not x.is_cuda or not takes(tokens, n, k, x.dtype) or not available(x.device.index):
        return fallback.linear(x, codes, residual, codebook, in_scale, out_scale, bias, bits)
    x = x.contiguous()
    if bias is not None:
        bias = bias.float()
    inputs = [_aligned(t) for t in (x, codes, residual, codebook, in_scale, out_scale, bias)]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    _launch(inputs, out, bits, tokens, n, k)
    return out


def _aligned(tensor: Tensor | None) -> Tensor | None:
    return tensor.clone() if tensor is not None and tensor.data_ptr() % ALIGNMENT else tensor


def _launch(inputs: list[Tensor | None], out: Tensor, bits: int, tokens: int, n: int, k: int) -> None:
    device = out.device.index
    chunk = _pass(tokens)
    chunks = -(-tokens // chunk)
    main, rotate = _kernels(bits, chunk, out.dtype == torch.float16, device)
    cut = plan(n, k, bits, min(tokens, chunk), _sms(device))
    fragments = scales = None
    if chunk > 4:
        fragments = torch.empty(chunks * cut.slices * chunk * 512, dtype=torch.uint8, device=out.device)
        scales = torch.empty(chunks * cut.slices * chunk * 2, dtype=torch.float32, device=out.device)
    pointers = [0 if t is None else t.data_ptr() for t in (*inputs, out, fragments, scales)]
    if not pointers[2]:
        pointers[2] = pointers[1]
    norm = (fallback._block(n) * fallback._block(k)) ** -0.5
    arguments = struct.pack("10Q7if", *pointers, tokens, n, k, cut.across, cut.slices, cut.per_block, cut.blocks, norm)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if chunk > 4:
        rotate.launch((cut.slices, chunk // 8, chunks), 256, 0, 1, stream, arguments)
    grid = (cut.tiles * cut.cluster, chunks, 1)
    threads = 32 * cut.across * cut.down
    main.launch(grid, threads, cut.shared(bits, min(tokens, chunk)), cut.cluster, stream, arguments)
