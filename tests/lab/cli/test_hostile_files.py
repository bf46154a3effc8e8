"""Files of others cannot command the terminal, run code or stop a command: what `make fuzz` looks for, case by case."""

import pytest

from softprune.lab.cli.output import error_line, print_table


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    error_line("a file called \x1b[31mred\x9b\udcff\n and more")
    print_table(["name"], [["\x1b]0;title\x07"]])
    out, err = capsys.readouterr()
    assert err == "error: a file called \\x1b[31mred\\x9b\\udcff\n and more\n"
    assert out.split() == ["name", "\\x1b]0;title\\x07"]


def test_a_path_that_is_too_long_is_an_error_with_a_remedy(softprune) -> None:
    result = softprune("report", "1" * 5000)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
