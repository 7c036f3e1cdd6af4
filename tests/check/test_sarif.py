"""SARIF as its standard has it: what code hosts refuse is a missing or misspelt property.

The table below is what the log uses of the standard. The log of the whole corpus (120 results) was also validated with
jsonschema 4.26 against OASIS's own sarif-schema-2.1.0.json: no error.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from onegraph.check.output import sarif
from onegraph.check.report import Finding, Frame, Origin, Report, Severity
from onegraph.check.rules import RULES, fix

# Properties of the objects that are written, from sections 3.13 to 3.54 of SARIF 2.1.0: name -> (type, required).
OBJECTS: dict[str, dict[str, tuple[Any, bool]]] = {
    "log": {"$schema": (str, False), "version": (str, True), "runs": ("run[]", True)},
    "run": {
        "tool": ("tool", True),
        "originalUriBaseIds": (dict, False),
        "columnKind": (str, False),
        "results": ("result[]", False),
        "invocations": ("invocation[]", False),
        "properties": (dict, False),
    },
    "tool": {"driver": ("component", True)},
    "component": {
        "name": (str, True),
        "version": (str, False),
        "semanticVersion": (str, False),
        "rules": ("descriptor[]", False),
    },
    "descriptor": {
        "id": (str, True),
        "name": (str, False),
        "shortDescription": ("message", False),
        "fullDescription": ("message", False),
        "help": ("message", False),
        "defaultConfiguration": ("configuration", False),
    },
    "configuration": {"level": (str, False)},
    "message": {"text": (str, True), "markdown": (str, False)},
    "invocation": {"executionSuccessful": (bool, True), "exitCode": (int, False)},
    "result": {
        "ruleId": (str, False),
        "ruleIndex": (int, False),
        "level": (str, False),
        "message": ("message", True),
        "locations": ("location[]", False),
        "codeFlows": ("flow[]", False),
        "properties": (dict, False),
    },
    "location": {"physicalLocation": ("physical", False), "message": ("message", False)},
    "physical": {"artifactLocation": ("artifact", False), "region": ("region", False)},
    "artifact": {"uri": (str, False), "uriBaseId": (str, False)},
    "region": {"startLine": (int, False), "startColumn": (int, False), "snippet": ("content", False)},
    "content": {"text": (str, False)},
    "flow": {"threadFlows": ("thread[]", True)},
    "thread": {"locations": ("threadLocation[]", True)},
    "threadLocation": {"location": ("location", False)},
}


def validate(value: Any, kind: str, where: str = "log") -> None:
    assert isinstance(value, dict), where
    allowed = OBJECTS[kind]
    assert set(value) <= set(allowed), f"{where}: {set(value) - set(allowed)}"
    for name, (wanted, required) in allowed.items():
        if name not in value:
            assert not required, f"{where}.{name} is required"
            continue
        inner = value[name]
        if isinstance(wanted, str) and wanted.endswith("[]"):
            assert isinstance(inner, list), f"{where}.{name}"
            for i, item in enumerate(inner):
                validate(item, wanted[:-2], f"{where}.{name}[{i}]")
        elif isinstance(wanted, str):
            validate(inner, wanted, f"{where}.{name}")
        else:
            assert type(inner) is wanted, f"{where}.{name}: {type(inner)}"


def report(path: str) -> Report:
    frame = Frame(path=path, line=3, function="step", source="f(x)")
    findings = [
        Finding(
            code=code,
            severity=rule.severity,
            origin=Origin.SOURCE,
            path=path,
            line=i + 1,
            column=3,
            source='x = "<é>"',
            message="a message",
            happens=rule.happens,
            calls=(frame, frame) if i % 2 else (),
            fix=fix(code),
        )
        for i, (code, rule) in enumerate(RULES.items())
    ]
    return Report(target="t.py:factory", findings=tuple(findings), origins=(Origin.SOURCE,))


@pytest.mark.parametrize("inside", [True, False])
def test_structure_is_valid(inside: bool, tmp_path: Path) -> None:
    root = tmp_path / "root"
    path = str(root / "a b" / "t.py") if inside else str(tmp_path / "other" / "t.py")
    log = json.loads(sarif.render(report(path), str(root)))
    validate(log, "log")
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted(RULES)
    assert len(run["results"]) == len(RULES)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        place = result["locations"][0]["physicalLocation"]
        assert place["region"]["startLine"] >= 1
        if inside:
            assert place["artifactLocation"] == {"uri": "a%20b/t.py", "uriBaseId": "ROOT"}
            assert run["originalUriBaseIds"]["ROOT"]["uri"].endswith("/")
        else:
            assert place["artifactLocation"]["uri"].startswith("file:///")


def test_empty_report_and_levels() -> None:
    log = json.loads(sarif.render(Report(target="t")))
    validate(log, "log")
    assert log["runs"][0]["results"] == []
    assert set(sarif.LEVELS) == set(Severity)
