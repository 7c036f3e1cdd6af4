"""The engine on a GPU: captured, split and eager give the same tokens, alone and in any batch."""

import pytest
import torch

from onegraph.engine.engine import Engine
from onegraph.engine.evaluate import evaluate
from onegraph.engine.params import SamplingParams
from onegraph.ops.sampling import greedy, sample
from onegraph.runtime.prove import prove
from test_engine import dense
from tiny_decoder import TinyDecoder

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * n + 3 * k) % 101 for n in range(length)] for k, length in enumerate((1, 40, 7, 16, 17, 90, 3, 33, 64))]
GREEDY = SamplingParams(max_tokens=40)
WARM = SamplingParams(max_tokens=40, temperature=0.8, top_k=50, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def model():
    return TinyDecoder(device="cuda:0")


def engine(model, **options):
    return Engine(model, **{"max_batch": 5, "max_context": 160, "page_size": 16, "chunk": 32} | options)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampling"])
def test_captured_split_eager_and_dense_agree(model, params):
    expected = [dense(model, prompt, params) for prompt in PROMPTS]
    for capture, mode in ((None, "captured"), ("split", "split"), (False, "eager")):
        e = engine(model, capture=capture)
        assert e.mode == mode
        assert e.generate(PROMPTS, params) == expected, mode
        assert [e.generate([prompt], params)[0] for prompt in PROMPTS] == expected, f"{mode}, each alone"
        assert e.stats.mode == mode


def test_the_padding_of_a_chunk_may_reach_beyond_the_context(model):
    few = SamplingParams(max_tokens=6)
    expected = [dense(model, prompt, few) for prompt in PROMPTS]
    assert engine(model, max_context=96, chunk=64).generate(PROMPTS, few) == expected


def test_stop_tokens_are_met_a_step_late_and_dropped(model):
    free = [dense(model, prompt, GREEDY) for prompt in PROMPTS]
    stop = SamplingParams(max_tokens=40, stop=sorted({tokens[9] for tokens in free[:3]}))
    expected = [dense(model, prompt, stop) for prompt in PROMPTS]
    assert min(map(len, expected)) < 12
    assert engine(model).generate(PROMPTS, stop) == expected


@pytest.mark.parametrize("capture", [True, "split"])
@pytest.mark.parametrize("sampling", [False, True])
def test_the_steps_are_proven(model, capture, sampling):
    e = engine(model, capture=capture)
    g = torch.Generator().manual_seed(0)
    state = {f"keys {i}": k for i, k in enumerate(e.executor.cache.keys)}
    state |= {f"values {i}": v for i, v in enumerate(e.executor.cache.values)}
    start = {name: torch.randn(t.shape, generator=g).to(t) for name, t in state.items()}

    def rows(n):
        pages = 1 + torch.randperm(50, generator=g)[: n * 10]
        return {
            "positions": torch.randint(0, 100, (n,), generator=g).int(),
            "limits": torch.randint(0, 160, (n,), generator=g).int(),
            "table": pages.view(n, 10).int(),
            "slots": torch.arange(1, n + 1).int(),
            "temperature": torch.rand(n, generator=g),
            "top_k": torch.randint(0, 50, (n,), generator=g).int(),
            "top_p": torch.rand(n, generator=g),
            "seed": torch.randint(0, 2**60, (n,), generator=g),
        }

    def reset():
        for name, tensor in state.items():
            tensor.copy_(start[name])

    # Page 0 takes what padding rows write, several to one place: which of them stays is nobody's business.
    owned = {name: tensor[1:] for name, tensor in state.items()}
    cases = [{"drawn": torch.randint(0, 101, (n,), generator=g)} | rows(n) for n in (5, 1, 3, 2, 4)]
    assert prove(e.executor.step("decode", sampling=sampling).stages[0], cases, reset=reset, state=owned) == []
    cases = [{"tokens": torch.randint(0, 101, (1, 32), generator=g)} | rows(1) for _ in range(3)]
    assert prove(e.executor.step("prefill", sampling=sampling).stages[0], cases, reset=reset, state=owned) == []


def test_long_generation_does_not_grow_memory(model):
    e = engine(model, max_batch=2, max_context=256)
    long = SamplingParams(max_tokens=200)
    first = e.generate(PROMPTS[:2], long)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        assert e.generate(PROMPTS[:2], long) == first
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert e.stats.build_seconds == 0


def test_an_error_in_the_callback_leaves_the_engine_usable(model):
    e = engine(model)
    expected = e.generate(PROMPTS, GREEDY)

    def interrupt(index, token):
        if index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        e.generate(PROMPTS, GREEDY, on_token=interrupt)
    assert e.generate(PROMPTS, GREEDY) == expected


def test_a_second_gpu_gives_the_same_tokens(model):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = engine(model).generate(PROMPTS, WARM)
    assert engine(TinyDecoder(device="cuda:1")).generate(PROMPTS, WARM) == expected


def test_draws_are_those_of_the_cpu():
    for op in (greedy, sample):
        for case in op.cases:
            g = torch.Generator().manual_seed(1)
            arguments = case.make(torch.device("cpu"), torch.float32, g)
            assert op(*arguments).equal(op(*(t.cuda() for t in arguments)).cpu()), (op.name, case.name)


def test_evaluation_is_that_of_the_cpu(model):
    tokens = torch.randint(0, 101, (300,), generator=torch.Generator().manual_seed(0))
    cpu = evaluate(TinyDecoder(), tokens, reference=TinyDecoder(seed=2), window=100)
    gpu = evaluate(model, tokens, reference=TinyDecoder(seed=2), window=100)
    assert gpu.perplexity == pytest.approx(cpu.perplexity, rel=1e-3)
    assert gpu.kl == pytest.approx(cpu.kl, rel=1e-3)
    assert gpu.tokens == cpu.tokens
