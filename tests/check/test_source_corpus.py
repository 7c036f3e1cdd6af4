"""Source reading held to the corpus: how many planted hazards it sees at the right line, how often it cries wolf."""

import corpus_tools

from onegraph.check.source import check_source

# Not visible without running: parameters swapped by the caller, tensors freed behind the graph, autograd nodes made
# earlier, hooks that add themselves. The source column of the hazard table says "partly" or "no" for each.
RECALL, PRECISION = 0.9, 0.98


def test_precision_and_recall() -> None:
    hits, missed, false = 0, [], []
    for case in corpus_tools.cases():
        report = check_source(str(case.path), case.name.split(":")[1])
        found = {(f.line, f.code) for f in report.findings if f.path == str(case.path)}
        explained = set()
        for expected in case.expected:
            matching = {(line, code) for line, code in found if line == expected.line and code in expected.codes}
            explained |= matching
            if matching and not expected.optional:
                hits += 1
            elif not matching and not expected.optional:
                missed.append((case.name, expected.line, sorted(expected.codes)))
        false += [(case.name, *place) for place in sorted(found - explained)]
    assert hits > 100
    assert hits / (hits + len(missed)) >= RECALL, missed
    assert hits / (hits + len(false)) >= PRECISION, false
