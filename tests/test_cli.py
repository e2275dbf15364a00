"""The command: what it takes, what it prints, how it fails."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwatch import cli, service
from gpuwatch.cli import main, parser
from gpuwatch.layout import SCHEMA_AT, State
from gpuwatch.reader import Snapshot, read
from gpuwatch.rulebook import RULES
from gpuwatch.version import __version__
from tests.recorded import write_run

ROOT = Path(__file__).parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "hooks")])
    return subprocess.run(
        [sys.executable, "-m", "gpuwatch", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error: one line, and nothing on standard output."""
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("gpuwatch: "), said
    return said.err


def test_commands_and_options_are_frozen() -> None:
    subparsers = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    known = {
        name: [option for action in command._actions for option in action.option_strings or [action.metavar]]
        for name, command in subparsers.choices.items()
    }
    assert known == {
        "report": ["-h", "--help", "RUN", "--json", "--html", "--dir"],
        "compare": ["-h", "--help", "RUN_A", "RUN_B", "--json", "--fail-on-regression", "--dir"],
        "serve": ["-h", "--help", "--listen", "--exit-when-idle", "--web-config", "--any-port", "--dir"],
        "explain": ["-h", "--help", "RULE", "--list"],
        "snapshot": ["-h", "--help", "FILE", "--json", "--html"],
        "replay": ["-h", "--help", "FILE", "--conf", "--capacity", "--json"],
        "run": ["SCRIPT"],
        "stack": ["-h", "--help", "DIR", "--target", "--force"],
        "doctor": ["-h", "--help", "--json", "--dir"],
        "demo": ["-h", "--help", "--steps", "--without"],
    }


# -- report -----------------------------------------------------------------------------------------------------------


def test_report_shows_the_latest_run(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(records, "first")
    write_run(records, "second")
    assert main(["report"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("gpuwatch: second") and shown.err == ""
    assert not any(line.endswith(" ") for line in shown.out.splitlines())


def test_report_takes_a_name_and_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "elsewhere", "first")
    write_run(tmp_path / "elsewhere", "second")
    assert main(["report", "fir", "--dir", str(tmp_path / "elsewhere")]) == 0
    assert capsys.readouterr().out.startswith("gpuwatch: first")


def test_report_as_json_is_the_document(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(records)
    assert main(["report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run"]["name"] == "train"
    assert report["findings"][0]["rule"] == "data-workers-zero"


def test_report_as_html_writes_the_file(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(records)
    target = tmp_path / "report.html"
    assert main(["report", "--html", str(target)]) == 0
    assert target.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out == f"wrote {target}\n"


def test_json_stays_json_when_html_is_written_too(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(records)
    assert main(["report", "--json", "--html", str(tmp_path / "report.html")]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["state"] == "clean"


def test_a_target_that_cannot_be_written_is_one_line(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(records)
    assert main(["report", "--html", str(tmp_path / "missing" / "report.html")]) == 2
    assert "report.html: No such file or directory" in one_line(capsys)


def test_no_records_at_all_says_what_to_do(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    line = one_line(capsys)
    assert str(records) in line and "gpuwatch.attach(model, loader)" in line


def test_an_unknown_run_names_what_there_is(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(records, "first")
    assert main(["report", "nonesuch"]) == 2
    assert "no run 'nonesuch'; there are: first" in one_line(capsys)


def test_a_directory_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["report", "--dir", str(file)]) == 2
    assert f"cannot read the directory of records {file}: Not a directory" in one_line(capsys)


def test_a_directory_that_only_the_daemon_lists_says_where_to_look(
    records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(path: Path, look: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cli, "read_all", denied)
    assert main(["report"]) == 2
    assert "Permission denied; a daemon (`gpuwatch serve`) shows what is in it, or keep records" in one_line(capsys)
    monkeypatch.setattr(service, "running", lambda directory: "http://127.0.0.1:9847/")
    assert main(["report"]) == 2
    assert "Permission denied; see http://127.0.0.1:9847/, or keep records of your own" in one_line(capsys)


def test_corrupt_records_are_skipped_counted_and_named(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(records, "good")
    (records / "bad.gpw").write_bytes(b"nothing")
    (records / "worse.gpw").symlink_to("/etc/passwd")
    assert main(["report"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("gpuwatch: good")
    assert shown.err.startswith("gpuwatch: skipped 2 unreadable records") and "bad.gpw has 7 bytes" in shown.err
    assert shown.err.count("\n") == 1


def test_a_report_reads_its_own_run_whole_and_of_others_the_headers(
    records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        write_run(records, f"run{number}")
    taken: list[Path] = []

    def seen(path: Path) -> Snapshot:
        taken.append(path)
        return read(path)

    monkeypatch.setattr("gpuwatch.report.runs.read", seen)
    assert main(["report", "run3"]) == 0
    assert [path.name.partition(".")[0] for path in taken] == ["run3"]
    capsys.readouterr()


def test_a_record_spoilt_below_its_header_is_one_line(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(records, "spoilt").path
    content = path.read_bytes()
    at = content.index(b"\n", SCHEMA_AT) + 1
    path.write_bytes(content[:at] + b"]" + content[at + 1 :])
    assert main(["report"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"gpuwatch: {path.name} holds no valid schema")
    assert shown.err.count("\n") == 1
    write_run(records, "spoilt", rank=1)
    assert main(["report"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("gpuwatch: spoilt") and "skipped 1 unreadable record" in shown.err


def test_a_name_the_terminal_cannot_show_is_shown_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, "läuft-\udcff-\x1b[2J")
    done = run("report", "--dir", str(tmp_path), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == ""
    assert "\x1b" not in done.stdout and "l\\xe4uft" in done.stdout


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    write_run(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for option in ([], ["--json"]):
        command = [sys.executable, "-m", "gpuwatch", "report", "--dir", str(tmp_path), *option]
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment, timeout=180
        )
        assert (done.returncode, done.stderr) == (0, "")
    os.close(writing)


def test_reading_a_report_does_not_end_a_run_that_is_watched(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    for _ in range(2):
        done = run("report", "--dir", str(tmp_path), "--json")
        assert json.loads(done.stdout)["run"]["state"] == "running"
    writer.close(State.CLEAN)


def test_a_report_loads_neither_torch_nor_the_daemon(tmp_path: Path) -> None:
    write_run(tmp_path)
    program = (
        "import sys; from gpuwatch.cli import main; main(sys.argv[1:]);"
        "print({'torch', 'prometheus_client', 'yaml', 'grafanalib'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "report", "--dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=180)
    assert done.stderr == "set()\n"


# -- explain ----------------------------------------------------------------------------------------------------------


def test_every_rule_is_listed_and_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [rule.id for rule in RULES]
    for rule in RULES:
        assert main(["explain", rule.id]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"# {rule.title}") and rule.fix in text


def test_an_unknown_rule_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "data-stal"]) == 2
    assert "no rule 'data-stal': did you mean data-stall" in one_line(capsys)
    assert main(["explain", "zzz"]) == 2
    assert "gpuwatch explain --list" in one_line(capsys)


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"gpuwatch {__version__}\n"


def test_a_python_that_drops_texts_of_functions_runs_it_too() -> None:
    done = subprocess.run([sys.executable, "-OO", "-m", "gpuwatch", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "What a training run spends, and why." in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["nonesuch"], "invalid choice: 'nonesuch'"),
        (["report", "--nonesuch"], "unrecognized arguments: --nonesuch (see gpuwatch report --help)"),
        (["explain"], "RULE --list is required"),
        (["serve", "--exit-when-idle", "soon"], "'soon' is not a number of seconds"),
        (["serve", "--listen", "nowhere"], "expected HOST:PORT"),
        (["demo", "--steps", "0"], "'0' is not a number of steps"),
        (["demo", "--without", "nonesuch"], "no planted fault 'nonesuch'; there are: anomaly, workers"),
    ],
)
def test_a_usage_that_is_wrong_is_one_line_and_status_2(
    records: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    assert said in one_line(capsys)


def test_a_busy_port_is_one_line_and_status_2(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--listen", f"127.0.0.1:{port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in one_line(capsys)
