"""Checkpoints on disk: each is a folder that appears whole or not at all, and is read only if every byte is as written.

`step-000040/` holds state.json, tensors.safetensors, buffer.safetensors, adapters/<version>.safetensors and
manifest.json: the format, the identity of the run, the step, and size and sha256 of every other file. It is built under
a hidden name, `.step-000040.part`, and renamed. One that is written again is first set aside as
`.step-000040.replaced`, where it counts until its successor stands.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from estr_lite.codec import pack, pack_rollouts, unpack, unpack_rollouts
from estr_lite.policy.adapter import Adapter, known
from estr_lite.types import Group

FORMAT = 1
STATE, TENSORS, BUFFER, MANIFEST = "state.json", "tensors.safetensors", "buffer.safetensors", "manifest.json"
FILE = re.compile(r"state\.json|(tensors|buffer|adapters/\d+)\.safetensors")
FOLDER = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")
PROBE = "probe_logp"  # beside an adapter's tensors, whose names have dots


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped."""

    step: int  # training steps done
    state: Mapping[str, Any]  # JSON values: counters, ledger, cursor, tickets in flight
    tensors: Mapping[str, Tensor]  # weights, optimizer state, RNG states
    groups: Sequence[Group]  # finished groups that wait to be trained
    adapters: Mapping[int, Adapter]  # versions still needed


class Checkpoints:
    """The last `keep` checkpoints of the run that `identity` names, in one folder.

    Checkpoints that `newest` refused are left where they are and do not count; `tell` hears why.
    """

    def __init__(self, folder: Path, keep: int, identity: str, tell: Callable[[str], None]) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: the newest checkpoint always stays.")
        self.folder, self.keep, self.identity = folder, keep, identity
        self._tell = tell
        self._refused = set[Path]()

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then delete all but the last `keep`; killed at any moment, the newest is whole.

        Raises:
            OSError: if it cannot be written; earlier ones stay.
        """
        name = f"step-{checkpoint.step:06d}"
        target, part, aside = self.folder / name, self.folder / f".{name}.part", self.folder / f".{name}.replaced"
        try:
            self._tidy()
            self._build(part, checkpoint)
            if target.exists():
                target.rename(aside)
            part.rename(target)
            _sync(self.folder)
            _sync(self.folder.parent)
        except OSError as error:
            raise OSError(
                f"Checkpoint {target} cannot be written: {error.strerror or error}. Earlier ones stay. "
                f"Free disk space, or name another run folder."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._refused.discard(target)
        older = [path for step, path in self._found() if step < checkpoint.step]
        for path in older[: max(0, len(older) - self.keep + 1)]:
            with suppress(OSError):
                path.rename(path.with_name(f".{path.name.lstrip('.')}.part"))  # no half-deleted one is ever seen
        self._tidy()
        return target

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole and this run's; None if there is none."""
        reasons = dict[Path, str]()
        found = None
        for _, path in reversed(self._found()):
            try:
                found = self._read(path)
            except ValueError as error:
                reasons[path] = str(error)
            else:
                instead = f"{path.name} is used instead"
                break
        else:
            instead = "there is no other to use instead"
        for path, reason in reasons.items():
            self._tell(f"Checkpoint {path} is refused, because {reason}; {instead}.")
        self._refused.update(reasons)
        return found

    def _found(self) -> list[tuple[int, Path]]:
        """Steps and folders, oldest first, without those that were refused."""
        matches = [(FOLDER.fullmatch(path.name), path) for path in self.folder.glob("*step-*")]
        found = [(int(match[1] or match[2]), path) for match, path in matches if match and path not in self._refused]
        return sorted(found, key=lambda item: (item[0], item[1].name))  # "." sorts before "s"

    def _build(self, part: Path, checkpoint: Checkpoint) -> None:
        (part / "adapters").mkdir(parents=True)
        header, rollouts = pack_rollouts([(group.ticket, group.rollouts) for group in checkpoint.groups])
        contents = {
            STATE: json.dumps(checkpoint.state, allow_nan=False).encode(),
            TENSORS: pack({}, checkpoint.tensors),
            BUFFER: pack({"groups": header}, rollouts),
        }
        entries = {name: _write(part / name, data) for name, data in contents.items()}
        previous = [path for _, path in self._found()][-1:]
        for version, adapter in checkpoint.adapters.items():
            name = f"adapters/{version}.safetensors"
            data = pack({"version": version}, {**adapter.tensors, PROBE: adapter.probe_logp})
            linked = any(_link(path / name, part / name, data) for path in previous)
            entries[name] = _entry(data) if linked else _write(part / name, data)
        manifest = {"format": FORMAT, "identity": self.identity, "step": checkpoint.step, "files": entries}
        _write(part / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        _sync(part / "adapters")
        _sync(part)

    def _read(self, folder: Path) -> Checkpoint:
        """The checkpoint in a folder; ValueError says which file or field is not as it was written."""
        match = FOLDER.fullmatch(folder.name)
        assert match is not None
        step = int(match[1] or match[2])
        contents = {name: _content(folder, name, entry) for name, entry in self._manifest(folder, step).items()}
        header, rollouts = unpack(contents[BUFFER])
        return Checkpoint(
            step=step,
            state=json.loads(contents[STATE]),
            tensors=unpack(contents[TENSORS])[1],
            groups=[Group(ticket, found) for ticket, found in unpack_rollouts(header["groups"], rollouts)],
            adapters=dict(_adapter(data) for name, data in contents.items() if name.startswith("adapters/")),
        )

    def _manifest(self, folder: Path, step: int) -> dict[str, Any]:
        """What the manifest says of every file."""
        expected = {"format": FORMAT, "step": step, "identity": self.identity}
        data = _bytes(folder, MANIFEST)
        try:
            manifest = json.loads(data)
            found = {field: manifest[field] for field in expected}
            files = dict[str, dict[str, Any]](manifest["files"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{MANIFEST} is damaged: {error!r}") from error
        for field, value in expected.items():
            if found[field] != value:
                why = ": a run of another configuration or model wrote it" if field == "identity" else ""
                raise ValueError(f"its {field} is {reprlib.repr(found[field])}, not {reprlib.repr(value)}{why}")
        missing = {STATE, TENSORS, BUFFER} - files.keys()
        foreign = {name for name in files if not FILE.fullmatch(name)}
        if missing or foreign:
            raise ValueError(f"{MANIFEST} does not list {sorted(missing)}, or lists {sorted(foreign)}")
        return files

    def _tidy(self) -> None:
        """Delete what was left half-written or half-deleted, and what has its successor."""
        for path in self.folder.glob(".step-*"):
            if path.suffix == ".part" or (self.folder / path.stem[1:]).exists():
                shutil.rmtree(path, ignore_errors=True)


def _adapter(data: bytes) -> tuple[int, Adapter]:
    header, tensors = unpack(data)
    probe = tensors.pop(PROBE)
    return header["version"], Adapter(header["version"], tensors, known(probe))


def _entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _content(folder: Path, name: str, entry: object) -> bytes:
    """A file's bytes; ValueError if they are not those of its manifest entry."""
    data = _bytes(folder, name)
    found = _entry(data)
    if found == entry:
        return data
    if not isinstance(entry, dict) or entry.keys() != found.keys():
        raise ValueError(f"{MANIFEST} is damaged: it has no size and sha256 of {name}")
    if entry["size"] != found["size"]:
        raise ValueError(f"{name} has {found['size']} bytes where {MANIFEST} says {entry['size']}")
    raise ValueError(f"{name} is damaged: its sha256 is not the one in {MANIFEST}")


def _bytes(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{name} is missing") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error


def _write(path: Path, data: bytes) -> dict[str, Any]:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return _entry(data)


def _link(source: Path, path: Path, data: bytes) -> bool:
    """Link to a file that holds just these bytes; False where there is none, or no link can be made."""
    try:
        if source.read_bytes() != data:
            return False
        os.link(source, path)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Make renames in a folder last; only POSIX has a way to."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
