"""A comparison of two runs as files that machines read: JUnit XML, and github-action-benchmark's custom JSON."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

from specbench.analysis.compare import AMBIGUOUS, REGRESSED
from specbench.report import comparison as words
from specbench.report.base import Row
from specbench.report.comparison import Comparison, markdown
from specbench.report.plain import plain

# What XML 1.0 cannot hold, even escaped.
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(comparison: Comparison) -> str:
    """A test case a row: a regression fails, an ambiguous row is skipped with its reason, the rest passes.

    A method that could not be compared is a skipped case of its own. The form is that of JUnit's Ant task
    (testsuites / testsuite / testcase), which GitHub, GitLab and Jenkins read.
    """
    rows, missing = comparison["rows"], comparison["missing"]
    failed = sum(row["verdict"] == REGRESSED for row in rows)
    skipped = sum(row["verdict"] == AMBIGUOUS for row in rows) + len(missing)
    counts = {
        "tests": str(len(rows) + len(missing)),
        "failures": str(failed),
        "errors": "0",
        "skipped": str(skipped),
    }
    suites = ET.Element("testsuites", counts)
    name = f"{comparison['new']['name']} against {comparison['base']['name']}"
    suite = ET.SubElement(suites, "testsuite", {"name": _xml(name), **counts})
    for row in rows:
        kind = f"specbench.{row['metric']}.{row['task']}"
        case = ET.SubElement(suite, "testcase", {"classname": _xml(kind), "name": _xml(words.label(row))})
        said = _xml(words.sentence(row))
        if row["verdict"] == REGRESSED:
            ET.SubElement(case, "failure", {"message": said, "type": REGRESSED})
        elif row["verdict"] == AMBIGUOUS:
            ET.SubElement(case, "skipped", {"message": said})
        else:
            ET.SubElement(case, "system-out").text = said
    for place in missing:
        name = words.method(place)
        case = ET.SubElement(suite, "testcase", {"classname": "specbench.compared", "name": _xml(name)})
        ET.SubElement(case, "skipped", {"message": _xml(f"{name}: {place['reason']}")})
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def github_action_benchmark(comparison: Comparison) -> str:
    """NEW's values as benchmark-action/github-action-benchmark's `customBiggerIsBetter` reads them.

    A list of {name, unit, value, range, extra} (its README, "Use this action with custom tools"). Memory, of
    which less is better, is not in it: that tool's other kind needs a file of its own.
    """
    rows = [
        row for row in comparison["rows"] if not row["smaller_is_better"] and row["new"]["point"] is not None
    ]
    return json.dumps([_benchmark(row) for row in rows], indent=2, ensure_ascii=False) + "\n"


def _benchmark(row: Row) -> dict[str, Any]:
    entry = {"name": plain(words.label(row)), "unit": row["unit"], "value": row["new"]["point"]}
    low, high = row["new"]["low"], row["new"]["high"]
    if low is not None and high is not None:
        entry["range"] = f"± {(high - low) / 2:.3g}"
    return entry | {"extra": plain(words.sentence(row))}


def _json(comparison: Comparison) -> str:
    return json.dumps(comparison, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _xml(text: str) -> str:
    return NOT_XML.sub("�", plain(text))


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": markdown,
    "json": _json,
    "junit": junit,
    "github-action-benchmark": github_action_benchmark,
}
