"""Our layers and our cache under `generate` on a GPU: what is captured replays as the eager step computes.

Two ways to capture. By hand, from the one graph that Dynamo sees, the kernels are the eager step's: bits must be equal,
and a test takes seconds. As `generate` does it by itself (inductor, reduce-overhead), rounding differs: logits are
compared over tokens that are given, and nothing may be skipped. Sizes are multiples of 64, which our CUDA kernels take.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import save_e8p
from onegraph.integrations.hf import TurboQuantCache
from onegraph.integrations.hf.cache import ATTENTION

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache  # noqa: E402

pytestmark = pytest.mark.gpu

RATES = {"bits": 3, "lm_head": 4, "embed_tokens": 2, "layers": {"model.layers.0.self_attn.o_proj": 16}}
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 192,
}
TOKENS = torch.arange(20).unsqueeze(0) * 5 % 131
CODES = "turboquant:4,window=8,first=1"
STEPS = {  # how keys and values are stored, how attention runs, dtype
    "static": (None, "sdpa", torch.bfloat16),
    "static, fp16": (None, "sdpa", torch.float16),
    "from codes": (CODES, ATTENTION, torch.bfloat16),
    "decoded": (CODES, "sdpa", torch.bfloat16),
    "prod, from codes": ("turboquant:3,mode=full,keys=prod", ATTENTION, torch.float16),
}


def make(
    path: Path, dtype: torch.dtype, implementation: str = ATTENTION, device: str = "cuda:0", **changes: Any
) -> Any:
    if not path.exists():
        save_e8p("smollm2", path, rates=RATES, **(SIZES | changes))
    found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device)
    found.set_attn_implementation(implementation)
    return found


def new_cache(model: Any, kv: str | None) -> Any:
    if kv is None:
        return StaticCache(config=model.config, max_cache_len=64)
    return TurboQuantCache(model.config, 64, kv)


def logits(model: Any, cache: Any, **options: Any) -> Tensor:
    """[steps, V] of a continuation that is given, so that steps stay comparable whatever was drawn."""
    given = {"prefix_allowed_tokens_fn": lambda row, ids: [len(ids) * 7 % 192], "max_new_tokens": 8, **options}
    found = model.generate(
        TOKENS.to(model.device), past_key_values=cache, output_logits=True, return_dict_in_generate=True, **given
    )
    return torch.cat(found.logits)


def by_hand(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """A Dynamo backend: the first call runs, the second is captured, all from then on are replays."""
    calls: list[list[Any]] = []
    captured = torch.cuda.CUDAGraph()
    outputs: list[Any] = []

    def call(*args: Any) -> Any:
        if not calls:
            calls.append(list(args))
            return graph.forward(*args)
        if len(calls) == 1:  # what stands where it stood is kept in place; the rest is copied in before each replay
            calls.append([a if a is first else a.clone() for a, first in zip(args, calls[0], strict=True)])
            with torch.cuda.graph(captured):
                outputs.extend(graph.forward(*calls[1]))
        for held, arg in zip(calls[1], args, strict=True):
            if held is not arg:
                held.copy_(arg)
        captured.replay()
        return [out.clone() if isinstance(out, Tensor) else out for out in outputs]

    return call


@pytest.mark.parametrize("step", STEPS)
def test_the_step_that_dynamo_sees_replays_bit_for_bit(step: str, tmp_path: Path) -> None:
    kv, implementation, dtype = STEPS[step]
    model = make(tmp_path / "model", dtype, implementation)
    eager = logits(model, new_cache(model, kv), disable_compile=True)
    torch._dynamo.reset()
    config = CompileConfig(backend=by_hand, mode=None, fullgraph=True)
    assert torch.equal(logits(model, new_cache(model, kv), compile_config=config), eager)


def test_logits_are_those_of_the_cpu(tmp_path: Path) -> None:
    with torch.no_grad():
        exact = make(tmp_path / "model", torch.float32, device="cpu")(TOKENS).logits
        for dtype, allowed in ((torch.bfloat16, 0.04), (torch.float16, 0.006)):
            got = make(tmp_path / "model", dtype)(TOKENS.to("cuda:0")).logits.cpu().float()
            assert (got - exact).norm() / exact.norm() < allowed


@pytest.mark.parametrize("kv", [None, "turboquant:4,window=8"], ids=["static", "codes"])
def test_generate_captures_by_itself_and_a_new_cache_compiles_nothing(kv: str | None, tmp_path: Path) -> None:
    """Each `generate` brings a cache of its own: its buffers lie elsewhere, so the graph is captured again, and that
    is all (StaticCache is compiled again by versions of torch that guard its addresses). A step that replays another's
    logits is off by 1; codes that round the other way cost about 0.05."""
    model = make(tmp_path / "model", torch.float16, num_hidden_layers=1)
    eager = logits(model, new_cache(model, kv), disable_compile=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        got = logits(model, new_cache(model, kv))
        assert ((got - eager).norm(dim=1) / eager.norm(dim=1)).max() < 0.2
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (2 if kv is None else 1)
    assert not torch._dynamo.utils.counters["graph_break"]
