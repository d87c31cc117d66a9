"""A command line that runs a process in user, mount, network and process namespaces, if the system allows it.

The process sees Python, the system's libraries and an empty folder, in which it starts. It sees no other file of the
user, no ``/proc``, no other process and no network. bubblewrap (``bwrap``) is used if it is installed, else
``unshare``, ``mount``, ``pivot_root`` and ``setpriv`` of util-linux.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

#: pivot_root and mount are in /usr/sbin or /sbin on some systems
PATH = os.pathsep.join([os.defpath, "/usr/local/bin", "/usr/bin", "/usr/sbin", "/bin", "/sbin"])
#: the longest that the trial of a program may take
PROBE_SECONDS = 60.0
#: runs in the namespaces, in an empty folder: makes a new root with the arguments before ``--``, read-only, then runs
#: the command. umount needs /proc, so an empty folder is mounted over the old root; without capabilities it stays
#: there.
_NEW_ROOT = """
set -e
root=$PWD
mount -t tmpfs tmpfs "$root"
mkdir "$root/dev" "$root/empty" "$root/old"
bind() {
  if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root$(dirname "$1")"; : > "$root$1"; fi
  mount --bind "$1" "$root$1"
}
bind /dev/null
while [ "$1" != -- ]; do
  if [ -L "$1" ]; then ln -s "$(readlink "$1")" "$root$1"
  else bind "$1"; mount -o remount,bind,ro "$root$1"
  fi
  shift
done
shift
cd "$root"
pivot_root . old
mount -t tmpfs -o ro tmpfs /old
cd /empty
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@"
"""


def _places(files: Sequence[Path]) -> list[str]:
    """What the process may read: the system's programs and libraries, this Python, and ``files``."""
    system = [place for place in ("/usr", "/bin", "/sbin", "/lib", "/lib64") if os.path.lexists(place)]
    python = [place for place in (sys.base_prefix, sys.prefix) if not Path(place).is_relative_to("/usr")]
    return list(dict.fromkeys([*system, *python, *map(str, files)]))


def _bubblewrap(files: Sequence[Path]) -> list[str]:
    command = (
        "bwrap --unshare-all --die-with-parent --new-session --cap-drop ALL --dev /dev --dir /empty --chdir /empty"
    )
    words = command.split()
    for place in _places(files):
        link = os.path.islink(place) and place.count("/") == 1
        words += ["--symlink", os.readlink(place), place] if link else ["--ro-bind", place, place]
    return words


def _util_linux(files: Sequence[Path]) -> list[str]:
    command = "unshare --user --map-root-user --net --ipc --uts --mount --pid --fork --kill-child -- sh -c"
    return [*command.split(), _NEW_ROOT, "sh", *_places(files), "--"]


@cache
def sandbox(*files: Path) -> tuple[list[str], str]:
    """The words to put before a command of this Python, and their name; no words and a warning if nothing works.

    The command is to be started in an empty folder.

    Args:
        files: further files that the process may read.
    """
    reasons = []
    for program, words in (("bwrap", _bubblewrap(files)), ("unshare", _util_linux(files))):
        if shutil.which(program) is None:
            reasons.append(f"{program} is not installed")
            continue
        probe = [*words, sys.executable, "-I", "-c", "import os; print(os.path.exists('/proc/self'), os.getpid() < 9)"]
        try:
            with tempfile.TemporaryDirectory() as folder:
                ran = subprocess.run(
                    probe, capture_output=True, text=True, timeout=PROBE_SECONDS, env={"PATH": PATH}, cwd=folder
                )
        except subprocess.TimeoutExpired:
            reasons.append(f"{program}: did not end within {PROBE_SECONDS:g} s")
            continue
        except (subprocess.SubprocessError, OSError, ValueError) as error:  # ValueError: it wrote what is not UTF-8
            reasons.append(f"{program}: {getattr(error, 'strerror', None) or error}")
            continue
        if ran.stdout.split() == ["False", "True"]:
            return words, f"namespaces by {program}"
        reasons.append(f"{program}: {(ran.stderr.strip() or 'it hides nothing').splitlines()[-1]}")
    logging.getLogger("fs_lowrank").warning(
        "HumanEval: generated code runs without namespaces and can read every file that you can read (%s); install "
        "bubblewrap, or use a container",
        "; ".join(reasons),
    )
    return [], "no namespaces"
