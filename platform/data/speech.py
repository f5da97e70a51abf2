"""Speech Commands as published (Warden 2018): one folder per word, one second of sound per file, clients by speaker.

    WORD/SPEAKER_nohash_N.wav            the archive of all clips, with validation_list.txt and testing_list.txt
    _background_noise_/*.wav             recordings from which silence is cut
    _unknown_/WORD_SPEAKER_nohash_N.wav  and _silence_/N.wav: only in the archive of the test set

Features are computed once, when the data are prepared: 40 mel-frequency cepstral coefficients of 51 frames, from sound
at 8 kHz, windows of 40 ms every 20 ms (FedorAS, App. E.2). What the paper leaves open follows the authors' code:
spectra of 400 samples, 128 bands of the HTK scale, and a tenth as many clips of silence as a speaker has spoken clips.
Their code cuts a new second out of the recordings of noise whenever silence is read; here each clip of silence is cut
once, from a stretch of the recording that only its part uses.

As in the paper, speakers of the test list are the test data, and speakers of the validation list the validation data if
clients hold none back (`data.validation_share=0`). The paper does not say how single clients are tested on words.
"""

from __future__ import annotations

import hashlib
import math
import wave
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray
from fedloom.platform.data.augment import FEATURES, OF_ALL
from fedloom.platform.data.source import Source
from fedloom.platform.seeding import stream

FOLDERS = ("speech_commands", "speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02")
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
"""The words of the task of 12 classes, in the order of their labels."""
UNKNOWN, SILENCE, NOISE = "_unknown_", "_silence_", "_background_noise_"
MANY = 35
"""The number of words in version 0.02; an excerpt of the test archive may lack rare ones."""
LISTS = ("validation_list.txt", "testing_list.txt")
RATE = 16_000
ZEROS, CUTOFF = 6, 0.99
"""Zero crossings of the resampler's sinc on either side, and its cutoff as a share of the lower rate's band."""
FRAMES = 51
HELD_OUT = 5
"""Every fifth speaker is for testing if there are no training clips."""

Sound = NDArray[np.float32]


@dataclass(frozen=True)
class Clip:
    """A second of sound: its path below the folder, label, speaker (None: unknown), and first sample in the file."""

    path: str
    label: int
    speaker: str | None
    start: int = 0


def speaker_of(path: str) -> str:
    """The speaker of a clip, from the file's name."""
    return Path(path).stem.partition("_nohash_")[0].rpartition("_")[2]


def word_of(name: str) -> str:
    """The word spoken in a file of the test archive's folder of other words, from the file's name."""
    return name.partition("_")[0]


def part_of(path: str) -> str:
    """The part of all clips of a speaker, by the authors' hash: validation or test (a tenth each), or train."""
    percent = _hash(speaker_of(path)) % 2**27 * (100.0 / (2**27 - 1))
    return "validation" if percent < 10 else "test" if percent < 20 else "train"


def mfcc(sound: Sound, features: str = "htk") -> Sound:
    """The features (40, 51) of one second of sound at 16 kHz, whose samples are in -1 to 1."""
    (librosa, _), f = _packages(), FEATURES[features]
    bands = {"sr": f["rate"], "hop_length": f["hop"], "n_mels": f["mels"]}
    if features == "htk":
        of_bands = {**bands, "n_fft": f["fft"], "win_length": f["window"], "htk": True, "norm": None}
        power = librosa.feature.melspectrogram(y=halved(sound), pad_mode="reflect", **of_bands)
        coefficients: Sound = librosa.feature.mfcc(S=librosa.power_to_db(power), n_mfcc=f["coefficients"])
    else:
        low = librosa.resample(sound, orig_sr=RATE, target_sr=f["rate"], res_type=f["resampler"])
        coefficients = librosa.feature.mfcc(y=low, n_mfcc=f["coefficients"], n_fft=f["window"], **bands)
    return coefficients.astype(np.float32)


def halved(sound: Sound) -> Sound:
    """The sound at half the rate, resampled by a sinc under a squared cosine: torchaudio's default."""
    width = math.ceil(ZEROS * 2 / CUTOFF)
    t = np.arange(-width, width + 2) / 2 * CUTOFF
    kernel = np.sinc(t) * np.cos(np.clip(t / ZEROS, -1, 1) * np.pi / 2) ** 2 * CUTOFF / 2
    low: Sound = np.correlate(np.pad(sound, (width, width + 1)), kernel, "valid")[::2]
    return low.astype(np.float32)


def read_second(path: Path, start: int = 0) -> Sound:
    """The samples (16000,) of a WAV file from index `start` on, in -1 to 1; a shorter sound is padded with zeros.

    Raises ValueError for a file that is no sound, empty, of another rate, or of several channels.
    """
    _, soundfile = _packages()
    try:
        samples, rate = soundfile.read(path, frames=RATE, start=start, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be read as sound ({error}); expected 16 kHz mono WAV") from error
    if rate != RATE or samples.shape[1] != 1:
        kind = f"{rate} Hz, {samples.shape[1]} channel{'s' if samples.shape[1] > 1 else ''}"
        raise ValueError(f"{path}: is {kind}; expected {RATE} Hz, 1 channel: convert it")
    if not len(samples):
        raise ValueError(f"{path}: has no samples; expected up to a second of sound: remove it")
    return np.pad(samples[:, 0], (0, RATE - len(samples)))


def _packages() -> tuple[Any, Any]:
    """librosa and soundfile, which only the preparation of sounds needs; ValueError if they cannot be imported."""
    try:
        import librosa
        import soundfile

        return librosa, soundfile
    except (ImportError, OSError) as error:  # soundfile loads a library of the system
        raise ValueError(
            f"speech_commands needs librosa and soundfile ({error}): pip install 'fedloom[speech]'"
        ) from error


@dataclass(frozen=True, eq=False)
class SpeechSource(Source):
    """The clips of a folder; created by `SpeechSource.find`."""

    folder: Path
    num_classes: int
    features: str = "htk"
    """The entry of `FEATURES` by which inputs are computed."""
    silence: float | None = 0.1
    """Silence as a share of spoken clips, per training speaker or other part; None: each second of noise once."""
    has_validation: bool = False
    kind = "features"
    scale = 1.0

    @classmethod
    def find(cls, root: Path, classes: int, **options: Any) -> SpeechSource | None:
        """The source in one of `FOLDERS` under `root`; None if there is none. ValueError for another `classes`."""
        if classes not in (12, MANY):
            raise ValueError(f"data.options.classes={classes}: Speech Commands is read with 12 or {MANY} classes")
        folder = next((root / name for name in FOLDERS if (root / name).is_dir()), None)
        return None if folder is None else cls(folder, classes, **options)

    @cached_property
    def class_names(self) -> Sequence[str]:
        """The words; for 12 classes the ten words, then the other words as one class, and silence."""
        if self.num_classes == len(WORDS) + 2:
            return (*WORDS, UNKNOWN, SILENCE)
        words = [name for name in self._folders if not name.startswith("_")]
        if UNKNOWN in self._folders:  # the test archive has all other words in one folder
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
            "features": dict(FEATURES[self.features]),
            "sha256_of_names_and_sizes": digest.hexdigest(),
            **({} if self.silence is None else {"silence": self.silence}),
        }

    def labels(self, part: str) -> IntArray:
        return np.array([clip.label for clip in self._clips[part]], dtype=np.int64)

    def inputs(self, part: str, rows: IntArray) -> AnyArray:
        clips = self._clips[part]
        features = np.empty((len(rows), 1, OF_ALL["coefficients"], FRAMES), dtype=np.float32)
        for i, row in enumerate(rows.tolist()):
            features[i, 0] = mfcc(read_second(self.folder / clips[row].path, clips[row].start), self.features)
        return features

    @cached_property
    def client_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The speakers of all parts."""
        return tuple(sorted({c.speaker for part in self._clips.values() for c in part if c.speaker is not None}))

    def clients(self, part: str) -> IntArray:
        """The client of each clip (n,); a hash assigns silence without a speaker to one of the part's speakers."""
        clips = self._clips[part]
        speakers = sorted({c.speaker for c in clips if c.speaker is not None})
        number = {name: i for i, name in enumerate(self.client_names)}
        owners = [c.speaker or speakers[_hash(f"{c.path} {c.start}") % len(speakers)] for c in clips]
        return np.array([number[owner] for owner in owners], dtype=np.int64)

    # -- files ------------------------------------------------------------------------------------------------------

    @cached_property
    def _clips(self) -> Mapping[str, tuple[Clip, ...]]:
        """The clips of every part, by class, then by name."""
        listed, spoken = self._listed(), list(self._spoken())
        part = {c.path: part_of(c.path) if listed is None else listed.get(c.path, "train") for c in spoken}
        alone = "train" not in part.values()  # the archive of the test set alone: its speakers are split in turn
        if alone:
            turns = {name: self._turn(i, alone) for i, name in enumerate(sorted({speaker_of(path) for path in part}))}
            part = {path: turns[speaker_of(path)] for path in part}
        parts = {name: [c for c in spoken if part[c.path] == name] for name in ("train", "test", "validation")}
        for name, clips in parts.items():
            if not clips and (name != "validation" or self.has_validation):
                raise ValueError(f"{self.folder}: has no clips for the {name} part; unpack the archive again")
            clips += self._silence(name, tuple(clips), alone)
            if alone:
                clips.sort(key=lambda c: (c.label, c.path, c.start))
        return {name: tuple(clips) for name, clips in parts.items() if name != "validation" or self.has_validation}

    def _turn(self, i: int, alone: bool) -> str:
        """The part of the i-th clip of silence or, with the archive of the test set alone, of the i-th speaker."""
        if not alone:
            return {8: "validation", 9: "test"}.get(i % 10, "train")
        if i % HELD_OUT == HELD_OUT - 1:
            return "test"
        return "validation" if self.has_validation and i % 10 == HELD_OUT - 2 else "train"

    def _silence(self, part: str, spoken: Sequence[Clip], alone: bool) -> list[Clip]:
        """The part's silence, drawn with replacement: per speaker for training, for other parts as a whole."""
        if self.num_classes == MANY or self.silence == 0:
            return []
        if self.silence is None:
            return [clip for i, clip in enumerate(self._seconds()) if self._turn(i, alone) == part]
        owners = Counter(c.speaker if part == "train" else None for c in spoken)
        places, rng = self._quiet(part, alone), stream(0, "silence", part)
        drawn = []
        for owner, count in sorted(owners.items(), key=lambda pair: str(pair[0])):
            for _ in range(int(count * self.silence)):
                path, first, last = places[rng.integers(len(places))]
                drawn.append(Clip(path, len(WORDS) + 1, owner, int(rng.integers(first, last + 1))))
        return drawn

    def _quiet(self, part: str, alone: bool) -> list[tuple[str, int, int]]:
        """Where the part's silence is drawn from: files, each with the first and last sample at which a clip may begin.

        The first 80 % of a recording of noise are for training, the next 10 % for validation, the last for testing.
        """
        if (self.folder / SILENCE).is_dir():
            return [(c.path, 0, 0) for i, c in enumerate(self._seconds()) if self._turn(i, alone) == part]
        low, high = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}[part]
        frames = {name: _frames(self.folder / name) for name in self._noises()}
        stretches = [(name, n * low // 10, n * high // 10 - RATE) for name, n in frames.items()]
        fitting = [stretch for stretch in stretches if stretch[1] <= stretch[2]]
        if not fitting:
            raise ValueError(
                f"{self.folder / NOISE}: has no recording of ten seconds or more; unpack the archive again"
            )
        return fitting

    def _listed(self) -> dict[str, str] | None:
        """The parts of the clips in the published lists; None without lists. Clips in neither are for training."""
        there = [name for name in LISTS if (self.folder / name).is_file()]
        if not there:
            return None
        if len(there) < len(LISTS):
            missing = next(name for name in LISTS if name not in there)
            raise ValueError(f"{self.folder / missing}: not found beside {there[0]}; unpack the archive again")
        part_of_clip: dict[str, str] = {}
        for name, part in zip(LISTS, ("validation", "test"), strict=True):
            path = self.folder / name
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text ({error}); unpack the archive again") from error
            part_of_clip |= {line.strip(): part for line in lines}
        return part_of_clip

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
                if label is not None:  # with 35 classes, other folders have no label
                    yield Clip(f"{folder}/{name}", label, speaker_of(name))

    def _seconds(self) -> Iterator[Clip]:
        """The files of silence or, without them, the seconds of the recordings of noise."""
        label = len(WORDS) + 1
        if (self.folder / SILENCE).is_dir():
            yield from (Clip(f"{SILENCE}/{name}", label, None) for name in _waves(self.folder / SILENCE))
            return
        for name in self._noises():
            last = _frames(self.folder / name) - RATE
            yield from (Clip(name, label, None, at) for at in range(0, last + 1, RATE))

    def _noises(self) -> list[str]:
        if not (self.folder / NOISE).is_dir():
            raise ValueError(f"{self.folder}: has neither {NOISE}/ nor {SILENCE}/ to make silence from; unpack it")
        return [f"{NOISE}/{name}" for name in _waves(self.folder / NOISE)]


def _waves(folder: Path) -> list[str]:
    names = sorted(f.name for f in folder.iterdir() if f.suffix == ".wav")
    if not names:
        raise ValueError(f"{folder}: has no .wav files; unpack the archive again")
    return names


def _hash(text: str) -> int:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)


def _frames(path: Path) -> int:
    """The number of samples in a WAV file, from its header: this needs none of the packages for reading sound."""
    try:
        with wave.open(str(path), "rb") as file:
            return file.getnframes()
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{path}: cannot be read as sound ({error or 'it ends early'}); expected 16 kHz mono WAV"
        ) from error
