"""The model card of a quantized checkpoint, as the Hugging Face hub reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from models import save_hf
from onegraph import Quantization, quantize, verify
from onegraph.api.card import license_of
from onegraph.api.size import human_bytes
from onegraph.formats.checkpoint import Checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
FRONT = """\
---
language:
- en
license: other
license_name: 'some-terms'
license_link: TERMS.md
---
# Figures of the base
"""


def made(source: Path, out: Path, **options: Any) -> tuple[Quantization, Any, list[str]]:
    """The quantization, its card as the hub's own library reads it, and what was said."""
    said: list[str] = []
    sizes = {"tokens": 128, "sequence": 64, "recipe": "quick", "device": "cpu"}
    quantization = quantize(source, out, remark=said.append, **sizes | options)
    return quantization, huggingface_hub.ModelCard((out / "README.md").read_text()), said


def test_a_card_names_base_license_rates_sizes_and_calibration(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--Base-1B" / "snapshots" / ("a1" * 20)
    snapshot.parent.mkdir(parents=True)
    tiny.write_model(snapshot)
    (snapshot / "README.md").write_text(FRONT)
    (snapshot / "LICENSE").write_text("the terms")
    out = tmp_path / "out"
    told, card, said = made(snapshot, out, bits=3, layers={"*.down_proj": 4, "*.v_proj": 16}, lm_head=4)
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("org/Base-1B", "quantized")
    assert (data.license, data.license_name) == ("other", "some-terms")
    assert data.license_link == "https://huggingface.co/org/Base-1B/blob/main/TERMS.md"
    assert (data.library_name, data.pipeline_tag) == ("onegraph", "text-generation")
    assert data.tags == ["onegraph", "e8p", "quantized", "3-bit", "llama"]
    assert f"| {told.before.linear_bits:.2f} | {told.after.linear_bits:.2f} |" in card.text
    assert f"| {told.before.bits:.2f} | {told.after.bits:.2f} |" in card.text
    rates = "3 bits; `model.layers.*.mlp.down_proj` (2 of them) 4; `model.layers.*.self_attn.v_proj` (2 of them) kept"
    assert f"- Rates: {rates}; `lm_head` 4.\n" in card.text
    assert "128 tokens, bundled with onegraph" in card.text
    weights = [human_bytes(size.total_bytes) for size in (told.before, told.after)]
    assert f"| weights | {weights[0]} | {weights[1]} |" in card.text
    assert 'pip install -e ".[hub,serve,constraints]"' in card.text
    for way in ("onegraph chat MODEL", "onegraph serve MODEL", "import onegraph.integrations.hf", "vllm serve MODEL"):
        assert way in card.text
    assert "Figures of the base" not in card.content
    assert (snapshot / "README.md").read_text() == FRONT
    assert (out / "LICENSE").read_text() == "the terms"
    assert f"{out / 'README.md'} describes the model, for those you may pass it on to (license other)" in said
    (out / "README.md").write_text("edited")
    assert verify(out).ok, "people edit their cards"


def test_a_local_base_is_not_called_a_model_of_the_hub(tmp_path: Path) -> None:
    _, card, said = made(tiny.write_model(tmp_path / "a `b<script>"), tmp_path / "out", format="nvfp4")
    assert card.data.base_model is None
    assert "\n# base_model: ORG/NAME " in (tmp_path / "out" / "README.md").read_text()
    assert card.data.license is None
    assert "license was not found" in card.text
    assert "(no license found: add it)" in said[-1]
    assert "quantized by onegraph" in card.text
    assert "`a ?b<script>`" in card.text
    assert card.text.count("<script>") == card.text.count("?b<script>`"), "in code alone"
    assert "vllm serve" not in card.text, "onegraph's plugin does not read it"


@pytest.mark.parametrize(("variant", "runs"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_of_models_with_experts_vllm_runs_all_but_gpt_oss(variant: str, runs: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = tmp_path / variant
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_hf(variant, source, **sizes, vocab_size=tiny.CONFIG["vocab_size"])
    (source / "tokenizer.json").write_text(json.dumps(tiny.tokenizer_json()))
    _, card, _ = made(source, tmp_path / "out")
    assert card.data.tags[-1] == variant
    assert "onegraph chat MODEL" in card.text
    assert ("vllm serve MODEL" in card.text) is runs
    assert ("vLLM does not run gpt-oss in these formats" in card.text) is not runs


def test_the_license_of_a_gguf_file(tmp_path: Path) -> None:
    keys = {"general__license": "apache-2.0", "general__license__link": "https://www.apache.org/licenses/LICENSE-2.0"}
    _, card, _ = made(tiny.write_gguf(tmp_path / "m.gguf", **keys), tmp_path / "out")
    assert (card.data.license, card.data.license_link) == (keys["general__license"], keys["general__license__link"])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (FRONT, {"license": "other", "license_name": "some-terms", "license_link": "TERMS.md"}),
        ("---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        ("# no front matter\nlicense: mit\n", {}),
        ("---\nlicense: mit\n", {}),
        ("---\nlicense: [mit, apache-2.0]\nlicense_name: {{a}}\n---\n", {}),
        ("---\nlicense: mit\u2028evil: yes\n---\n", {"license": "mit"}),
        ("---\nlicense: -\nlicense_name: a:\nlicense_link: https://a.b/c?d\n---\n", {}),
        ("---\nlicense: &a !!python/object:os.system x\n---\n", {}),
        ("---\n" + "x: y\n" * 20_000 + "license: mit\n---\n", {}),
        (b"\xff---\nlicense: mit\n---\n", {}),
    ],
)
def test_only_plain_words_of_somebody_elses_card_are_taken(
    content: str | bytes, found: dict[str, str], tmp_path: Path
) -> None:
    path = tiny.write_model(tmp_path / "m")
    (path / "README.md").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert license_of(Checkpoint.open(path)) == found
