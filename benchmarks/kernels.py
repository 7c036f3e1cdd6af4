"""Microseconds of linears on codes and of decode attention, compared with peers and with the memory-bandwidth roofline.

Rules (docs/benchmarks/README.md): kernels are timed under CUDA-graph replay on random data, over so many copies of the
weights that the L2 holds none of them at its next use. A row also has the time that its bytes take at the copy
bandwidth of the same run. A row is a flat dict, one JSON line.
"""

import copy
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onegraph.engine.record import Row, machine
from onegraph.formats.quantization import OWN
from onegraph.ops.attention import paged_attention, rope_cache_write
from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.weight import weight_ops

LINEAR_SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (576, 3072), (1536, 576))  # (k in, n out)
HUMMING = "humming g128"
L2_TIMES = 8  # weights are rotated over so many times the L2
MAX_COPIES = 512  # of small layers: a graph of more nodes takes longer to build than it is worth


def replay_us(step: Callable[[], Any], device: torch.device, calls: int = 1, budget_ms: int = 100) -> float:
    """Median microseconds of one of the `calls` that `step` makes, captured into one graph and replayed."""
    from triton.testing import do_bench

    stream = torch.cuda.Stream(device)
    with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        us: float = do_bench(graph.replay, warmup=budget_ms // 4, rep=budget_ms, return_mode="median") * 1e3
    return us / calls


@lru_cache(maxsize=8)
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a 2 GiB copy by a kernel: the roof that others are held against.

    (A plain `copy_` becomes a memcpy node in a graph, which reached 2.8 TB/s on an H200 where a kernel reaches 4.3.)
    """
    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (replay_us(lambda: torch.neg(source, out=target), device) * 1e-6)


def bench_linear(
    shapes: Sequence[tuple[int, int]] = LINEAR_SHAPES,
    *,
    tokens: Sequence[int] = (1, 16),
    bits: Sequence[int] = (2, 3, 4),
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    dense: bool = True,
    peers: bool = True,
    format: str = "e8p",
) -> Iterator[Row]:
    """Times the linear of `format` on layers of k inputs and n outputs, the dense linear of torch if `dense`, and
    beside each rate, if `peers`, the integer linear of humming-kernels (group 128) where that is installed and takes
    the shape.

    Yields rows as they are measured: name, k, n, tokens, bits, us, gb_per_s, roof_us (bytes of the weights and scales
    over the copy bandwidth), percent_of_roof and, of ours, error (||y - y64|| / ||y64|| against float64, first 64
    tokens). Raises ValueError on a machine without a CUDA GPU.
    """
    device = _gpu(device)
    about = machine(device)
    contestants = [("torch dense", 16)] if dense else []
    ours = (f"onegraph {format}", HUMMING) if peers and has_humming() else (f"onegraph {format}",)
    contestants += [(name, rate) for rate in bits for name in ours]
    for k, n in shapes:
        for name, rate in contestants:
            if name == HUMMING and (k % 128 or n % 128):
                continue
            layers, size = _copies(name, k, n, rate, device, dtype)
            for count in tokens:
                x = torch.randn(count, k, device=device, dtype=dtype)

                def step(layers: list[Callable[[Tensor], Tensor]] = layers, x: Tensor = x) -> None:
                    for layer in layers:
                        layer(x)

                us = replay_us(step, device, len(layers), budget_ms=40)
                roof = size / copy_bandwidth(device) * 1e6
                first = layers[0]
                held = {}
                if isinstance(first, Coded):
                    held["error"] = float(f"{first.error(x[:64], first(x)[:64]):.2g}")
                yield {
                    "bench": "linear",
                    "name": name,
                    "k": k,
                    "n": n,
                    "tokens": count,
                    "bits": rate,
                    "dtype": str(dtype).removeprefix("torch."),
                    "us": round(us, 2),
                    "gb_per_s": round(size / us * 1e-3, 1),
                    "roof_us": round(roof, 2),
                    "percent_of_roof": round(100 * roof / us, 1),
                    "copies": len(layers),
                    **held,
                    **about,
                }


def bench_attention(
    contexts: Sequence[int] = (1024, 32768),
    *,
    batches: Sequence[int] = (1,),
    tokens: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Row]:
    """Times a layer's attention in a decode step, or a round of `tokens` a row: RoPE, cache write and attention over
    `context` keys a row.

    Yields rows: "onegraph paged_decode" (one launch), "onegraph unfused" (the same as separate ops) and, of one token,
    "torch SDPA" (attention alone, over contiguous keys; the peer that every machine has), each with the roof of the
    keys and values read once. Caches of several layers are walked, shuffled pages each. Raises ValueError without a
    CUDA GPU.
    """
    device = _gpu(device)
    about = machine(device)
    angle = torch.outer(torch.arange(max(contexts)), 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    for context in contexts:
        for batch in batches:
            size = 2 * batch * context * kv_heads * head_dim * dtype.itemsize
            wanted = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
            copies = min(max(2, -(-wanted // size)), MAX_COPIES)
            pages = -(-context // page_size)
            table = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages) + 1
            shape = (copies, 2, 1 + batch * pages, page_size, kv_heads, head_dim)
            cache = torch.randn(shape, device=device, dtype=dtype)
            qkv = torch.randn(batch, tokens, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype)
            position = torch.full((batch,), context - tokens, device=device, dtype=torch.int32)
            counts = torch.full_like(position, tokens)
            tickets = torch.zeros(batch, kv_heads, device=device, dtype=torch.int32)
            before = (qkv, None, None, 0.0, cos, sin, position, counts, table)

            def one_launch(before: Any = before, tickets: Tensor = tickets, cache: Tensor = cache) -> None:
                for k, v in cache:
                    paged_decode(*before, k, v, tickets, heads, head_dim**-0.5, 0)

            def apart(before: Any = before, cache: Tensor = cache) -> None:
                for k, v in cache:
                    q = rope_cache_write(*before, k, v, heads)
                    paged_attention(q, k, v, before[8], before[6], head_dim**-0.5, 0)

            steps: dict[str, Callable[[], None]] = {"onegraph paged_decode": one_launch, "onegraph unfused": apart}
            if tokens == 1:
                steps["torch SDPA"] = _sdpa(cache, qkv[..., : heads * head_dim], context)
            roof = size / copy_bandwidth(device) * 1e6
            for name, step in steps.items():
                us = replay_us(step, device, copies, budget_ms=40)
                yield {
                    "bench": "attention",
                    "name": name,
                    "context": context,
                    "batch": batch,
                    "tokens": tokens,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "head_dim": head_dim,
                    "dtype": str(dtype).removeprefix("torch."),
                    "us": round(us, 2),
                    "gb_per_s": round(size / us * 1e-3, 1),
                    "roof_us": round(roof, 2),
                    "percent_of_roof": round(100 * roof / us, 1),
                    "copies": copies,
                    **about,
                }
            del cache, steps


def _sdpa(cache: Tensor, q: Tensor, context: int) -> Callable[[], None]:
    """torch's attention of q [B, 1, heads * D] to each of the caches [copies, 2, 1 + pages, page_size, kv_heads, D],
    laid out as [copies, 2, B, kv_heads, context, D]: the sentinel page left out, each row's keys side by side."""
    copies, _, _, _, kv_heads, dim = cache.shape
    rows = cache[:, :, 1:].reshape(copies, 2, len(q), -1, kv_heads, dim)[:, :, :, :context].transpose(3, 4)
    dense, query = rows.contiguous(), q.reshape(len(q), -1, 1, dim)
    grouped = query.shape[1] != kv_heads

    def step() -> None:
        for k, v in dense:
            torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=grouped)

    return step


def _gpu(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"device is {device}; kernels are timed on a CUDA GPU, and this machine has none that torch sees"
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _copies(
    name: str, k: int, n: int, bits: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """As many layers of random weights as L2_TIMES the L2 holds, and the bytes that one of them reads."""
    size = k * n * bits // 8
    if bits < 16:
        size += k * n // 64 if name == HUMMING else 4 * (k + n)
    wanted = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    count = min(max(2, -(-wanted // size)), MAX_COPIES)
    first = linear_layer(name, k, n, bits, device, dtype)
    if name == HUMMING:
        return [first, *(copy.deepcopy(first) for _ in range(count - 1))], size
    return [first, *(linear_layer(name, k, n, bits, device, dtype) for _ in range(count - 1))], size


def linear_layer(
    name: str, k: int, n: int, bits: int, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """One contestant of `bench_linear` with random weights; called once, it has compiled what it needs."""
    if bits == 16:
        return _dense(torch.randn(n, k, device=device, dtype=dtype))
    if name == HUMMING:
        return _integer(k, n, bits, device, dtype)
    return Coded(k, n, bits, device, name.removeprefix("onegraph "))


def _dense(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nn.functional.linear(x, weight)


def has_humming() -> bool:
    """Whether humming-kernels is installed."""
    return importlib.util.find_spec("humming") is not None


def _integer(k: int, n: int, bits: int, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    from humming.layer import HummingLayer  # type: ignore[import-not-found]  # a peer, optional

    config = {"dtype": f"int{bits}", "group_size": 128}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=dtype).to(device)
    layer.load_from_unquantized(torch.randn(n, k, device=device, dtype=dtype))
    layer.transform()
    return layer


class Coded:
    """A linear of random codes in a format of `OWN`."""

    def __init__(self, k: int, n: int, bits: int, device: torch.device, format: str = "e8p") -> None:
        self.format = OWN[format].formats[bits]
        stored = {
            key: torch.empty(field.shape(n, k), dtype=field.dtype, device=device)
            for key, field in self.format.stored.items()
        }
        self.format.fill(stored, k, torch.Generator(device).manual_seed(0))
        self.weight = self.format.fold(stored) | self.format.constants(device)
        self.ops = weight_ops(self.format)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(self.format, x, self.weight, None, None, None, False, False)

    def error(self, x: Tensor, y: Tensor) -> float:
        """||y - y64|| / ||y64|| against float64."""
        truth = x.double() @ self.ops.decode(self.format, self.weight).double().T
        return ((y.double() - truth).norm() / truth.norm()).item()
