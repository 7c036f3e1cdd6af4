"""What drafts is shared by ranks where that saves time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models import save_hf
from onegraph.api.outline import described, table_entry
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8PConfig
from onegraph.models import shares
from onegraph.models.config import LlamaConfig
from onegraph.models.eagle import EagleConfig, EagleHead
from onegraph.models.eagle_net import head_config
from onegraph.models.llama import config_of
from onegraph.models.loader import Loader
from onegraph.models.shares import read_bytes, shares_draft

CONFIGS = Path(__file__).parent / "configs"


def of(name: str, path: Path, bits: int | None, head: int | None = None) -> tuple[Loader, Any]:
    """A published model in bfloat16, or in E8P, from its config.json alone."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    if bits is not None:
        config |= {"quantization_config": E8PConfig(bits=bits, lm_head=head).to_dict()}
        config |= {} if head is None else {"tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = described(path)
    parsed = config_of(checkpoint)
    return Loader(checkpoint, parsed, torch.bfloat16), parsed


@pytest.mark.parametrize(
    ("name", "bits", "head", "counts"),
    [
        ("Llama-3.2-1B", None, None, [2, 4]),
        ("Llama-3.2-1B", 4, 4, [4]),
        ("Llama-3.2-1B", 2, 4, []),
        ("Qwen3-0.6B", 4, 4, []),
        ("Llama-3.1-8B", 2, 4, [2, 4]),
        ("SmolLM2-135M-Instruct", None, None, []),  # nine heads
    ],
)
def test_a_draft_model_is_shared_where_fewer_bytes_save_more_than_exchanges_cost(
    name: str, bits: int | None, head: int | None, counts: list[int], tmp_path: Path
) -> None:
    loader, config = of(name, tmp_path, bits, head)
    assert [ranks for ranks in (1, 2, 4) if shares_draft(loader, config, ranks)] == counts


def test_a_token_reads_the_experts_that_it_uses_and_a_tied_embedding_as_head(tmp_path: Path) -> None:
    loader, config = of("Qwen3-30B-A3B", tmp_path, None)
    assert 2 * 3.0e9 < read_bytes(loader, config) < 2 * 3.2e9, "3.3B active parameters, 0.3B of them the embedding"
    loader, config = of("Llama-3.2-1B", tmp_path, None)
    assert read_bytes(loader, config) == pytest.approx(2 * 1.236e9, rel=1e-3)


@pytest.mark.parametrize(("bits", "counts"), [(None, [2, 4]), (4, [2, 4]), (2, [4])])
def test_the_head_of_an_8b_model_is_shared(bits: int | None, counts: list[int], tmp_path: Path) -> None:
    """One layer, 4096 wide, and 32,000 tokens: four exchanges against 749 MB in bfloat16, 188 in E8P at 4 bits."""
    model = LlamaConfig.from_dict(json.loads((CONFIGS / "Llama-3.1-8B.json").read_text()))
    config = head_config(model, (1, 15, 28), 32000, "tests/8b")
    config |= {} if bits is None else {"quantization_config": E8PConfig(bits=bits, lm_head=bits).to_dict()}
    about = model, torch.device("cuda"), torch.bfloat16
    expected = EagleHead.loader(Checkpoint(tmp_path, config, {}), *about).expected()
    table = {name: table_entry(tmp_path, shape, kinds[0]) for name, (shape, kinds) in expected.items()}
    loader, layer = EagleHead.loader(Checkpoint(tmp_path, config, table), *about), EagleConfig.from_dict(config).layer
    assert read_bytes(loader, layer) == pytest.approx(749e6 * (bits or 16) / 16, rel=0.01)
    assert [ranks for ranks in (1, 2, 4) if shares_draft(loader, layer, ranks)] == counts


def test_what_ranks_cannot_share_is_whole_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "EXCHANGE_S", 0.0)
    save_hf("llama", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        config = config_of(checkpoint)
        loader = Loader(checkpoint, config, torch.float32)
    assert [ranks for ranks in (1, 2, 3, 4) if shares_draft(loader, config, ranks)] == [2], "six heads, two of keys"
