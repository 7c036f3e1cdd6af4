"""INT4 kernels on a GPU against their reference: every number of tokens, launches behind one another, models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models import hf_model
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.ops.int4 import int4_linear, random_order, random_weight
from onegraph.ops.registry import reference_ops
from test_int4 import config, packed, truth

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "columns"),
    [(1024, 2048, 128), (1000, 11008, 128), (512, 1024, 64), (272, 768, 32), (4096, 512, 512), (80, 4096, 4096),
     (136, 320, 64), (48, 96, 32), (40, 384, 96)],
)  # fmt: skip
def test_from_1_to_64_tokens(n: int, k: int, columns: int, dtype: torch.dtype) -> None:
    """Against the reference in float32; the same bits again, and rounded once where float32 is asked for."""
    weight = random_weight(n, k, columns, "cuda", rng(), torch.bfloat16 if columns == 64 else torch.float16)
    order = random_order(k, "cuda", rng(1)) if k // columns > 1 else None
    bias = torch.randn(n, generator=rng(2)).cuda()
    for tokens in (*range(1, 19), 31, 32, 33, 64):
        x = torch.randn(tokens, k, generator=rng(3)).to("cuda", dtype)
        for given in (None, order):
            with reference_ops():
                want = int4_linear(x.float(), *weight, given, bias, True)
            got = int4_linear(x, *weight, given, bias, False)
            assert got.dtype == dtype
            assert float((got.float() - want).norm() / want.norm()) < TOLERANCE[dtype], tokens
            assert torch.equal(got, int4_linear(x, *weight, given, bias, False)), tokens
            wide = int4_linear(x, *weight, given, bias, True)
            assert wide.dtype == torch.float32
            assert float((wide - want).norm() / want.norm()) < TOLERANCE[dtype], tokens


def test_a_tokens_result_does_not_depend_on_those_beside_it() -> None:
    """Up to four tokens, which one kernel takes: each has bytes, sums and scales of its own."""
    weight = random_weight(512, 2048, 128, "cuda", rng())
    x = torch.randn(4, 2048, generator=rng(1)).cuda().bfloat16()
    together = int4_linear(x, *weight, None, None, False)
    for i in range(4):
        assert torch.equal(int4_linear(x[i : i + 1], *weight, None, None, False)[0], together[i])


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_launches_that_overlap_wait_for_one_another(tokens: int) -> None:
    """Linears behind one another in a graph, as each lets the next begin before it ends, give the bits that they give
    one at a time."""
    g = rng()
    linears = [random_weight(2048, 2048, 128, "cuda", g) for _ in range(3)]
    order = random_order(2048, "cuda", g)
    x = torch.empty(tokens, 2048, device="cuda", dtype=torch.bfloat16)

    def step(wait: bool) -> Tensor:
        h = x
        for i in range(12):
            h = int4_linear(h, *linears[i % 3], order if i % 4 == 3 else None, None, False)
            if wait:
                torch.cuda.synchronize()
        return h

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step(wait=False)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = step(wait=False)
    for _ in range(10):
        x.copy_(torch.randn(tokens, 2048, generator=g))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        assert torch.isfinite(got).all()
        assert torch.equal(got, step(wait=True))


@pytest.mark.parametrize(("layout", "act_order"), [("awq", False), ("gptq", True), ("packed", False)])
def test_what_a_gpu_reads_is_what_a_cpu_reads(layout: str, act_order: bool, tmp_path: Path) -> None:
    """Words are taken apart on the device that they go to."""
    hf = hf_model("qwen2", hidden_size=128, intermediate_size=256, head_dim=16)
    tensors: dict[str, Tensor] = {}
    for seed, (name, parameter) in enumerate(hf.named_parameters()):
        layer, _, kind = name.rpartition(".")
        if "proj" not in layer or kind == "bias":
            tensors[name] = parameter.detach()
            continue
        t = truth(*parameter.shape, 32, seed, act_order=act_order, zero=8 if layout == "packed" else None)
        tensors |= packed(layout, layer, t)
    told = {"quantization_config": config(layout, 32, act_order=act_order)}
    (tmp_path / "config.json").write_text(json.dumps(hf.config.to_dict() | told, default=str))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        here, there = (Llama.load(checkpoint, device=device, decode=False) for device in ("cpu", "cuda"))
    state, found = here.state_dict(), 0
    for name, tensor in there.state_dict().items():
        if name.rpartition(".")[2] in ("codes", "scale", "zero", "order"):
            assert torch.equal(tensor.cpu(), state[name]), name
            found += 1
    assert found
