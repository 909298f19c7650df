"""The files that tell current figures, as they are to be, and written."""

from __future__ import annotations

from pathlib import Path

from deltaline_bench.current.page import write_page, write_picks
from deltaline_bench.current.picks import PICKS
from deltaline_bench.current.picture import draw
from deltaline_bench.current.tables import RESULTS, read_tables

PAGE, PICTURE, README = Path("docs/figures.md"), Path("docs/figures.svg"), Path("README.md")
BEGIN, END = "<!-- figures: python -m deltaline_bench figures -->\n", "<!-- end of figures -->\n"


def current_files(root: Path) -> dict[Path, str]:
    """Return the content that each of the files of a tree is to have. Raises ValueError."""
    tables = read_tables(root)
    told = {record.path.stem for table in tables.values() for record in table.records}
    others = sorted(path for path in (root / RESULTS).iterdir() if path.stem not in told)
    before, begin, rest = (root / README).read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{README}: expected its table between {BEGIN.strip()} and {END.strip()}")
    return {
        PAGE: write_page(tables.values(), others),
        PICTURE: draw(PICKS, tables),
        README: before + begin + write_picks(PICKS, tables) + end + after,
    }


def write_current(root: Path) -> None:
    """Write the files into a tree."""
    for path, content in current_files(root).items():
        (root / path).write_text(content, encoding="utf-8")
