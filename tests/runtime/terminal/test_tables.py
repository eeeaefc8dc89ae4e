"""Tables of figures on terminals of every width."""

import pytest

from vtx.runtime.terminal.console import WideTable, say_report

HEADS = ("method", *(f"figure {number}" for number in range(7)))
LONG = "mustdrop:gamma=0.05,alpha=0.1,tau=off,key=0.08 + K = 8"
ROWS = [[name, *(f"{number}.25 ({number}.00 to {number}.50)" for number in range(7))] for name in ("none", LONG)]


def printed(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    say_report(["A paragraph of words that is wrapped. " * 6, WideTable("times", HEADS, ROWS), "The end."])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132, 203])
def test_a_table_fits_the_terminal_and_no_figure_wraps(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(width, monkeypatch, capsys)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for figure in ROWS[0][1:]:
        assert text.count(figure) == 2, figure
    for head in HEADS[1:]:
        assert text.count(head) == 1, head


def test_a_terminal_wide_enough_gets_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(printed(240, monkeypatch, capsys))
    assert text.count("method") == 1
    assert LONG in text
