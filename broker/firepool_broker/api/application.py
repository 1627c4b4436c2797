"""The route table and the application made of it."""

from __future__ import annotations

from msgspec import Struct
from tornado.web import Application

from firepool_broker.api.handlers import Handler, Parts
from firepool_broker.api.resources import blobs, broker, fleet, jobs, sessions


class Route(Struct, frozen=True):
    """A path and the handler that answers it.

    Parameters
    ----------
    path
        As in OpenAPI: a part in braces is a parameter, one segment long.
    handler
        The handler.
    """

    path: str
    handler: type[Handler]

    @property
    def pattern(self) -> str:
        """The path as a regular expression."""
        parts = self.path.split("/")
        return "/".join(
            f"(?P<{part[1:-1]}>[^/]+)" if part.startswith("{") else part.replace(".", r"\.")
            for part in parts
        )


ROUTES = (
    Route("/healthz", broker.Alive),
    Route("/readyz", broker.Ready),
    Route("/metrics", broker.MetricsPage),
    Route("/openapi.json", broker.Description),
    Route("/v1/whoami", broker.WhoamiPage),
    Route("/v1/shutdown", broker.Shutdown),
    Route("/v1/sessions", sessions.Sessions),
    Route("/v1/sessions/{lease_tag}", sessions.Session),
    Route("/v1/sessions/{lease_tag}/stream", sessions.Stream),
    Route("/v1/sessions/{lease_tag}/release", sessions.Release),
    Route("/v1/jobs", jobs.Jobs),
    Route("/v1/jobs/{job_id}", jobs.Job),
    Route("/v1/jobs/{job_id}/cancel", jobs.Cancel),
    Route("/v1/jobs/{job_id}/interrupt", jobs.Interrupt),
    Route("/v1/jobs/{job_id}/output", jobs.Output),
    Route("/v1/packages/{sha256}", blobs.Package),
    Route("/v1/blobs/{sha256}", blobs.Blob),
    Route("/v1/pools", fleet.Pools),
    Route("/v1/pods", fleet.Pods),
    Route("/v1/pods/{name}/retire", fleet.Retire),
    Route("/v1/events", fleet.Events),
)


def make_application(parts: Parts) -> Application:
    """Return the application that answers for these parts."""
    return Application(
        [(route.pattern, route.handler, {"parts": parts}) for route in ROUTES],
        default_handler_class=broker.Nothing,
        default_handler_args={"parts": parts},
        log_function=_no_log,
    )


def _no_log(handler: object) -> None:
    """Log nothing for a request: tornado's line for each would outgrow what a person reads."""
