"""DeepSeek-V4's keys in FP8 with a bfloat16 rotary part: the row, the ops that write and read it, the model on it."""

import pytest
import torch

from deepseek import prompts, save_hf
from models import Decoder

GPU = torch.cuda.is_available()
pytest.importorskip("triton")
if not GPU:
    import interpreter_fixes  # noqa: F401

from onegraph.engine.engine import Engine  # noqa: E402
from onegraph.engine.params import SamplingParams  # noqa: E402
from onegraph.formats.checkpoint import Checkpoint  # noqa: E402
from onegraph.formats.deepseek_kv import pack_rows, row_bytes, unpack_rows  # noqa: E402
from onegraph.models.deepseek_v4 import DeepseekV4  # noqa: E402
from onegraph.ops.calls import DeepseekCompress, DeepseekPrepare  # noqa: E402
from onegraph.ops.deepseek_attention import deepseek_attention, deepseek_qkv  # noqa: E402
from onegraph.ops.deepseek_compress import deepseek_compress  # noqa: E402
from onegraph.ops.deepseek_prepare import deepseek_prepare  # noqa: E402
from onegraph.ops.registry import reference_ops  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers over eight orders of magnitude, so that blocks differ in scale and some codes are subnormal."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * 10 ** (4 * torch.randn(shape, generator=g)).clamp(-4, 4)


@pytest.mark.parametrize(("dim", "rope"), [(512, 64), (32, 8), (96, 16), (200, 2)])
def test_a_row_keeps_what_the_format_can(dim, rope):
    x = spread(50, dim)
    rows = pack_rows(x, rope)
    assert rows.shape == (50, row_bytes(dim, rope))
    back = unpack_rows(rows, dim, rope)
    assert torch.equal(back[:, dim - rope :], x[:, dim - rope :].bfloat16().float())
    for start in range(0, dim - rope, 64):
        part, got = (t[:, start : min(start + 64, dim - rope)] for t in (x, back))
        top = part.abs().amax(1, keepdim=True)
        # Three bits of mantissa, down to 2^-9 of a scale that is at most twice what the largest number needs.
        assert ((got - part).abs() <= torch.maximum(part.abs() / 16, top / 448 * 2**-9)).all()
    assert torch.equal(unpack_rows(pack_rows(back, rope), dim, rope), back), "what was read is written as it was"


def test_sizes_and_zeros():
    assert row_bytes(512, 64) == 592
    assert torch.equal(unpack_rows(pack_rows(torch.zeros(3, 96), 16), 96, 16), torch.zeros(3, 96))
    tiny = torch.full((1, 96), 1e-38)
    assert unpack_rows(pack_rows(tiny, 16), 96, 16).isfinite().all()


def kernels():
    from onegraph.ops.triton import deepseek_attention, deepseek_compress

    return deepseek_attention.deepseek_qkv, deepseek_compress.deepseek_compress


def near(got: torch.Tensor, want: torch.Tensor, dim: int, rope: int) -> None:
    """Rows are equal but for codes at a tie, which another order of summation may round the other way."""
    assert got.shape == want.shape
    differs = got != want
    assert differs.float().mean() < 0.01
    a, b = unpack_rows(got.cpu(), dim, rope), unpack_rows(want.cpu(), dim, rope)
    assert ((a - b).abs() <= b.abs() / 7 + 1e-3 * b.abs().amax()).all()


def both_ways(check):
    """Interpreted where there is no GPU; else compiled."""
    return pytest.mark.gpu(check) if GPU else check


@both_ways
def test_the_kernels_write_the_rows_of_the_reference():
    qkv, compress = kernels()
    for dim, half, heads in ((96, 8, 2), (32, 4, 3)):
        case = deepseek_qkv.cases[1].make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(1))
        positions = case[6].to(DEVICE)
        g = torch.Generator().manual_seed(2)
        q, kv = torch.randn(3, 5, heads * dim, generator=g), torch.randn(3, 5, dim, generator=g)
        angle = torch.arange(80).unsqueeze(1) * torch.arange(1, 1 + half) * 0.1
        rest = (
            [t.to(DEVICE) for t in (q, kv, torch.ones(dim))],
            1e-6,
            [t.to(DEVICE) for t in (angle.cos(), angle.sin())],
        )
        args = (*rest[0], rest[1], *rest[2], positions, True)
        near(qkv(*args)[1], deepseek_qkv.reference(*args)[1], dim, 2 * half)
    for case in deepseek_compress.cases:
        if case.name not in ("csa_chunk", "hca_chunk"):
            continue
        args = list(case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3)))
        dim, rope = args[3].shape[0], 2 * args[5].shape[1]
        args[11] = pack_rows(args[11], rope)
        mine, theirs = ([a.clone().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
        compress(DeepseekCompress(*mine))
        deepseek_compress.reference(*theirs)
        near(mine[11], theirs[11], dim, rope)
        assert torch.equal(mine[1], theirs[1])
        assert not torch.equal(mine[11].cpu(), args[11]), "something was written"


@both_ways
@pytest.mark.parametrize("case", [c for c in deepseek_prepare.cases if "decode" in c.name], ids=lambda c: c.name)
def test_one_launch_writes_the_rows_of_the_reference(case):
    """Keys and entries of a token in one launch."""
    from onegraph.ops.triton.deepseek_prepare import deepseek_prepare as kernel

    args = list(case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3)))
    dim, rope = args[1].shape[2], 2 * args[4].shape[1]
    args[6], args[15] = True, pack_rows(args[15], rope)
    mine, theirs = ([a.clone().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
    q, kv = kernel(DeepseekPrepare(*mine))
    wanted = deepseek_prepare.reference(*theirs)
    torch.testing.assert_close(q, wanted[0], atol=2e-6, rtol=2e-6)
    near(kv, wanted[1], dim, rope)
    near(mine[15], theirs[15], dim, rope)
    assert not torch.equal(mine[15].cpu(), args[15]), "something was written"
    if args[20] is not None:
        torch.testing.assert_close(mine[20], theirs[20], atol=2e-6, rtol=2e-6)


@both_ways
@pytest.mark.parametrize("case", [c for c in deepseek_attention.cases if "flash" not in c.name], ids=lambda c: c.name)
def test_attention_to_rows_is_attention_to_what_they_stand_for(case):
    from onegraph.ops.triton.deepseek_attention import deepseek_attention as kernel

    args = list(case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3)))
    dim, rope = args[0].shape[3], 2 * args[4].shape[1]
    states = (1, 2, 10) if args[10] is not None else (1, 2)
    rows = [a.clone().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
    for i in states:
        rows[i] = rows[i] if rows[i].dtype == torch.uint8 else pack_rows(rows[i], rope)
    plain = [unpack_rows(a, dim, rope) if i in states else a for i, a in enumerate(rows)]
    want = deepseek_attention.reference(*plain)
    for op in (deepseek_attention.reference, deepseek_attention.unpacked(kernel)):
        mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in rows]
        assert float((op(*mine) - want).norm() / want.norm()) < 2e-6
        assert torch.equal(unpack_rows(mine[2], dim, rope)[1:], plain[2][1:]), "the ring has the rows themselves"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8") / "m"
    save_hf("flash", path, head_dim=96, partial_rotary_factor=1 / 12)
    with Checkpoint.open(path) as checkpoint:
        return DeepseekV4.load(checkpoint, DEVICE)


@pytest.fixture
def fp8(model):
    model.fp8_kv = True
    yield model
    model.fp8_kv = False


def logits(model, text, counts):
    state, parts, at = Decoder(model, 1, 384, page_size=128), [], 0
    while at < len(text):
        count = counts[len(parts) % len(counts)]
        parts += state.feed([text[at : at + count]])
        at += count
    return torch.cat(parts), state.cache


def test_the_model_on_it(model):
    """Close to keys in full precision, smaller, and the same however the text is cut."""
    text = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, wide = logits(model, text, [300])
    model.fp8_kv = True
    with reference_ops():
        whole, cache = logits(model, text, [300])
        pieces, _ = logits(model, text, [1, 7, 40])
    model.fp8_kv = False
    error = float((whole - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.5, error  # a random model of width 48 is nothing but sensitive
    assert float((pieces - whole).norm() / whole.norm()) < 0.02, "a code at a tie may fall the other way"
    assert cache.windows[0].dtype == torch.uint8
    assert cache.nbytes < 0.85 * wide.nbytes, "most of it is what compressors keep, which stays as it is"
    sizes = {"rows": 1, "pages": cache.pages, "page_size": 128, "itemsize": 4, "fp8": True}
    assert cache.nbytes == sum(type(cache).bytes_of(block.attention, **sizes) for block in model.blocks)


def test_generation_on_it(fp8):
    engine = Engine(fp8, max_batch=3, max_context=256, chunk=32, capture=None if GPU else False)
    few = SamplingParams(max_tokens=12)
    first = engine.generate(prompts(), few)
    assert engine.generate(prompts(), few) == first
    assert [engine.generate([p], few)[0] for p in prompts()] == first
