"""What the documents name is there: modules, tests, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def test_the_table_of_modules_is_complete() -> None:
    table = DESIGN.split("## runtime/\n", 1)[1].split("\n### ", 1)[0]
    first_column = " ".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE))
    assert set(re.findall(r"`([a-z_]+)/?`", first_column)) == {
        path.stem for path in (ROOT / "src/stepgraph/runtime").iterdir() if not path.stem.startswith("__")
    }


def test_the_tests_that_hold_the_rules_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    missing = {name for name in re.findall(r"`(test_\w+)`", DESIGN) if f"def {name}(" not in sources}
    assert not missing


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/design.md",
        "docs/tape.md",
        "docs/memory.md",
        "docs/open-ends.md",
        "docs/results.md",
        "docs/tensor_parallel.md",
    ],
)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = (ROOT / document).parent / path if path else ROOT / document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
