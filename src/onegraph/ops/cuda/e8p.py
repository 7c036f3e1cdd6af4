"""E8P linear for few tokens: how `e8p.cu` is cut over the GPU, and which calls it takes.

Which kernel a call runs, and how it is cut, follows from its shape, dtype and device alone. What `e8p.cu` does not take
(float32, more than `MAX_TOKENS` tokens, dimensions that are no multiples of 64) runs on Triton's kernels; so does
everything where it cannot be built, after one warning.
"""

import struct
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from onegraph.ops.cuda import build

SOURCE = Path(__file__).with_name("e8p.cu")
MAX_TOKENS = 64  # above, Triton's path: decode once, multiply by cuBLAS
SLICE, ROWS, PARTS = 256, 128, 8  # as in e8p.cu; PARTS is row tiles of 16 in ROWS
GPC = 18  # SMs of a GPC, which a cluster must fit into (H200: clusters of 8 leave 4 SMs of 18 idle)
SM_SHARED = 228 * 1024  # bytes of an SM, 1024 of them reserved for each block
SHARED_LIMIT = 227 * 1024  # bytes that a block can have on Hopper
ALIGNMENT = 16  # bytes, of every pointer


@dataclass(frozen=True, order=True)
class Variant:
    """How the kernel is compiled: row tiles fetched `ahead`, `warps` of a block, blocks that share an SM (`per_sm`)."""

    ahead: int
    warps: int
    per_sm: int


def variants(bits: int, most: int) -> tuple[Variant, ...]:
    """What was worth compiling on an H200 (docs/performance.md): registers that spill or stall ruled out the rest."""
    if most == 4:
        return Variant(4 if bits == 2 else 2, 16, 1), Variant(4, 8, 2)
    return (Variant(2 if bits == 2 or most == 8 else 1, 16, 1),)


@dataclass(frozen=True, order=True)
class Plan:
    """How one shape is cut: each of `tiles` clusters of `cluster` blocks owns `blocks` times 128 rows. A block owns
    `per_block` slices of k, one for each of `across` warps at a time; `down` such rows of warps share the rows."""

    variant: Variant
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

    def cost(self, bits: int, tokens: int, sms: int) -> float:
        """What the busiest SM has to do, in slices of 128 rows (about 0.33 us each at 2 bits on an H200)."""
        per_sm = self.variant.per_sm
        at_once = sms * per_sm if self.cluster == 1 else sms // GPC * (GPC * per_sm // self.cluster)
        waves = -(-self.tiles // at_once)
        beside = min(per_sm, -(-self.tiles * self.cluster // sms))  # blocks that share an SM
        turns = -(-self.blocks * PARTS // self.down) * -(-self.per_block // self.across)
        work = turns * self.across * self.down / PARTS * beside
        if self.across * self.down * beside <= 8:  # too few warps to hide the lookups' latency
            work *= 1.4 if bits == 2 else 1.6
        slices_a_warp = -(-self.per_block // self.across)
        operands = slices_a_warp * (0.1 * tokens if tokens <= 4 else 0.5)  # rotated here, or loaded
        together = 1.5 + 0.1 * self.cluster if self.cluster > 1 else 0.0
        return waves * (work + operands + 2.0) + together + 0.2 * self.blocks


def cuts(n: int, k: int, bits: int, tokens: int, sms: int) -> list[Plan]:
    """Every cut that fits into shared memory."""
    slices, whole = -(-k // SLICE), -(-n // ROWS)
    found = []
    for variant in variants(bits, _pass(tokens)):
        room = min(SHARED_LIMIT, SM_SHARED // variant.per_sm - 1024)
        for cluster in range(1, 9):
            per_block = -(-slices // cluster)
            if (cluster - 1) * per_block >= slices:
                continue  # a block would have nothing to do
            least = -(-per_block // variant.warps)  # turns that a warp takes through slices
            for across in {-(-per_block // turns) for turns in (least, least + 1, 2 * least)}:
                down = max(d for d in (1, 2, 4, 8) if d == 1 or d * across <= variant.warps)
                for blocks in {1, -(-whole * cluster // sms)}:
                    tiles = -(-whole // blocks)
                    cut = Plan(variant, tiles, cluster, blocks, slices, per_block, across, down)
                    if cut.shared(bits, tokens) <= room:
                        found.append(cut)
    return found


@lru_cache(maxsize=1024)
def plan(n: int, k: int, bits: int, tokens: int, sms: int) -> Plan:
    """The cut that costs least."""
    return min(cuts(n, k, bits, tokens, sms), key=lambda cut: (cut.cost(bits, tokens, sms), cut))


def _block(dimension: int) -> int:
    """Of the Hadamard rotation of a dimension that 64 divides."""
    return 64 if dimension % 128 else 128


def _pass(tokens: int) -> int:
    """Tokens that one pass over the codes takes."""
    return 4 if tokens <= 4 else 8 if tokens <= 8 else 16


def takes(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether `e8p.cu` computes this shape."""
    return 0 < tokens <= MAX_TOKENS and n % 64 == 0 and k % 64 == 0 and dtype in (torch.bfloat16, torch.float16)


@cache
def _kernels(bits: int, most: int, half: bool, variant: Variant, device: int) -> tuple[build.Kernel, ...]:
    defines = {"BITS": bits, "TOKENS": most, "HALF": int(half), "TRIGGER": 1}
    defines |= {"DEPTH": variant.ahead, "WARPS": variant.warps, "BLOCKS": variant.per_sm}
    return build.load(SOURCE, defines, ("e8p_linear", "e8p_rotate"), device, SHARED_LIMIT)


@cache
def available(device: int) -> bool:
    """Whether the kernels can be built for this GPU; warns once where not."""
    try:
        _kernels(2, 4, False, variants(2, 4)[0], device)
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
        from onegraph.ops.triton.e8p import linear as fallback  # kernels are compiled or interpreted as of their import

        return fallback(x, codes, residual, codebook, in_scale, out_scale, bias, bits)
    x = x.contiguous()
    if bias is not None:
        bias = bias.float()
    inputs = [_aligned(t) for t in (x, codes, residual, codebook, in_scale, out_scale, bias)]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if torch.cuda.current_device() == x.device.index:
        _launch(inputs, out, bits, tokens, n, k)
    else:
        with torch.cuda.device(x.device):  # the driver launches in the current context
            _launch(inputs, out, bits, tokens, n, k)
    return out


def _aligned(tensor: Tensor | None) -> Tensor | None:
    return tensor.clone() if tensor is not None and tensor.data_ptr() % ALIGNMENT else tensor


def _launch(inputs: list[Tensor | None], out: Tensor, bits: int, tokens: int, n: int, k: int) -> None:
    device = out.device.index
    chunk = _pass(tokens)
    chunks = -(-tokens // chunk)
    cut = plan(n, k, bits, min(tokens, chunk), _sms(device))
    main, rotate = _kernels(bits, chunk, out.dtype == torch.float16, cut.variant, device)
    fragments = scales = None
    if chunk > 4:
        fragments = torch.empty(chunks * cut.slices * chunk * 512, dtype=torch.uint8, device=out.device)
        scales = torch.empty(chunks * cut.slices * chunk * 2, dtype=torch.float32, device=out.device)
    pointers = [0 if t is None else t.data_ptr() for t in (*inputs, out, fragments, scales)]
    if not pointers[2]:
        pointers[2] = pointers[1]
    norm = (_block(n) * _block(k)) ** -0.5
    arguments = struct.pack("10Q7if", *pointers, tokens, n, k, cut.across, cut.slices, cut.per_block, cut.blocks, norm)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if chunk > 4:
        rotate.launch((cut.slices, chunk // 8, chunks), 256, 0, 1, stream, arguments)
    grid = (cut.tiles * cut.cluster, chunks, 1)
    threads = 32 * cut.across * cut.down
    main.launch(grid, threads, cut.shared(bits, min(tokens, chunk)), cut.cluster, stream, arguments)
