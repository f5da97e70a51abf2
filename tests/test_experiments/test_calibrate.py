"""`fedloom calibrate`: rates from what was measured elsewhere and from what is timed here; mistakes are one line."""

from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.runs import calibrate as module
from fedloom.experiments.runs.calibrate import calibrate
from fedloom.tiers.device_files import read_device_table

DIGITS = ["experiment=fedavg_digits", "space.stem_channels=8"]


def test_a_measured_client_gives_its_rate() -> None:
    facts = calibrate(DIGITS, architecture="smallest", samples=64, epochs=5, seconds=0.5)
    assert facts["macs_per_s"] == 3 * facts["macs"] * 64 * 5 / 0.5
    assert facts["keys"] == f"devices.macs_per_s=[{facts['macs_per_s']:.6g}]"


def test_measured_clients_become_a_device_table(tmp_path: Path) -> None:
    measured, out = tmp_path / "phones.csv", tmp_path / "devices.csv"
    measured.write_text("device_id,samples,epochs,seconds\n4,100,1,2\n9,50,2,1\n")
    facts = calibrate([*DIGITS, "devices.up_bytes_per_s=1000"], measured=measured, out=out)
    table = read_device_table(out)
    assert table.macs_per_s.tolist() == [3 * facts["macs"] * 50.0, 3 * facts["macs"] * 100.0]
    assert set(table.up_bytes_per_s) == {1000.0}
    assert facts["keys"] == f"tiers.device_table={out}"
    assert facts["macs_per_s"]["median"] == 3 * facts["macs"] * 75.0


def test_a_client_is_timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_S", 0.0)
    facts = calibrate([*DIGITS, "tiers.paths=500"])
    assert facts["repeats"] == 3
    assert facts["device"] == "cpu, 1 thread"
    assert facts["macs_per_s"] == pytest.approx(3 * facts["macs"] * facts["samples"] / facts["seconds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "3"], "give --seconds and --samples"),
        (["--samples", "3", "--epochs", "2"], "give --seconds and --samples"),
        (["--samples", "3", "--seconds", "0"], "argument --seconds: 0: must be a number, greater than 0"),
        (["--samples", "3", "--seconds", "1", "--out", "x.csv"], "give what was measured on them with --measured"),
        (["--seconds", "1", "--measured", "x.csv"], "not allowed with argument"),
        (["--measured", "none.csv"], "none.csv: there is no such file"),
        (
            ["--architecture", "middle", "--samples", "3", "--seconds", "1"],
            "--architecture 'middle' is no architecture",
        ),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["calibrate", *DIGITS, *words])
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
