"""The README's examples do what they say."""

import re
from pathlib import Path


def test_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)
    assert examples
    for code in examples:
        exec(code, {})
