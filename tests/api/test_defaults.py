"""Sampling defaults are one rule: the request, generation_config.json, onegraph's default; in every command alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph import LLM, SamplingParams
from onegraph.api.defaults import DEFAULT, SamplingDefaults
from onegraph.formats.checkpoint import Checkpoint
from test_server import Running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.write_model(tmp_path_factory.mktemp("defaults") / "plain")
    (path / "generation_config.json").write_text(json.dumps({"temperature": 1.5, "top_k": 30}))
    return path


@pytest.mark.parametrize(
    ("config", "given", "filled"),
    [
        ({}, {}, (0.7, 0.95, 0)),
        ({"top_k": 20}, {}, (0.7, 0.95, 20)),
        ({"top_k": 20}, {"temperature": 1.0}, (1.0, 0.95, 20)),
        ({"do_sample": False, "temperature": 0.6}, {}, (0.0, 1.0, 0)),
        ({"do_sample": False}, {"temperature": 0.5}, (0.5, 1.0, 0)),
        ({"do_sample": True}, {}, (1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.5}, (0.6, 0.5, 0)),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0}, (0.0, 1.0, 0)),
        ({"temperature": 0.6}, {"temperature": 0, "top_k": 4}, (0.0, 1.0, 4)),
        ({"do_sample": True, "temperature": 1e-6}, {}, (0.0, 1.0, 0)),
        ({"temperature": 0.6, "top_k": -1}, {}, (0.6, 1.0, 0)),
        ({"temperature": 0.6, "top_k": 50.0}, {}, (0.6, 1.0, 50)),
    ],
)
def test_what_a_request_leaves_open(
    config: dict[str, Any], given: dict[str, Any], filled: tuple[float, float, int], model: Path, tmp_path: Path
) -> None:
    tiny.write_model(tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text(json.dumps(config))
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        found = SamplingDefaults.of(checkpoint).fill(SamplingParams(**given))
    assert (found.temperature, found.top_p, found.top_k) == filled


def test_a_value_that_is_not_allowed_is_an_error_unless_the_request_has_its_own(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text(json.dumps({"temperature": 1, "top_p": 2}))
    with LLM(tmp_path / "m", device="cpu") as llm:
        says = r"^generation_config.json: top_p: got 2; allowed is above 0, up to 1 for off; give a top_p of your own$"
        with pytest.raises(ValueError, match=says):
            llm.generate("the", max_tokens=1)
        assert llm.generate("the", max_tokens=1, top_p=1.0).token_ids


def test_python_command_line_and_server_agree(model: Path) -> None:
    with LLM(model, device="cpu") as llm:
        wanted = llm.generate("the thing", max_tokens=8, seed=5)
        explicit = SamplingParams(max_tokens=8, seed=5, temperature=1.5, top_k=30, top_p=1.0)
        assert llm.generate("the thing", explicit).token_ids == wanted.token_ids
        chat = llm.chat("the thing", max_tokens=8, seed=5)
        greedy = llm.generate("the thing", max_tokens=8, temperature=0)
    assert greedy.token_ids != wanted.token_ids
    command = ["generate", model, "--raw", "--prompt", "the thing", "--max-tokens", 8, "--seed", 5, "--json"]
    status, out, errors = invoke([*command, "--device", "cpu"])
    assert status == 0, errors
    assert json.loads(out)["outputs"][0]["tokens"] == wanted.token_ids
    server = Running(model)
    try:
        how: dict[str, Any] = {"model": "plain", "max_tokens": 8, "seed": 5}
        made = server.client.completions.create(prompt="the thing", **how)
        assert made.choices[0].text == wanted.text
        messages: Any = [{"role": "user", "content": "the thing"}]
        assert server.client.chat.completions.create(messages=messages, **how).choices[0].message.content == chat.text
    finally:
        server.end()


def test_without_max_tokens_a_chat_may_fill_the_context_and_a_continuation_has_256(tmp_path: Path) -> None:
    longer = tiny.CONFIG | {"max_position_embeddings": 1024, "eos_token_id": None}
    tiny.write_model(tmp_path / "m", longer)
    (tmp_path / "m/generation_config.json").write_text(json.dumps(DEFAULT))
    settings = json.loads((tmp_path / "m/tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(tmp_path / "m", device="cpu", max_model_len=400, max_num_seqs=1) as llm:
        assert len(llm.generate("the", seed=1).token_ids) == 256
        chat = llm.chat("the", seed=1)
        assert len(chat.token_ids) == 400 - chat.prompt_tokens
