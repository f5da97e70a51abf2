"""Speech Commands: the published layouts, whose clip belongs where, features by a second implementation, refusals."""

import os
import shutil
import sys
import wave
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import librosa
import numpy as np
import pytest
from scipy.fft import dct

from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.data.registry import find_source
from fedloom.platform.data.speech import FEATURES, RATE, WORDS, SpeechSource, halved, mfcc, part_of, read_second

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
    found: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for i in range(60):
        found[part_of(f"yes/{i:08x}_nohash_0.wav")].append(f"{i:08x}")
    return found


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """All words as published, two training speakers and one for each other part, without lists."""
    root, by_part = tmp_path / "speech_commands_v0.02", speakers()
    names = [*by_part["train"][:2], by_part["validation"][0], by_part["test"][0]]
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
    # A tenth of 35 clips is silence: of each of the two training speakers, and of the test part as a whole.
    assert sorted(Counter(found.clients("train")[y == 11].tolist()).values()) == [3, 3]
    assert (test == 11).sum() == 3
    # Of 30.5 seconds of noise training hears the first 80 %, the test the last 10 %.
    starts = {part: [c.start / RATE for c in found._clips[part] if c.label == 11] for part in ("train", "test")}
    assert max(starts["train"]) <= 0.8 * 30.5 - 1
    assert min(starts["test"]) >= 0.9 * 30.5 - 1e-9
    assert len({*starts["train"]}) == 6, "silence is cut anywhere, not at whole seconds"
    # The rule before: of thirty seconds of noise every tenth tests, and the one before it is for validation.
    before = source(archive, silence=None)
    assert ((before.labels("train") == 11).sum(), (before.labels("test") == 11).sum()) == (24, 3)
    assert found.client_names == tuple(sorted([*by_part["train"][:2], by_part["test"][0]]))
    assert set(found.clients("train").tolist()) == {found.client_names.index(s) for s in by_part["train"][:2]}
    assert found.class_names == (*WORDS, "_unknown_", "_silence_")


@pytest.mark.slow
def test_speakers_meant_for_validation_are_the_validation_data_of_nobody(archive: Path) -> None:
    chosen = replace(config(archive, validation_share=0.0), test_share=None)
    path = prepare_dataset(chosen)
    dataset = Dataset.open(path)
    name = speakers()["validation"][0]
    assert name in dataset.client_names
    assert {dataset.client_names[i] for i in dataset.clients("validation").tolist()} == {name}
    data = FederatedData.open(path, prepare_partition(chosen, dataset, 1))
    x, y = data.central("validation").tensors()
    assert Counter(y.tolist()) == {**dict.fromkeys(range(10), 1), 10: 25, 11: 3}
    assert data.num_central("validation") == len(x) == 38
    assert data.sizes("train").tolist() == [38, 38], "all clips of a training speaker train"
    assert data.sizes("validation").tolist() == [0, 0]
    with data.reading_test():
        assert data.sizes("test").tolist() == [0, 0], "those who test are no clients"
        assert len(data.central("test")) == 38
    assert not Dataset.open(prepare_dataset(config(archive))).has_validation
    with pytest.raises(ValueError, match="part=valid: must be one of train, test, validation"):
        dataset.num_samples("valid")


def test_the_published_lists_decide_where_they_are(archive: Path) -> None:
    root, by_part = archive / "speech_commands_v0.02", speakers()
    first, second = by_part["train"][:2]
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
    root, names = tmp_path / "speech_commands", speakers()["test"][:5]
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
    # A tenth of eleven clips of a speaker is one of silence; no file of silence is in both parts.
    assert Counter(found.labels("test").tolist()) == dict.fromkeys(range(12), 1)
    assert Counter(found.labels("train").tolist()) == dict.fromkeys(range(12), 4)
    silent = [{c.path for c in found._clips[part] if c.label == 11} for part in ("train", "test")]
    assert not silent[0] & silent[1]
    before = source(tmp_path, silence=None)
    assert Counter(before.labels("test").tolist()) == {**dict.fromkeys(range(11), 1), 11: 2}
    assert Counter(before.labels("train").tolist()) == {**dict.fromkeys(range(11), 4), 11: 8}
    apart = find_source(config(tmp_path, validation_share=0.0))
    assert isinstance(apart, SpeechSource)
    assert {c.speaker for c in apart._clips["validation"] if c.label < 11} == {sorted(names)[3]}
    assert {c.speaker for c in apart._clips["train"]} == {*sorted(names)[:3]}


def test_prepared_features_are_those_of_the_files(archive: Path) -> None:
    dataset = Dataset.open(prepare_dataset(config(archive, train_samples=30, test_samples=12)))
    assert (dataset.input_shape, dataset.num_classes) == ((1, 40, 51), 12)
    found = source(archive)
    rows = np.arange(3)
    assert found.inputs("train", rows).dtype == np.float32
    np.testing.assert_array_equal(
        found.inputs("train", rows)[1, 0], mfcc(read_second(found.folder / found._clips["train"][1].path))
    )
    options: list[dict[str, Any]] = [{}, {"classes": 35}, {"features": "slaney"}, {"silence": 0.2}, {"silence": None}]
    assert len({str(source(archive, **given).identity()) for given in options}) == len(options)


# -- features ---------------------------------------------------------------------------------------------------------


def by_hand(low: np.ndarray, features: str) -> np.ndarray:
    """40 coefficients of 51 frames of a second at 8 kHz, from their definition (Davis and Mermelstein 1980)."""
    htk = features == "htk"
    fft, mels = (400, 128) if htk else (320, 40)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(320) / 320)
    padded = np.pad(low.astype(np.float64), fft // 2, mode="reflect" if htk else "constant")
    # The window lies in the middle of the samples whose spectrum is computed.
    frames = np.stack([padded[i * 160 + (fft - 320) // 2 :][:320] for i in range(51)])
    power = np.abs(np.fft.rfft(frames * window, fft, axis=1)) ** 2

    def mel(hz: float) -> float:  # HTK: logarithmic; Slaney: linear to 1 kHz, logarithmic above
        if htk:
            return float(2595 * np.log10(1 + hz / 700))
        return hz / (200 / 3) if hz < 1000 else 15 + np.log(hz / 1000) / (np.log(6.4) / 27)

    def hz(m: float) -> float:
        if htk:
            return float(700 * (10 ** (m / 2595) - 1))
        return m * 200 / 3 if m < 15 else 1000 * np.exp((m - 15) * np.log(6.4) / 27)

    edges = [hz(m) for m in np.linspace(0, mel(4000), mels + 2)]
    bins = np.arange(fft // 2 + 1) * 8000 / fft
    filters = np.zeros((mels, len(bins)))
    for i in range(mels):
        low_, centre, high = edges[i : i + 3]
        rising, falling = (bins - low_) / (centre - low_), (high - bins) / (high - centre)
        filters[i] = np.maximum(0, np.minimum(rising, falling)) * (1 if htk else 2 / (high - low_))
    decibel = 10 * np.log10(np.maximum(1e-10, filters @ power.T))
    decibel = np.maximum(decibel, decibel.max() - 80)
    return np.asarray(dct(decibel, axis=0, norm="ortho"))[:40]


@pytest.mark.parametrize("features", FEATURES)
def test_features_are_those_of_a_second_implementation(features: str) -> None:
    t = np.arange(RATE) / RATE
    noise = np.random.default_rng(1).normal(0, 0.01, RATE)
    sound = (0.3 * np.sin(2 * np.pi * 440 * t) + 0.2 * np.sin(2 * np.pi * 1800 * t * (1 + t)) + noise).astype(
        np.float32
    )
    found = mfcc(sound, features)
    assert found.shape == (40, 51)

    def half(sound: np.ndarray) -> np.ndarray:
        return halved(sound) if features == "htk" else librosa.resample(sound, orig_sr=RATE, target_sr=8000)

    np.testing.assert_allclose(found, by_hand(half(sound), features), atol=2e-3, rtol=1e-4)
    # Half the samples of a tone below 4 kHz are the tone, and nothing is left of one above.
    tone, above = (np.sin(2 * np.pi * hz * t).astype(np.float32) for hz in (440, 6000))
    np.testing.assert_allclose(half(tone)[200:-200], tone[::2][200:-200], atol=1e-3)
    assert np.abs(half(above)[200:-200]).max() < 2e-3


def test_the_resampler_is_a_sinc_under_a_squared_cosine() -> None:
    impulse = np.zeros(64, dtype=np.float32)
    impulse[32] = 1
    # .495 sin(pi t) / (pi t) cos(pi t / 12)^2 at t = .99 k / 2, for k = 0, 2 and 4 samples from the middle.
    np.testing.assert_allclose(halved(impulse)[16:19], [0.495, 0.0046708, -0.0037701], atol=1e-6)
    assert len(halved(np.zeros(RATE, dtype=np.float32))) == 8000


@pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="needs FEDLOOM_DATA")
def test_the_clips_of_50_speakers() -> None:
    found = find_source(DataConfig("speech_commands", os.environ["FEDLOOM_DATA"], partition="natural"))
    y, test = found.labels("train"), found.labels("test")  # type: ignore[union-attr]
    # 2552 words of 50 speakers, of whom ten test, and a tenth as many clips of silence per speaker, rounded down.
    assert ((y < 11).sum() + (test < 11).sum(), (test == 11).sum()) == (2552, (test < 11).sum() // 10)
    assert len(found.client_names) == 50
    assert len(np.unique(found.clients("test"))) == 10  # type: ignore[union-attr]
    silent = np.bincount(found.clients("train")[y == 11], minlength=50)  # type: ignore[union-attr]
    assert (silent == np.bincount(found.clients("train")[y < 11], minlength=50) // 10).all()  # type: ignore[union-attr]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: write_wav(f, rate=8000), "is 8000 Hz, 1 channel; expected 16000 Hz, 1 channel: convert it"),
        (lambda f: write_wav(f, channels=2), "is 16000 Hz, 2 channels; expected 16000 Hz, 1 channel"),
        (lambda f: write_wav(f, seconds=0.0), "has no samples; expected up to a second of sound: remove it"),
        (lambda f: f.write_bytes(b"RIFF, but not much more"), "cannot be read as sound"),
    ],
)
def test_a_file_that_is_no_clip_is_refused(archive: Path, spoil: Callable[[Path], object], message: str) -> None:
    file = archive / "speech_commands_v0.02" / "yes" / f"{speakers()['train'][0]}_nohash_0.wav"
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
    with pytest.raises(ValueError, match="has neither _background_noise_/ nor _silence_/ to make silence from"):
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
