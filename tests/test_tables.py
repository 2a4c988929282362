"""Tables by hand."""

import csv
import io

from vitplast_jax.reports import tables

ROWS = [{"name": "mha", "mean": 1.25, "count": 37248}, {"name": "fc1", "mean": None, "count": 5}]


def test_text_table_is_aligned():
    assert tables.text_table(ROWS) == (
        "name   mean   count\n----  -----  ------\nmha   1.250  37,248\nfc1       -       5"
    )


def test_text_table_of_nothing_has_its_header():
    assert tables.text_table([], ["a", "b"]) == "a  b\n-  -"


def test_markdown_table():
    assert tables.markdown_table(ROWS, ["name", "count"]) == (
        "| name | count |\n| --- | ---: |\n| mha | 37,248 |\n| fc1 | 5 |\n"
    )
    assert "a\\|b" in tables.markdown_table([{"x": "a|b"}])


def test_csv_keeps_every_digit_and_flattens():
    value = 0.1 + 0.2
    text = tables.csv_text([{"a": value, "q": {"0.5": 1, "0.95": None}}, {"a": None, "q": {"0.5": 2, "0.95": 3}}])
    lines = list(csv.reader(io.StringIO(text)))
    assert lines == [["a", "q_0.5", "q_0.95"], [repr(value), "1", ""], ["", "2", "3"]]


def test_numbers_for_people():
    found = [tables.format_cell(v) for v in (0.0, 1e-5, 0.123456, 1234.4, 12345.6, 1e9, 1234567, None, True, "x")]
    assert found == ["0", "1.000e-05", "0.1235", "1234", "12346", "1.000e+09", "1,234,567", "-", "True", "x"]
