"""GGUF: the same model as the safetensors one, against transformers' own reading of the file, and damage named."""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fuzz import tiny
from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.formats.gguf import _hf_name
from onegraph.models.config import LlamaConfig
from onegraph.models.rope import Rope

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def read_all(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    assert all(checkpoint.tensor(name).isfinite().all() for name in checkpoint.names)
    checkpoint.sidecar("tokenizer.json")


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_config_is_the_one_that_the_directory_has(file: Path) -> None:
    assert Checkpoint.open(file).config == {**tiny.CONFIG, "attention_bias": False, "mlp_bias": False}


def test_unquantized_tensors_are_exact(tmp_path: Path) -> None:
    for kind, dtype in (("F32", torch.float32), ("F16", torch.float16)):
        checkpoint = Checkpoint.open(tiny.write_gguf(tmp_path / f"{kind}.gguf", kinds=(kind,)))
        truth = tiny.tensors()
        assert checkpoint.names == sorted(truth)
        for name, weight in truth.items():
            assert checkpoint.dtype(name) == (dtype if weight.dim() == 2 else torch.float32)
            assert torch.equal(checkpoint.tensor(name), weight.to(checkpoint.dtype(name))), name


def test_quantized_tensors_are_near(file: Path) -> None:
    """Within the rounding of each format: half a step of the block's largest value over its number of levels."""
    checkpoint, truth = Checkpoint.open(file), tiny.tensors()
    kinds = {"float32": 0.0, "bfloat16": 2**-8, "float16": 1 / 12}  # the last: Q8_0 and Q4_1, and F16 itself
    for name, weight in truth.items():
        error = (checkpoint.tensor(name, dtype=torch.float32) - weight.float()).abs().max() / weight.float().abs().max()
        assert error <= kinds[str(checkpoint.dtype(name)).removeprefix("torch.")], name
    assert checkpoint.nbytes < sum(w.nbytes for w in truth.values()) * 1.2


def test_float16_keeps_q4_1_closer_than_bfloat16_would(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write_gguf(tmp_path / "q.gguf", kinds=("Q4_1",)))
    name = "model.layers.0.mlp.up_proj.weight"
    exact = checkpoint.tensor(name, dtype=torch.float32)
    assert checkpoint.dtype(name) == torch.float16
    half = (checkpoint.tensor(name).float() - exact).norm()
    brain = (exact.bfloat16().float() - exact).norm()
    assert 0 < half < brain / 6


def test_logits_equal_those_of_transformers_reading_the_same_file(tmp_path: Path) -> None:
    """Names, q/k order, rope base, epsilon and tied head, with transformers' GGUF loader as the oracle."""
    transformers = pytest.importorskip("transformers")
    file = tiny.write_gguf(tmp_path / "tiny.gguf", kinds=("F32", "Q8_0"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    checkpoint = Checkpoint.open(file)
    ours = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config)).float()
    state = {name: checkpoint.tensor(name, dtype=torch.float32) for name in checkpoint.names}
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    ours.tie_weights()
    tokens = torch.arange(40).reshape(2, 20) * 5
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write_gguf(tmp_path / "m.gguf", kinds=("F16",), tied=False))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.tensor("lm_head.weight"), tiny.tensors()["model.embed_tokens.weight"].flip(0))


def test_tokenizer_files(file: Path) -> None:
    checkpoint = Checkpoint.open(file)
    ours = Tokenizer.from_str((checkpoint.sidecar("tokenizer.json") or b"").decode())
    truth = Tokenizer.from_str(json.dumps(tiny.tokenizer_json()))
    for text in ("the in a the 2024\n", "<|im_start|>user\nthé😀<|im_end|>", ""):
        assert ours.encode(text).ids == truth.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == truth.decode(truth.encode(text).ids)
    assert b"<|im_end|>" in (checkpoint.sidecar("tokenizer_config.json") or b"")
    assert checkpoint.sidecar("generation_config.json") == b'{\n  "bos_token_id": 1,\n  "eos_token_id": 2\n}\n'
    assert checkpoint.sidecar("vocab.json") is None


def test_the_tokenizers_config_and_where_generation_ends(tmp_path: Path) -> None:
    keys = {"tokenizer__ggml__padding_token_id": 3, "tokenizer__ggml__unknown_token_id": 0}
    checkpoint = Checkpoint.open(tiny.write_gguf(tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=0, **keys))
    assert json.loads(checkpoint.sidecar("tokenizer_config.json") or b"") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": tiny.CONFIG["max_position_embeddings"],
        **{f"{role}_token": tiny.TOKENS[i] for role, i in (("bos", 1), ("eos", 2), ("pad", 3), ("unk", 0))},
        "chat_template": tiny.TEMPLATE,
    }
    generation = json.loads(checkpoint.sidecar("generation_config.json") or b"")
    assert generation == {"bos_token_id": 1, "pad_token_id": 3, "eos_token_id": [2, 0]}
    same = Checkpoint.open(tiny.write_gguf(tmp_path / "n.gguf", tokenizer__ggml__eot_token_id=2))
    assert json.loads(same.sidecar("generation_config.json") or b"") == {"bos_token_id": 1, "eos_token_id": 2}


def test_a_text_begins_with_bos_where_the_file_says_so(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write_gguf(tmp_path / "m.gguf", tokenizer__ggml__add_bos_token=1))
    ours = Tokenizer.from_str((checkpoint.sidecar("tokenizer.json") or b"").decode())
    plain = Tokenizer.from_str(json.dumps(tiny.tokenizer_json()))
    assert ours.encode("the in").ids == [1, *plain.encode("the in").ids]
    pair = ours.encode("the", "in")
    assert pair.ids == [1, *plain.encode("the").ids, *plain.encode("in").ids]
    assert pair.type_ids == [0] * (1 + len(plain.encode("the").ids)) + [1] * len(plain.encode("in").ids)
    assert ours.encode("the in", add_special_tokens=False).ids == plain.encode("the in").ids


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("tokens", ["a", "b", "a"], "the same token stands twice"),
        ("tokens", ["a", 1], "tokenizer.ggml.tokens is not a list of at most"),
        ("token_type", [1], "token_type does not give one type for each of"),
        ("token_type", 3, "token_type does not give one type for each of"),
        ("merges", ["t h e"], "merge 't h e' is not made of two tokens that give a third"),
        ("merges", ["the in"], "merge 'the in' is not made of two tokens that give a third"),
        ("merges", None, "tokenizer.ggml.merges is not a list of at most"),
        ("pre", 5, "pre-tokenizer 5, supported are"),
        ("model", None, "tokenizer model None, only 'gpt2'"),
        ("bos_token_id", 10**6, "bos token id is 1000000"),
        ("bos_token_id", None, "add_bos_token is set but there is no bos_token_id"),
    ],
)
def test_a_tokenizer_that_is_damaged_is_named(file: Path, key: str, value: Any, why: str) -> None:
    checkpoint: Any = Checkpoint.open(file)
    checkpoint._metadata |= {"tokenizer.ggml.add_bos_token": True, f"tokenizer.ggml.{key}": value}
    if value is None:
        del checkpoint._metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CheckpointError, match=re.escape(why)) as caught:
        checkpoint.sidecar("tokenizer.json")
    assert str(caught.value).startswith(f"{file}: ")


def test_names_of_tensors() -> None:
    assert _hf_name("token_embd.weight", Path()) == "model.embed_tokens.weight"
    assert _hf_name("blk.0.attn_q.bias", Path()) == "model.layers.0.self_attn.q_proj.bias"
    assert _hf_name("blk.99999.ffn_down.weight", Path()) == "model.layers.99999.mlp.down_proj.weight"
    for odd in (
        "attn_q.weight",
        "blk.0.attn_q",
        "blk.0.attn_q.weight.x",
        "block.0.attn_q.weight",
        "blk.0.attn_q.scale",
    ):
        with pytest.raises(CheckpointError, match="is not one of a plain Llama model"):
            _hf_name(odd, Path())
    for layer in ("-1", "x", "", "²", "٣", "100000"):
        with pytest.raises(CheckpointError, match="is not one of a plain Llama model"):
            _hf_name(f"blk.{layer}.attn_q.weight", Path())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general__architecture": "qwen2moe"}, ("'qwen2moe'", "'llama'")),
        ({"llama__embedding_length": "wide"}, ("llama.embedding_length", "'wide'")),
        ({"llama__embedding_length": 0}, ("llama.embedding_length is 0",)),
        ({"llama__attention__head_count": 3}, ("head_count 3 does not divide the embedding's 64",)),
        ({"llama__attention__head_count_kv": 1}, ("k_proj.weight has shape [32, 64]", "needs [16, 64]")),
        (
            {"llama__attention__key_length": 32, "llama__rope__dimension_count": 32},
            ("q_proj.weight has shape [64, 64]", "needs [128, 64]"),
        ),
        ({"llama__attention__key_length": 15}, ("unequal or odd length",)),
        ({"llama__attention__value_length": 8}, ("unequal or odd length",)),
        ({"llama__rope__dimension_count": 8}, ("partial rotary",)),
        ({"llama__rope__freq_base": float("nan")}, ("freq_base is nan",)),
        ({"llama__expert_count": 8}, ("mixtures of experts",)),
        ({"llama__attention__scale": 0.5}, ("llama.attention.scale is 0.5",)),
        ({"llama__attention__sliding_window": 64}, ("llama.attention.sliding_window is 64", "safetensors directory")),
        ({"llama__attention__clamp_kqv": 8.0}, ("llama.attention.clamp_kqv is 8.0",)),
        ({"llama__attention__causal": False}, ("llama.attention.causal is False",)),
        ({"llama__logit_scale": 0.0625}, ("llama.logit_scale is 0.0625",)),
        ({"llama__embedding_scale": 12.0}, ("llama.embedding_scale is 12.0",)),
        ({"llama__residual_scale": 0.22}, ("llama.residual_scale is",)),
        ({"llama__final_logit_softcapping": 30.0}, ("llama.final_logit_softcapping is 30.0",)),
        (
            {"llama__rope__scaling__type": "longrope"},
            ("llama.rope.scaling.type is 'longrope'", "none, linear and yarn"),
        ),
        ({"llama__rope__scaling__attn_factor": 1.5}, ("llama.rope.scaling.attn_factor is 1.5", "with yarn only")),
        ({"llama__rope__scaling__yarn_ext_factor": 0.5}, ("llama.rope.scaling.yarn_ext_factor is 0.5",)),
        ({"llama__wat": 1}, ("has the key 'llama.wat'", "may change what the model computes")),
        ({"tokenizer__wat": 1}, ("has the key 'tokenizer.wat'", "may change the tokens")),
        ({"tokenizer__ggml__add_eos_token": True}, ("tokenizer.ggml.add_eos_token is True",)),
        ({"tokenizer__ggml__model": "llama"}, ("'llama'", "safetensors directory")),
        ({"tokenizer__ggml__pre": "deepseek-r1"}, ("'deepseek-r1'", "smollm")),
        ({"tokenizer__ggml__eos_token_id": 10**6}, ("eos token id is 1000000",)),
        ({"general__alignment": 33}, ("general.alignment is 33",)),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, keys: dict[str, Any], words: tuple[str, ...]) -> None:
    if "general__architecture" in keys or "general__alignment" in keys:
        file = tiny.write_gguf(tmp_path / "m.gguf", spare=1)
        raw = file.read_bytes()
        if "general__architecture" in keys:
            new = struct.pack("<Q", 8) + b"qwen2moe"
            raw = raw.replace(struct.pack("<Q", 5) + b"llama", new, 1)
        else:
            raw = raw.replace(struct.pack("<Q", 5) + b"spare", struct.pack("<Q", 17) + b"general.alignment", 1)
            raw = raw.replace(b"general.alignment" + struct.pack("<II", 4, 1), b"general.alignment\4\0\0\0\41\0\0\0")
        file.write_bytes(raw)
    else:
        file = tiny.write_gguf(tmp_path / "m.gguf", **keys)
    if "tokenizer__ggml__model" not in keys and "tokenizer__ggml__pre" not in keys:
        refused(file, *words)
    else:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(file).sidecar("tokenizer.json")
        assert all(word in str(caught.value) for word in words)


def test_a_tensor_of_an_unknown_type_is_named(file: Path, tmp_path: Path) -> None:
    raw, bad = bytearray(file.read_bytes()), tmp_path / "bad.gguf"
    kind = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    raw[kind : kind + 4] = struct.pack("<I", 999)
    bad.write_bytes(raw)
    refused(bad, f"{bad}: tensor 'token_embd.weight'")


def test_rope_scaling_is_handed_on(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    config = Checkpoint.open(tiny.write_gguf(tmp_path / "m.gguf", **keys)).config
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"scaling__type": "linear", "scaling__factor": 2.0}, LINEAR),
        ({"scaling__factor": 2.0}, LINEAR),
        ({"scale_linear": 2.0}, LINEAR),
        ({"scaling__type": "none", "scaling__factor": 2.0}, None),
        ({"scaling__type": "linear"}, None),
        (
            {
                "scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 64,
                "scaling__attn_factor": 0.5, "scaling__yarn_beta_fast": 16.0, "scaling__yarn_beta_slow": 2.0,
                "scaling__yarn_ext_factor": 1.0, "scaling__finetuned": True,
            },
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
                "beta_slow": 2.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4)),
            },
        ),
    ],
)  # fmt: skip
def test_every_key_of_rope_scaling_is_read(
    tmp_path: Path, keys: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    """With the meaning that llama.cpp gives them; and what comes of it is a config that runs."""
    given: dict[str, Any] = {f"llama__rope__{key}": value for key, value in keys.items()}
    config = Checkpoint.open(tiny.write_gguf(tmp_path / "m.gguf", **given)).config
    assert config.get("rope_scaling") == scaling
    (rope,) = set(LlamaConfig.from_dict(config).ropes)
    assert rope is not None
    assert rope.kind == ("default" if scaling is None else scaling["rope_type"])


@pytest.mark.parametrize("original", [64, 8192])
def test_the_scaling_of_llama_3_1_is_read_from_its_tensor(tmp_path: Path, original: int) -> None:
    """As llama.cpp's converter writes it: what each frequency is divided by."""
    rope = Rope(kind="llama3", theta=10000.0, factor=8.0, original=original)
    factors = (Rope(theta=10000.0).frequencies(16) / rope.frequencies(16)).numpy().astype(np.float32)
    file = tiny.write_gguf(tmp_path / "m.gguf", factors=factors)
    if original == 64:  # no model's
        refused(file, "rope_freqs.weight is not the scaling of Llama 3.1")
        return
    checkpoint = Checkpoint.open(file)
    assert checkpoint.names == sorted(tiny.tensors())
    found = LlamaConfig.from_dict(checkpoint.config).ropes[0]
    assert found is not None
    torch.testing.assert_close(found.frequencies(16), rope.frequencies(16))


def test_rope_factors_of_one_are_none(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write_gguf(tmp_path / "m.gguf", factors=np.ones(8, np.float32)))
    assert "rope_scaling" not in checkpoint.config


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"llama__rope__scaling__factor": 0.5}, "llama.rope.scaling.factor is 0.5"),
        ({"llama__rope__freq_base": 0.5}, "llama.rope.freq_base is 0.5"),
        ({"llama__attention__layer_norm_rms_epsilon": 5.0}, "llama.attention.layer_norm_rms_epsilon is 5.0"),
    ],
)
def test_errors_name_the_keys_of_the_file(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    config = Checkpoint.open(tiny.write_gguf(tmp_path / "m.gguf", **keys)).config
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        LlamaConfig.from_dict(config)
    assert "config.json" not in str(caught.value)


def test_truncation_anywhere_is_refused_quickly(file: Path, tmp_path: Path) -> None:
    raw, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 7), *range(3000, len(raw), 997), len(raw) - 1]:
        cut.write_bytes(raw[:length])
        start = time.perf_counter()
        refused(cut, "cut.gguf")
        assert time.perf_counter() - start < 2


def test_absurd_counts_end_at_once(file: Path, tmp_path: Path) -> None:
    """The counts of tensors, keys, tokens and text bytes, each as large as 64 bits allow."""
    raw, bad = file.read_bytes(), tmp_path / "bad.gguf"
    tokens = raw.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    name = raw.index(b"token_embd.weight")
    for at, size in ((8, 8), (16, 8), (24, 8), (tokens, 8), (name - 8, 8), (name + 17, 4), (name + 21, 8)):
        for value in (b"\xff" * size, b"\xff" * (size - 1) + b"\x7f", b"\0" * (size - 1) + b"\x01"):
            bad.write_bytes(raw[:at] + value + raw[at + size :])
            start = time.perf_counter()
            refused(bad, "bad.gguf")
            assert time.perf_counter() - start < 2


def test_a_flipped_bit_is_harmless_or_named(file: Path, tmp_path: Path) -> None:
    """Bits of the header one by one, and of the scales: CheckpointError or a finite model, nothing else."""
    raw, bad = bytearray(file.read_bytes()), tmp_path / "bad.gguf"
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(len(raw), (150,), generator=generator).tolist() + list(range(32)):
        for bit in (0, 6, 7):
            raw[at] ^= 1 << bit
            bad.write_bytes(raw)
            raw[at] ^= 1 << bit
            with contextlib.suppress(CheckpointError):
                read_all(bad)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"GGU", b"GGUF", b"GGUF\1\0\0\0", b"GGUF\0\0\0\3" + bytes(100), b"\x80\x04pickle", bytes(100)):
        (tmp_path / "x").write_bytes(content)
        refused(tmp_path / "x", str(tmp_path / "x"))


def test_without_the_gguf_package_the_command_that_installs_it_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    refused(file, 'not installed; in a checkout of onegraph: pip install -e ".[gguf]"')
