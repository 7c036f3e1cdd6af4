"""The table of models in docs/reference/models.md is what records, configs and tests say."""

from onegraph.models.config import LlamaConfig
from onegraph.models.families import FAMILIES
from tools import compatibility


def test_the_table_is_the_one_that_the_tool_makes() -> None:
    page = compatibility.PAGE.read_text()
    made = compatibility.replaced(page, compatibility.table())
    assert made == page, "python -m tools compatibility --write"


def test_every_family_has_a_tiny_model() -> None:
    """Aliases of another family's record need none of their own."""
    tested = compatibility.variants()
    own = {
        kind
        for kind, traits in FAMILIES.items()
        if not any(traits == FAMILIES[other] for other in tested & {*FAMILIES})
    }
    assert own <= tested, f"{sorted(own - tested)} have no tiny model in tests/models.py"


def test_a_row_counts_what_a_checkpoint_would_hold() -> None:
    kind, size, text = compatibility.row(compatibility.CONFIGS / "Llama-3.2-1B.json")
    config = LlamaConfig.from_dict({"model_type": kind, "hidden_size": 2048, "num_attention_heads": 32} | {
        "num_hidden_layers": 16, "intermediate_size": 8192, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": True,
    })  # fmt: skip
    inside = sum(n * k for name, (n, k, _) in config.parts.linears.items() if name != "lm_head")
    assert 0 < size - (inside // 2 + 2 * 128256 * 2048) < 0.01 * size, "scales and norms besides"
    assert text.startswith("| Llama-3.2-1B | `llama` | bf16 | 1, 2, 4, 8 |")


def test_how_a_model_was_tested_is_what_result_lines_say() -> None:
    """Whole steps of a shape count for each model with these weights, and kernels of a shape do not."""
    cells = {
        name: compatibility.row(compatibility.CONFIGS / f"{name}.json")[2].split(" | ")[-1]
        for name in ("SmolLM2-135M-Instruct", "Llama-3.1-8B", "Llama-3.2-1B", "gpt-oss-20b")
    }
    assert cells == {
        "SmolLM2-135M-Instruct": "tiny, full size, real weights |", "Llama-3.1-8B": "tiny, full size |",
        "Llama-3.2-1B": "tiny |", "gpt-oss-20b": "tiny, full size |",
    }  # fmt: skip
