/** The parts of the broker's answers that the panel shows. Times are Unix seconds. */

export type BrokerState = 'running' | 'none' | 'unreachable' | 'incompatible';

export interface IAbout {
  /** Release of the Python package in the Jupyter server. */
  version: string;
  wire: number;
  broker: {
    state: BrokerState;
    kind: 'embedded' | 'remote';
    message?: string;
    version?: string | null;
    backend?: string | null;
    isolation?: string | null;
    network?: string | null;
  };
}

export interface IPool {
  name: string;
  shape: Record<string, unknown>;
  description: string;
  counts: {
    warm_ready: number;
    warming: number;
    busy: number;
    draining: number;
    unhealthy: number;
  };
  queue_length: number;
  estimated_wait_seconds: number | null;
  isolation: string | null;
}

export interface IPod {
  name: string;
  pool: string;
  state: string;
  session: string | null;
  job: string | null;
  hold_expires_at: number | null;
}

export interface ISession {
  lease_tag: string;
  connected: boolean;
  notebook: string | null;
  kernel_id: string | null;
  pods: string[];
  jobs_running: number;
  jobs_queued: number;
}

export type JobState =
  | 'PENDING'
  | 'QUEUED'
  | 'RUNNING'
  | 'SUCCEEDED'
  | 'FAILED'
  | 'CANCELLED';

export interface IJob {
  id: string;
  name: string | null;
  kind: string;
  state: JobState;
  lease_tag: string | null;
  sku: string | null;
  times: {
    submitted: number | null;
    first_instruction: number | null;
    ended: number | null;
  };
  acquisition: { path: string; reason: string } | null;
  waiting: { reason: string; message: string; position: number } | null;
  error: { class: string; message: string; ename?: string | null } | null;
  cell: { notebook: string | null; cell_id: string | null } | null;
}

/** Tell whether nothing more will happen to a job. */
export function isOver(job: IJob): boolean {
  return (
    job.state === 'SUCCEEDED' ||
    job.state === 'FAILED' ||
    job.state === 'CANCELLED'
  );
}

/** One message of a job's output, numbered from 0. */
export interface IMessage {
  type: string;
  n?: number;
  name?: string;
  text?: string;
  data?: Record<string, unknown>;
  metadata?: Record<string, unknown>;
  transient?: { display_id?: string };
  wait?: boolean;
  ename?: string;
  evalue?: string;
  traceback?: string[];
  level?: string;
}
