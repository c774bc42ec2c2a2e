"""Makes the site show what is outside docs/: CHANGELOG.md as a page, and other files of the repository as links."""

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the page of the changelog, and links that leave docs/."""
    repository = f"]({config.extra['repository']}/"
    if page.file.src_uri == "changelog.md":
        text = Path(config.config_file_path).with_name("CHANGELOG.md").read_text()
        return text.replace("](docs/", "](").replace("](SECURITY.md", f"{repository}SECURITY.md")
    return markdown.replace("](" + "../" * (page.file.src_uri.count("/") + 1), repository)
