"""Shows CHANGELOG.md, whose links are those of the repository, as a page of the site."""

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Put the changelog in the place of its page."""
    if page.file.src_uri != "changelog.md":
        return markdown
    text = Path(config.config_file_path).with_name("CHANGELOG.md").read_text()
    return text.replace("](docs/", "](").replace("](SECURITY.md)", f"]({config.extra['repository']}/SECURITY.md)")
