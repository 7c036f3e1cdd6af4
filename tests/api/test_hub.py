"""Models by their name on the hub: what is fetched, what of it is recorded, and what is said where nothing can be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph import LLM, plan, quantize
from onegraph.api import hub as hub_module
from onegraph.api.hub import CONFIGS, PATTERNS, locate
from onegraph.formats.checkpoint import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {"calibration": "the thing in the inn, and a hat. " * 200, "tokens": 256, "sequence": 64, "device": "cpu"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """snapshot_download that knows one model, with a pickle and a program beside its weights."""
    plain = tiny.write_model(tmp_path / "hub")
    (plain / "pytorch_model.bin").write_bytes(b"pickle")
    (plain / "modeling.py").write_text("raise SystemExit")
    state: dict[str, Any] = {"calls": [], "fail": None}

    def snapshot_download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        state["calls"].append((repo, revision, allow_patterns))
        if state["fail"] is not None:
            raise state["fail"]
        path = tmp_path / "cache" / COMMIT
        for file in huggingface_hub.utils.filter_repo_objects(os.listdir(plain), allow_patterns=allow_patterns):
            path.mkdir(parents=True, exist_ok=True)
            shutil.copy(plain / file, path)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    hub_module._fetch.cache_clear()
    return state


def test_a_name_is_fetched_without_pickles_or_code_and_its_commit_is_recorded(
    hub: dict[str, Any], tmp_path: Path
) -> None:
    found = locate("org/Some.Model-1B@main")
    assert found.name == f"org/Some.Model-1B@{COMMIT}"
    assert hub["calls"] == [("org/Some.Model-1B", "main", PATTERNS)]
    names = {file.name for file in found.path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} | {
        "generation_config.json"
    }
    made = quantize("org/model", tmp_path / "out", recipe="quick", **SMALL)
    assert made.source == f"org/model@{COMMIT}"
    with LLM("org/model", device="cpu", max_num_seqs=1) as llm:
        assert llm.path == made.source
        assert len(llm.generate("the thing", max_tokens=3).tokens) <= 3


def test_commands_take_names(hub: dict[str, Any], tmp_path: Path) -> None:
    status, out, errors = invoke(["generate", "org/model", "--raw", "--prompt", "the", "--max-tokens", 3])
    assert status == 0, errors
    assert out.strip()
    assert len(hub["calls"]) == 1, "one commit in one process, whoever asks for the model again"
    status, out, errors = invoke(
        ["quantize", "org/model@v1", tmp_path / "out", "--dry-run", "--json", "--device", "cpu"]
    )
    assert status == 0, errors
    assert json.loads(out)["source"] == f"org/model@{COMMIT}"
    assert hub["calls"][-1] == ("org/model", "v1", CONFIGS)


def test_a_path_that_is_there_is_no_name(hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write_model(tmp_path / "org" / "model")
    assert locate("org/model").name == "org/model"
    for path in (
        "/org/model",
        "../org/other",
        "model",
        "a/b/c",
        "org/model.gguf",
        "org/../x",
        "org/",
        "org/m@",
        "-o/m",
    ):
        assert locate(path).path == Path(path)
    assert locate(Path("no/model")).path == Path("no/model"), "a pathlib.Path is a path"
    assert hub["calls"] == []


def test_a_name_that_quantize_works_on_is_a_path(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "x.partial").mkdir(parents=True)
    for command in (["generate", "out/x", "--prompt", "the"], ["verify", "out/x"]):
        status, _, errors = invoke(command)
        assert status == 2
        assert errors.strip() == (
            "onegraph: error: out/x: quantizing it has not been finished; the same quantize command goes on with what "
            "lies in out/x.partial"
        )
    assert hub["calls"] == []


def test_a_directory_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    tiny.write_gguf(tmp_path / "folder" / "tiny.gguf")
    assert locate(tmp_path / "folder").path == tmp_path / "folder" / "tiny.gguf"
    made = quantize(tmp_path / "folder", tmp_path / "out", recipe="quick", **SMALL)
    assert made.source == str(tmp_path / "folder")
    shutil.copy(tmp_path / "folder" / "tiny.gguf", tmp_path / "folder" / "other.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files and no config\.json; name the file"):
        locate(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert locate(tmp_path / "folder").path == tmp_path / "folder"


@pytest.mark.parametrize("command", ["quantize", "generate", "eval"])
def test_without_the_package_one_line_says_how(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "text").write_text("the")
    rest = {"quantize": [tmp_path / "out"], "generate": ["--prompt", "the"], "eval": ["--text", tmp_path / "text"]}
    status, _, errors = invoke([command, "org/model@v2", *rest[command]])
    assert status == 2
    assert errors.strip() == (
        "onegraph: error: org/model: no such file or directory, and names of the Hugging Face hub need "
        'huggingface_hub, which is not installed; in a checkout of onegraph: pip install -e ".[hub]"; or fetch it by '
        "hand (hf download org/model --revision v2 --local-dir DIR) and give DIR"
    )


def test_what_the_hub_refuses_is_said(hub: dict[str, Any]) -> None:
    hub["fail"] = OSError("401: this model is gated\nlog in")
    with pytest.raises(CheckpointError, match="OSError: 401: this model is gated") as caught:
        locate("org/model")
    assert "\n" not in str(caught.value)


class Hub(BaseHTTPRequestHandler):
    """The hub's protocol, as far as snapshot_download asks."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        type(self).asked.append(path)
        names = sorted(os.listdir(self.folder))
        if path.startswith("/api/models/org/model"):
            body: Any = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in path:
                sizes = {name: (self.folder / name).stat().st_size for name in names}
                body = [
                    {"type": "file", "path": n, "size": size, "oid": f"{i:040x}"}
                    for i, (n, size) in enumerate(sizes.items())
                ]
            self.answer(json.dumps(body).encode(), "application/json")
        elif path.startswith(f"/org/model/resolve/{COMMIT}/") and path.rpartition("/")[2] in names:
            self.answer((self.folder / path.rpartition("/")[2]).read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(content):040x}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    plain = tiny.write_model(tmp_path / "served")
    (plain / "pytorch_model.bin").write_bytes(b"pickle")
    Hub.folder, Hub.asked = plain, []
    running = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{running.server_port}", "HF_HOME": str(tmp_path / "home")}
    try:
        yield environment | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}, Hub.asked
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def test_over_http_once_and_then_offline(server: tuple[dict[str, str], list[str]]) -> None:
    """The real huggingface_hub against a server on the loopback; the second run may not ask it."""
    environment, asked = server
    command = [
        sys.executable,
        "-c",
        "import sys; from onegraph.cli import main; sys.exit(main(sys.argv[1:]))",
        "generate",
    ]
    command += ["org/model", "--raw", "--prompt", "the", "--max-tokens", "3", "--device", "cpu"]

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=300)

    missing = run(HF_HUB_OFFLINE="1")
    assert missing.returncode == 2
    assert missing.stderr.splitlines()[-1].startswith(
        "onegraph: error: org/model: no such file or directory here, and it"
    )
    assert "HF_HUB_OFFLINE is set, and it is not in the cache; where" in missing.stderr.splitlines()[-1]
    assert "hf download org/model --local-dir DIR" in missing.stderr.splitlines()[-1]
    nowhere = run(HF_ENDPOINT="http://127.0.0.1:1")
    assert nowhere.returncode == 2
    assert "the hub cannot be reached; where there is a network: hf" in nowhere.stderr.splitlines()[-1]
    proxied = run(HF_ENDPOINT="http://hub.invalid", HTTP_PROXY="http://127.0.0.1:1", NO_PROXY="", no_proxy="")
    assert proxied.returncode == 2
    assert "the hub cannot be reached" in proxied.stderr.splitlines()[-1]
    assert asked == []
    first = run()
    assert first.returncode == 0, first.stderr
    assert any(path.endswith("/model.safetensors") for path in asked)
    assert not any(path.endswith(".bin") for path in asked)
    asked.clear()
    second = run(HF_HUB_OFFLINE="1")
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr
    assert asked == []


def test_a_dry_run_needs_only_the_config(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(tiny.CONFIG))
    whole = tiny.write_model(tmp_path / "whole")
    alone, full = (plan(path, device="cpu") for path in (tmp_path / "m", whole))
    assert (alone.before, alone.after, alone.linears) == (full.before, full.after, full.linears)
