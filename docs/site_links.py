"""Hook of mkdocs: links to files of the repository become their paths, because the site has only the documents."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    documents, here = Path(config.docs_dir).resolve(), Path(page.file.abs_src_path).parent

    def shown(link: re.Match[str]) -> str:
        text, target = link[1], (here / link[2]).resolve()
        if target.is_relative_to(documents):
            return link[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        path = target.relative_to(documents.parent).as_posix() + ("/" if target.is_dir() else "")
        return f"`{path}`" if path.rstrip("/").endswith(text.strip("`/ ")) else f"{text} (`{path}`)"

    return LINK.sub(shown, markdown)
