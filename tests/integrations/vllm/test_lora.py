"""LoRA adapters that vLLM's own layers add to linears of ours: the tokens of our engine with the same adapters."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from models import TILED, save_rotated
from onegraph import LLM
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8PConfig
from onegraph.formats.trellis import TrellisConfig
from onegraph.models.load import load_decoder
from test_adapters import ADAPTERS, write_adapter

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

from test_generate import serving
from test_serve import SETTINGS, wait

PROMPTS = [[5, 9, 77, 3], [100, 2, 64, 8, 30, 41, 12], list(range(20, 60)), [1], [7, 7, 7]]
NAMES = ["some", None, "all", "some", "all"]
COUNT = 10
SIZES: dict[str, Any] = {  # heads as vLLM has them on a CPU
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXED = {"model.layers.0.self_attn.q_proj": 2, "model.layers.1.mlp.up_proj": 16}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "same rate": ("llama", E8PConfig(bits=4), SIZES),
    "head and embedding in codes": ("smollm2", E8PConfig(bits=4, lm_head=3, embed_tokens=4), SIZES),
    "biases, several rates in a layer": ("qwen2", E8PConfig(bits=3, layers=MIXED), SIZES),
    "trellis": ("qwen3", TrellisConfig(bits=3, layers=MIXED, lm_head=4, embed_tokens=6), TILED),
    "two ranks": (
        "llama",
        E8PConfig(bits=4),
        SIZES | {"head_dim": 64, "num_key_value_heads": 4, "intermediate_size": 256},
    ),
    "transformers' model in vLLM": ("smollm3", E8PConfig(bits=4, lm_head=4), SIZES),
}


def ours(path: Path, folder: Path, names: Sequence[str | None]) -> list[list[int]]:
    with Checkpoint.open(path) as checkpoint:
        adapters = {name: folder / name for name in ADAPTERS}
        model = load_decoder(checkpoint, "cpu", torch.float32, max_context=128, adapters=adapters)
    params = [SamplingParams(max_tokens=COUNT, adapter=name) for name in names]
    return Engine(model, max_context=128).generate(PROMPTS, params)


def theirs(llm: Any, folder: Path, names: Sequence[str | None]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and their log-probabilities."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams as Params

    params = Params(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False, logprobs=0)
    numbers = {name: i for i, name in enumerate(ADAPTERS, start=1)}
    requests = [None if name is None else LoRARequest(name, numbers[name], str(folder / name)) for name in names]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    done = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    answers = [each.outputs[0] for each in done]
    told = [[row[t].logprob for t, row in zip(each.token_ids, each.logprobs, strict=True)] for each in answers]
    return [list(each.token_ids) for each in answers], told


def merged(oracle: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of an answer's tokens."""
    with torch.no_grad():
        rows = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


def save(case: str, folder: Path) -> dict[str | None, Any]:
    """A checkpoint "m" and adapters beside it; transformers' models with each one's products in their weights."""
    variant, config, sizes = CASES[case]
    dense = save_rotated(config, variant, folder / "m", **sizes)
    oracles = {None: dense}
    for name in ADAPTERS:
        oracles[name] = copy.deepcopy(dense)
        added = write_adapter(folder / name, name, dense, target_modules=[*ADAPTERS[name][2]])
        with torch.no_grad():
            for key, more in added.items():
                oracles[name].get_parameter(key).add_(more)
    return oracles


@pytest.mark.parametrize("case", [case for case in CASES if case != "two ranks"])
def test_tokens_are_our_engines(case: str, tmp_path: Path) -> None:
    """Two adapters and none in one batch; the probabilities are those of the weights with the adapters' products."""
    if CASES[case][0] == "smollm3" and "ONEGRAPH_ALONE" not in os.environ:
        # vLLM changes transformers' class, and another test of this process may have had it do so: in one of its own.
        node = f"{__file__}::test_tokens_are_our_engines[{case}]"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", node]
        done = subprocess.run(command, env=os.environ | {"ONEGRAPH_ALONE": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
        assert "1 passed" in done.stdout
        return
    oracles = save(case, tmp_path)
    # On a CPU vLLM's kernels take the last slot for sequences without an adapter: there it has to stay empty.
    with serving(tmp_path / "m", enable_lora=True, max_loras=3, max_lora_rank=8) as llm:
        together, told = theirs(llm, tmp_path, NAMES)
        plain, _ = theirs(llm, tmp_path, [None] * 5)
        alone, _ = theirs(llm, tmp_path, ["all"] * 5)
    assert together == ours(tmp_path / "m", tmp_path, NAMES)
    assert plain == ours(tmp_path / "m", tmp_path, [None] * 5)
    assert alone == ours(tmp_path / "m", tmp_path, ["all"] * 5)
    assert all(tokens != others for tokens, others, name in zip(together, plain, NAMES, strict=True) if name)
    if CASES[case][0] == "smollm3":  # vLLM has changed transformers' class, which runs here no more
        return
    for name, prompt, answer, found in zip(NAMES, PROMPTS, together, told, strict=True):
        assert found == pytest.approx(merged(oracles[name], prompt, answer), abs=2e-3)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM takes the GPU")),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def test_the_server_has_adapters_as_models(place: str, tiny_chat: Path, tmp_path: Path) -> None:
    """`--lora-modules`: a request chooses one by its name."""
    import openai

    generator = torch.Generator().manual_seed(0)
    shapes = {"mlp.down_proj": (128, 256), "self_attn.q_proj": (256, 128)}
    dense = {f"model.layers.{i}.{name}.weight": size for i in range(2) for name, size in shapes.items()}
    weights = {key: torch.randn(size, generator=generator) for key, size in dense.items()}
    write_adapter(tmp_path / "some", "some", Weights(weights), target_modules=[*ADAPTERS["some"][2]])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_chat), *SETTINGS[place]]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"]
    command += ["--enable-lora", "--max-loras", "2", "--lora-modules", f"red={tmp_path / 'some'}"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait(process, port, log)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0)
        assert {"tiny", "red"} <= {model.id for model in client.models.list()}
        prompt = [5, 9, 77, 3, 12]
        told = {name: tokens_of(client, name, prompt) for name in ("tiny", "red")}
    finally:
        process.terminate()
        process.wait(30)
    assert told["tiny"] != told["red"]
    if place == "cpu":
        with LLM(tiny_chat, device="cpu", dtype="float32", adapters={"red": tmp_path / "some"}) as llm:
            for name, adapter in (("tiny", None), ("red", "red")):
                (made,) = llm.generate([prompt], max_tokens=12, temperature=0, adapter=adapter)
                assert told[name][: len(made.token_ids)] == made.token_ids
                assert len(made.token_ids) > 1


def tokens_of(client: Any, model: str, prompt: list[int]) -> list[int]:
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    made = client.completions.create(
        model=model, prompt=prompt, max_tokens=12, temperature=0, logprobs=0, extra_body=extra
    )
    return [int(token.removeprefix("token_id:")) for token in made.choices[0].logprobs.tokens]


class Weights:
    """What `write_adapter` takes of a model."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.weights


PROGRAM = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[4])
from pathlib import Path
from vllm import LLM
if __name__ == "__main__":
    from test_lora import NAMES, theirs
    folder = Path(sys.argv[1])
    llm = LLM(str(folder / "m"), skip_tokenizer_init=True, max_model_len=128, max_num_seqs=8, enable_lora=True,
              max_lora_rank=8, **json.loads(sys.argv[2]))
    with open(sys.argv[3], "w") as file:
        json.dump([theirs(llm, folder, names) for names in (NAMES, [None] * 5)], file)
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)
"""


def in_a_process(folder: Path, settings: dict[str, Any], environment: dict[str, str]) -> Any:
    """What `theirs` gives with NAMES, and without adapters."""
    known = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    words = [str(folder), json.dumps(settings), str(folder / "out"), json.dumps([p for p in sys.path if "tests" in p])]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, env=os.environ | known | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((folder / "out").read_text())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM takes the GPU")
def test_two_ranks_share_adapters(tmp_path: Path) -> None:
    save("two ranks", tmp_path)
    settings = {"tensor_parallel_size": 2, "dtype": "float32", "enforce_eager": True, "max_loras": 3}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    (together, _), (plain, _) = in_a_process(tmp_path, settings, environment)
    assert together == ours(tmp_path / "m", tmp_path, NAMES)
    assert plain == ours(tmp_path / "m", tmp_path, [None] * 5)


@pytest.mark.gpu
def test_graphs_have_adapters(tmp_path: Path) -> None:
    """Two adapters and none in a batch of a captured step; both slots are taken, and none is none. Graphs give what the
    compiled step gives without them, and log-probabilities are those of the merged weights up to bfloat16."""
    oracles = save("same rate", tmp_path)
    common = {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 29, "max_loras": 2}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    found = {}
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        sizes = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8]}
        found[mode] = in_a_process(tmp_path, common | {"compilation_config": sizes}, environment)
    (tokens, told), (plain, _) = found["FULL_AND_PIECEWISE"]
    assert tokens == found["NONE"][0][0]
    assert plain == found["NONE"][1][0]
    assert [a == b for a, b in zip(tokens, plain, strict=True)] == [name is None for name in NAMES]
    off = [
        abs(a - b)
        for name, prompt, answer, row in zip(NAMES, PROMPTS, tokens, told, strict=True)
        for a, b in zip(row, merged(oracles[name], prompt, answer), strict=True)
    ]
    assert median(off) < 0.05
