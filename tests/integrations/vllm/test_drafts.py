"""Several tokens a request in the TurboQuant backend: what full graphs may hold, and what rejection leaves behind.

The first tests build vLLM's metadata by hand and run one layer; a graph is played by the metadata of another batch,
which a graph holds on to. In the last vLLM's engine verifies drafts whose mistakes are chosen here.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_generate import serving, tokens_of
from test_kv_cache import TEXT, turboquant
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from onegraph.api.llm import LLM
from onegraph.check import check_step
from onegraph.check.report import Verdict
from onegraph.engine.params import SamplingParams
from onegraph.formats.turboquant_layout import TurboQuantLayout

DIM, HEADS, KV_HEADS, SIZE, PAGES = 64, 4, 2, 16, 4  # pages of a request
K = 2  # drafts
LAYOUT = TurboQuantLayout(DIM, 4, 4, page_size=SIZE)
POISON = 255  # norms of these bytes are NaN


def config(method: str = "ngram") -> Any:
    """What the builder reads of vLLM's configuration."""
    speculative = SimpleNamespace(
        num_speculative_tokens=K, parallel_drafting=False, uses_draft_model=lambda: method == "draft_model"
    )
    return SimpleNamespace(
        speculative_config=speculative,
        use_v2_model_runner=True,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


class Layer:
    """One layer of the backend with requests of `PAGES` pages each; its tensors stay where they are, as vLLM's do."""

    def __init__(self, requests: int, *, rope: bool, method: str = "ngram", device: str = "cpu") -> None:
        from onegraph.integrations.vllm.turboquant import TurboQuantBuilder, TurboQuantImpl

        spec = SimpleNamespace(head_size=DIM, block_size=SIZE)
        self.builder = TurboQuantBuilder(spec, ["layer"], config(method), torch.device(device))
        self.impl = TurboQuantImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, kv_cache_dtype="turboquant:4")
        if rope:
            angle = torch.outer(torch.arange(PAGES * SIZE), 100.0 ** -(torch.arange(DIM // 2) / DIM))
            self.impl.rope = angle.cos().to(device), angle.sin().to(device)
        shape = 1 + requests * PAGES, KV_HEADS, LAYOUT.page_bytes
        self.cache = torch.full(shape, POISON, dtype=torch.uint8, device=device)
        self.pages = torch.randperm(requests * PAGES, generator=torch.Generator().manual_seed(1)).int().view(-1, PAGES)
        self.pages += 1
        self.table = torch.zeros(8, PAGES, dtype=torch.int32)
        self.starts, self.lengths = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        self.slots = torch.full((128,), -1)

    def batch(self, requests: list[int], held: list[int], new: list[int], rows: int = 0, tokens: int = 0) -> Any:
        """vLLM's description of a step: requests that hold `held` tokens get `new` more; padded to a graph's size."""
        rows, total = rows or len(requests), sum(new)
        bounds = torch.tensor([0, *new]).cumsum(0)
        self.starts.fill_(total)[: len(bounds)] = bounds
        self.lengths.zero_()[: len(new)] = torch.tensor(held) + torch.tensor(new)
        self.table.zero_()[: len(requests)] = self.pages[requests]
        self.slots.fill_(-1)[:total] = torch.cat(
            [
                self.pages[r, at // SIZE] * SIZE + at % SIZE
                for r, h, n in zip(requests, held, new, strict=True)
                for at in [torch.arange(h, h + n)]
            ]
        )
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: rows + 1],
            query_start_loc_cpu=self.starts[: rows + 1].clone(),
            seq_lens=self.lengths[:rows],
            num_reqs=rows,
            num_actual_tokens=tokens or total,
            max_query_len=max(new),
            max_seq_len=PAGES * SIZE,
            block_table_tensor=self.table[:rows],
            slot_mapping=self.slots[: tokens or total],
            seq_lens_cpu_upper_bound=self.lengths[:rows].clone(),
        )

    def forward(self, metadata: Any, qkv: Tensor) -> Tensor:
        """qkv [T, heads + 2 kv_heads, D] -> [T, heads, D]."""
        out = qkv.new_full((len(qkv), HEADS, DIM), torch.nan)
        parts = (qkv, qkv, qkv) if self.impl.rope else qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        return self.impl.forward(None, *parts, self.cache, metadata, out)

    def step(self, requests: list[int], held: list[int], new: list[int], draw: int = 0) -> Tensor:
        made = self.builder.build(0, self.batch(requests, held, new))
        return self.forward(made, vectors(requests, held, new, draw))

    def without(self, requests: list[int], held: list[int]) -> Tensor:
        """The cache, with poison for all that the requests' pages hold behind their first `held` tokens, and for the
        page of nobody, into which padding may be written."""
        cache = self.cache.clone()
        cache[0] = POISON
        for request, first in zip(requests, held, strict=True):
            at = torch.arange(first, PAGES * SIZE)
            poison(cache, self.pages[request, at // SIZE], at % SIZE)
        return cache


def poison(cache: Tensor, pages: Tensor, places: Tensor) -> None:
    """Tokens at `places` of `pages` [N], in all heads."""
    for head in range(cache.shape[1]):
        cache[pages.long().unsqueeze(1), head, LAYOUT.offsets(places)] = POISON


def vectors(requests: list[int], held: list[int], new: list[int], draw: int = 0) -> Tensor:
    """qkv of tokens, each by its request, its place and which of the tokens that may stand there it is (`draw`)."""
    rows = [
        torch.randn(HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(1000 * draw + 100 * r + at))
        for r, h, n in zip(requests, held, new, strict=True)
        for at in range(h, h + n)
    ]
    return torch.stack(rows)


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    from onegraph.integrations.vllm import turboquant as backend

    monkeypatch.setattr(backend.TurboQuantBackend, "rate", (4, 4))


def one_by_one(layer: Layer, request: int, held: int, new: int, draw: int = 0) -> Tensor:
    return torch.cat([layer.step([request], [held + i], [1], draw) for i in range(new)])


def test_what_is_declared() -> None:
    """Full graphs of equal requests stay with drafts; what the backend cannot do, vLLM refuses by its answers."""
    from onegraph.integrations.vllm.turboquant import TurboQuantBackend, TurboQuantBuilder

    support = TurboQuantBuilder.get_cudagraph_support(config(), SimpleNamespace())
    assert support == AttentionCGSupport.UNIFORM_BATCH
    both, decode = "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"
    for mode, want in ((both, both), (decode, decode), ("FULL", both)):
        compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode)
        compilation.set_splitting_ops_for_v1("none")
        taken = compilation.resolve_cudagraph_mode_and_sizes(support, "CUSTOM", 1 + K, use_v2_model_runner=True)
        assert taken == CUDAGraphMode[want]
    assert not TurboQuantBackend.supports_device_cpu_query_lens_mismatch()
    assert TurboQuantBuilder.get_varlen_cudagraph_max_query_len(config(), SimpleNamespace()) is None
    layer = Layer(1, rope=False)
    assert layer.builder.reorder_batch_threshold == 1 + K
    assert not layer.builder.supports_draft_decode_metadata_update


@pytest.mark.parametrize("rope", [False, True], ids=["turned", "rope"])
def test_a_graph_of_drafts_replays_for_other_requests(rope: bool) -> None:
    """Captured for four requests, replayed for two and their padding, round after round with drafts rejected: what one
    token at a time gives, from codes among which all but the kept ones are poison. Nothing else is written."""
    layer, other = Layer(3, rope=rope), Layer(3, rope=rope)
    requests, held = [2, 0], [SIZE - 2, SIZE + 5]  # the first crosses into its next page
    for one in (layer, other):
        one.step(requests, [0, 0], held)

    dummy = layer.batch([0, 1, 2, 0], [0] * 4, [1 + K] * 4)
    layer.table.zero_()  # as vLLM captures: every request in the page of nobody
    graph = layer.builder.build_for_cudagraph_capture(dummy)

    for draw, kept in ((1, [1, 3]), (2, [2, 1]), (3, [3, 2])):
        new = [1 + K] * 2
        before = layer.without(requests, held)
        layer.builder.build(0, layer.batch(requests, held, new, rows=4, tokens=4 * (1 + K)))
        qkv = torch.cat((vectors(requests, held, new, draw), torch.full((2 * (1 + K), HEADS + 2 * KV_HEADS, DIM), 9.0)))
        out = layer.forward(graph, qkv)

        want = torch.cat([one_by_one(other, r, h, 1 + K, draw) for r, h in zip(requests, held, strict=True)])
        torch.testing.assert_close(out[: 2 * (1 + K)], want, atol=1e-4, rtol=1e-4)
        assert not out[2 * (1 + K) :].any()
        assert layer.without(requests, held).equal(before)
        held = [h + n for h, n in zip(held, kept, strict=True)]
        for one in (layer, other):
            one.cache = one.without(requests, held)


def test_a_round_may_be_captured() -> None:
    """Metadata and layer on the simulated GPU: nothing is read by the host, replays of other requests are eager."""
    from onegraph.integrations.vllm import turboquant as backend

    def factory() -> tuple[Any, Any]:
        layer, new = Layer(3, rope=True, device="cuda"), torch.tensor([0, 1 + K, 2 + 2 * K, 2 + 2 * K])

        def step(qkv: Tensor, starts: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
            batch = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=new,
                seq_lens=lengths,
                num_reqs=3,
                num_actual_tokens=3 + 3 * K,
                max_query_len=1 + K,
                max_seq_len=PAGES * SIZE,
                block_table_tensor=table,
                slot_mapping=table,  # not looked at
            )
            return layer.forward(layer.builder.build(0, batch), qkv)

        def inputs(i: int) -> tuple[Tensor, ...]:
            given = (
                torch.randn(3 + 3 * K, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(i)),
                new.int() if i % 2 else torch.tensor([0, 1 + K, 2 + 2 * K, 3 + 3 * K]).int(),
                torch.tensor([1 + K + i, 30 - 2 * i, 0 if i % 2 else 1 + K]).int(),
                layer.pages.roll(i, dims=0),
            )
            return tuple(tensor.cuda() for tensor in given)

        return step, inputs

    backend._constants.cache_clear()
    try:
        report = check_step(factory)
    finally:
        backend._constants.cache_clear()  # whose tensors are the simulated GPU's
    assert report.verdict == Verdict.CAPTURABLE, report.to_json()


@pytest.mark.parametrize("rope", [False, True], ids=["turned", "rope"])
def test_requests_of_different_lengths(rope: bool) -> None:
    """Drafts of two lengths, a chunk of a prompt, a prompt that begins, and one so short that it counts as drafts."""
    layer, other = Layer(6, rope=rope), Layer(6, rope=rope)
    requests, held, new = list(range(6)), [20, 9, 33, 16, 0, 0], [3, 3, 1, 10, 12, 2]
    for one in (layer, other):
        one.step(requests[:4], [0] * 4, held[:4])
    made = layer.builder.build(0, layer.batch(requests, held, new))
    assert [(span.rows, span.length) for span in made.spans] == [(2, 3), (1, 1), (1, 10), (1, 2)]
    before = layer.without(requests, held)
    out = layer.forward(made, vectors(requests, held, new)).split(new)
    assert layer.without(requests, held).equal(before)

    for request in (0, 1, 2, 3, 5):
        want = one_by_one(other, request, held[request], new[request])
        torch.testing.assert_close(out[request], want, atol=1e-4, rtol=1e-4)
    exact = other.step([4], [0], [12])
    torch.testing.assert_close(out[4], exact)
    assert not torch.allclose(out[4], one_by_one(other, 4, 0, 12), atol=1e-2)
    assert torch.equal(layer.cache[1:], other.cache[1:])


def test_drafts_of_different_lengths() -> None:
    """A step without a prompt, in which the drafts are as many as were found; a request without tokens parts two."""
    layer, other = Layer(5, rope=True), Layer(5, rope=True)
    requests, held, new = list(range(5)), [12, 15, 9, 20, 8], [3, 1, 2, 0, 2]
    for one in (layer, other):
        one.step(requests, [0] * 5, held)
        one.cache = one.without(requests, held)
    out = layer.step(requests, held, new).split(new)
    assert layer.without(requests, held).equal(other.without(requests, held))
    for request in (0, 1, 2, 4):
        want = one_by_one(other, request, held[request], new[request])
        torch.testing.assert_close(out[request], want, atol=1e-4, rtol=1e-4)


def test_what_is_drafted_past_the_longest_text_is_written_nowhere() -> None:
    layer = Layer(2, rope=True, method="draft_model")
    layer.step([0, 1], [0, 0], [20, 20])
    before = layer.cache.clone()
    batch = layer.batch([0, 1], [0, 20], [1, 1])  # as vLLM moves it: position 0, a text of one token, no slot
    batch.slot_mapping[0] = -1
    out = layer.forward(layer.builder.build_for_drafting(batch, 1), vectors([0, 1], [0, 20], [1, 1], draw=5))
    assert not out[0].any()
    assert torch.equal(layer.cache[layer.pages[0].long()], before[layer.pages[0].long()])
    assert not torch.equal(layer.cache[layer.pages[1].long()], before[layer.pages[1].long()])


def test_a_drafting_model_reads_one_token_more() -> None:
    """Than vLLM says on the host. Behind a prompt of one token its first pass is no prompt; what a prompt and the token
    behind it are is one, and attends to itself exactly, as the verifying model's does."""
    layer, other = (Layer(2, rope=True, method="draft_model") for _ in range(2))
    for one in (layer, other):
        one.step([0], [0], [1])
    new = [2 + K, 20]
    batch = layer.batch([0, 1], [1, 0], new)
    batch.seq_lens_cpu_upper_bound -= 1
    first, prompt = layer.forward(layer.builder.build(0, batch), vectors([0, 1], [1, 0], new)).split(new)
    torch.testing.assert_close(first, one_by_one(other, 0, 1, 2 + K), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(prompt, other.step([1], [0], [20]))


class Chosen:
    """vLLM's `custom_class` drafter: of the texts in `texts` it names the next tokens, or none, fewer, or wrong ones,
    by the place where they would stand."""

    texts: ClassVar[list[list[int]]] = []
    made: ClassVar[list[tuple[int, int]]] = []  # drafts, and how many of them are right

    def __init__(self, config: Any) -> None: ...

    def load_model(self, *_: Any) -> None: ...

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        drafts = []
        for row, new in enumerate(sampled):
            length = int(lengths[row])
            text = next((t for t in self.texts if new and t[:length] == tokens[row, :length].tolist()), [])
            right, wrong = [(3, 0), (1, 2), (0, 0), (0, 3), (2, 0), (0, 1)][length % 6]
            named = text[length : length + right]
            drafts.append(named + [(token + 1) % 256 for token in text[length + right : length + right + wrong]])
            self.made.append((len(drafts[-1]), len(named)))
        return drafts


def test_greedy_text_is_that_without_drafts(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM's engine, with what was rejected poisoned before the next step is written."""
    prompts = [TEXT[:12], TEXT[20:50], TEXT[60:66], TEXT[30:64]]
    drafts = {"method": "custom_class", "model": f"{__name__}.Chosen", "num_speculative_tokens": 3}
    settings = {"enable_prefix_caching": False, "block_size": 32, "speculative_config": drafts}
    with turboquant() as backend, serving(tiny_chat, **settings) as llm:
        monkeypatch.setattr(Chosen, "texts", [])
        plain = tokens_of(llm, prompts, 40)
        monkeypatch.setattr(Chosen, "texts", [p + answer for p, answer in zip(prompts, plain, strict=True)])
        monkeypatch.setattr(Chosen, "made", [])
        seen = poisoned(monkeypatch, backend.TurboQuantBuilder)
        assert tokens_of(llm, prompts, 40) == plain
    assert {length for length, _ in Chosen.made} == {0, 1, 2, 3}
    assert sum(seen) > 50
    assert len(seen) < 30, "drafts that are right are kept"


def poisoned(patch: pytest.MonkeyPatch, builder: Any) -> list[int]:
    """From here on each step begins with poison where the one before wrote tokens that no request kept; how many."""
    build, written, counts = builder.build, set[tuple[int, int]](), list[int]()

    def between(self: Any, *args: Any, **keywords: Any) -> Any:
        made, size = build(self, *args, **keywords), self.kv_cache_spec.block_size
        rows = list(zip(made.block_table.tolist(), made.positions.tolist(), made.counts.tolist(), strict=True))
        kept = {(pages[t // size], t % size) for pages, held, _ in rows for t in range(held)}
        if rejected := sorted(written - kept):
            pages, places = torch.tensor(rejected).T
            layers = self.vllm_config.compilation_config.static_forward_context
            for name in self.layer_names:
                cache = layers[name].kv_cache
                poison(cache.view(cache.shape[0], cache.shape[1], -1), pages, places)
        counts.append(len(rejected))
        written.clear()
        written.update((pages[t // size], t % size) for pages, held, new in rows for t in range(held, held + new))
        return made

    patch.setattr(builder, "build", between)
    return counts


@pytest.mark.slow
def test_a_head_of_ours_drafts_as_in_our_own_engine(smollm2_4bit: Path) -> None:
    """An EAGLE-3 head as `onegraph draft-head` writes it, beside weights in codes, whose layers hand vLLM the hidden
    states that it reads: the same text, and as many drafts right in each place."""
    head = Path(__file__).parents[3] / "heads" / "smollm2-135m-instruct-4bit"
    prompt = [1, 504, 4723, 282, 4649, 314]  # "The capital of France is"
    with LLM(smollm2_4bit, device="cpu", dtype="float32", draft=f"eagle:{head}", draft_tokens=3) as own:
        text = list(own.engine.generate([prompt], SamplingParams(max_tokens=40, temperature=0))[0])
        wanted = [own.stats.accepted_at[place] for place in range(3)]
    assert sum(wanted) > 5
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with serving(smollm2_4bit, speculative_config=drafts, disable_log_stats=False) as llm:
        assert tokens_of(llm, [prompt], 40) == [text]
        found = next(m.values for m in llm.get_metrics() if m.name.endswith("accepted_tokens_per_pos"))
    # vLLM counts those too that stand behind the last token.
    assert all(0 <= got - want <= 1 for got, want in zip(found, wanted, strict=True))


def test_a_draft_model_keeps_a_head_of_its_own_beside_one_in_codes(tiny_chat: Path) -> None:
    """vLLM compares the two weights, and shares the model's head where they are equal."""
    drafts = {"method": "draft_model", "model": str(tiny_chat), "num_speculative_tokens": 2}
    with serving(tiny_chat, speculative_config=drafts) as llm:
        assert llm.apply_model(shares_head) == [False]


def shares_head(model: Any) -> bool:
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share

    draft, own = SimpleNamespace(has_own_lm_head=True), SimpleNamespace(weight=torch.zeros(8, 128))
    return bool(_should_share(draft, "has_own_lm_head", own, model.lm_head))
