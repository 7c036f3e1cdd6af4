"""What a checkpoint may do to you: nothing. The process that its template and tokenizer run in, and what comes out."""

from __future__ import annotations

import gc
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph.api import sandbox, sandbox_worker
from onegraph.api.sandbox import Exhausted, Sandbox, SandboxWorkerError
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint, CheckpointError

CHAT = [{"role": "user", "content": "Hi"}]
VALUES = ("'a b'", "3.5", "[3, 1]", "messages", "{'a': 1}")
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "m")


@pytest.fixture
def cage() -> Iterator[Sandbox]:
    made = Sandbox("templates", 1 << 30)
    yield made
    made._stop()


def render(cage: Sandbox, template: str, seconds: float = 3) -> Any:
    return cage.call("render", seconds=seconds, template=template, messages=CHAT, variables={})


def pid(cage: Sandbox) -> int:
    cage.start()
    assert cage._child is not None
    return cage._child.pid


def change(model: Path, **parts: Any) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(content | parts))


# ------------------------------------------------------------------------------------------------------- the process


def test_the_process_sees_nothing_of_the_environment(cage: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen = Path(f"/proc/{pid(cage)}/environ").read_bytes()
    names = {entry.split(b"=")[0] for entry in seen.split(b"\0") if entry}
    assert names <= {b"TZ", b"LD_LIBRARY_PATH", b"TOKENIZERS_PARALLELISM"}
    assert b"hf_secret" not in Path(f"/proc/{pid(cage)}/cmdline").read_bytes()


SHUT = """
import os, signal, socket, subprocess, sys, threading
sys.path.insert(0, sys.argv[1])
import sandbox_worker
if sys.argv[2] == "limits":
    sandbox_worker._filter_calls = lambda: False
parent = os.getppid()
filtered = sandbox_worker.enter_sandbox()
ways = {
    "open": lambda: open("/etc/hostname"),
    "write": lambda: open(sys.argv[3], "w"),
    "socket": lambda: socket.socket(),
    "pair": lambda: socket.socketpair(),
}
if filtered:
    ways["fork"] = os.fork
    ways["exec"] = lambda: os.execv("/bin/true", ["true"])
    ways["thread"] = lambda: threading.Thread(target=print).start()
    ways["kill"] = lambda: os.kill(parent, 0)
    ways["list"] = lambda: os.listdir("/")
    ways["remove"] = lambda: os.unlink(sys.argv[3] + ".kept")
for name, way in ways.items():
    try:
        way()
    except (OSError, RuntimeError):
        continue
    sys.stdout.write(f"{name} is possible\\n")
sys.stdout.write(f"filtered {filtered}\\n")
"""


@pytest.mark.parametrize("by", ["limits", "filter"])
def test_the_process_has_no_files_network_or_other_processes(by: str, tmp_path: Path) -> None:
    """By the limits of the process alone, and where the kernel has it by a filter of system calls."""
    folder, target = str(Path(sandbox_worker.__file__).parent), tmp_path / "written"
    kept = tmp_path / "written.kept"
    kept.touch()
    done = subprocess.run(
        [sys.executable, "-I", "-c", SHUT, folder, by, str(target)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    if by == "filter" and done.stdout == "filtered False\n":
        pytest.skip("this kernel does not let a process filter its system calls")
    assert done.stdout == f"filtered {by == 'filter'}\n"
    assert not target.exists()
    assert kept.exists()


def test_the_process_is_limited(cage: Sandbox) -> None:
    child = pid(cage)
    assert resource.prlimit(child, resource.RLIMIT_AS) == (1 << 30, 1 << 30)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        assert resource.prlimit(child, kind) == (0, 0)
    assert sorted(os.listdir(f"/proc/{child}/fd")) == ["0", "1", "2"]
    assert os.getsid(child) == child, "not of our terminal"


def test_a_child_that_started_early_is_the_next_sandboxs() -> None:
    sandbox.start_early("templates")
    sandbox.start_early("templates")
    _, early = sandbox._started_early["templates"]
    first, second = Sandbox("templates", 1 << 30), Sandbox("templates", 1 << 31)
    for cage in (first, second):
        assert render(cage, "{{ 1 + 1 }}") == "2"
        assert cage.filtered
    assert pid(first) == early.pid
    assert pid(second) != early.pid
    assert [resource.prlimit(pid(cage), resource.RLIMIT_AS)[0] for cage in (first, second)] == [1 << 30, 1 << 31]


def test_a_child_that_started_early_and_nobody_takes_ends_with_its_parent() -> None:
    code = "from onegraph.api import sandbox; sandbox.start_early('templates')"
    done = subprocess.run([sys.executable, "-c", f"{code}; print(sandbox._started_early['templates'][1].pid)"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    status, deadline = Path(f"/proc/{int(done.stdout)}/status"), time.monotonic() + 60

    def runs() -> bool:
        try:
            return "State:\tZ" not in status.read_text()  # init may be slow to collect it
        except OSError:
            return False

    while runs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs()


def test_300_prompts_take_one_process(model: Path) -> None:
    t = Tokenizer(Checkpoint.open(model))
    assert t.template is not None
    t.chat(CHAT)
    before = pid(t._cage), pid(t.template._cage)
    start = time.perf_counter()
    for i in range(300):
        assert f"number {i}<" in t.decode(t.chat([{"role": "user", "content": f"number {i}"}]), special=True)
    assert time.perf_counter() - start < 10, "some 0.4 s on an idle machine"
    assert (pid(t._cage), pid(t.template._cage)) == before


def test_after_a_failure_the_next_call_is_answered(cage: Sandbox) -> None:
    first = pid(cage)
    with pytest.raises(SandboxWorkerError, match="no"):
        render(cage, "{{ raise_exception('no') }}")
    assert render(cage, "{{ 1 + 1 }}") == "2"
    assert pid(cage) == first
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(Exhausted, match="ran longer than 0 s"):
        render(cage, loop, seconds=0.2)
    assert render(cage, "{{ 1 + 2 }}") == "3"
    with pytest.raises(Exhausted, match="ran out of its 1024 MiB"):
        render(cage, "{{ 'x' * 10**10 }}")
    os.kill(pid(cage), signal.SIGKILL)
    with pytest.raises(
        Exhausted, match="its process was killed, by a user or for the memory of this machine; try again"
    ):
        render(cage, "{{ 1 }}")
    assert render(cage, "{{ 1 + 3 }}") == "4"


def test_an_interrupted_call_does_not_answer_the_next(cage: Sandbox) -> None:
    class Stop(Exception):
        pass

    def ring(*_: object) -> None:
        raise Stop

    pid(cage)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Stop):
            render(cage, "{% for a in range(99999) %}{% for b in range(99) %}{% endfor %}{% endfor %}old")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert render(cage, "new") == "new"


def test_threads_and_forks_get_their_own_answers(cage: Sandbox) -> None:
    wrong = []

    def ask(which: int) -> None:
        wrong.extend(i for i in range(30) if render(cage, f"{which} {i}") != f"{which} {i}")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    parents = pid(cage)
    if (forked := os.fork()) == 0:
        try:
            os._exit(0 if render(cage, "forked") == "forked" and pid(cage) != parents else 1)
        finally:
            os._exit(2)
    assert os.waitpid(forked, 0)[1] == 0
    assert render(cage, "still") == "still"
    assert pid(cage) == parents


def test_the_processes_end_with_their_owner(model: Path) -> None:
    """At once, not when garbage is next collected."""
    gc.disable()
    try:
        t = Tokenizer(Checkpoint.open(model))
        t.chat(CHAT)
        assert t.template is not None
        children = pid(t._cage), pid(t.template._cage)
        del t
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
    finally:
        gc.enable()


def test_a_process_that_cannot_start_is_named(cage: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    with pytest.raises(OSError, match="cannot start a process for templates"):
        render(cage, "{{ 1 }}")


# ---------------------------------------------------------------------------------------------------------- templates


def test_what_a_template_is_given_leads_nowhere() -> None:
    """Whatever attributes and items a template can get at: no module, no function with globals."""
    seen: dict[int, object] = {}

    class Given(sandbox_worker.Templates):
        def render(self, template: str, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
            def look(value: object) -> str:
                seen[id(value)] = value
                return ""

            return super().render(template, messages, variables | {"look": look})

    Given().render("{{ look(raise_exception) }}{{ look(strftime_now) }}", CHAT, {})
    assert len(seen) == 2
    todo = list(seen.values())
    known: set[str] = set()
    while todo:
        value = todo.pop()
        assert not isinstance(value, types.ModuleType), value
        assert not isinstance(value, types.FunctionType) or value.__globals__ == {"__builtins__": {}}, value
        nexts = [getattr(value, name, None) for name in dir(value)]
        nexts += list(value.values()) if isinstance(value, dict) else []
        nexts += list(value) if isinstance(value, list | tuple) else []
        for each in nexts:
            shown = f"{type(each)} {re.sub('0x[0-9a-f]+', '', repr(each))}"  # methods are made anew at each look
            if not isinstance(each, str | int | bytes | None) and shown not in known:
                known.add(shown)
                todo.append(each)
    assert len(known) > 100


@pytest.mark.parametrize("value", ["strftime_now", "raise_exception", "cycler.__init__", "messages"])
def test_a_template_cannot_read_the_environment(value: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = "{0.__globals__[sys].modules[os].environ[HF_TOKEN]}"
    (model / "chat_template.jinja").write_text(
        '{{ raise_exception(("%s"|attr("format"))(%s)) }}' % (path, value)  # noqa: UP031
    )
    status, out, errors = invoke(["generate", model, "--prompt", "Hi"])
    assert (status, out) == (2, "")
    assert "the checkpoint's chat template failed" in errors
    assert "hf_secret" not in errors


def test_all_of_jinja_works_where_nothing_can_be_imported_any_more(cage: Sandbox) -> None:
    from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS

    uses = [f"{value} | {name}{more}" for name in DEFAULT_FILTERS for value in VALUES for more in ("", "(1)", "('a')")]
    uses += [f"{value} is {name}" for name in DEFAULT_TESTS for value in VALUES]
    uses += ["lipsum(n=1)", "cycler(1, 2).next()", "joiner()()", "namespace(a=1).a", "'\\N{BULLET}é'", "nothing.at.all"]
    failures = []
    for use in uses:
        try:
            render(cage, f"{{{{ {use} }}}}")
        except SandboxWorkerError as error:
            failures.append((use, str(error)))
    assert not [each for each in failures if re.search("Module|Import|permitted|ran (out|longer)", each[1])]
    assert len(failures) < 0.6 * len(uses), "else it does not show much"


def test_each_prompt_has_its_own_time(cage: Sandbox) -> None:
    """The limit is for one rendering, not for the life of the process."""
    busy = "{% for a in range(300) %}{% for b in range(3000) %}{% endfor %}{% endfor %}x"
    start = time.process_time()
    for _ in range(8):
        assert render(cage, busy, seconds=2) == "x"
    assert time.process_time() - start < 2, "it is not this process that works"


# --------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("where", ["normalizer", "decoder"])
def test_forty_doublings_are_one_line(where: str, model: Path) -> None:
    """Neither the machine's memory nor its time: a process of its own has 2 GiB and some seconds."""
    kinds = {"normalizer": "normalizers", "decoder": "decoders"}
    change(model, **{where: {"type": "Sequence", kinds[where]: [DOUBLE] * 40}})
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if where == "normalizer":
        status, out, errors = invoke(["generate", model, "--raw", "--prompt", "a"])
        assert (status, out, errors.count("\n")) == (2, "", 1)
        assert re.search(r"tokenizer\.json: cannot encode this text: ran (out|longer)", errors)
    else:
        t = Tokenizer(Checkpoint.open(model))
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot decode: ran (out|longer)"):
            t.decode([tiny.TOKENS.index("a")])
        assert t.decode([tiny.TOKENS.index("t")]) == "t", "the next call has a process again"
    assert time.perf_counter() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB"


def test_a_text_that_is_long_gets_more_memory(model: Path) -> None:
    """400 bytes for each of the text, which is twice what it takes."""
    t = Tokenizer(Checkpoint.open(model))
    before = pid(t._cage)
    assert len(t.encode("the " * 1000)) == 2000
    assert pid(t._cage) == before
    assert t._memory(0) == t._memory(1 << 20) < t._memory(6 << 20) < t._memory(60 << 20)
    assert t._cage.call("encode", seconds=9, memory=t._memory(6 << 20), text="the", special=False) == [
        tiny.TOKENS.index("the")
    ]
    child = pid(t._cage)
    assert child != before
    assert resource.prlimit(child, resource.RLIMIT_AS)[1] == t._memory(6 << 20)


HOSTILE = "\x1b]0;owned\x07\x9b2J\rx\u202ey\n\tz"


@pytest.mark.parametrize(
    ("to", "batch"), [("terminal", False), ("terminal", True), ("pipe", False), ("pipe", True), ("json", False)]
)
def test_control_characters_are_escaped_on_a_terminal(to: str, batch: bool, model: Path, tmp_path: Path) -> None:
    everything = {"type": "Replace", "pattern": {"Regex": r"\A[\s\S]+\z"}, "content": HOSTILE}
    level = tiny.tokenizer_json()["decoder"]
    change(model, decoder={"type": "Sequence", "decoders": [level, everything]})
    (tmp_path / "prompts").write_text("the\nin\n")
    prompt = ["--batch", str(tmp_path / "prompts")] if batch else ["--prompt", "the"]
    command = [sys.executable, "-m", "onegraph.cli", "generate", str(model), "--raw", *prompt, "--max-tokens", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    if to != "terminal":
        done = subprocess.run(
            command + ["--json"] * (to == "json"), capture_output=True, env=environment, timeout=120, check=True
        )
        text = done.stdout.decode()
        assert (json.loads(text)["outputs"][0]["text"] if to == "json" else text).count(HOSTILE) >= 1
        return
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    written = b""
    try:
        while more := os.read(ours, 1 << 16):
            written += more
    except OSError:  # how a terminal says that the other side has gone
        pass
    os.close(ours)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    shown = written.decode().replace("\r\n", "\n")
    assert "\\x1b]0;owned\\x07\\x9b2J\\rx\\u202ey\n\tz" in shown
    assert not [c for c in shown if c in "\x1b\x07\x9b\r\u202e"]


def test_each_promise_of_the_document_names_its_test(repo: Path) -> None:
    text = (repo / "docs" / "reference" / "checkpoints.md").read_text()
    section = text.split("## Security\n")[1].split("\n## ")[0]
    promises = section.split("\n- ")[1:]
    assert len(promises) > 8
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)`:\s+((?:`\w+`(?:,\s+)?)+)", promise)
        assert named, promise
        for file, names in named:
            for name in re.findall(r"\w+", names):
                assert f"def {name}(" in (repo / file).read_text(), name
