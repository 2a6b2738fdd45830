"""The examples of the documents do what they say, and the README stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "docs/torchrec.md"])
def test_examples_run(document: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert examples
    for code in examples:
        exec(code, {})


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
