"""W4A4: the kernel that rounds activations, on a CPU, each thread a fiber; what FP4 tensor cores are given; prompts of
published checkpoints."""

import dataclasses
import json
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuzz import tiny
from models import Decoder
from on_cpu import compile_run
from onegraph import LLM, quantize
from onegraph.check import check_step
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.nvfp4 import E4M3, GROUP, NVFP4, PROMPTS_TOO, swizzle_scales, tiled_shape, unswizzle_scales
from onegraph.models.llama import Llama, check_w4a4
from onegraph.models.load import load_decoder
from onegraph.models.ranks import Ranks
from onegraph.nn.linear import Linear
from onegraph.ops import nvfp4_linear as ops
from onegraph.ops.cuda import nvfp4_activations
from onegraph.ops.nvfp4 import decode_e2m1, random_weight, times_scales
from onegraph.ops.nvfp4 import quantize as to_codes
from onegraph.ops.registry import reference_ops
from published import LAYOUTS, save, w4a16
from test_cli import invoke
from test_ranks import logits_of, of_ranks, text

HERE = Path(__file__).parent / "nvfp4_on_cpu"
DTYPES = torch.bfloat16, torch.float16, torch.float32
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("nvfp4_activations")
    for file in (nvfp4_activations.KERNELS.path, HERE / "nvfp4_common.cuh"):
        shutil.copy(file, path)
    shutil.copy(HERE / "activations.cpp", path / "run.cpp")

    @cache
    def made(half: int, wide: int, tiles_only: bool = False) -> Path:
        program = path / f"run-{half}-{wide}-{tiles_only}"
        words = [f"-DHALF={half}", f"-DFLOAT={wide}", *(["-DTILES_ONLY"] if tiles_only else [])]
        compile_run(path, words, program)
        return program

    return made


def run(program: Path, x: Tensor, unit: float, k: int) -> Tensor:
    """Bytes that the kernel writes."""
    count = torch.Size(tiled_shape(len(x), k // GROUP)).numel()
    given, got = program.with_suffix(".in"), program.with_suffix(".out")
    head = struct.pack("4if", len(x), k, x.nbytes, count, unit)
    given.write_bytes(head + x.view(torch.uint8).numpy().tobytes())
    done = subprocess.run([program, given, got], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return torch.frombuffer(bytearray(got.read_bytes()), dtype=torch.uint8)


def hard(rows: int, k: int, unit: float) -> Tensor:
    """Magnitudes over the whole range of scales, halves between codes and between scales, zeros of both signs, and
    numbers that no scale reaches."""
    x = torch.randn(rows, k, generator=rng()) * torch.exp2(torch.randint(-12, 9, (rows, k), generator=rng(1)).float())
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0, 0.0, -2.5, -0.25, 6.375, 1e9, -1e-9, 5.5])
    x[1::3] = steps.repeat(k // GROUP) * unit * torch.exp2(torch.arange(k).div(GROUP, rounding_mode="floor") % 15 - 6)
    x[2 % rows, :GROUP] = 0
    return x


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "k"), [(3, 64), (130, 80), (1, 16), (257, 128)])
@pytest.mark.parametrize("unit", [2.0**-6, 0.0137])
def test_the_kernel_rounds_as_the_reference_does(build, rows: int, k: int, dtype: torch.dtype, unit: float) -> None:
    x = hard(rows, k, unit).to(dtype)
    got = run(build(int(dtype == torch.float16), int(dtype == torch.float32)), x, unit, k)
    codes, scale = to_codes(x, torch.tensor(unit))
    split = rows * k // 2
    assert torch.equal(got[:split].view(rows, k // 2), codes)
    assert torch.equal(got[split:], swizzle_scales(scale).flatten())


@needs_compiler
def test_not_a_number_is_a_scale_that_is_none(build) -> None:
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    x[1, 20] = float("nan")
    scale = unswizzle_scales(run(build(0, 0), x, 0.01, 32)[32:], 2, 2)
    assert scale.view(E4M3).float().isnan().tolist() == [[False, False], [False, True]]


@needs_compiler
@pytest.mark.parametrize(("rows", "k"), [(48, 64), (130, 80), (256, 1024)])
def test_scales_of_a_weight_in_tiles(build, rows: int, k: int) -> None:
    scale = torch.randint(0, 127, (rows, k // GROUP), generator=rng(), dtype=torch.uint8)
    assert torch.equal(run(build(0, 0, True), scale, 0.0, k), swizzle_scales(scale).flatten())


# ------------------------------------------------------------------------------------ what tensor cores are given


def tensor_cores(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """torch._scaled_mm of FP4 as it is documented: a [T, k/2], b [k/2, n] column-major, scales in tiles."""
    assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
    assert a_scale.dtype == b_scale.dtype == E4M3
    assert a_scale.dim() == b_scale.dim() == 1
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert all(size % 16 == 0 for size in (a.shape[1], *b.shape))  # as torch 2.11 checks them
    sides = []
    for codes, scale in ((a, a_scale), (b.t(), b_scale)):
        codes = codes.view(torch.uint8)
        plain = unswizzle_scales(scale.view(torch.uint8), len(codes), codes.shape[1] * 2 // GROUP)
        sides.append(times_scales(decode_e2m1(codes), plain).double())
    return (sides[0] @ sides[1].T).to(out_dtype)


@pytest.mark.parametrize("given", ["frozen", "dynamic"])
@pytest.mark.parametrize("bias", [False, True])
def test_tensor_cores_get_what_the_reference_multiplies(given: str, bias: bool, monkeypatch: Any) -> None:
    """Shapes, order of scales, factors and bias of the branch that no GPU here has run."""
    monkeypatch.setattr(ops, "has_fp4_tensor_cores", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", tensor_cores)
    x = torch.randn(2, 67, 96, generator=rng()).bfloat16()
    codes, scale, gain = random_weight((48, 96), "cpu", rng(1))
    b = torch.randn(48, generator=rng(2)) if bias else None
    unit = torch.tensor(0.0021) if given == "frozen" else None
    got = ops.linear_w4a4_on_gpu(x, codes, scale, gain, unit, b)
    want = ops.nvfp4_linear_w4a4(x, codes, scale, gain, unit, b)
    assert got.dtype == x.dtype
    assert (got.float() - want.float()).norm() <= 2e-3 * want.float().norm()  # the sums are rounded to float32 first


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("own", [False, True], ids=["stand-in", "tensor cores"])
@pytest.mark.parametrize("bias", [False, True])
def test_on_a_gpu_a_replay_is_the_reference(own: bool, bias: bool, monkeypatch: Any) -> None:
    """All launches but the product on any GPU, on those with FP4 tensor cores that too; captured, on another input."""
    if not own:
        monkeypatch.setattr(ops, "has_fp4_tensor_cores", lambda device: True)
        monkeypatch.setattr(torch, "_scaled_mm", tensor_cores)
    elif not ops.has_fp4_tensor_cores(torch.device("cuda", 0)):
        pytest.skip("needs FP4 tensor cores")
    x = torch.zeros(1, 130, 1024, device="cuda", dtype=torch.bfloat16)
    weight, unit = random_weight((272, 1024), "cuda", rng(1)), torch.tensor(0.0021, device="cuda")
    b = torch.randn(272, generator=rng(2)).cuda() if bias else None
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        ops.linear_w4a4_on_gpu(x, *weight, unit, b)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = ops.linear_w4a4_on_gpu(x, *weight, unit, b)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=rng(seed)))
        graph.replay()
        torch.cuda.synchronize()
        want = ops.nvfp4_linear_w4a4.reference(x, *weight, unit, b).float()
        assert (got.float() - want).norm() <= 4e-3 * want.norm()


def test_what_tensor_cores_do_not_take_is_emulated(monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "has_fp4_tensor_cores", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", tensor_cores)
    for n, k in ((40, 96), (48, 80)):
        weight, x = random_weight((n, k), "cpu", rng()), torch.randn(3, k, generator=rng(1))
        assert torch.equal(
            ops.linear_w4a4_on_gpu(x, *weight, None, None), ops.nvfp4_linear_w4a4(x, *weight, None, None)
        )


# ------------------------------------------------------------------------------------------- prompts of a model

PROMPT = ops.FEW + 6
NVFP4_LAYOUTS = ("NVIDIA NVFP4", "NVIDIA NVFP4 in config.json", "NVIDIA MIXED of MXFP8", "compressed-tensors NVFP4")


def loaded(name: str, path: Path, **options: Any) -> Llama:
    if not path.exists():
        save(LAYOUTS[name], path)
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint, **options)


def test_only_a_prompt_is_rounded() -> None:
    codes, scale, gain = random_weight((48, 64), "cpu", rng())
    unit = torch.tensor(0.003)
    layer = Linear(PROMPTS_TOO, {"codes": codes, "scale": scale, "global_scale": gain, "input_scale": unit})
    plain = Linear(NVFP4, {"codes": codes, "scale": scale, "global_scale": gain})
    for shape in ((1, 64), (PROMPT, 64), (ops.FEW, 1, 64), (40, 8, 64), (1, ops.FEW, 64)):
        x = torch.randn(shape, generator=rng(1))
        assert torch.equal(layer(x), plain(x)), shape
    x = torch.randn(1, ops.FEW + 1, 64, generator=rng(1))
    assert torch.equal(layer(x), ops.nvfp4_linear_w4a4(x, codes, scale, gain, unit, None))
    assert not torch.equal(layer(x), plain(x))
    halves = [layer.part(columns=span) for span in ((0, 32), (32, 64))]  # a rank each
    parts = [half(x[..., i * 32 : i * 32 + 32].contiguous()) for i, half in enumerate(halves)]
    torch.testing.assert_close(parts[0] + parts[1], layer(x))


@pytest.mark.parametrize("name", NVFP4_LAYOUTS)
def test_a_published_checkpoint_reads_prompts_as_it_was_made_for(name: str, tmp_path: Path) -> None:
    """Every linear in NVFP4 of a prompt, by itself; then steps as without."""
    model = loaded(name, tmp_path / "m", w4a4=True)
    linears = [each for each in model.modules() if isinstance(each, Linear) and each.format is PROMPTS_TOO]
    assert len(linears) == (12 if name in NVFP4_LAYOUTS[::3] else 6)  # of three blocks, siblings joined
    seen = []

    def look(layer: Linear, args: tuple[Tensor, ...], y: Tensor) -> None:
        weight = (layer.codes, layer.scale, layer.global_scale)
        w4a4 = ops.nvfp4_linear_w4a4(*args, *weight, layer.input_scale, layer.bias)
        plain = ops.nvfp4_linear(*args, *weight, layer.bias)
        seen.append((torch.equal(y, w4a4), torch.equal(y, plain)))

    for layer in linears:
        assert layer.input_scale == pytest.approx(0.02)
        layer.register_forward_hook(look)
    decoder = Decoder(model, rows=1, max_context=PROMPT + 2)
    decoder.feed([text(PROMPT)])
    assert seen == [(True, False)] * len(linears)
    seen.clear()
    decoder.feed([[5]])
    assert seen == [(False, True)] * len(linears)


def test_ranks_read_prompts_as_one_device_does(tmp_path: Path) -> None:
    rows = [text(2 * PROMPT)]  # half of it as a prompt
    whole = logits_of(loaded("NVIDIA NVFP4", tmp_path / "m", w4a4=True), rows)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        got = of_ranks(Ranks.load(checkpoint, ["cpu"] * 2, w4a4=True), rows)
    plain = logits_of(loaded("NVIDIA NVFP4", tmp_path / "m"), rows)
    # a last bit of an activation may lie on either side of a code's edge
    assert (got[0] - whole[0]).norm() < 0.01 * whole[0].norm() < 0.1 * (plain[0] - whole[0]).norm()


def test_the_engine_shares_no_pages_of_such_prompts(tmp_path: Path) -> None:
    prompts = [text(PROMPT), text(PROMPT + 30, 1)]
    engines = {}
    for w4a4 in (False, True):
        model = loaded("NVIDIA NVFP4", tmp_path / "m", decode=False, w4a4=w4a4)
        engines[w4a4] = Engine(model, max_batch=2, max_context=160, page_size=8, chunk=80, capture=False)
    assert (engines[False].executor.prefix_cacheable, engines[True].executor.prefix_cacheable) == (True, False)
    together = engines[True].generate(prompts, SamplingParams(max_tokens=6))
    alone = [engines[True].generate([prompt], SamplingParams(max_tokens=6))[0] for prompt in prompts]
    assert together == alone


def test_a_user_who_asks_for_it_gets_it(tmp_path: Path) -> None:
    """Through `LLM` and `eval`, on a CPU: another answer to a prompt than weights alone give, a little worse."""
    quantize(tiny.write_model(tmp_path / "m"), tmp_path / "q", format="nvfp4", device="cpu")
    (file,) = (tmp_path / "q").glob("*.safetensors")
    tensors = load_file(file)
    scales = [name for name in tensors if name.endswith("weight_scale_2")]
    tensors |= {name.replace("weight_scale_2", "input_scale"): torch.tensor(0.002) for name in scales}
    save_file(tensors, file, {"format": "pt"})
    written, kl = {}, {}
    (tmp_path / "text").write_text("".join(chr(97 + 7 * i % 26) for i in range(600)))
    command = ["eval", tmp_path / "q", "--text", tmp_path / "text", "--reference", tmp_path / "m", "--device", "cpu"]
    for w4a4 in (False, True):
        with LLM(tmp_path / "q", device="cpu", max_context=160, w4a4=w4a4) as llm:
            written[w4a4] = llm.generate([list(range(3, 3 + PROMPT))], max_tokens=8)[0].tokens
        status, out, _ = invoke([*map(str, command), "--json", *(["--w4a4"] if w4a4 else [])])
        assert status == 0
        kl[w4a4] = json.loads(out)["kl"]
    assert written[False] != written[True]
    assert kl[False] < kl[True] < 4 * kl[False]


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_steps_may_be_captured(kind: Any, tmp_path: Path) -> None:
    save(LAYOUTS["NVIDIA NVFP4"], tmp_path / "m")

    def factory() -> Any:
        with Checkpoint.open(tmp_path / "m") as checkpoint, mock.patch("onegraph.models.llama.check_w4a4"):
            model = Llama.load(checkpoint, "cuda", decode=False, w4a4=True)
        runner = Engine(model, max_batch=4, max_context=96, page_size=4, chunk=72, capture=False).executor.step(kind)

        def step() -> Any:
            with reference_ops():
                return runner.replay(4 if kind == "decode" else 1)

        return step, lambda index: ()

    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in check_step(factory).findings] == []


@pytest.mark.parametrize("name", ["NVIDIA MIXED", "NVIDIA FP8"])  # the first with weights alone in NVFP4
def test_a_checkpoint_that_was_not_made_for_it_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w4a4: no linear of this checkpoint is in NVFP4 with an input_scale; leave"):
        loaded(name, tmp_path / "m", w4a4=True)


def test_a_layer_with_weights_alone_in_nvfp4_stays_so(tmp_path: Path) -> None:
    layout = LAYOUTS["NVIDIA NVFP4"]
    save(dataclasses.replace(layout, coders=layout.coders | {"down_proj": w4a16}), tmp_path / "m")
    model = loaded("NVIDIA NVFP4", tmp_path / "m", decode=False, w4a4=True)
    formats = [each.format for each in model.blocks[0].modules() if isinstance(each, Linear)]
    assert sorted(map(str, formats)) == [str(NVFP4), *[str(PROMPTS_TOO)] * 3]


def test_a_gpu_without_fp4_tensor_cores_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with pytest.raises(ValueError, match=r"^w4a4: NVIDIA H200 is of compute capability 9\.0; FP4 tensor"):
        check_w4a4(mock.Mock(), torch.device("cuda"))


def test_deepseek_and_the_command_line_say_what_they_do_not_take(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "m")
    status, _, said = invoke(["generate", str(model), "--prompt", "a", "--device", "cpu", "--w4a4"])
    assert status == 2
    assert "--w4a4: no linear of this checkpoint is in NVFP4 with an input_scale; leave w4a4 out" in said
    with pytest.raises(ValueError, match="w4a4 reads prompts of models of the Llama kind"):
        load_decoder(mock.Mock(config={"model_type": "deepseek_v4"}), "cpu", torch.float32, w4a4=True)
