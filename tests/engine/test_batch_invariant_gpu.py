"""Results that do not depend on what runs beside them, on a GPU: each op of a decode step, and the texts of engines."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import save_e8p, save_hf
from onegraph.engine.draft import NgramDrafter, OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8P
from onegraph.formats.weight import WeightFormat
from onegraph.models.chain import chained
from onegraph.models.llama import Llama
from onegraph.nn.linear import Linear
from onegraph.ops.activation import GeGLU, SwiGLU
from onegraph.ops.calls import PagedDecode
from onegraph.ops.decode_attention import paged_decode
from onegraph.ops.embedding import embedding
from onegraph.ops.invariant import batch_invariant
from onegraph.ops.norm import add_rms_norm, rms_norm
from onegraph.ops.sampling import greedy, sample
from test_batch_invariant import HEADS, STARTS, in_rounds, texts
from test_weight_format import FORMATS, made

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_family")]

COUNTS = *range(1, 17), 24, 33, 128  # tokens of a call: 1 to 8 of 1 to 16 rows
EVERY = {  # what decode_round takes, and what is Triton's: head sizes, more heads a kv head
    **HEADS,
    "llama": (32, 8, 128, 16, 0, False),
    "80": (4, 4, 80, 8, 0, False),
    "gemma": (8, 4, 256, 16, 100, True),
    "twelve": (12, 1, 128, 16, 0, False),
}


@pytest.fixture(autouse=True)
def inside():
    with batch_invariant():
        yield


def rows(x: Tensor) -> list[slice]:
    """Parts of [T, ...]: each token alone, its first few, its last few."""
    few = [count for count in COUNTS if count < len(x)]
    return [slice(i, i + 1) for i in range(min(len(x), 40))] + [
        part for count in few for part in (slice(0, count), slice(len(x) - count, len(x)))
    ]


# ------------------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("case", ["plain", "sinks", "capped"])
@pytest.mark.parametrize("name", EVERY)
def test_attention(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's tokens one by one, alone; in rounds of any size, beside 15 rows and as the 16th."""
    monkeypatch.setitem(HEADS, name, EVERY[name])
    call = texts(name, 8, [*STARTS, *(37 * i for i in range(9)), 2000])
    tensors = (t.cuda() if isinstance(t, Tensor) else t for t in call)
    call = PagedDecode(*tensors)
    if case == "sinks":
        call = replace(call, sinks=torch.randn(call.heads, device="cuda"))
    if case == "capped":
        call = replace(call, softcap=2.0)
    attend = lambda call: paged_decode(*call)  # noqa: E731
    count = len(call.qkv)
    alone = torch.cat([in_rounds(call, [1] * 8, slice(i, i + 1), attend) for i in range(count)])
    for sizes in ([1] * 8, [2, 6], [3, 4, 1], [5, 3], [1, 7], [8]):
        assert torch.equal(in_rounds(call, sizes, slice(None), attend), alone), sizes
        assert torch.equal(in_rounds(call, sizes, slice(0, 3), attend), alone[:3]), sizes
    with batch_invariant(False):
        other = in_rounds(call, [8], slice(None), attend)
    assert float((other.float() - alone.float()).norm() / alone.float().norm()) < 8e-3


# -------------------------------------------------------------------------------------------------------------- linears


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1536, 576), (576, 1536), (320, 14336)])
@pytest.mark.parametrize("format", FORMATS, ids=str)
@torch.no_grad()
def test_linears(format: WeightFormat, n: int, k: int) -> None:
    layer = made(format, n, k, bias=True).cuda()
    layer = Linear(format, layer.tensors, layer.bias.bfloat16())
    if "weight" in layer.tensors:
        layer = layer.dense(torch.bfloat16)
    alike(layer, k)
    alike(partial(layer, float32=True), k)


@pytest.mark.parametrize("bits", E8P)
@torch.no_grad()
def test_linears_that_run_what_stands_around_them(bits: int) -> None:
    layer = made(E8P[bits], 1024, 2048).cuda()
    alike(partial(layer, eps=1e-5), 2048)
    add = torch.randn(COUNTS[-1], 1024, device="cuda").bfloat16()
    x = torch.randn(COUNTS[-1], 4096, device="cuda").bfloat16()
    whole = layer(x, add=add, silu=True)
    for part in rows(x):
        assert torch.equal(layer(x[part].clone(), add=add[part].clone(), silu=True), whole[part]), part


def alike(run, width: int, count: int = COUNTS[-1]) -> None:
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(0)).cuda().bfloat16()
    x *= 1 + torch.arange(count, device="cuda").unsqueeze(1)  # each token of another size
    whole = run(x)
    assert whole.isfinite().all()
    for part in rows(x):
        assert torch.equal(run(x[part].clone()), whole[part]), part


# ----------------------------------------------------------------------------------------------- what is a row's anyway


@pytest.mark.parametrize("width", [576, 1000, 4096])
def test_norms_gates_embeddings_and_draws(width: int) -> None:
    g = torch.Generator().manual_seed(1)
    weight, table = (torch.randn(size, generator=g).cuda().bfloat16() for size in ((width,), (500, width)))
    alike(lambda x: rms_norm(x, weight, 1e-5), width)
    alike(lambda x: torch.cat(add_rms_norm(x, x.flip(1).contiguous(), weight, 1e-5), dim=1), width)
    alike(SwiGLU(), 2 * width)
    alike(GeGLU(), 2 * width)
    alike(lambda x: torch.tanh(x.float() / 30) * 30, width)
    alike(lambda x: embedding((x[:, 0].float().abs() * 7).long() % 500, table), width)
    alike(lambda x: greedy(x.round()), width)  # many ties

    def drawn(x: Tensor) -> Tensor:
        like = lambda value, dtype: torch.full((len(x),), value, dtype=dtype, device="cuda")  # noqa: E731
        settings = like(0.8, torch.float32), like(50, torch.int32), like(0.95, torch.float32)
        return sample(x.float(), *settings, like(3, torch.int64), like(11, torch.int32))

    alike(drawn, width)


# -------------------------------------------------------------------------------------------------------------- engines

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS = {
    "dense": ("smollm2", None, {}),
    "e8p2": ("smollm2", {"bits": 2}, {}),
    "e8p4": ("qwen3", {"bits": 4, "lm_head": 4}, {"head_dim": 128}),
    "gemma2": ("gemma2", None, {}),
}
PROMPTS = [
    [(7 * n + 3 * k) % 512 for n in range(length)] for k, length in enumerate((1, 300, 7, 16, 17, 90, 3, 33, 64))
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    variant, rates, changes = MODELS[request.param]
    path = tmp_path_factory.mktemp("invariant") / "model"
    sizes = SIZES | changes
    save_hf(variant, path, **sizes) if rates is None else save_e8p(variant, path, rates=rates, **sizes)
    with Checkpoint.open(path) as checkpoint:
        return chained(Llama.load(checkpoint, "cuda", torch.bfloat16))


@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "sampling"])
def test_the_text_is_that_without_drafts_and_alone(model, warm: bool) -> None:
    """256 tokens of each of 9 prompts: one at a time, all at once, and in rounds of every count, eagerly too."""
    fields = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if warm else {}
    count = len(PROMPTS)
    params = [SamplingParams(max_tokens=256, seed=count * 5 + i, **fields) for i in range(count)]

    def engine(**options) -> Engine:
        sizes = {"max_batch": 16, "max_context": 640}
        with batch_invariant(False):  # an engine sees to it by itself
            return Engine(model, batch_invariant=True, **sizes | options)

    def write(engine: Engine, prompts=PROMPTS, params=params) -> list[list[int]]:
        with batch_invariant(False):
            return engine.generate(prompts, params)

    plain = engine(max_batch=1, max_context=700)
    expected = [write(plain, [p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert write(engine()) == expected
    whole = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    oracle = partial(OracleDrafter, whole, 0.8, 512)
    for drafter, tokens, options in (
        (NgramDrafter, 7, {}), (oracle, 1, {}), (oracle, 2, {"max_batch": 3}), (oracle, 3, {}), (oracle, 5, {}),
        (oracle, 7, {}), (oracle, "auto", {"max_batch": 5}), (oracle, 3, {"capture": "split"}),
        (oracle, 7, {"max_batch": 2, "capture": False}),
    ):  # fmt: skip
        drafting = engine(draft=drafter, draft_tokens=tokens, **options)
        assert write(drafting) == expected, (drafter, tokens)
    assert drafting.stats.accepted_tokens > 256


def test_without_it_texts_part(tmp_path: Path) -> None:
    """Or the test above would hold anyway."""
    save_e8p("smollm2", tmp_path / "model", rates={"bits": 2}, **SIZES)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = chained(Llama.load(checkpoint, "cuda", torch.bfloat16))
    params = SamplingParams(max_tokens=256, temperature=1.0, seed=7)
    found = []
    with batch_invariant(False):
        for wanted in (False, True):
            alone, together = (Engine(model, max_batch=n, max_context=640, batch_invariant=wanted) for n in (1, 16))
            found.append([alone.generate([p], params)[0] for p in PROMPTS] == together.generate(PROMPTS, params))
    assert found == [False, True]
