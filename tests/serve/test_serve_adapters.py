"""Adapters by the name of the model that a request asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from fuzz import tiny
from onegraph import LLM
from onegraph.api.tokenizer import Tokenizer
from onegraph.cli import main
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve.app import Server, Settings
from onegraph.serve.models import Models
from onegraph.serve.worker import Worker

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def write_adapter(path: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in tiny.tensors().items():
        if name.removesuffix(".weight").endswith(MODULES):
            at = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            tensors[f"{at}A.weight"] = torch.randn(2, weight.shape[1], generator=generator) * 0.5
            tensors[f"{at}B.weight"] = torch.randn(weight.shape[0], 2, generator=generator) * 0.5
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("adapters")
    path = tiny.write_model(folder / "m")
    adapters = {name: write_adapter(folder / name, i) for i, name in enumerate(("red", "blue"))}
    with LLM(path, adapters=adapters, max_num_seqs=4, max_model_len=96, device="cpu") as found:
        yield found


def test_a_request_chooses_by_the_model_it_names(llm: LLM) -> None:
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    names = ["m", "red", "blue", "red"]
    wanted = [llm.generate("the thing", adapter=None if name == "m" else name, **how).text for name in names]
    assert len(set(wanted)) == 3, "the case would not show an adapter"

    async def ask() -> tuple[list[httpx.Response], Any, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as http:
            bodies = [{"model": name, "prompt": "the thing", **how} for name in (*names, "green")]
            answers = await asyncio.gather(*[http.post("/v1/completions", json=body, timeout=60) for body in bodies])
            return answers, (await http.get("/v1/models")).json(), (await http.get("/v1/models/red")).json()

    with Checkpoint.open(llm.path) as checkpoint:
        worker = Worker(llm, Tokenizer(checkpoint), queue=8, prepare="plain")
    models = Models.of("m", worker)
    models.start()
    app = Server(models, Settings()).app()
    *answers, unknown = (found := asyncio.run(ask()))[0]
    worker.close()
    assert [answer.json()["choices"][0]["text"] for answer in answers] == wanted
    assert [answer.json()["model"] for answer in answers] == names
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "this is 'm', 'red', 'blue'" in unknown.json()["error"]["message"]
    assert [(card["id"], card.get("parent")) for card in found[1]["data"]] == [("m", None), ("red", "m"), ("blue", "m")]
    assert found[2]["parent"] == "m"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lora-modules", "red"], "allowed is NAME=DIRECTORY of an adapter"),
        (["--lora-modules", "m=x"], "two models have the same name"),
        (["--lora-modules", "red=nowhere"], "nowhere: has no adapter_config.json"),
    ],
)
def test_modules_that_are_refused(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["serve", str(tiny.write_model(tmp_path / "m")), "--device", "cpu", "--port", "0", *options]
    try:
        status = main(command)
    except SystemExit as error:
        status = int(str(error.code))
    assert status != 0
    assert says in capsys.readouterr().err
