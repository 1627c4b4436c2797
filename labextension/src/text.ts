/** How figures and names are worded. */

import { IState } from './model';
import { IJob, IPool } from './types';

/** `2 cores, 4 GiB`, `1 × h200, 8 cores, 64 GiB`. */
export function shapeText(pool: IPool): string {
  const { gpu, cpu, memory_gib: memory } = pool.shape;
  const parts: string[] = [];
  if (typeof gpu === 'string' && gpu) {
    const [model, count] = gpu.split(':');
    parts.push(`${count || 1} × ${model}`);
  }
  if (typeof cpu === 'number') {
    parts.push(`${cpu} ${cpu === 1 ? 'core' : 'cores'}`);
  }
  if (typeof memory === 'number') {
    parts.push(`${Number(memory.toFixed(1))} GiB`);
  }
  return parts.join(', ') || pool.description;
}

/** What isolates a pool's pods; the first pod finds it out. */
export function isolationText(pool: IPool): string {
  const { isolation } = pool;
  return isolation && isolation !== 'auto' ? isolation : 'being probed';
}

/** `8 ms`, `1.2 s`, `3 min`, `2 h`. */
export function durationText(seconds: number): string {
  if (seconds < 1) {
    return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  }
  if (seconds < 60) {
    return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  }
  return seconds < 5400
    ? `${Math.round(seconds / 60)} min`
    : `${(seconds / 3600).toFixed(1)} h`;
}

/** `14:03`, as the browser's language writes it. */
export function clockText(seconds: number): string {
  return new Date(seconds * 1000).toLocaleTimeString([], {
    hour: '2-digit',
    minute: '2-digit'
  });
}

export function basename(path: string): string {
  return path.split('/').pop() || path;
}

/** The first line of a cell's code, the name of a script, else where the job came from. */
export function jobTitle(job: IJob): string {
  return job.name || jobPlace(job) || `${job.kind} ${job.id.slice(-8)}`;
}

/** The notebook that the job came from. */
export function jobPlace(job: IJob): string {
  const notebook = job.cell?.notebook;
  return notebook ? basename(notebook) : '';
}

export const STATE_WORDS: Record<IJob['state'], string> = {
  PENDING: 'preparing',
  QUEUED: 'waiting',
  RUNNING: 'running',
  SUCCEEDED: 'succeeded',
  FAILED: 'failed',
  CANCELLED: 'cancelled'
};

/** Submit → first instruction of the user's code, in seconds. */
export function startSeconds(job: IJob): number | null {
  const { submitted, first_instruction: first } = job.times;
  return submitted !== null && first !== null ? first - submitted : null;
}

export function plural(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? '' : 's'}`;
}

/** `2 warm · 1 busy · queue 0`, or why there is nothing to count. */
export function statusText(state: IState): string {
  switch (state.phase) {
    case 'running': {
      let warm = 0;
      let busy = 0;
      let queue = 0;
      for (const pool of state.pools) {
        warm += pool.counts.warm_ready;
        busy += pool.counts.busy;
        queue += pool.queue_length;
      }
      return `${warm} warm · ${busy} busy · queue ${queue}`;
    }
    case 'loading':
      return 'Firepool …';
    case 'none':
      return 'Firepool: not started';
    case 'server-missing':
      return 'Firepool: server part missing';
    case 'version-mismatch':
    case 'incompatible':
      return 'Firepool: versions differ';
    case 'forbidden':
      return 'Firepool: no access';
    default:
      return 'Firepool: not reachable';
  }
}

/** `ValueError` where user code raised it, else the class; nothing where the state says it all. */
export function errorText(job: IJob): string {
  const error = job.error;
  if (!error || (job.state === 'CANCELLED' && error.class === 'Cancelled')) {
    return '';
  }
  return (error.class === 'NonZeroExit' && error.ename) || error.class;
}
