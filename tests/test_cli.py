"""The command line: what it prints, writes and returns."""

import json

import pytest

from ckpt_ext import cli, doctor
from ckpt_ext import compare as comparing
from ckpt_ext.doctor import Check
from ckpt_ext.modules import TransformerBlock

TINY = "compare --blocks 1 --dim 16 --heads 2 --length 16 --batch 2 --steps 2 --warmup 1".split()


def test_compare_end_to_end(tmp_path, capsys):
    out = tmp_path / "made" / "here"
    assert cli.main([*TINY, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "ours: attention" in printed.out and "same bits" in printed.out
    assert "training" in printed.err

    report = json.loads((out / "report.json").read_text())
    assert report["ok"] is True
    assert report["config"]["dim"] == 16 and report["config"]["residual_dropout"] == 0.1
    assert report["machine"]["device"] == "cpu" and report["machine"]["threads"] >= 1 and report["machine"]["torch"]
    assert "nothing about a GPU" in report["note"]
    runs = {run["name"]: run for run in report["runs"]}
    assert list(runs) == ["plain", "torch checkpoint", "ours: all", "ours: attention", "ours: input", "ours: offload", "ours: segments"]
    assert runs["plain"]["losses"] == runs["torch checkpoint"]["losses"]
    assert runs["ours: input"]["bit_equal"] and runs["ours: attention"]["bit_equal"]
    assert runs["ours: input"]["saved_bytes"] == report["input_bytes"] + 16 == 2 * 16 * 16 * 4 + 16
    assert [verdict["ok"] for verdict in report["verdicts"] if verdict["required"]] == [True, True]

    markdown = (out / "report.md").read_text()
    assert report["command"] in markdown
    assert markdown.count("\n| ") == 2 * (1 + len(runs))  # figures, and what the peaks are made of
    picture = (out / "memory.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_the_command_in_the_report_is_what_was_asked_for(tmp_path):
    cli.main([*TINY, "--out", str(tmp_path)])
    command = json.loads((tmp_path / "report.json").read_text())["command"].split()
    assert command[0] == "ckpt-ext" and command[1:] == TINY


def test_output_that_is_no_terminal_is_not_broken_up(capsys):
    cli.main(TINY)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= cli.WIDTH
    row = next(line for line in lines if "torch checkpoint" in line)
    assert "1.00x" in row


def test_a_text_of_ones_own(tmp_path, capsys):
    file = tmp_path / "text"
    file.write_bytes(b"to be or not to be, " * 10)
    assert cli.main([*TINY, "--text", str(file)]) == 0
    file.write_bytes(b"")
    assert cli.main([*TINY, "--text", str(file)]) == 2
    assert "text must have more than length=16 bytes, got 0" in capsys.readouterr().err
    assert cli.main([*TINY, "--text", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3"], "dim must be a multiple of heads=3"),
        (["--kv-heads", "4"], "kv_heads must divide heads=2"),
        (["--blocks", "0"], "blocks must be a positive int"),
        (["--residual-dropout", "2"], "residual_dropout must be a probability"),
        (["--device", "nowhere"], "device 'nowhere' must be usable"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(arguments, message, capsys):
    assert cli.main([*TINY, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ckpt-ext compare: {message}") and printed.err.count("\n") == 1


def test_wrong_gradients_give_exit_code_1(monkeypatch, capsys):
    class Wrong(TransformerBlock):
        def forward(self, x):
            y = super().forward(x)
            return 2 * y - y.detach()

    monkeypatch.setattr(comparing, "TransformerBlock", Wrong)
    monkeypatch.setattr(comparing, "OURS", {"ours: all": comparing.OURS["ours: all"], "ours: input": comparing.OURS["ours: input"]})
    assert cli.main(TINY) == 1
    assert "FAILED" in capsys.readouterr().out


CHECKS = {
    0: [
        Check("python", True, "3.11", required=True),
        Check("gpu", None, "none", required=False),
        Check("nvcc", False, "absent", required=False),
    ],
    1: [Check("torch", False, "1.0; too old", required=True)],
}


@pytest.mark.parametrize("code", [0, 1])
def test_doctor(code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: CHECKS[code])
    assert cli.main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert all(check.name in shown and check.detail in shown for check in CHECKS[code])
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is (code == 0)
    assert [check["name"] for check in report["checks"]] == [check.name for check in CHECKS[code]]


def test_doctor_on_this_machine(capsys):
    assert cli.main(["doctor"]) == 0
    assert "backend aten" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "expected"), [(["--version"], "ckpt-ext "), (["--help"], "compare"), (["compare", "--help"], "512")])
def test_version_and_help(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    assert expected in capsys.readouterr().out


def test_a_command_must_be_given(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2


@pytest.mark.parametrize("extra, message", [
    (["--out", __file__], "exists"),
    (["--device", "meta"], "device must hold data"),
    (["--threads", "100000"], "threads must be between"),
    (["--seed", "99999999999999999999999"], "seed must be in"),
    (["--lr", "inf"], "lr must be a finite number"),
])
def test_arguments_are_refused_before_any_training(capsys, extra, message):
    assert cli.main(["compare", "--blocks", "1", "--dim", "16", "--heads", "2", "--length", "8", "--steps", "1", *extra]) == 2
    assert message in capsys.readouterr().err
