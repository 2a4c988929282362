"""How does a report become one HTML page that needs nothing else? Headings, paragraphs, tables and pictures.

In: sections, each a heading and the parts below it, made by :func:`paragraph`, :func:`table` and :func:`picture`. Out:
the text of a page: pictures are part of it, nothing is loaded from anywhere. All text is escaped here and nowhere else.
"""

import base64
import html
import os
from collections.abc import Iterable, Mapping, Sequence

from vitplast_jax.files import as_path
from vitplast_jax.reports import tables

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #202020; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
th { border-bottom: 2px solid #444; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; }
.note { color: #444; }
@media print { body { max-width: none; margin: 0; } section { break-inside: avoid; } }
"""


def paragraph(text: str, note: bool = False) -> str:
    return f'<p class="note">{html.escape(text)}</p>' if note else f"<p>{html.escape(text)}</p>"


def table(rows: Sequence[Mapping], columns: Sequence[str] | None = None) -> str:
    """A table of records, its cells formatted as in all other tables; numbers are flush right."""
    names = list(columns) if columns is not None else list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join("<tr>" + "".join(_cell(row.get(name)) for name in names) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def _cell(value) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = ' class="number"' if number else ""
    return f"<td{kind}>{html.escape(tables.format_cell(value))}</td>"


def picture(path: str | os.PathLike, description: str) -> str:
    """A PNG file as part of the page; ``description`` is for those who cannot see it."""
    data = base64.b64encode(as_path(path).read_bytes()).decode()
    return f'<p><img alt="{html.escape(description, quote=True)}" src="data:image/png;base64,{data}"></p>'


def page(title: str, sections: Iterable[tuple[str, Sequence[str]]]) -> str:
    """The whole page; sections without parts are left out."""
    body = "\n".join(
        f"<section>\n<h2>{html.escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"
        for heading, parts in sections
        if parts
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )
