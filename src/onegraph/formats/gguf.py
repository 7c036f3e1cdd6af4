"""GGUF files of the Llama family, read lazily through the same interface as any other checkpoint.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf_header` reads the header, the `gguf`
package dequantizes the block formats.

Quantized tensors present themselves as float16. A Q4_1 weight is d*q + m with d and m float16 and q in 0..15: exact in
float32, and rounded by at most 2^-12 of itself in float16, 1/512 of the quantization step where the same rounding to
bfloat16 would cost 1/64 of it. Asked for as float32 (calibration does) the tensor is the exact one.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onegraph.formats.checkpoint import CARD, LICENSE, Checkpoint, TensorInfo
from onegraph.formats.extras import install
from onegraph.formats.files import CheckpointError, quote
from onegraph.formats.gguf_config import read_config, token_id
from onegraph.formats.gguf_header import GGUFHeader, read_header

MAX_TOKENS = 1 << 21
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # everything else: float16

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # what the frequencies of RoPE are divided by: Llama 3.1's scaling
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What llama.cpp calls tokenizer.ggml.pre -> the tokenizers library's pre-tokenizer.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}


class GGUFCheckpoint(Checkpoint):
    """A GGUF file with the interface of `Checkpoint`: Hugging Face tensor names and config, tokenizer files made from
    the metadata, tensors dequantized when asked for."""

    format = "gguf"

    def __init__(
        self, path: Path, config: dict[str, Any], tensors: dict[str, TensorInfo], data: mmap.mmap, header: GGUFHeader
    ) -> None:
        super().__init__(path, config, tensors)
        self._data, self._metadata = data, header.metadata
        self._sources = {_hf_name(t.name, path): t for t in header.tensors if t.name != ROPE_FACTORS}

    @staticmethod
    def read(path: Path) -> GGUFCheckpoint:
        """Opens the file and checks the whole header. Raises CheckpointError, also where `gguf` is not installed."""
        _gguf()
        with path.open("rb") as stream:
            try:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise CheckpointError(f"{path}: an empty file, a GGUF file or a directory is expected") from None
        header = read_header(data, path)
        tensors = _tensor_table(path, header, len(data))
        return GGUFCheckpoint(
            path, read_config(path, header.metadata, tensors, _rope_factors(path, header, data)), tensors, data, header
        )

    def close(self) -> None:
        super().close()
        self._data.close()

    def forget(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):  # the map itself stays: there is one file, and more of it to read
            self._data.madvise(mmap.MADV_DONTNEED)

    def unrounded(self, name: str) -> torch.Tensor:
        return self.tensor(name, dtype=torch.float32)

    def _read(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        gguf = _gguf()
        info, source = self.info(name), self._sources.get(name)
        assert source is not None
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, source.offset)
        rows = raw.reshape(*reversed(source.dims[1:]), -1)
        try:
            # A damaged scale overflows; `tensor` reports the infinity by name.
            with np.errstate(all="ignore"):
                values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(source.kind))
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {quote(source.name)} cannot be dequantized: {error}") from None
        tensor = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(info.shape)
        if source.name.split(".")[-2] in ("attn_q", "attn_k"):
            tensor = _unpermute(tensor, self.config["head_dim"])
        return tensor.to(dtype or info.dtype)

    def sidecar(self, name: str) -> bytes | None:
        """The tokenizer files and the license, as the metadata gives them. Raises CheckpointError for a tokenizer not
        supported."""
        if name == CARD:
            keys = {key: self._metadata.get(f"general.{key.replace('_', '.')}") for key in LICENSE}
            told = [f"{key}: {value}" for key, value in keys.items() if isinstance(value, str) and value.isprintable()]
            return "\n".join(["---", *told, "---", ""]).encode() if told else None
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "tokenizer.json": self._tokenizer,
            "tokenizer_config.json": self._tokenizer_config,
            "generation_config.json": self._generation_config,
        }
        if name not in makers or "tokenizer.ggml.tokens" not in self._metadata:
            return None
        return (json.dumps(makers[name](), ensure_ascii=False, indent=2) + "\n").encode()

    def _tokenizer(self) -> dict[str, Any]:
        """tokenizer.json: byte-level BPE of the kind that `tokenizer.ggml.pre` names."""
        meta, refuse = self._metadata, self._refuse
        kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
        if kind != "gpt2":
            raise refuse(f"tokenizer model {quote(kind)}, only 'gpt2' (byte-level BPE) is supported")
        if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
            raise refuse(f"pre-tokenizer {quote(pre)}, supported are {', '.join(sorted(_PRE_TOKENIZERS))}")
        tokens = self._texts("tokenizer.ggml.tokens", MAX_TOKENS)
        vocabulary = {token: i for i, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            raise refuse("the same token stands twice in tokenizer.ggml.tokens")
        kinds = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
        if not isinstance(kinds, list) or len(kinds) != len(tokens):
            raise refuse(f"tokenizer.ggml.token_type does not give one type for each of {len(tokens)} tokens")
        merges = [merge.split(" ") for merge in self._texts("tokenizer.ggml.merges", MAX_TOKENS)]
        for merge in merges:
            if len(merge) != 2 or not all(p in vocabulary for p in (*merge, "".join(merge))):
                raise refuse(f"merge {quote(' '.join(merge))} is not made of two tokens that give a third")
        added = [  # 3 is a control token, 4 a user-defined one
            {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": kinds[i] == 3}
            for i, token in enumerate(tokens)
            if kinds[i] in (3, 4)
        ]
        post = None
        if meta.get("tokenizer.ggml.add_bos_token"):
            bos = self._token_id("bos")
            if bos is None:
                raise refuse("tokenizer.ggml.add_bos_token is set but there is no bos_token_id")
            single = [{"SpecialToken": {"id": tokens[bos], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
            special = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
            pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
            post = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": _PRE_TOKENIZERS[pre],
            "post_processor": post,
            "decoder": _BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        }

    def _tokenizer_config(self) -> dict[str, Any]:
        tokens = self._texts("tokenizer.ggml.tokens", MAX_TOKENS)
        found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        found["model_max_length"] = self.config["max_position_embeddings"]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            index = self._token_id(key)
            if index is not None:
                found[f"{role}_token"] = tokens[index]
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            found["chat_template"] = template
        return found

    def _generation_config(self) -> dict[str, Any]:
        roles = ("bos", "bos"), ("pad", "padding")
        ids: dict[str, int | list[int] | None] = {f"{role}_token_id": self._token_id(key) for role, key in roles}
        stops = [index for index in (self._token_id("eos"), self._token_id("eot")) if index is not None]
        ids["eos_token_id"] = None if not stops else stops[0] if len(set(stops)) == 1 else stops
        return {key: value for key, value in ids.items() if value is not None}

    def _token_id(self, role: str) -> int | None:
        return token_id(self.path, self._metadata, role)

    def _texts(self, key: str, limit: int) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or len(value) > limit or not all(isinstance(item, str) for item in value):
            raise self._refuse(f"{key} is not a list of at most {limit} texts")
        return value

    def _refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}; use the model's safetensors directory instead")


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"a GGUF file needs gguf, which is not installed; {install('gguf')}") from None
    return gguf


def _unpermute(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undoes llama.cpp's reordering of q and k rows: [heads, D/2, 2] (interleaved RoPE) -> [heads, 2, D/2]."""
    rows = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape).contiguous()


def _hf_name(name: str, path: Path) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 6:
        module = _BLOCK.get(parts[2])
        if module is not None and parts[3] in ("weight", "bias"):
            return f"model.layers.{int(parts[1])}.{module}.{parts[3]}"
    raise CheckpointError(f"{path}: tensor {quote(name)} is not one of a plain Llama model, which is all that is read")


def _tensor_table(path: Path, header: GGUFHeader, size: int) -> dict[str, TensorInfo]:
    gguf = _gguf()
    table: dict[str, TensorInfo] = {}
    spans = []
    for tensor in header.tensors:
        where = f"{path}: tensor {quote(tensor.name)}"
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            block, width = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise CheckpointError(f"{where} has unknown type {tensor.kind}") from None
        if kind.name[0] == "I" and kind.name[1:].isdigit():
            raise CheckpointError(f"{where} has type {kind.name}, a float or quantized type is expected")
        if tensor.dims[0] % block or not all(tensor.dims):
            raise CheckpointError(f"{where} of type {kind.name} has dimensions {tensor.dims}, not multiples of {block}")
        nbytes = math.prod(tensor.dims) // block * width
        if tensor.offset + nbytes > size:
            raise CheckpointError(
                f"{where} ends at byte {tensor.offset + nbytes}, the file has {size} (truncated?); fetch it again"
            )
        spans.append((tensor.offset, tensor.offset + nbytes, tensor.name))
        if tensor.name == ROPE_FACTORS:
            if kind.name != "F32" or len(tensor.dims) != 1:
                raise CheckpointError(f"{where} is {kind.name} {list(tensor.dims)}; a list of F32 is expected")
            continue
        name = _hf_name(tensor.name, path)
        if name in table:
            raise CheckpointError(f"{where} occurs twice")
        shape = tuple(reversed(tensor.dims))
        table[name] = TensorInfo(shape, _STORED.get(kind.name, torch.float16), nbytes, path)
    spans.sort()
    for (_, stop, first), (start, _, second) in itertools.pairwise(spans):
        if start < stop:
            raise CheckpointError(f"{path}: tensors {quote(first)} and {quote(second)} overlap; fetch it again")
    return table


def _rope_factors(path: Path, header: GGUFHeader, data: mmap.mmap) -> np.ndarray | None:
    """`rope_freqs.weight`, float32 [head_dim / 2], where the file has it."""
    found = [tensor for tensor in header.tensors if tensor.name == ROPE_FACTORS]
    if len(found) > 1:
        raise CheckpointError(f"{path}: tensor {quote(ROPE_FACTORS)} occurs twice")
    return np.frombuffer(data, np.float32, found[0].dims[0], found[0].offset).copy() if found else None
