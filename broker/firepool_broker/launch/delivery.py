"""Everything an attempt needs, put together and brought to its pod before the hand-off."""

from __future__ import annotations

import asyncio
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
        return attempt_spec(job_id, attempt, caller, request, setting, self._settings[pool])

    async def deliver(self, client: AgentClient, job_id: str) -> None:
        """Hand over what the job names, by file, all at once."""
        wanted = references(self._job(job_id)[3])
        if not wanted:
            return
        transfers = []
        for kind, digest in wanted:
            path = self._blobs.path(digest)
            if path is not None:
                transfers.append(client.deliver(kind, digest, str(path)))
        await asyncio.gather(*transfers)

    def prepare_request(self, pool: str, caller: str, tag: str) -> dict[str, Any] | None:
        """Build what an agent is told to prepare for a session."""
        return prepare_request(self._setting(caller, tag, ""), self._settings[pool])
