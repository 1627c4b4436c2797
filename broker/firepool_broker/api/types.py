"""Every request and response of the HTTP API, as the types that decode and encode them.

The contract of this module: a request type refuses unknown fields, a response type always
carries every field, times are Unix seconds (``float``), sizes are bytes or MiB as their name
says, and whatever is optional is ``None`` when absent. The OpenAPI document is generated from
these types, so a field exists here or it does not exist.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

JobKind = Literal["cell", "call", "command"]
JobState = Literal["PENDING", "QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
OnLost = Literal["fail", "requeue"]
Launcher = Literal["python", "torchrun", "ray", "shell"]
SessionFiles = Literal["kept", "restored", "fresh"]
WaitingReason = Literal[
    "pod_starting",
    "pod_silent",
    "no_capacity",
    "quota",
    "session_order",
    "withheld",
    "package",
    "requirements",
    "priority",
]


class Request(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of what a client sends: unknown fields are refused by name."""


class View(Struct, kw_only=True):
    """Base of what the broker answers: every field is always present."""


# -- parts of requests ---------------------------------------------------------------------------


class Environment(Request):
    """The interpreter that a session's jobs run in, as its client found it."""

    executable: str
    """Absolute path of the interpreter."""
    prefix: str
    """``sys.prefix`` of that interpreter."""
    base_prefix: str
    """``sys.base_prefix`` of that interpreter."""
    version: str
    """Python version, for example ``3.11.7``."""
    digest: str
    """Hex digest of what is installed; another digest never shares a process or an overlay."""
    path: list[str] = field(default_factory=list)
    """Extra entries for ``sys.path``, for example sources installed as editable."""
    visible: list[str] = field(default_factory=list)
    """Paths that must be visible inside the pod."""


class Input(Request):
    """One value, namespace or call that travels to the pod, inline or as a blob."""

    kind: Literal["namespace", "value", "call"]
    """``namespace``: a dict of names; ``value``: one name; ``call``: (function, args, kwargs)."""
    format: Literal["cloudpickle", "json", "npy", "arrow"]
    """How the bytes are encoded."""
    name: str | None = None
    """The name a ``value`` is bound to."""
    names: list[str] | None = None
    """The names a ``namespace`` holds, for messages."""
    data: str | None = None
    """The bytes, base64, when they travel inline."""
    blob: str | None = None
    """SHA-256 (hex) of the blob that holds the bytes."""


class Shape(Request):
    """A hardware shape; it is rounded up to the smallest SKU that fits."""

    gpu: str | None = None
    """Accelerator and count, for example ``h200:2``."""
    cpu: float | None = None
    """Cores."""
    memory_gib: float | None = None
    """Memory in GiB."""


class CellReference(Request):
    """Where in a notebook a job came from."""

    notebook: str | None = None
    """Path of the notebook, as the client names it."""
    cell_id: str | None = None
    """Id of the cell."""


class ClientProcess(Request):
    """The process that opens a session."""

    pid: int
    """Process id."""
    host: str
    """Host name."""


# -- requests ------------------------------------------------------------------------------------


class JobRequest(Request):
    """A job to run: a notebook cell, a function call or a command."""

    kind: JobKind
    """What runs: ``cell`` (``code``), ``call`` (an input of kind ``call``), ``command``."""
    id: str | None = None
    """Client-chosen id: the same request again returns the same job."""
    code: str | None = None
    """Source of a cell."""
    filename: str | None = None
    """File name that tracebacks show."""
    line_offset: int = 0
    """Lines before the code in the notebook's cell, added to line numbers."""
    argv: list[str] | None = None
    """Arguments of a command."""
    shell: str | None = None
    """Shell text of a command, instead of ``argv``."""
    lease_tag: str | None = None
    """The session the job belongs to; a session token's own session when left out."""
    client_id: str | None = None
    """The client process that submits."""
    queue: str = "default"
    """Named stream of the caller's work."""
    sku: str | None = None
    """Name of the pool; the default pool when neither this nor ``shape`` is given."""
    shape: Shape | None = None
    """Hardware shape, instead of ``sku``."""
    attached: bool = True
    """The submitter waits for the job; such a job never outlives its session in the queue."""
    parallel: bool = False
    """May run beside the session's other attached jobs."""
    priority: int = 0
    """Higher goes first, within -100 to 100."""
    name: str | None = None
    """A name for people."""
    timeout_seconds: float | None = None
    """The attempt is ended after this many seconds."""
    max_retries: int = 0
    """How often an attempt that failed runs again, within 0 to 100."""
    on_lost: OnLost = "fail"
    """What happens when the pod is lost while the job runs."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables for this job, over those of its session."""
    requirements: list[str] = field(default_factory=list)
    """Requirement specifiers that are installed into an overlay first."""
    package: str | None = None
    """SHA-256 (hex) of an uploaded package."""
    inputs: list[Input] = field(default_factory=list)
    """Values that travel to the pod."""
    outputs: list[str] = field(default_factory=list)
    """Names that come back as results."""
    single_use: bool = False
    """Runs on a pod of its own that is retired afterwards."""
    pods: int = 1
    """How many pods the job needs."""
    launcher: Launcher = "python"
    """How a job of several pods starts."""
    image: str | None = None
    """Digest of another image than the pool's."""
    secrets: list[str] = field(default_factory=list)
    """Names of secrets the job may read."""
    live: bool = False
    """Runs in the session's living interpreter."""
    cell: CellReference | None = None
    """Where in a notebook the job came from."""
    environment: Environment | None = None
    """Interpreter; the session's when left out."""
    cwd: str | None = None
    """Working directory; the session's when left out."""


class SessionRequest(Request):
    """Registers a client under a tag, or updates what it registered before."""

    lease_tag: str
    """The caller's name for the session."""
    client_id: str
    """The client process; another id under the same tag takes the session over."""
    environment: Environment | None = None
    """Interpreter of the session's jobs."""
    cwd: str | None = None
    """Folder of the notebook: the working directory of its cells on a local pod."""
    env: dict[str, str] = field(default_factory=dict)
    """The client's own variables; start-up hooks among them are left out."""
    notebook: str | None = None
    """Path of the notebook, for people."""
    kernel_id: str | None = None
    """Id of the Jupyter kernel."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the distributions that matter for what travels."""
    process: ClientProcess | None = None
    """The client's process."""


class InterruptRequest(Request):
    """Interrupts a running job."""

    kill: bool = False
    """Kill the attempt instead of sending it an interrupt."""


class Empty(Request):
    """A request without fields."""


class ShutdownRequest(Request):
    """Asks the broker to end."""

    drain: bool = True
    """Take no new jobs, let running ones end and remove the pods. Without it the broker ends at
    once and leaves jobs and pods to the next one."""
    cancel: bool = False
    """With `drain`: cancel the jobs that run, and those that somebody waits for, instead of letting
    them finish. Detached jobs that wait stay for the next broker."""


# -- parts of answers ----------------------------------------------------------------------------


class ErrorDetail(View):
    """Why a request was refused."""

    error_class: str = field(name="class")
    """A word a program can act on."""
    message: str
    """A sentence that says what to do."""
    field_name: str | None = field(name="field", default=None)
    """The field of the request that is wrong."""
    retry_after: float | None = None
    """Seconds after which to try again."""
    job: str | None = None
    """The job that is concerned."""


class ErrorView(View):
    """The body of every refusal."""

    error: ErrorDetail
    """Why the request was refused."""


class JobError(View):
    """Why a job ended without success."""

    error_class: str = field(name="class")
    """The error class, for example ``NonZeroExit``, ``OOM``, ``PodLost``."""
    message: str
    """A sentence for people."""
    ename: str | None = None
    """Name of the exception that ended user code."""
    evalue: str | None = None
    """Text of that exception."""
    traceback: list[str] | None = None
    """Lines of the remote traceback."""


class Waiting(View):
    """Why a queued job does not run yet, or what a running one waits for (`pod_silent`)."""

    reason: WaitingReason
    """The reason, as a word."""
    message: str
    """One line for people."""
    position: int
    """Place in the queue, from 1; 0 for a job that runs."""
    estimate_seconds: float | None = None
    """About how long it will take; ``None`` when unknown."""


class Acquisition(View):
    """How a job came by its pods."""

    path: str
    """``warm``, ``recycled``, ``standby``, ``new``, ``custom_image`` or ``single_use``."""
    reason: str
    """Why no warmer path was used."""


class JobTimes(View):
    """When a job reached each phase, in Unix seconds."""

    submitted: float | None = None
    queued: float | None = None
    claimed: float | None = None
    committed: float | None = None
    handed_off: float | None = None
    first_instruction: float | None = None
    ended: float | None = None


class Retries(View):
    """How many attempts each budget has paid for."""

    user: int = 0
    """Attempts that failed by themselves."""
    infra: int = 0
    """Attempts lost to pod, node or broker."""


class Result(View):
    """A value that a job brought back, inline or as a blob."""

    name: str
    """Name of the value; ``return`` for a call's."""
    format: str
    """Encoding of the bytes."""
    size_bytes: int
    """Size of the encoded value."""
    type: str
    """Type of the value, for people."""
    data: str | None = None
    """The bytes, base64, when they are inline."""
    sha256: str | None = None
    """The blob that holds the bytes otherwise."""
    error: str | None = None
    """Why this value could not come back."""


class OutputPosition(View):
    """How much output of a job is kept."""

    next: int = 0
    """Number that the next message will have."""
    bytes: int = 0
    """Bytes kept."""
    dropped_bytes: int = 0
    """Bytes that the cap dropped."""


class KilledProcess(View):
    """A process that was ended with its job."""

    pid: int
    """Process id inside the pod."""
    name: str
    """Name of the process."""


class JobView(View):
    """A job as its caller sees it."""

    id: str
    name: str | None
    kind: JobKind
    state: JobState
    lease_tag: str | None
    queue: str
    sku: str | None
    priority: int
    attached: bool
    attempt: int
    """Number of the last attempt; 0 before the first."""
    times: JobTimes
    acquisition: Acquisition | None = None
    waiting: Waiting | None = None
    error: JobError | None = None
    exit_code: int | None = None
    """Exit code of the last attempt's process; absent when none ever exited."""
    retries: Retries = field(default_factory=Retries)
    pods: list[str] = field(default_factory=list)
    """Names of the pods of the last attempt."""
    results: list[Result] = field(default_factory=list)
    output: OutputPosition = field(default_factory=OutputPosition)
    session_dir: str | None = None
    session_files: SessionFiles | None = None
    tier: str | None = None
    """How the process came to be: ``parked``, ``fork`` or ``fresh``."""
    imports_seconds: float | None = None
    """Seconds that the job's own imports took."""
    peak_memory_mib: int | None = None
    killed: list[KilledProcess] = field(default_factory=list)
    """Processes that were still there when the job ended."""
    cell: CellReference | None = None
    notes: list[str] = field(default_factory=list)
    """Lines that a person would want to know."""


class JobList(View):
    """Some of the caller's jobs, newest first."""

    jobs: list[JobView]


class SessionOpened(View):
    """What a client needs after it registered."""

    lease_tag: str
    token: str
    """Token that names this caller and session; valid until the session ends by goodbye."""
    ttl_seconds: float
    """The session lapses this long after its stream closed."""
    session_dir: str
    """Folder that belongs to the session."""
    resumed: bool
    """The session was there before."""


class SessionView(View):
    """A session as its caller sees it."""

    lease_tag: str
    client_id: str | None
    connected: bool
    """The client's stream is open."""
    expires_at: float | None
    """When the session lapses; ``None`` while it is connected."""
    created_at: float
    notebook: str | None = None
    kernel_id: str | None = None
    cwd: str | None = None
    session_dir: str | None = None
    environment_digest: str | None = None
    pods: list[str] = field(default_factory=list)
    """Pods that the session holds or uses."""
    jobs_running: int = 0
    jobs_queued: int = 0


class SessionList(View):
    """The caller's sessions."""

    sessions: list[SessionView]


class PodCounts(View):
    """Pods of a pool, in the operator's words and in four stages of supply."""

    warm_ready: int = 0
    warming: int = 0
    busy: int = 0
    draining: int = 0
    unhealthy: int = 0
    requested: int = 0
    scheduled: int = 0
    ready: int = 0
    routable: int = 0


class PoolView(View):
    """A pool: a hardware shape with its scaling policy and what there is of it now."""

    name: str
    shape: dict[str, Any]
    description: str
    policy: dict[str, Any]
    counts: PodCounts
    queue_length: int
    estimated_wait_seconds: float | None
    isolation: str | None


class PoolList(View):
    """All pools."""

    pools: list[PoolView]
    default: str | None
    """The pool of a request that names none."""


class PodView(View):
    """A pod; what belongs to another caller is left out."""

    name: str
    uid: str | None
    pool: str
    state: str
    owner: str | None
    session: str | None
    queue: str | None
    job: str | None
    hold_expires_at: float | None
    retire_after: bool
    isolation: str | None
    age_seconds: float
    jobs_run: int
    story: list[str]
    """Its last transitions, for people."""


class PodList(View):
    """All pods."""

    pods: list[PodView]


class BrokerInfo(View):
    """The broker that answers."""

    version: str
    wire: int
    """Version of the wire format; clients compare this and nothing else."""
    backend: str
    isolation: str
    network: str
    pid: int
    started_at: float


class Whoami(View):
    """Who the broker takes the client for."""

    caller: str
    session: str | None
    broker: BrokerInfo


class Health(View):
    """Whether the broker is alive or ready."""

    status: str


class Accepted(View):
    """Something was asked for and will happen."""

    accepted: bool = True


class ReleaseView(View):
    """What a session gave back."""

    released: list[str]
    """Names of the pods."""


class BlobView(View):
    """A blob or package that is stored."""

    sha256: str
    size_bytes: int


# -- server-sent events --------------------------------------------------------------------------


class StreamEvent(Struct, frozen=True):
    """One server-sent event.

    Parameters
    ----------
    event
        Type of the event.
    data
        Its body: one JSON document without line breaks.
    number
        The event's id, by which a client resumes; ``None`` for events that are not replayed.
    """

    event: str
    data: bytes
    number: int | None = None


class StatusEvent(View):
    """``status`` in an output stream: the job moved, or waits for another reason."""

    state: JobState
    waiting: Waiting | None
    attempt: int
    acquisition: Acquisition | None
