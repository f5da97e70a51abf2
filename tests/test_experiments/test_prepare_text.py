from pathlib import Path

import pytest

from fedloom.experiments.runs.describe import prepare


def test_the_command_prepares_text(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.train.txt").write_text("one two three\n" * 20)  # 79 labels: 16 sequences of 5
    (tmp_path / "ptb" / "ptb.test.txt").write_text("two\n" * 8)
    options = [f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}", "data.sequence_length=5"]
    told = prepare(["dataset=ptb", "data.partition=iid", "data.num_clients=3", *options])
    assert (told["classes"], told["train_samples"], told["test_samples"], told["clients"]) == (5, 16, 3, 3)
    assert told["train_samples_per_client"] == [4, 5]
    assert told["validation_samples_per_client"] == [1, 1]
    assert Path(told["partition"]).parent == tmp_path / "cache" / "partitions"


def test_a_partition_that_text_does_not_allow_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data.partition=lda: ptb has no class labels to draw by; must be one of quantity, iid"
    ):
        prepare(["dataset=ptb", f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}"])
    assert list(tmp_path.iterdir()) == []
