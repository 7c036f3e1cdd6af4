"""`onegraph check --vllm MODEL`: a worker's decode step, as vLLM itself calls it, through the checker.

vLLM captures what its model's `forward` does inside the context that it sets up (attention metadata, KV cache). So the
check steps into that call: the engine serves a prompt eagerly, and the second decode step's forward is captured and
replayed on the GPU right there, on other tokens than the captured ones. Without a GPU only the model's source is read.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onegraph.check.judge import judge
from onegraph.check.report import CheckError, Report
from onegraph.check.source import check_tree

PROMPT, NEW = [1, 2, 3, 4, 5, 6, 7, 8], 4


def check_decode_step(model: str, *, steps: int = 4, **settings: Any) -> Report:
    """Check the decode step of `model` (a checkpoint that vLLM serves) for one request.

    Args:
        steps: replays to compare, 3 or more. settings: keywords of `vllm.LLM`.

    Returns a report whose `facts["vllm"]` says what limits vLLM's own graphs, one line each. Raises CheckError where
    vLLM is missing or does not serve the model.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker must be this process
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, of a CPU that others use too
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise CheckError(f"--vllm: vLLM cannot be imported ({error}); pip install vllm") from None
    small = {"max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True} | settings
    try:
        llm = LLM(model, enforce_eager=True, **small)
    except (ValueError, OSError, RuntimeError) as error:
        raise CheckError(f"--vllm {model}: vLLM does not load it: {' '.join(str(error).split())[:300]}") from error

    reports: list[Report] = []
    places = llm.apply_model(lambda module: _step_into(module, model, steps, reports))
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    llm.apply_model(lambda module: delattr(module, "forward"))  # the class's own again

    sources = [check_tree(place) for place in places[0]]
    report = judge(model, [*reports, *sources])
    report.facts["read"] = sorted(each for source in sources for each in source.facts["read"])
    report.facts["vllm"] = limits(llm.llm_engine.vllm_config)
    return report


def limits(config: Any) -> list[str]:
    """What vLLM may capture by what its attention backends say of themselves, and what forces eager, a line each."""
    from vllm.v1.attention.backend import AttentionCGSupport

    found: dict[str, str] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "get_attn_backend"):
            continue
        backend = layer.get_attn_backend()
        support = backend.get_builder_cls().get_cudagraph_support(config, layer.get_kv_cache_spec(config))
        text = {
            AttentionCGSupport.ALWAYS: "any batch as one graph",
            AttentionCGSupport.UNIFORM_BATCH: "decode and equal drafts as one graph, other batches around attention",
            AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: "decode as one graph, other batches around attention",
            AttentionCGSupport.NEVER: "graphs around attention only: its metadata forces the attention to run eagerly",
        }[support]
        found.setdefault(f"{backend.get_name()} ({support.name}): {text}", name)
    return [f"{text}; e.g. {name}" for text, name in found.items()]


def _step_into(module: Any, target: str, steps: int, reports: list[Report]) -> list[str]:
    """Has the second decode step of `module` checked in passing; the files that its class and those above stand in."""
    forward, seen = module.forward, [0]

    def stepped(*args: Any, **keywords: Any) -> Any:
        tokens = keywords.get("input_ids", args[0] if args else None)
        seen[0] += isinstance(tokens, Tensor) and tokens.numel() == 1
        if seen[0] == 2 and isinstance(tokens, Tensor) and tokens.is_cuda and not reports:
            from onegraph.check.live import live_step

            def factory() -> tuple[Callable[[Tensor], Any], Callable[[int], tuple[Tensor]]]:
                def step(ids: Tensor) -> Any:
                    if "input_ids" in keywords:
                        return forward(*args, **(keywords | {"input_ids": ids}))
                    return forward(ids, *args[1:], **keywords)

                return step, lambda i: (tokens * 0 + 1 + i,)

            reports.append(live_step(factory, steps=steps, target=target))
        return forward(*args, **keywords)

    module.forward = stepped
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    paths = dict.fromkeys(inspect.getsourcefile(kind) for kind in kinds)
    return [path for path in paths if path is not None]
