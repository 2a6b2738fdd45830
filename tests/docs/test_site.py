"""The site builds strictly, and its pages load nothing from other hosts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

LOADED = re.compile(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"?(?:https?:)?//", re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_site_builds_and_loads_nothing_from_outside(tmp_path: Path) -> None:
    """Fails if a page links to a page or an anchor that is not there, or if `font: false` is removed."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    html = sorted(tmp_path.rglob("*.html"))
    assert len(html) > 20
    assert [page.name for page in html if LOADED.search(page.read_text())] == []
    styles = [path for path in tmp_path.rglob("*.css") if re.search(r"url\([\"']?(?:https?:)?//", path.read_text())]
    assert styles == []
