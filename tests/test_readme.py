"""The README's example does what it says."""

import re
from pathlib import Path


def test_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)
    exec(code, {})
