"""`onegraph check --run`: threads and pools of the program's own, which do what they do in Python and on a GPU."""

import time
from pathlib import Path

import pytest
from programs import HEAD, cli, line_of, lines, ran

from onegraph.check import CheckError, Severity

WORKER = (
    HEAD
    + """
import threading
scale = 1.0
def work():
    side = torch.cuda.Stream()
    g = torch.cuda.CUDAGraph()
    (x + w) * scale
    with torch.cuda.graph(g, stream=side):
        y = (x + w) * scale
    {then}
worker = threading.Thread(target=work)
worker.start()
worker.join()
"""
)


def test_a_capture_in_another_thread_is_a_capture_like_any_other(tmp_path: Path) -> None:
    report = ran(tmp_path, WORKER.format(then="g.replay(); assert y.tolist() == [3.0] * 4"))
    assert report.findings == ()
    (capture,) = report.facts["captures"]
    assert (capture["compared"], capture["line"]) == (1, line_of(WORKER, "with torch.cuda.graph"))


def test_what_it_finds_in_another_thread_has_its_line_and_its_calls(tmp_path: Path) -> None:
    text = WORKER.format(then="globals()['scale'] = 2.0; g.replay()")
    report = ran(tmp_path, text)
    assert lines(report) == {("CG202", line_of(text, "y = (x + w) * scale"))}
    (finding,) = report.errors
    assert [call.function for call in finding.calls] == ["work"]  # none of Python's own way there


def test_captured_in_one_thread_and_replayed_in_another(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
import threading
graphs, ready = [], threading.Event()
class Runner:
    scale = 1.0
    def capture(self):
        x * self.scale
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            self.out = x * self.scale
        graphs.append(g)
        ready.wait(60)
runner = Runner()
worker = threading.Thread(target=runner.capture)
worker.start()
while not graphs:
    pass
runner.scale = 3.0
graphs[0].replay()
ready.set()
assert runner.out.tolist() == [1.0] * 4
"""
    )
    report = ran(tmp_path, text)
    assert lines(report) == {("CG202", line_of(text, "self.out = "))}


def test_each_thread_has_its_stream_and_its_gpu(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
import threading
side, seen = torch.cuda.Stream(), []
entered, left = threading.Event(), threading.Event()
def look():
    seen.append(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        with torch.cuda.stream(side):  # the one that the main thread is in
            entered.set()
            left.wait(60)
        seen.append(torch.cuda.current_stream())
own, default = torch.cuda.Stream(), torch.cuda.default_stream()
torch.cuda.set_device(1)
thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
thread.start()
thread.join()
torch.cuda.set_device(0)
with torch.cuda.stream(side):
    thread = threading.Thread(target=look)
    thread.start()
    entered.wait(60)
assert torch.cuda.current_stream() == default
left.set()
thread.join()
assert seen == [0, default, own], seen
x + w
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    y = x + w
g.replay()
"""
    )
    assert ran(tmp_path, text).findings == ()


MEANWHILE = (
    HEAD
    + """
import threading
go, done, both = threading.Event(), threading.Event(), threading.Condition()
def other():
    go.wait(60)
    with both:
        x * 3  # of the other thread
        done.set()
        both.notify()
threading.Thread(target=other).start()
x + w
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g, capture_error_mode="{mode}"):
    y = x + w
    {meanwhile}
g.replay()
"""
)


@pytest.mark.parametrize(
    ("mode", "meanwhile", "found"),
    [
        # Nothing of the capture waits for it: it breaks the capture only by what it allocates.
        ("global", "go.set()\n    while not done.is_set(): pass", ("CG309", Severity.WARNING, "# of the other thread")),
        ("thread_local", "go.set()\n    while not done.is_set(): pass", None),
        ("global", "with both:\n        go.set()\n        both.wait(1)", ("CG309", Severity.ERROR, "both.wait")),
    ],
)
def test_another_thread_works_during_the_capture(
    tmp_path: Path, mode: str, meanwhile: str, found: tuple[str, Severity, str] | None
) -> None:
    text = MEANWHILE.format(mode=mode, meanwhile=meanwhile)
    report = ran(tmp_path, text)
    expected = {(found[0], found[1], line_of(text, found[2]))} if found else set()
    assert {(f.code, f.severity, f.line) for f in report.findings} == expected


def test_threads_capture_one_after_the_other(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
from concurrent.futures import ThreadPoolExecutor
def capture(n):
    g, part = torch.cuda.CUDAGraph(), x[:n]
    with torch.cuda.graph(g, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        out = part + n
    for _ in range(3):
        g.replay()
    return out
x + 1
with ThreadPoolExecutor(4) as pool:
    outs = list(pool.map(capture, (1, 2, 3, 4)))
assert [o.tolist() for o in outs] == [[n + 1.0] * n for n in (1, 2, 3, 4)]
"""
    )
    report = ran(tmp_path, text)
    assert report.findings == ()
    assert [c["ops"] for c in report.facts["captures"]] == [1, 1, 1, 1]


def test_a_pool_of_the_program_is_a_real_one(tmp_path: Path) -> None:
    """Work that waits for what is submitted later; what a worker does is no part of a capture that is over."""
    text = (
        HEAD
        + """
import queue
from concurrent.futures import ThreadPoolExecutor
messages = queue.Queue()
pool = ThreadPoolExecutor(2)
first = pool.submit(messages.get)
pool.submit(messages.put, 5)
assert first.result(60) == 5
g = torch.cuda.CUDAGraph()
pool.submit(lambda: x + w).result()
with torch.cuda.graph(g):
    y = x + w
pool.submit(g.replay).result()
assert y.tolist() == [3.0] * 4
"""
    )
    report = ran(tmp_path, text)
    assert report.findings == ()
    assert report.facts["captures"][0]["compared"] == 1


@pytest.mark.parametrize("wait", [".result()", ""])
def test_work_that_a_capture_submits_is_found(tmp_path: Path, wait: str) -> None:
    text = (
        HEAD
        + f"""
import threading
from concurrent.futures import ThreadPoolExecutor
pool, go = ThreadPoolExecutor(1), threading.Event()
x + w
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    y = x + w
    if {bool(wait)}:
        go.set()
    work = pool.submit(lambda: go.wait(60) and y.mul_(2)){wait}
go.set()
pool.submit(lambda: x + w).result()  # nothing of the capture's
g.replay()
g.replay()
"""
    )
    report = ran(tmp_path, text)
    assert lines(report) == {("CG309", line_of(text, "pool.submit(lambda: go"))}
    assert report.facts["captures"][0]["compared"] == 2  # the copy has none of the pool's threads


def test_threads_and_pools_are_waited_for_as_python_does(tmp_path: Path) -> None:
    text = (
        HEAD
        + f"""
import threading, time
from concurrent.futures import ThreadPoolExecutor
pool, ended = ThreadPoolExecutor(1), threading.Event()
def submitted():
    ended.wait(60)
    x + w
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y = x * x.sum().item()
def started():
    ended.set()
    work.result(60)
    until = time.monotonic() + 60
    try:
        while time.monotonic() < until:  # the last line has not run yet
            pool.submit(int)
    except RuntimeError as error:
        open({str(tmp_path / "refused")!r}, "w").write(str(error))
work = pool.submit(submitted)
threading.Thread(target=started).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    )
    report = ran(tmp_path, text)
    assert lines(report) == {("CG101", line_of(text, "x.sum().item()"))}
    assert "cannot schedule new futures after" in (tmp_path / "refused").read_text()


def test_a_thread_without_an_end_is_told_with_its_line(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
import threading
def endless():
    while True:
        threading.Event().wait(0.01)  # here
threading.Thread(target=endless).start()
"""
    )
    (tmp_path / "program.py").write_text(text)
    begin = time.monotonic()
    done = cli("--timeout", "4", "--run", "program.py", cwd=tmp_path)
    assert time.monotonic() - begin < 100
    assert done.returncode == 2
    assert f"still running at {tmp_path / 'program.py'}:{line_of(text, '# here')} after 4 s" in done.stderr


def test_what_cannot_be_checked_in_a_thread_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        HEAD
        + """
import threading
threading.Thread(target=torch.nn.LazyLinear(4).cuda).start()
"""
    )
    with pytest.raises(CheckError, match="a lazy module"):
        ran(tmp_path, text)
    assert "Traceback" not in capfd.readouterr().err
