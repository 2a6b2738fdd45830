"""The examples of the README do what they say, and it stays short. tests/docs runs those of the other documents."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    for code in examples:
        exec(code, {})


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
