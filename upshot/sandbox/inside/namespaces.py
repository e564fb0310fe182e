"""Namespaces: the zygote's (network, mounts, a small read-only root) and each run's (processes, mounts, IPC, /tmp)."""

from __future__ import annotations

import os
import sys
from urllib.parse import quote, unquote

from upshot.sandbox.inside import kernel

ZYGOTE_FLAGS = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
RUN_FLAGS = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
INNER_ID = 1000
SCRATCH = "/box/tmp"
"""Where a run's private /tmp is mounted; /tmp points there."""
KEPT = "/.kept"
"""The place of trees that outside are below /tmp (such as a Python there): every run's own /tmp shows them again."""
DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime", "/etc/java-17-openjdk")
PASSWD = "root:x:0:0:root:/:/bin/false\nsandbox:x:{user}:{user}:sandbox:/tmp:/bin/sh\n"


def python_paths() -> list[str]:
    """Every directory from which this Python imports, and its prefix; not the working tree of a user's project."""
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    inside = [os.path.realpath(path) for path in prefixes]
    libraries = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return _without_nested([*prefixes, *inside, *libraries])


def visible_paths(extra: tuple[str, ...] = ()) -> list[str]:
    """All trees that a program may read."""
    system = [path for path in SYSTEM_PATHS if os.path.exists(path)]
    if os.path.realpath(sys.base_prefix).startswith("/nix/store/"):
        system.append("/nix/store")  # there, every library has a separate tree beside Python's
    return _without_nested([*system, *python_paths(), *extra])


def _without_nested(paths: list[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if os.path.exists(path) and not any(path.startswith(f"{outer.rstrip('/')}/") for outer in kept):
            kept.append(path)
    return kept


def enter(kind: str, workbench: str, uid: int | None = None, extra: tuple[str, ...] = ()) -> None:
    """Move this process into fresh namespaces behind a small read-only root; kind is 'root' or 'user'.

    workbench: an existing empty directory on which the new root is mounted while it is built. extra: directories shown
    read-only besides the system's and Python's. With a user namespace, real root first becomes `uid`, because root
    inside would own root's files outside.
    """
    user = INNER_ID if uid is None or kind == "user" else uid  # the user of the programs, for /etc/passwd
    if kind == "user":
        if uid is not None:
            become(uid)
        uid, gid = os.geteuid(), os.getegid()
        kernel.call("unshare", kernel.CLONE_NEWUSER | ZYGOTE_FLAGS)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INNER_ID} {uid} 1")
        _write("/proc/self/gid_map", f"{INNER_ID} {gid} 1")
    else:
        kernel.call("unshare", ZYGOTE_FLAGS)
    _build_root(workbench, extra, user)


def become(uid: int) -> None:
    """Change to an ordinary user for good, keeping the right to write our own /proc entries."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _build_root(base: str, extra: tuple[str, ...], user: int) -> None:
    kernel.call("mount", "none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE, None)
    kernel.call("mount", "tmpfs", base, "tmpfs", kernel.MS_NOSUID, "size=4m,nr_inodes=4096,mode=755")
    for name in ("box", "box/tmp", "dev", "etc", "proc", ".old"):
        os.mkdir(f"{base}/{name}", 0o755)
    # The run's /tmp is mounted below a separate directory, so that one Landlock rule on that directory, made once,
    # covers every run's fresh file system.
    os.symlink(SCRATCH, f"{base}/tmp")
    for path in visible_paths(extra):
        if path.startswith("/tmp/"):
            _bind(os.path.realpath(path), f"{base}{KEPT}/{quote(path, safe='')}")
        elif os.path.islink(path) and not os.path.isabs(os.readlink(path)):
            os.symlink(os.readlink(path), base + path)
        else:
            _bind(os.path.realpath(path), base + path)
    for path in SYSTEM_FILES:
        if os.path.exists(path):
            _bind(os.path.realpath(path), base + path)
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{base}/dev/{name}", kernel.MS_RDONLY | kernel.MS_NOSUID)  # it can still be written to
    _write(f"{base}/etc/passwd", PASSWD.format(user=user))
    os.symlink("/tmp", f"{base}/dev/shm")
    for link, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
        os.symlink(target, f"{base}/dev/{link}")
    kernel.syscall("pivot_root", base, f"{base}/.old")
    os.chdir("/")
    kernel.call("umount2", "/.old", kernel.MNT_DETACH)  # though it is still in use
    os.rmdir("/.old")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    kernel.call("mount", "none", "/", None, flags, None)


def _bind(source: str, target: str, flags: int = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV) -> None:
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        _write(target, "")
    kernel.call("mount", source, target, None, kernel.MS_BIND | kernel.MS_REC, None)
    kernel.set_mount_flags(target, flags)


def private_tmp(megabytes: int, inodes: int, uid: int, gid: int) -> list[kernel.Step]:
    """The prepared mounts of a run's own /tmp, in memory and of bounded size, empty except for the kept trees."""
    options = f"size={megabytes}m,nr_inodes={inodes},mode=700,uid={uid},gid={gid}"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    steps = [kernel.step("mount", "tmpfs", SCRATCH, "tmpfs", flags, options)]
    made: set[str] = set()
    for name in sorted(os.listdir(KEPT)) if os.path.isdir(KEPT) else ():
        place = SCRATCH
        for part in unquote(name).split("/")[2:]:
            place = f"{place}/{part}"
            if place not in made:
                made.add(place)
                # Its mode is set again, whatever the umask.
                steps += [kernel.step("mkdir", place, 0o755), kernel.step("chmod", place, 0o755)]
        # A bind mount of a read-only bind mount is read-only, too.
        steps.append(kernel.step("mount", f"{KEPT}/{name}", place, None, kernel.MS_BIND | kernel.MS_REC, None))
    return steps


def private_proc() -> kernel.Step:
    """The prepared mount of /proc showing a run's own processes only."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    return kernel.step("mount", "proc", "/proc", "proc", flags, "hidepid=invisible,subset=pid")
