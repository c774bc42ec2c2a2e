"""Program that writes the tables into the pages, and prints which pages it changed."""

from . import PAGES, ROOT, filled

changed = {path: new for path in PAGES if (new := filled(path.read_text())) != path.read_text()}
for path, new in changed.items():
    path.write_text(new)
    print(path.relative_to(ROOT))
if not changed:
    print("All pages are up to date")
