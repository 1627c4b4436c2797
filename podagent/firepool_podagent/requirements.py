"""Requirements of a job, installed into an overlay: what to run, and what to make of its end.

Deciding is apart from running: `Installation` names one command after the other, and whoever owns
it runs them (the agent without blocking, ``%pip`` in a cell in the foreground) and hands back how
they ended. The steps:

1. *Plan*: the resolver is asked what the requirements would add to the environment. It looks at a
   stand-in (a folder that names the installed packages), because even a dry run may leave a lock
   file or compiled files behind: the environment itself is never written.
2. *Install* exactly that into a new folder, without looking at dependencies again.
3. The folder becomes the overlay, and its marker is written.

uv is used where there is one, otherwise pip (the environment's, or the copy that comes with
Python). A failure ends the installation: there is no second try and no marker.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from firepool_podagent import overlays
from firepool_podagent.overlays import Overlay

TIMEOUT_SECONDS: Final = 600.0
"""How long one step may take."""
_SHOWN_LINES = 15
_SOURCES = ("index_url", "extra_index_url", "trusted_host", "find_links", "no_index", "cert")
_REPORTING_PIP = (22, 2)

# What says where packages come from is kept; what could send them elsewhere is not.
_KEPT_VARIABLES = re.compile(
    r"PIP_((EXTRA_)?INDEX_URL|TRUSTED_HOST|FIND_LINKS|NO_INDEX|CERT|CLIENT_CERT|PROXY|CACHE_DIR"
    r"|DEFAULT_TIMEOUT|CONFIG_FILE|KEYRING_PROVIDER|ONLY_BINARY|NO_BINARY|PRE)"
    r"|UV_(DEFAULT_INDEX|INDEX\w*|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|INSECURE_HOST|NATIVE_TLS"
    r"|SYSTEM_CERTS|CACHE_DIR|HTTP_\w+|KEYRING_PROVIDER|OFFLINE|CONFIG_FILE|NO_BUILD\w*"
    r"|PRERELEASE|EXCLUDE_NEWER)"
)
_DROPPED_VARIABLES = re.compile(
    r"(PIP|UV|PYTHON|CONDA|POETRY|PDM|PIPENV)_?\w*|VIRTUAL_ENV|__PYVENV_LAUNCHER__"
)
_CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@")
_USER_INFORMATION = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([^\s/@'\"]+)@")
_SECRET_LENGTH = 4
_PLANNED = re.compile(r"^ [+~] (?P<requirement>.+?)(?: \(from (?P<url>\S+)\))?$")
_LOCAL_PATH = re.compile(
    r"^(?P<name>[\w.-]+(?:\[[^\]]*\])?\s*@\s*)?(?P<path>\.{1,2}/\S+)(?P<rest>.*)$"
)


class RequirementsFailedError(Exception):
    """An installation failed; the message is the resolver's own, credentials masked."""


@dataclass(frozen=True)
class Command:
    """A program to run to its end, its two outputs joined.

    ``argv`` holds no secret; ``env`` is the complete environment.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    timeout_seconds: float = TIMEOUT_SECONDS


def masked(text: str) -> str:
    """Return ``text`` without the credentials of the addresses in it."""
    return _CREDENTIALS.sub(r"\g<scheme>****@", text)


class Installation:
    """One list of requirements on its way into an overlay.

    Parameters
    ----------
    environment
        The session's environment: executable, prefix, base_prefix, version, digest.
    requirements
        Lines as in a requirements file.
    destination
        The overlay; by default the one for these requirements below ``overlay_root``.
    overlay_root
        Folder of the overlays that the pods of a machine share.
    package
        Folder that relative paths are relative to.
    index_url
        Index to use in the place of the person's own; may hold credentials.
    variables
        The session's environment variables.
    keep
        Whether what the destination has already stays (a session's overlay grows).
    """

    def __init__(
        self,
        environment: Mapping[str, Any],
        requirements: Sequence[str],
        *,
        overlay_root: str | None = None,
        destination: str | None = None,
        package: str | None = None,
        index_url: str | None = None,
        variables: Mapping[str, str],
        keep: bool = False,
    ) -> None:
        self._environment = environment
        self._package = package
        self._lines = [self._absolute(line) for line in requirements]
        self._index_url = index_url
        self._keep = keep
        self._variables = variables
        if destination is None:
            if overlay_root is None:
                raise ValueError("an installation needs overlay_root or destination")
            destination = os.path.join(overlay_root, environment["digest"], self._key())
        self.overlay = Overlay(destination)
        self.installed: dict[str, str] = {}
        """What the installation added: distribution to version; known at its end."""
        told = [index_url or "", *requirements, *variables.values()]
        self._secrets = {
            part
            for text in told
            for found in _USER_INFORMATION.findall(text)
            for part in found.split(":")[1:]
            if len(part) >= _SECRET_LENGTH
        }
        self._tool = _Tool.find(environment, variables)
        self._stage: Path | None = None
        self._step = ""

    # --- the steps ------------------------------------------------------------------------------

    def begin(self) -> Command | None:
        """Return the first command; the overlay's lock must be held.

        None: there is nothing to install, and the overlay is complete.
        """
        self.overlay.clear_incomplete()
        self._stage = self.overlay.stage()
        (self._stage / "site").mkdir()
        (self._stage / "requirements.txt").write_text("\n".join(self._lines) + "\n", "utf-8")
        self._make_stand_in()
        if any("--hash" in line for line in self._lines) or not self._tool.can_plan:
            # Hashes are for exactly what is written, so the list is complete as it stands.
            return self._command("install", "requirements.txt")
        return self._command("plan", "requirements.txt")

    def advance(self, return_code: int, output: str) -> Command | None:
        """Take note of how a command ended; return the next one, None at the end.

        Raises
        ------
        RequirementsFailedError
            The command failed. Nothing is left of the installation.
        """
        try:
            if return_code != 0:
                raise RequirementsFailedError(self._explain(output))
            if self._step == "plan":
                planned = self._tool.planned(output, self._staged("report.json"))
                self._staged("planned.txt").write_text("\n".join(planned) + "\n", "utf-8")
                if planned:
                    return self._command("install", "planned.txt")
            self._finish()
        except BaseException:
            self.abandon()
            raise
        return None

    def abandon(self) -> None:
        """Leave nothing behind and give the lock back; also after a command that ran too long."""
        if self._stage is not None:
            shutil.rmtree(self._stage, ignore_errors=True)
            self._stage = None
        self.overlay.release()

    def _finish(self) -> None:
        site = self._staged("site")
        (site / ".lock").unlink(missing_ok=True)
        self._point_scripts_home(site / "bin")
        self.installed = {
            name: overlays.version_of(metadata)
            for name, metadata in overlays.distributions(site).items()
        }
        if self._keep and self.overlay.path.exists():
            merged = self._staged("merged")
            overlays.copy_linked(self.overlay.path, merged)
            overlays.merge(site, merged)
            site = merged
        self.overlay.put(site)
        self.abandon()

    def _point_scripts_home(self, scripts: Path) -> None:
        """Let scripts name the environment's interpreter, not the stand-in's."""
        if not scripts.is_dir():
            return
        stand_in = str(self._staged("stand-in/bin/python")).encode()
        for script in scripts.iterdir():
            content = script.read_bytes()
            if content.startswith(b"#!") and stand_in in content[:4096]:
                executable = os.fsencode(self._environment["executable"])
                script.write_bytes(content.replace(stand_in, executable, 1))

    def _explain(self, output: str) -> str:
        lines = [line.rstrip() for line in self.masked(output).splitlines() if line.strip()]
        lines = [line for line in lines if "stand-in" not in line]  # our own folder says nothing
        shown = "\n".join(lines[-_SHOWN_LINES:]) or f"{self._tool.name} said nothing"
        return f"{self._tool.name} could not install the requirements:\n{shown}"

    def masked(self, text: str) -> str:
        """Return a tool's output without credentials, also where they stand by themselves."""
        text = masked(text)
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "****")
        return text

    # --- what the commands are made of ----------------------------------------------------------

    def _staged(self, name: str) -> Path:
        if self._stage is None:
            raise RuntimeError("the installation is over")
        return self._stage / name

    def _command(self, step: str, file: str) -> Command:
        self._step = step
        env = self._command_environment()
        argv = self._tool.command(
            step,
            python=str(self._staged("stand-in/bin/python")),
            file=str(self._staged(file)),
            target=str(self._staged("site")),
            report=str(self._staged("report.json")),
            resolved=file == "planned.txt",
            no_index=_no_index(env, self._environment),
        )
        return Command(argv, env, str(self._staged("")))

    def _command_environment(self) -> dict[str, str]:
        env = {
            name: value
            for name, value in self._variables.items()
            if _KEPT_VARIABLES.fullmatch(name) or not _DROPPED_VARIABLES.fullmatch(name)
        }
        if self._index_url is not None:
            for name in ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL"):
                env.pop(name, None)
            env["PIP_INDEX_URL"] = env["UV_DEFAULT_INDEX"] = self._index_url
        env.update(self._tool.variables(env, self._environment))
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        env["GIT_TERMINAL_PROMPT"] = "0"
        # cache and overlay are often on two disks, and a warning about it helps nobody
        env["UV_LINK_MODE"] = "copy"
        return env

    def _make_stand_in(self) -> None:
        """Make a virtual environment that names what the real one has installed."""
        stand_in = self._staged("stand-in")
        version = ".".join(self._environment["version"].split(".")[:2])
        packages = stand_in / "lib" / f"python{version}" / "site-packages"
        packages.mkdir(parents=True)
        (stand_in / "bin").mkdir()
        executable = os.path.realpath(self._environment["executable"])
        (stand_in / "bin" / "python").symlink_to(executable)
        (stand_in / "pyvenv.cfg").write_text(
            f"home = {os.path.dirname(executable)}\ninclude-system-site-packages = false\n"
            f"version = {self._environment['version']}\n",
            "utf-8",
        )
        layers = [site_packages(self._environment)]
        if self._keep:
            layers.append(self.overlay.path)
        for layer in layers:
            present = overlays.distributions(packages)
            for name, metadata in overlays.distributions(layer).items():
                if name in present:
                    shutil.rmtree(present[name])
                # A real folder: uv does not look into linked ones.
                (packages / metadata.name).mkdir()
                for file in metadata.iterdir():
                    (packages / metadata.name / file.name).symlink_to(file)
        pip = site_packages(self._environment) / "pip"
        if pip.is_dir():
            (packages / "pip").symlink_to(pip)

    # --- the requirements themselves --------------------------------------------------------------

    def _absolute(self, line: str) -> str:
        """Return a requirement with its relative path made absolute.

        Raises
        ------
        RequirementsFailedError
            The line asks for something that an overlay cannot hold, or the file is not there.
        """
        text = line.strip()
        if "\0" in text or "\n" in text:
            raise RequirementsFailedError(f"not one line of requirements: {masked(text)!r}")
        if re.match(r"-e\b|--editable\b", text):
            raise RequirementsFailedError(
                f"{masked(text)}: code of your own travels as a package; -e has no place here"
            )
        if re.match(r"(-r|-c|--requirement|--constraint)\b", text):
            raise RequirementsFailedError(
                f"{masked(text)}: write the lines of that file instead; it is not on the pod"
            )
        match = _LOCAL_PATH.match(text)
        if match is None:
            if not re.fullmatch(r"[^\s:@]+\.(whl|zip|tar\.gz)", text) or os.path.isabs(text):
                return text
            match = _LOCAL_PATH.match(f"./{text}")
        if match is None or self._package is None:
            raise RequirementsFailedError(f"{text}: there is no package to find it in")
        path = os.path.normpath(os.path.join(self._package, match["path"]))
        if not path.startswith(os.path.join(os.path.normpath(self._package), "")):
            raise RequirementsFailedError(f"{text}: lies outside the package")
        if not os.path.exists(path):
            raise RequirementsFailedError(f"{text}: the package has no such file")
        if match["name"]:
            name = match["name"].rstrip("@ \t")
            return f"{name} @ {Path(path).as_uri()}{match['rest']}"
        return f"{path}{match['rest']}"

    def _key(self) -> str:
        digest = hashlib.sha256()
        for line in self._lines:
            match = re.search(r"(?:^|file://)(/\S+)", line)
            if match and os.path.isfile(match[1]):  # by content, not by where it was unpacked
                content = hashlib.sha256(Path(match[1]).read_bytes()).hexdigest()
                line = line.replace(match[1], content)
            digest.update(line.encode() + b"\0")
        digest.update((self._index_url or "").encode())
        return digest.hexdigest()


def site_packages(environment: Mapping[str, Any]) -> Path:
    """Return the folder of an environment's installed packages."""
    version = ".".join(environment["version"].split(".")[:2])
    return Path(environment["prefix"]) / "lib" / f"python{version}" / "site-packages"


class _Tool:
    """The resolver: uv or pip."""

    def __init__(self, name: str, start: list[str], *, can_plan: bool, path: str = "") -> None:
        self.name = name
        self.can_plan = can_plan
        self._start = start
        self._path = path

    @staticmethod
    def find(environment: Mapping[str, Any], variables: Mapping[str, str]) -> _Tool:
        """Return the environment's uv, the one on the path, or pip."""
        beside = os.path.join(environment["prefix"], "bin", "uv")
        uv = (
            beside if os.access(beside, os.X_OK) else shutil.which("uv", path=variables.get("PATH"))
        )
        if uv:
            return _Tool("uv", [uv], can_plan=True)
        packages = site_packages(environment)
        pip = overlays.distributions(packages).get("pip")
        if pip is not None:
            numbers = re.findall(r"\d+", overlays.version_of(pip))[:2]
            return _Tool("pip", [], can_plan=tuple(map(int, numbers)) >= _REPORTING_PIP)
        version = ".".join(environment["version"].split(".")[:2])
        bundled = sorted(
            Path(environment["base_prefix"], "lib", f"python{version}").glob(
                "ensurepip/_bundled/pip-*.whl"
            )
        )
        if not bundled:
            raise RequirementsFailedError(
                f"{environment['prefix']} has neither uv nor pip: install one of them there"
            )
        return _Tool("pip", [], can_plan=True, path=str(bundled[-1]))

    def command(
        self,
        step: str,
        *,
        python: str,
        file: str,
        target: str,
        report: str,
        resolved: bool,
        no_index: bool,
    ) -> list[str]:
        """Return the command line of a step."""
        if self.name == "uv":
            argv = [*self._start, "pip", "install", "--no-progress", "--color", "never"]
            argv += ["--python", python, "-r", file]
            argv += ["--dry-run"] if step == "plan" else ["--target", target]
            argv += ["--no-index"] if no_index else []
        else:
            argv = [python, "-m", "pip", "install", "--no-input", "--no-color"]
            argv += ["--disable-pip-version-check", "--retries", "2", "--progress-bar", "off"]
            argv += ["-r", file]
            if step == "plan":
                argv += ["--dry-run", "--quiet", "--report", report]
            else:
                argv += ["--target", target, "--no-user", "--no-compile"]
        return [*argv, "--no-deps"] if resolved else argv

    def variables(self, env: Mapping[str, str], environment: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables that the tool needs beside those it was given."""
        if self.name == "uv":
            return _uv_variables(env, environment)
        return (
            {"PYTHONPATH": self._path, "PIP_REQUIRE_VIRTUALENV": "0"}
            if self._path
            else {"PIP_REQUIRE_VIRTUALENV": "0"}
        )

    def planned(self, output: str, report: Path) -> list[str]:
        """Return the exact requirements that a plan names."""
        if self.name == "uv":
            found = []
            for line in output.splitlines():
                match = _PLANNED.match(line)
                if match:
                    name = match["requirement"].partition("==")[0]
                    found.append(
                        f"{name} @ {match['url']}" if match["url"] else match["requirement"]
                    )
            return found
        return [_pinned(item) for item in json.loads(report.read_text("utf-8"))["install"]]


def _pinned(item: Mapping[str, Any]) -> str:
    metadata, source = item["metadata"], item["download_info"]
    if not item["is_direct"]:
        return f"{metadata['name']}=={metadata['version']}"
    if vcs := source.get("vcs_info"):
        return f"{metadata['name']} @ {vcs['vcs']}+{source['url']}@{vcs['commit_id']}"
    return f"{metadata['name']} @ {source['url']}"


def _uv_variables(env: Mapping[str, str], environment: Mapping[str, Any]) -> dict[str, str]:
    """Tell uv what the person told pip, where they told uv nothing."""
    told = {**_pip_configuration(env, environment)}
    for name in _SOURCES:
        if value := env.get(f"PIP_{name.upper()}"):
            told[name] = value
    if any(re.fullmatch(r"UV_(DEFAULT_INDEX|INDEX(_URL)?)", name) for name in env):
        for name in ("index_url", "extra_index_url"):
            told.pop(name, None)
    names = {
        "index_url": ("UV_DEFAULT_INDEX", " "),
        "extra_index_url": ("UV_INDEX", " "),
        "trusted_host": ("UV_INSECURE_HOST", " "),
        "find_links": ("UV_FIND_LINKS", ","),
        "cert": ("SSL_CERT_FILE", " "),
    }
    told.pop("no_index", None)  # an option only
    return {
        names[key][0]: names[key][1].join(value.split())
        for key, value in told.items()
        if names[key][0] not in env
    }


def _no_index(env: Mapping[str, str], environment: Mapping[str, Any]) -> bool:
    """Return whether the person told pip to use no index: uv knows that as an option only."""
    told = env.get("PIP_NO_INDEX") or _pip_configuration(env, environment).get("no_index", "")
    return told.lower() in ("1", "true", "yes", "on")


def _pip_configuration(env: Mapping[str, str], environment: Mapping[str, Any]) -> dict[str, str]:
    """Read where packages come from out of pip's configuration files, least specific first."""
    import configparser

    home = env.get("HOME", "")
    files = [
        "/etc/pip.conf",
        os.path.join(home, ".pip", "pip.conf"),
        os.path.join(env.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "pip/pip.conf"),
        os.path.join(environment["prefix"], "pip.conf"),
        env.get("PIP_CONFIG_FILE", ""),
    ]
    found = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, "utf-8")
        except (configparser.Error, UnicodeDecodeError):  # pip will say so if it is used
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                for name in (
                    "index-url",
                    "extra-index-url",
                    "trusted-host",
                    "find-links",
                    "no-index",
                ):
                    if value := parser.get(section, name, fallback=""):
                        found[name.replace("-", "_")] = value
    return found
