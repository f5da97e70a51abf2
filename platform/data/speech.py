"""Speech Commands as published (Warden 2018): one folder per word, one second of sound per file, clients by speaker.

    WORD/SPEAKER_nohash_N.wav            the archive of all clips, with validation_list.txt and testing_list.txt
    _background_noise_/*.wav             from which it takes silence, second by second
    _unknown_/WORD_SPEAKER_nohash_N.wav  and _silence_/N.wav: the archive of the test set alone

Features are computed once, when the data are prepared: 40 mel-frequency cepstral coefficients of 51 frames, from sound
at 8 kHz, windows of 40 ms every 20 ms (FedorAS, App. E.2).
"""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray
from fedloom.platform.data.source import Source

FOLDERS = ("speech_commands", "speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02")
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
"""The words of the task of 12 classes, in the order of their labels."""
UNKNOWN, SILENCE, NOISE = "_unknown_", "_silence_", "_background_noise_"
MANY = 35
"""The words of version 0.02, of which a part of the test archive may lack rare ones."""
LISTS = ("validation_list.txt", "testing_list.txt")
RATE = 16_000
FEATURES = {"rate": 8_000, "coefficients": 40, "window": 320, "hop": 160, "mels": 40}
"""What features are computed with: samples per second, and samples per window and hop at that rate."""
RESAMPLER = "soxr_hq"
FRAMES = 51
HELD_OUT = 5
"""Every fifth speaker tests if no clip is meant for training."""

Sound = NDArray[np.float32]


@dataclass(frozen=True)
class Clip:
    """A second of sound: its place under the folder, its label, who speaks (None: nobody), and its first sample."""

    path: str
    label: int
    speaker: str | None
    start: int = 0


def speaker_of(path: str) -> str:
    """Who speaks, by the name of the file."""
    return Path(path).stem.partition("_nohash_")[0].rpartition("_")[2]


def word_of(name: str) -> str:
    """Which of the other words is spoken in a file of the archive of test clips."""
    return name.partition("_")[0]


def part_of(path: str) -> str:
    """Where the authors' hash of a speaker puts all of its clips: training, validation or testing (a tenth each)."""
    place = _hash(speaker_of(path)) % 2**27 * (100.0 / (2**27 - 1))
    return "validation" if place < 10 else "testing" if place < 20 else "training"


def mfcc(sound: Sound) -> Sound:
    """The features (40, 51) of one second at 16 kHz, in -1 to 1."""
    librosa, f = _librosa(), FEATURES
    low = librosa.resample(sound, orig_sr=RATE, target_sr=f["rate"], res_type=RESAMPLER)
    found: Sound = librosa.feature.mfcc(
        y=low, sr=f["rate"], n_mfcc=f["coefficients"], n_fft=f["window"], hop_length=f["hop"], n_mels=f["mels"]
    )
    return found.astype(np.float32)


def read_second(path: Path, start: int = 0) -> Sound:
    """The samples (16000,) of a WAV file from one of them on, in -1 to 1; a shorter sound is followed by zeros.

    Raises ValueError for a file that is no sound, empty, of another rate, or of several channels.
    """
    soundfile = _soundfile()
    try:
        samples, rate = soundfile.read(path, frames=RATE, start=start, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be read as sound ({error}); expected 16 kHz mono WAV") from error
    if rate != RATE or samples.shape[1] != 1:
        kind = f"{rate} Hz, {samples.shape[1]} channel{'s' if samples.shape[1] > 1 else ''}"
        raise ValueError(f"{path}: is {kind}; expected {RATE} Hz, 1 channel: convert it")
    if not len(samples):
        raise ValueError(f"{path}: has no samples; expected up to a second of sound: take it out")
    return np.pad(samples[:, 0], (0, RATE - len(samples)))


def _librosa() -> Any:
    """librosa, imported only where features are computed; ValueError if it cannot be."""
    try:
        import librosa
    except ImportError as error:
        raise _missing(error) from error
    return librosa


def _soundfile() -> Any:
    """soundfile, imported only where sound is read; ValueError if it cannot be."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # it looks for a library of the system
        raise _missing(error) from error
    return soundfile


def _missing(error: Exception) -> ValueError:
    return ValueError(f"speech_commands needs librosa and soundfile ({error}): pip install 'fedloom[speech]'")


@dataclass(frozen=True, eq=False)
class SpeechSource(Source):
    """The clips of a folder; created by `SpeechSource.find`."""

    folder: Path
    num_classes: int
    kind = "features"
    scale = 1.0

    @classmethod
    def find(cls, root: Path, classes: int) -> SpeechSource | None:
        """The source in one of `FOLDERS` under `root`; None if there is none. ValueError for another `classes`."""
        if classes not in (12, MANY):
            raise ValueError(f"data.options.classes={classes}: Speech Commands is read with 12 or {MANY} classes")
        folder = next((root / name for name in FOLDERS if (root / name).is_dir()), None)
        return None if folder is None else cls(folder, classes)

    @cached_property
    def class_names(self) -> Sequence[str]:
        """The words, for 12 classes followed by the other words and silence."""
        if self.num_classes == len(WORDS) + 2:
            return (*WORDS, UNKNOWN, SILENCE)
        words = [name for name in self._folders if not name.startswith("_")]
        if UNKNOWN in self._folders:  # the archive of test clips has the other words together
            return (*words, *sorted({word_of(name) for name in _waves(self.folder / UNKNOWN)} - {*words}))
        if len(words) != MANY:
            raise ValueError(
                f"{self.folder}: has the folders of {len(words)} words, {MANY} classes need {MANY}: unpack the archive "
                "again, or take data.options.classes=12"
            )
        return words

    @cached_property
    def _folders(self) -> list[str]:
        hidden = (".", "__")
        return sorted(f.name for f in self.folder.iterdir() if f.is_dir() and not f.name.startswith(hidden))

    def identity(self) -> Fields:
        # Names and sizes, not contents, as for images in folders: 105 000 files would be read in every run.
        digest = hashlib.sha256()
        for part, clips in self._clips.items():
            for clip in clips:
                size_bytes = (self.folder / clip.path).stat().st_size
                digest.update(f"{part}/{clip.path}\t{clip.label}\t{clip.start}\t{size_bytes}\n".encode())
        return {
            "layout": "speech commands",
            "classes": self.num_classes,
            "features": {**FEATURES, "resampler": RESAMPLER},
            "sha256_of_names_and_sizes": digest.hexdigest(),
        }

    def labels(self, part: str) -> IntArray:
        return np.array([clip.label for clip in self._clips[part]], dtype=np.int64)

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        clips = self._clips[part]
        features = np.empty((len(rows), 1, FEATURES["coefficients"], FRAMES), dtype=np.float32)
        for place, row in enumerate(rows.tolist()):
            features[place, 0] = mfcc(read_second(self.folder / clips[row].path, clips[row].start))
        return features

    @cached_property
    def client_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The speakers of both parts."""
        return tuple(sorted({c.speaker for part in self._clips.values() for c in part if c.speaker is not None}))

    def clients(self, part: str) -> IntArray:
        """Silence belongs to speakers of the part that a hash chooses."""
        clips = self._clips[part]
        speakers = sorted({c.speaker for c in clips if c.speaker is not None})
        number = {name: i for i, name in enumerate(self.client_names)}
        owners = [c.speaker or speakers[_hash(f"{c.path} {c.start}") % len(speakers)] for c in clips]
        return np.array([number[owner] for owner in owners], dtype=np.int64)

    # -- files ------------------------------------------------------------------------------------------------------

    @cached_property
    def _clips(self) -> Mapping[str, tuple[Clip, ...]]:
        """The clips of "train" and "test", by class, then by name."""
        parts: dict[str, list[Clip]] = {"training": [], "validation": [], "testing": []}
        listed = self._listed()
        for clip in self._spoken():
            parts[part_of(clip.path) if listed is None else listed.get(clip.path, "training")].append(clip)
        silent = list(self._silent())
        for i, clip in enumerate(silent):  # the lists and the hash are of speakers
            parts[{8: "validation", 9: "testing"}.get(i % 10, "training")].append(clip)
        if not any(clip.speaker for clip in parts["training"]):  # the archive of the test set alone
            return _by_speaker([*parts["validation"], *parts["testing"], *parts["training"]], silent)
        found = {"train": tuple(parts["training"]), "test": tuple(parts["testing"])}
        for part, clips in found.items():
            if not clips:
                raise ValueError(f"{self.folder}: has no clips for the {part} part; unpack the archive again")
        return found

    def _listed(self) -> dict[str, str] | None:
        """The parts of the clips in the published lists; None without lists. Clips in neither are for training."""
        there = [name for name in LISTS if (self.folder / name).is_file()]
        if not there:
            return None
        if len(there) < len(LISTS):
            missing = next(name for name in LISTS if name not in there)
            raise ValueError(f"{self.folder / missing}: not found beside {there[0]}; unpack the archive again")
        return {
            line.strip(): part
            for name, part in zip(LISTS, ("validation", "testing"), strict=True)
            for line in _lines(self.folder / name)
        }

    def _spoken(self) -> Iterator[Clip]:
        missing = [word for word in WORDS if word not in self._folders]
        if missing:
            raise ValueError(f"{self.folder / missing[0]}: not found; Speech Commands has a folder per word: unpack it")
        label_of = {name: i for i, name in enumerate(self.class_names)}
        for folder in self._folders:
            if folder in (NOISE, SILENCE):
                continue
            for name in _waves(self.folder / folder):
                word = word_of(name) if folder == UNKNOWN and self.num_classes == MANY else folder
                label = label_of.get(word, label_of.get(UNKNOWN))
                if label is not None:  # of 35 classes none is for folders of something else
                    yield Clip(f"{folder}/{name}", label, speaker_of(name))

    def _silent(self) -> Iterator[Clip]:
        """Files of silence, else the seconds of the background noises; none for 35 classes."""
        if self.num_classes == MANY:
            return
        label = len(WORDS) + 1
        if (self.folder / SILENCE).is_dir():
            yield from (Clip(f"{SILENCE}/{name}", label, None) for name in _waves(self.folder / SILENCE))
        elif (self.folder / NOISE).is_dir():
            for name in _waves(self.folder / NOISE):
                last = _frames(self.folder / NOISE / name) - RATE
                yield from (Clip(f"{NOISE}/{name}", label, None, at) for at in range(0, last + 1, RATE))
        else:
            raise ValueError(f"{self.folder}: has neither {NOISE}/ nor {SILENCE}/, of which silence is made; unpack it")


def _waves(folder: Path) -> list[str]:
    names = sorted(f.name for f in folder.iterdir() if f.suffix == ".wav")
    if not names:
        raise ValueError(f"{folder}: has no .wav files; unpack the archive again")
    return names


def _hash(text: str) -> int:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}); unpack the archive again") from error


def _frames(path: Path) -> int:
    """The samples of a WAV file, from its head: reading sound needs packages that only preparation has."""
    try:
        with wave.open(str(path), "rb") as file:
            return file.getnframes()
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{path}: cannot be read as sound ({error or 'it ends early'}); expected 16 kHz mono WAV"
        ) from error


def _by_speaker(clips: Sequence[Clip], silent: Sequence[Clip]) -> Mapping[str, tuple[Clip, ...]]:
    """A fifth of the speakers, and of the silent clips, for the test part."""
    clips = sorted(clips, key=lambda c: (c.label, c.path, c.start))
    speakers = sorted({c.speaker for c in clips if c.speaker is not None})
    held = set(speakers[HELD_OUT - 1 :: HELD_OUT])
    held_silent = set(silent[HELD_OUT - 1 :: HELD_OUT])
    is_test = [clip in held_silent if clip.speaker is None else clip.speaker in held for clip in clips]
    pairs = list(zip(clips, is_test, strict=True))
    return {"train": tuple(c for c, test in pairs if not test), "test": tuple(c for c, test in pairs if test)}
