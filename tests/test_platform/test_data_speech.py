"""Speech Commands: the published layouts, whose clip belongs where, features by a second implementation, refusals."""

import os
import shutil
import sys
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import librosa
import numpy as np
import pytest
from scipy.fft import dct

from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.sources import find_source
from fedloom.platform.data.speech import RATE, WORDS, SpeechSource, mfcc, part_of, read_second

OTHERS = tuple(f"word{i:02d}" for i in range(25))


def write_wav(path: Path, seconds: float = 0.02, rate: int = RATE, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(len(path.name)).integers(-3000, 3000, round(seconds * rate) * channels)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def speakers() -> dict[str, list[str]]:
    """Ids by the part into which the authors' hash puts them."""
    found: dict[str, list[str]] = {"training": [], "validation": [], "testing": []}
    for i in range(60):
        found[part_of(f"yes/{i:08x}_nohash_0.wav")].append(f"{i:08x}")
    return found


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """All words as published, two training speakers and one for each other part, without lists."""
    root, by_part = tmp_path / "speech_commands_v0.02", speakers()
    names = [*by_part["training"][:2], by_part["validation"][0], by_part["testing"][0]]
    for word in (*WORDS, *OTHERS):
        for name in names:
            write_wav(root / word / f"{name}_nohash_0.wav")
    write_wav(root / "_background_noise_" / "hum.wav", seconds=30.5)
    return tmp_path


def config(root: Path, **options: Any) -> DataConfig:
    return DataConfig(
        "speech_commands", str(root), str(root / "cache"), partition="natural", num_clients=2, test_share=0.2, **options
    )


def source(root: Path, **options: Any) -> SpeechSource:
    found = find_source(config(root, options=options))
    assert isinstance(found, SpeechSource)
    return found


# -- whose clip belongs where -----------------------------------------------------------------------------------------


def test_the_authors_hash_decides_without_lists(archive: Path) -> None:
    found = source(archive)
    by_part = speakers()
    y, test = found.labels("train"), found.labels("test")
    spoken = y[y != 11]
    # Two training speakers say ten words and 25 others once; the validation speaker's clips are read by nobody.
    assert Counter(spoken.tolist()) == {**dict.fromkeys(range(10), 2), 10: 50}
    assert Counter(test[test != 11].tolist()) == {**dict.fromkeys(range(10), 1), 10: 25}
    # Of thirty seconds of noise every tenth tests, and the one before it is for validation.
    assert ((y == 11).sum(), (test == 11).sum()) == (24, 3)
    assert found.client_names == tuple(sorted([*by_part["training"][:2], by_part["testing"][0]]))
    assert set(found.clients("train").tolist()) == {found.client_names.index(s) for s in by_part["training"][:2]}
    assert found.class_names == (*WORDS, "_unknown_", "_silence_")


def test_the_published_lists_decide_where_they_are(archive: Path) -> None:
    root, by_part = archive / "speech_commands_v0.02", speakers()
    first, second = by_part["training"][:2]
    (root / "testing_list.txt").write_text("".join(f"{w}/{first}_nohash_0.wav\n" for w in (*WORDS, *OTHERS)))
    (root / "validation_list.txt").write_text(f"yes/{second}_nohash_0.wav\n")
    found = source(archive)
    named = {found.client_names[i] for i in found.clients("test").tolist()}
    assert named == {first}
    assert len(found.labels("train")) - (found.labels("train") == 11).sum() == 3 * 35 - 1
    (root / "validation_list.txt").unlink()
    with pytest.raises(ValueError, match=r"validation_list.txt: not found beside testing_list.txt; unpack the archive"):
        source(archive).labels("train")


def test_all_words_are_35_classes(archive: Path) -> None:
    write_wav(archive / "speech_commands_v0.02" / "_mine_" / "0_nohash_0.wav")
    found = source(archive, classes=35)
    assert len(found.class_names) == 35
    assert Counter(found.labels("train").tolist()) == dict.fromkeys(range(35), 2)


def test_of_the_test_archive_alone_every_fifth_speaker_tests(tmp_path: Path) -> None:
    root, names = tmp_path / "speech_commands", speakers()["testing"][:5]
    for word in WORDS:
        for name in names:
            write_wav(root / word / f"{name}_nohash_1.wav")
    for name in names:
        write_wav(root / "_unknown_" / f"zero_{name}_nohash_1.wav")
    for i in range(10):
        write_wav(root / "_silence_" / f"{i}.wav")
    many = source(tmp_path, classes=35)
    assert many.class_names == (*sorted(WORDS), "zero"), "the other words are told apart by the files' names"
    assert Counter(many.labels("train").tolist()) == dict.fromkeys(range(11), 4)
    found = source(tmp_path)
    assert {found.client_names[i] for i in found.clients("test").tolist()} == {sorted(names)[4]}
    assert Counter(found.labels("test").tolist()) == {**dict.fromkeys(range(11), 1), 11: 2}
    assert Counter(found.labels("train").tolist()) == {**dict.fromkeys(range(11), 4), 11: 8}


def test_prepared_features_are_those_of_the_files(archive: Path) -> None:
    dataset = Dataset.open(prepare_dataset(config(archive, train_samples=30, test_samples=12)))
    assert (dataset.input_shape, dataset.num_classes) == ((1, 40, 51), 12)
    found = source(archive)
    rows = np.arange(3)
    assert found.inputs("train", rows).dtype == np.float32
    np.testing.assert_array_equal(
        found.inputs("train", rows)[1, 0], mfcc(read_second(found.folder / found._clips["train"][1].path))
    )
    identities = {str(source(archive, classes=c).identity()) for c in (12, 35)}
    assert len(identities) == 2


# -- features ---------------------------------------------------------------------------------------------------------


def by_hand(low: np.ndarray) -> np.ndarray:
    """40 coefficients of 51 frames of a second at 8 kHz, from their definition (Davis and Mermelstein 1980)."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(320) / 320)
    padded = np.pad(low.astype(np.float64), 160)
    frames = np.stack([padded[i * 160 : i * 160 + 320] for i in range(51)])
    power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2

    def mel(hz: float) -> float:  # linear to 1 kHz, logarithmic above (Slaney)
        return hz / (200 / 3) if hz < 1000 else 15 + np.log(hz / 1000) / (np.log(6.4) / 27)

    def hz(m: float) -> float:
        return m * 200 / 3 if m < 15 else 1000 * np.exp((m - 15) * np.log(6.4) / 27)

    edges = [hz(m) for m in np.linspace(0, mel(4000), 42)]
    bins = np.arange(161) * 25.0
    filters = np.zeros((40, 161))
    for i in range(40):
        low_, centre, high = edges[i : i + 3]
        rising, falling = (bins - low_) / (centre - low_), (high - bins) / (high - centre)
        filters[i] = np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low_)
    decibel = 10 * np.log10(np.maximum(1e-10, filters @ power.T))
    decibel = np.maximum(decibel, decibel.max() - 80)
    return np.asarray(dct(decibel, axis=0, norm="ortho"))


def test_features_are_those_of_a_second_implementation() -> None:
    t = np.arange(RATE) / RATE
    noise = np.random.default_rng(1).normal(0, 0.01, RATE)
    sound = (0.3 * np.sin(2 * np.pi * 440 * t) + 0.2 * np.sin(2 * np.pi * 1800 * t * (1 + t)) + noise).astype(
        np.float32
    )
    found = mfcc(sound)
    assert found.shape == (40, 51)
    low = librosa.resample(sound, orig_sr=RATE, target_sr=8000)
    np.testing.assert_allclose(found, by_hand(low), atol=1e-3, rtol=1e-4)
    # Half the samples of a tone below 4 kHz are the tone.
    tone = np.sin(2 * np.pi * 440 * t).astype(np.float32)
    halved = librosa.resample(tone, orig_sr=RATE, target_sr=8000)
    np.testing.assert_allclose(halved[200:-200], tone[::2][200:-200], atol=1e-3)


@pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="needs FEDLOOM_DATA")
def test_the_clips_of_50_speakers() -> None:
    found = find_source(DataConfig("speech_commands", os.environ["FEDLOOM_DATA"], partition="natural"))
    y, test = found.labels("train"), found.labels("test")  # type: ignore[union-attr]
    assert len(y) + len(test) == 2672
    assert len(found.client_names) == 50
    assert len(np.unique(found.clients("test"))) == 10  # type: ignore[union-attr]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: write_wav(f, rate=8000), "is 8000 Hz, 1 channel; expected 16000 Hz, 1 channel: convert it"),
        (lambda f: write_wav(f, channels=2), "is 16000 Hz, 2 channels; expected 16000 Hz, 1 channel"),
        (lambda f: write_wav(f, seconds=0.0), "has no samples; expected up to a second of sound: take it out"),
        (lambda f: f.write_bytes(b"RIFF, but not much more"), "cannot be read as sound"),
    ],
)
def test_a_file_that_is_no_clip_is_refused(archive: Path, spoil: Callable[[Path], object], message: str) -> None:
    file = archive / "speech_commands_v0.02" / "yes" / f"{speakers()['training'][0]}_nohash_0.wav"
    spoil(file)
    with pytest.raises(ValueError, match=message) as refused:
        prepare_dataset(config(archive))
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list((archive / "cache").glob("*")), "nothing is half prepared"


def test_what_is_no_archive_is_refused(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"speech_commands not found under .*looked for speech_commands/ or"):
        find_source(config(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"data.options.classes=20: Speech Commands is read with 12 or 35 classes"):
        source(archive, classes=20)
    word = archive / "speech_commands_v0.02" / "yes"
    word.rename(word.parent / "yesterday")
    with pytest.raises(ValueError, match=r"yes: not found; Speech Commands has a folder per word: unpack it"):
        source(archive).labels("train")
    monkeypatch.setitem(sys.modules, "librosa", None)
    with pytest.raises(ValueError, match=r"speech_commands needs librosa and soundfile .*: pip install"):
        mfcc(np.zeros(RATE, dtype=np.float32))


def test_silence_is_needed_for_twelve_classes_and_all_words_for_35(archive: Path) -> None:
    root = archive / "speech_commands_v0.02"
    (root / "_background_noise_" / "hum.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"hum.wav: cannot be read as sound .*expected 16 kHz mono WAV"):
        source(archive).labels("train")
    shutil.rmtree(root / "_background_noise_")
    with pytest.raises(ValueError, match="has neither _background_noise_/ nor _silence_/, of which silence is made"):
        source(archive).labels("train")
    (root / "__MACOSX").mkdir()
    assert len(source(archive, classes=35).class_names) == 35
    shutil.rmtree(root / OTHERS[0])
    with pytest.raises(ValueError, match=r"has the folders of 34 words, 35 classes need 35: .*classes=12"):
        source(archive, classes=35).labels("train")
    (root / "validation_list.txt").write_bytes(b"\xff")
    (root / "testing_list.txt").write_text("")
    with pytest.raises(ValueError, match=r"validation_list.txt: not UTF-8 text"):
        source(archive).labels("train")
