"""Reading: clocks and random numbers of the host change where the step asks, not where the factory did."""

from pathlib import Path

import pytest

from onegraph.check import CheckError, check_step
from onegraph.check.source import check_source
from onegraph.check.targets import load

DRAWS = [
    ("import random", "random.random()"),
    ("from random import betavariate", "betavariate(1, 2)"),
    ("import random", "random.Random().gauss(0, 1)"),
    ("import uuid", "uuid.uuid4().int % 7"),
    ("import os", "os.urandom(1)[0]"),
    ("import secrets", "secrets.randbelow(7)"),
    ("import secrets", "int(secrets.token_hex(1), 16)"),
    ("import numpy as np", "np.random.rand()"),
    ("import numpy as np", "float(np.random.default_rng().normal())"),
    ("from numpy.random import uniform", "uniform(0, 1)"),
    ("import time", "time.process_time()"),
    ("import datetime", "datetime.datetime.now().microsecond"),
    ("import random", "random.choice([1, 2, 3])"),
]

CONSTANT = [
    ("import uuid", "uuid.uuid5(uuid.NAMESPACE_DNS, 'a').int % 7"),
    ("import random", "random.Random(3).random()"),
    ("import numpy as np", "np.float32(2.0)"),
    ("import datetime", "datetime.datetime(2020, 1, 1).day"),
]

FILE = """\
import torch
{imports}


def factory():
    {before}

    def step(x):
        {body}

    return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
"""


def _codes(folder: Path, imports: str, *, before: str = "", body: str) -> list[str]:
    path = folder / "steps.py"
    text = FILE.format(imports=imports, before=before or "pass", body=body)
    path.write_text(text)
    report = check_source(str(path), "factory")
    assert "source" not in report.facts, report.facts["source"]
    return [f"{f.code} {f.severity.value}" for f in report.findings]


@pytest.mark.parametrize(("imports", "draw"), DRAWS, ids=[draw for _, draw in DRAWS])
def test_a_step_that_draws_bakes_in_what_it_drew_and_a_factory_that_does_is_clean(imports, draw, tmp_path):
    assert _codes(tmp_path, imports, body=f"return x * ({draw})") == ["CG202 error"]
    assert _codes(tmp_path, imports, before=f"n = {draw}", body="return x * n") == []


@pytest.mark.parametrize(("imports", "draw"), CONSTANT, ids=[draw for _, draw in CONSTANT])
def test_what_such_modules_compute_is_no_draw(imports, draw, tmp_path):
    assert _codes(tmp_path, imports, body=f"return x * ({draw})") == []


def test_a_generator_of_the_factory_draws_in_the_step_whatever_its_seed(tmp_path):
    made = "rng = np.random.default_rng(0)"
    assert _codes(tmp_path, "import numpy as np", before=made, body="return x * rng.random()") == ["CG202 error"]
    assert _codes(tmp_path, "import numpy as np", before=f"{made}\n    n = rng.random()", body="return x * n") == []


def test_a_module_that_draws_when_it_is_imported_is_clean(tmp_path):
    assert _codes(tmp_path, "import random\n\nSEED = random.random()", body="return x * SEED") == []


def test_an_array_that_was_drawn_is_host_data_and_no_number(tmp_path):
    body = "return x + torch.from_numpy(np.random.rand(4)).to('cuda')"
    assert _codes(tmp_path, "import numpy as np", body=body) == ["CG102 error"]


def test_drawn_rows_index_as_an_array_does(tmp_path):
    before = "rng, table = np.random.default_rng(1), torch.ones(16, 4, device='cuda')"
    body = "return table[torch.from_numpy(rng.integers(0, 16, 5))] + x"
    assert _codes(tmp_path, "import numpy as np", before=before, body=body) == ["CG103 error"]


@pytest.mark.parametrize(
    ("generator", "draw", "code"),
    [
        ("torch.Generator()", "x * int(torch.randint(0, 9, (1,), generator=g))", "CG202"),
        ("torch.Generator(device='cuda')", "x + torch.rand(4, device='cuda', generator=g)", "CG301"),
    ],
)
def test_a_graph_need_not_know_a_generator_of_the_host_but_bakes_in_what_it_draws(tmp_path, generator, draw, code):
    text = f"g = {generator}"
    assert _codes(tmp_path, "", before=text, body=f"return {draw}") == [f"{code} error"]
    report = check_step(load(f"{tmp_path}/steps.py:factory").factory)
    assert {f.code for f in report.errors} == {code}


def test_a_generator_of_the_host_draws_nothing_on_the_device(tmp_path):
    _codes(tmp_path, "", before="g = torch.Generator()", body="return x.normal_(generator=g)")
    with pytest.raises(CheckError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        check_step(load(f"{tmp_path}/steps.py:factory").factory)


def test_a_tensor_that_is_chosen_lies_somewhere_else_in_every_step(tmp_path):
    before = "buffers = [torch.ones(4, device='cuda'), torch.zeros(4, device='cuda')]"
    body = "return x * random.choice(buffers)"
    assert _codes(tmp_path, "import random", before=before, body=body) == ["CG205 error"]
