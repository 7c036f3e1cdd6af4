"""Coding agents against the server, and the requests that they send, for tests that need no agent installed.

    python -m venv /tmp/aider && /tmp/aider/bin/pip install aider-chat
    npm install --prefix /tmp/opencode opencode-ai
    PYTHONPATH=src:tests python tests/serve/record_agents.py tests/fixtures/agent_requests.json \\
        aider=/tmp/aider/bin/aider opencode=/tmp/opencode/node_modules/.bin/opencode

Each agent repairs a file: it sends its own prompts and tools over HTTP, and edits the file by the answers. The model is
random: an answer is held to a text of the script (`Script`), and computed from the end of the prompt alone. Of long
texts, which are the agents' own, the record has the beginning; it has all fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from serve.record_clients import Script, served
from starlette.types import ASGIApp

from onegraph.serve.http import bind

WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TASK = "Make add return the sum."
LONG = 120  # characters of a text
TITLE, DONE = "Repair of add", "I have repaired add."
WHOLE = f"The new file:\n\ncalc.py\n```\n{RIGHT}```"
DIFF = f"One line:\n\ncalc.py\n```python\n<<<<<<< SEARCH\n{WRONG}=======\n{RIGHT}>>>>>>> REPLACE\n```"


class AgentScript(Script):
    """Titles and messages of commits beside the script's texts: requests for those come at any time."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self.further = {"truncate_prompt_tokens": 64}

    def next_text(self, asked: Any) -> str:
        said = json.dumps(asked["messages"]).lower()
        beside = "title generator" in said or "commit message" in said
        return TITLE if beside and not asked.get("tools") else super().next_text(asked)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextlib.contextmanager
def listening(script: AgentScript) -> Iterator[str]:
    """The address of the API."""
    with bind("127.0.0.1", 0) as found:
        server = uvicorn.Server(uvicorn.Config(script, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[found])), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(10)


def project(folder: Path) -> Path:
    """A repository with a wrong file."""
    folder.mkdir()
    (folder / "calc.py").write_text(WRONG)
    who = ["-c", "user.email=a@example.org", "-c", "user.name=a"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "start"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def run(command: list[str], folder: Path, **environment: str) -> str:
    own = {"PWD": str(folder), "HOME": str(folder.parent), "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org"}
    own |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 1200}
    made = subprocess.run(command, cwd=folder, env=os.environ | own | environment, **how)
    told = made.stdout + made.stderr
    assert (folder / "calc.py").read_text() == RIGHT, told
    return told


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return value[:LONG] + " ..." if isinstance(value, str) and len(value) > 2 * LONG else value


def aider(binary: str, script: AgentScript, url: str, root: Path) -> None:
    options = "--yes-always --no-check-update --no-show-release-notes --no-show-model-warnings --analytics-disable"
    command = [binary, "--model", "openai/tiny", "--message", TASK, *options.split(), "--no-gitignore", "calc.py"]
    for form, text, more in (("whole", WHOLE, []), ("diff", DIFF, ["--no-stream"])):
        script.texts = [text]
        folder = project(root / form)
        told = run([*command, "--edit-format", form, *more], folder, OPENAI_API_BASE=url, OPENAI_API_KEY="none")
        assert "Applied edit to calc.py" in told, told


def opencode(binary: str, script: AgentScript, url: str, root: Path) -> None:
    folder = project(root / "opencode")
    model = {"tiny": {"limit": {"context": 8192, "output": 512}}}
    options = {"baseURL": url, "apiKey": "none"}
    provider = {"onegraph": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": model}}
    config = {"model": "onegraph/tiny", "small_model": "onegraph/tiny", "provider": provider, "permission": "allow"}
    (folder / "opencode.json").write_text(json.dumps(config))
    path = str(folder / "calc.py")
    edit = {"filePath": path, "oldString": "return a - b", "newString": "return a + b"}
    script.texts = [call("read", filePath=path), call("edit", **edit), DONE]
    told = run(
        [binary, "run", TASK], folder, OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_MODELS_FETCH="1",
        XDG_DATA_HOME=str(root / "data"), XDG_CONFIG_HOME=str(root / "config"), XDG_CACHE_HOME=str(root / "cache"),
        XDG_STATE_HOME=str(root / "state"),
    )  # fmt: skip
    assert DONE in told, told


AGENTS = {"aider": aider, "opencode": opencode}


def main(target: Path, binaries: dict[str, str]) -> None:
    found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    with served() as plain, tempfile.TemporaryDirectory() as folder:
        for name, binary in binaries.items():
            script = AgentScript(plain._app)
            with listening(script) as url:
                (root := Path(folder) / name).mkdir()
                AGENTS[name](binary, script, url, root)
            told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
            found[name] = {
                "version": told.split()[-1],
                "requests": [each | {"request": shortened(each["request"])} for each in script.requests],
            }
            print(name, told.strip(), len(script.requests), "requests", flush=True)
            target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
