"""Where compiled kernels and models are kept on this machine, and on what kind of disk."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayssm_orch.orchestrator.diagnosis import Cache

# Types in /proc/mounts whose files live on another machine; FUSE ones are `fuse.<program>`.
_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2"),
    *("orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
}
_NETWORK_FUSE = {
    *("beegfs", "ceph", "ceph-fuse", "gcsfuse", "glusterfs", "goofys", "juicefs", "rclone", "s3fs", "sshfs"),
    *("blobfuse", "blobfuse2", "lustre", "mount-s3", "quobyte"),
}
# A model cache may hold very many files; counting this many takes under a second on a local disk.
_MOST_ENTRIES = 50_000


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/mounts."""

    point: str
    file_system: str


def look_at_caches(environment: Mapping[str, str]) -> tuple[Cache, ...]:
    """The caches that the packages use under `environment`."""
    mounts = parse_mounts(_read_mounts())
    return tuple(
        _cache(name, variable, path, name != "huggingface", mounts)
        for name, (variable, path) in cache_paths(environment).items()
    )


def cache_paths(environment: Mapping[str, str]) -> dict[str, tuple[str, Path]]:
    """Cache name -> the variable that moves it, and where it is.

    Sources: flashinfer.jit.env, triton.knobs.cache_knobs, vllm.envs, torch._inductor.runtime.cache_dir_utils,
    huggingface_hub.constants. vLLM points Inductor and Triton into its own root while it compiles a model.
    """
    home = Path(environment.get("HOME") or Path.home())
    xdg = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    defaults = {
        "flashinfer": ("FLASHINFER_WORKSPACE_BASE", home),
        "triton": ("TRITON_CACHE_DIR", Path(environment.get("TRITON_HOME") or home) / ".triton" / "cache"),
        "vllm": ("VLLM_CACHE_ROOT", xdg / "vllm"),
        "torchinductor": ("TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"),
        "huggingface": ("HF_HOME", xdg / "huggingface"),
    }
    paths = {
        name: (variable, Path(environment.get(variable) or default).expanduser().absolute())
        for name, (variable, default) in defaults.items()
    }
    variable, workspace = paths["flashinfer"]
    return paths | {"flashinfer": (variable, workspace / ".cache" / "flashinfer")}


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """The mounts of /proc/mounts, in its order; its octal escapes (`\\040` for a space) are undone."""
    fields = (line.split() for line in text.splitlines())
    return tuple(Mount(_unescape(line[1]), line[2]) for line in fields if len(line) >= 3)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that holds the absolute `path`: the deepest, and of several at one point the last."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(Path(mount.point).parts), default=None)


def is_network(file_system: str) -> bool:
    """Whether files of this type live on another machine."""
    program = file_system.removeprefix("fuse.")
    return file_system in _NETWORK or (program != file_system and program in _NETWORK_FUSE)


def directory_size(path: Path, most_entries: int = _MOST_ENTRIES) -> tuple[int, bool]:
    """(bytes on disk, complete) under `path`; after `most_entries` entries it stops and is not complete.

    Symbolic links are not followed, a file with several names counts once, what cannot be read counts nothing.
    """
    total = entries = 0
    linked: set[tuple[int, int]] = set()
    for folder, directories, files in os.walk(path):
        for name in (*directories, *files):
            entries += 1
            if entries > most_entries:
                return total, False
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            inode = (status.st_dev, status.st_ino)
            if status.st_nlink > 1 and name in files and inode in linked:
                continue
            linked.add(inode)
            total += status.st_blocks * 512
    return total, True


def _cache(name: str, variable: str, path: Path, kernels: bool, mounts: Sequence[Mount]) -> Cache:
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    mount = mount_of(nearest.resolve(), mounts)
    file_system = mount.file_system if mount else "unknown"
    size, complete = directory_size(path) if path.is_dir() else (None, True)
    disk = os.statvfs(nearest)
    return Cache(
        name=name,
        variable=variable,
        path=str(path),
        exists=path.is_dir(),
        kernels=kernels,
        bytes=size,
        bytes_complete=complete,
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        file_system=file_system,
        network=is_network(file_system),
        free_bytes=disk.f_bavail * disk.f_frsize,
    )


def _user() -> str:
    """The user's name as Inductor spells it; a container's user may have none."""
    try:
        name = getpass.getuser()
    except (KeyError, ImportError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)


def _read_mounts() -> str:
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
