"""Program that writes the tables into the pages."""

from . import PAGES, filled

for path in PAGES:
    path.write_text(filled(path.read_text()))
