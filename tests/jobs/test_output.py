"""What people and programs are shown: progress on stderr only, events as they happen, markup taken literally."""

from __future__ import annotations

import orjson

from jobs import progress as progress_module
from jobs.events import EventLog
from jobs.output import console, facts_table, print_json
from jobs.progress import RunProgress


def test_progress_never_touches_stdout(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    with RunProgress("name", 10, 2) as shown:
        shown.update(done=5, failed=1, reward=0.25, tokens_per_s=1234.0, in_flight=3)
        shown.update(done=6, failed=1, reward=None, tokens_per_s=0.0, in_flight=3)
    out, err = capsys.readouterr()
    assert out == "" and "name: 5/10" in err and "reward 0.250" in err and "1,234 tok/s" in err and "reward -" in err


def test_quiet_is_quiet(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    with RunProgress("name", 10, quiet=True) as shown:
        shown.update(done=5, failed=0, reward=1.0, tokens_per_s=1.0, in_flight=1)
    assert capsys.readouterr() == ("", "")


def test_json_is_one_object_and_takes_paths_and_numbers(capfdbinary, tmp_path):
    import numpy

    print_json({"path": tmp_path, "n": numpy.float32(0.5), "nan": float("nan"), "text": "杯"})
    found = orjson.loads(capfdbinary.readouterr().out)
    assert found == {"path": str(tmp_path), "n": 0.5, "nan": None, "text": "杯"}


def test_values_in_brackets_are_text_not_markup(capsys):
    console().print(facts_table("Facts", [("list", "[bold]x[/bold] [1, 2]"), ("none", None)]))
    out = capsys.readouterr().out
    assert "[bold]x[/bold] [1, 2]" in out and "None" in out


def test_events_are_readable_at_once_and_counted(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write({"event": "retry", "worker": "w", "odd": object})
    log.write({"event": "retry"})
    log.write({"x": 1})
    found = [orjson.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert [e.get("event") for e in found] == ["retry", "retry", None] and all(e["time"] > 0 for e in found)
    assert log.counts == {"retry": 2, "event": 1}
    log.close()
