"""Everything an attempt needs, put together and brought to its pod before the hand-off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from firepool_broker.api.types import JobRequest
from firepool_broker.launch.agent_client import AgentClient
from firepool_broker.launch.specification import (
    LaunchSettings,
    Setting,
    attempt_spec,
    prepare_request,
    references,
)
from firepool_broker.store.blobs import BlobStore

__all__ = ["Delivery", "Undeliverable"]


class Undeliverable(Exception):
    """What a job needs is not there any more.

    Parameters
    ----------
    error_class
        ``PackageInvalid`` or ``LaunchFailed``.
    message
        What is missing and how to bring it.
    """

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


class Delivery:
    """Builds specifications, and hands blobs and packages over.

    Parameters
    ----------
    job
        Returns caller, pool and request of an unfinished job.
    setting
        Returns where a caller's job or session runs: by caller, tag (or None) and job id.
    settings
        What holds for every attempt, by pool.
    blobs
        What was uploaded, packages included.
    """

    def __init__(
        self,
        job: Callable[[str], tuple[str, str, str | None, JobRequest]],
        setting: Callable[[str, str | None, str], Setting],
        settings: Mapping[str, LaunchSettings],
        blobs: BlobStore,
    ) -> None:
        self._job = job
        self._setting = setting
        self._settings = settings
        self._blobs = blobs

    async def specification(self, job_id: str, attempt: int) -> dict[str, Any]:
        """Build the document that starts an attempt.

        Raises
        ------
        Undeliverable
            When a blob or package that it names is not stored.
        """
        caller, pool, tag, request = self._job(job_id)
        for kind, digest in references(request):
            if self._blobs.path(digest) is None:
                what = "package" if kind == "packages" else "input"
                raise Undeliverable(
                    "PackageInvalid" if kind == "packages" else "LaunchFailed",
                    f"the {what} {digest} is not stored (any more); upload it and submit again",
                )
        setting = self._setting(caller, tag, job_id)
        os.makedirs(setting.session_dir, mode=0o700, exist_ok=True)
        return attempt_spec(job_id, attempt, caller, request, setting, self._settings[pool])

    async def deliver(self, client: AgentClient, folder: str, job_id: str) -> None:
        """Hand over what the job names, all at once.

        Parameters
        ----------
        folder
            One that broker and agent see under the same path. A pod need not see the broker's
            own folders, so each file is linked there first.
        """
        wanted = references(self._job(job_id)[3])
        if wanted:
            await asyncio.gather(
                *(self._hand_over(client, folder, kind, digest) for kind, digest in wanted)
            )

    async def _hand_over(self, client: AgentClient, folder: str, kind: str, digest: str) -> None:
        path = self._blobs.path(digest)
        if path is None:
            return  # the agent names what it lacks
        link = os.path.join(folder, f"{kind}-{digest}.incoming")
        try:
            await asyncio.to_thread(_link, str(path), link)
            await client.deliver(kind, digest, link)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)

    def prepare_request(self, pool: str, caller: str, tag: str) -> dict[str, Any] | None:
        """Build what an agent is told to prepare for a session."""
        return prepare_request(self._setting(caller, tag, ""), self._settings[pool])


def _link(path: str, link: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link)
    try:
        os.link(path, link)
    except OSError:
        shutil.copyfile(path, link)  # another file system, or one without links
