"""Make the texts of the quality figures, from the standard library of the Python that runs this (3.11.7 was used).

    python benchmarks/texts.py OUT_DIR

calibration.txt: the docstrings of the standard library's modules, classes and functions of 200 characters or more, in
the order of files and lines, each once; test suites, idlelib and pydoc_data are left out. calibration-long.txt: the
same, and the sources of those modules behind it. evaluation.txt: the help topics of `pydoc_data.topics` (the language
reference). evaluation-code.txt: the sources of idlelib. What calibrates and what evaluates share no file.
"""

import argparse
import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIP = {"test", "tests", "idlelib", "pydoc_data", "site-packages", "lib2to3", "turtledemo", "ensurepip", "__pycache__"}


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Sources, and what they say."""
    for file in sorted(root.rglob("*.py")):
        if SKIP & set(file.relative_to(root).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            yield source, ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue


def docstrings(root: Path) -> Iterator[str]:
    for _, tree in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= 200:
                    yield inspect.cleandoc(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    from pydoc_data import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    calibration = "\n\n".join(dict.fromkeys(docstrings(library)))
    texts = {
        "calibration.txt": calibration,
        "calibration-long.txt": "\n\n".join([calibration, *(source for source, _ in modules(library))]),
        "evaluation.txt": "\n\n".join(topics.topics[key] for key in sorted(topics.topics)),
        "evaluation-code.txt": "\n\n".join(
            file.read_text(encoding="utf-8") for file in sorted((library / "idlelib").glob("*.py"))
        ),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
