"""System V IPC and POSIX message queues: what is there, who made it, how to remove it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_IPC_RMID = 0
_TABLES = {
    "shm": ("shmid", "System V shared memory"),
    "sem": ("semid", "System V semaphores"),
    "msg": ("msqid", "a System V message queue"),
}


@dataclass(frozen=True)
class Object:
    """One System V object.

    Attributes
    ----------
    kind : {"shm", "sem", "msg"}
        Which table it stands in.
    number : int
        Its identifier.
    key : int
        Its key, 0 for a private one.
    owner : int
        User number.
    creator : int or None
        Process that made it; known for shared memory only.
    changed : int
        Unix seconds of its creation or last change.
    attached : int
        How many attachments a segment has.
    """

    kind: str
    number: int
    key: int
    owner: int
    creator: int | None
    changed: int
    attached: int

    def __str__(self) -> str:
        words = _TABLES[self.kind][1]
        return f"{words} with key 0x{self.key & 0xFFFFFFFF:x} (id {self.number})"


def objects() -> list[Object]:
    """Every System V object of this process's IPC namespace."""
    found: list[Object] = []
    for kind, (identifier, _) in _TABLES.items():
        try:
            with open(f"/proc/sysvipc/{kind}") as file:
                header, *lines = file.read().splitlines()
        except OSError:
            continue
        names = header.split()
        for line in lines:
            row = dict(zip(names, line.split(), strict=False))
            found.append(
                Object(
                    kind=kind,
                    number=int(row[identifier]),
                    key=int(row["key"]),
                    owner=int(row["uid"]),
                    creator=int(row["cpid"]) if "cpid" in row else None,
                    changed=int(row["ctime"]),
                    attached=int(row.get("nattch", 0)),
                )
            )
    return found


def remove(found: Object) -> None:
    """Remove one object; one that is gone already is no error.

    Raises
    ------
    OSError
        The system refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_int(found.number)
    if found.kind == "shm":
        result = library.shmctl(number, _IPC_RMID, None)
    elif found.kind == "sem":
        result = library.semctl(number, 0, _IPC_RMID)
    else:
        result = library.msgctl(number, _IPC_RMID, None)
    if result != 0:
        code = ctypes.get_errno()
        if code not in (22, 43):  # EINVAL, EIDRM: it is gone
            raise OSError(code, f"{found}: {os.strerror(code)}")


def remove_queues(folder: str) -> list[str]:
    """Unlink every POSIX message queue that a queue file system shows.

    Returns
    -------
    list of str
        What could not be removed.
    """
    failures = []
    for name in os.listdir(folder):
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            continue
        except OSError as error:
            failures.append(f"message queue /{name}: {error.strerror}")
    return failures
