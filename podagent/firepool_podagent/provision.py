"""What an attempt needs before its job can start: its package unpacked, its requirements installed.

Unpacking runs in a forked child and installing in supervised programs, so that neither holds the
agent up and nothing of either stays behind when the attempt is stopped.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from firepool_podagent.attempts import Attempt
from firepool_podagent.children import ChildFailedError, Children
from firepool_podagent.delivery import Deliveries
from firepool_podagent.templates import own_environment

_LOCK_SECONDS = 0.1


class ProvisionFailedError(RuntimeError):
    """The attempt cannot start.

    Attributes
    ----------
    error_class : str
        Class of its outcome.
    """

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


class Provisioner:
    """Prepares attempts of one pod."""

    def __init__(self, children: Children, deliveries: Deliveries) -> None:
        self._children = children
        self._deliveries = deliveries

    async def package(self, attempt: Attempt, folder: Path) -> str | None:
        """Unpack the attempt's package as a new folder; returns its path.

        Raises
        ------
        ProvisionFailedError
            ``PackageInvalid``; nothing is left of it.
        """
        sha256 = attempt.spec.get("package")
        if not sha256:
            return None
        try:
            await self._children.work(self._deliveries.extraction(sha256, folder))
        except ChildFailedError as error:
            raise ProvisionFailedError("PackageInvalid", str(error)) from None
        return str(folder)

    async def overlays(self, attempt: Attempt, package: str | None) -> list[str]:
        """Install what the attempt requires; returns the folders for its path, first ones first.

        Raises
        ------
        ProvisionFailedError
            ``RequirementsFailed``, with the resolver's own message.
        """
        spec = attempt.spec
        found = []
        if spec.get("requirements"):
            found.append(await self._install(attempt, package))
        if not (Path(spec["session_dir"]) / ".firepool").exists():
            return found
        # Imported late: neither they nor what they import is needed by most attempts.
        from firepool_podagent.interpreter.sessionpip import session_overlay
        from firepool_podagent.overlays import Overlay

        session = Overlay(session_overlay({**spec, "environment": _environment(spec)}))
        if session.is_complete():
            found.append(str(session.path))
        return found

    async def _install(self, attempt: Attempt, package: str | None) -> str:
        from firepool_podagent.overlays import evict
        from firepool_podagent.requirements import Installation, RequirementsFailedError

        spec = attempt.spec
        options = spec.get("requirements_options") or {}
        root = options.get("overlay_root") or str(Path(spec["session_dir"]) / ".firepool")
        try:
            installation = Installation(
                _environment(spec),
                spec["requirements"],
                overlay_root=root,
                package=package,
                index_url=options.get("index_url"),
                variables={**spec.get("env", {}), **spec.get("protected_env", {})},
            )
            overlay = installation.overlay
            if not overlay.is_complete():
                attempt.status("installing", requirements=list(spec["requirements"]))
                await self._fill(attempt, installation)
        except RequirementsFailedError as error:
            raise ProvisionFailedError("RequirementsFailed", str(error)) from None
        evict(root, keep=[str(overlay.path)])
        return str(overlay.path)

    async def _fill(self, attempt: Attempt, installation: Any) -> None:
        while not installation.overlay.acquire():  # another pod fills it right now
            await asyncio.wait((attempt.stopped,), timeout=_LOCK_SECONDS)
            if attempt.stopped.done():
                raise ProvisionFailedError("Cancelled", "the job was stopped before it began")
        try:
            if installation.overlay.is_complete():
                return
            command = installation.begin()
            while command is not None:
                code, output = await self._children.supervised(
                    command.argv, command.env, command.cwd, attempt.stopped, command.timeout_seconds
                )
                if attempt.stopped.done():
                    raise ProvisionFailedError("Cancelled", "the job was stopped before it began")
                command = installation.advance(code, output)
        finally:
            installation.abandon()
        added = ", ".join(f"{name} {version}" for name, version in installation.installed.items())
        attempt.say("info", f"installed {added or 'nothing new'}")


def _environment(spec: dict[str, Any]) -> dict[str, Any]:
    return spec.get("environment") or own_environment()
