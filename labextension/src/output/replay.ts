import * as nbformat from '@jupyterlab/nbformat';
import { IOutputAreaModel } from '@jupyterlab/outputarea';

import { FirepoolApi, FirepoolError } from '../api';
import { pause } from '../stream';
import { IJob, IMessage } from '../types';

const RETRY_MS = { first: 500, last: 10_000 };

/**
 * Follow a job's output from its beginning to its end, over broken connections.
 *
 * Returns the job as it ended, or null when the signal fired first. Throws when the broker does not
 * have the output (any more).
 */
export async function follow(
  api: FirepoolApi,
  job: string,
  signal: AbortSignal,
  onMessage: (message: IMessage) => void,
  onJob: (job: IJob) => void = () => undefined
): Promise<IJob | null> {
  let next = 0;
  let delay = RETRY_MS.first;
  while (!signal.aborted) {
    try {
      for await (const event of api.output(job, next, signal)) {
        delay = RETRY_MS.first;
        const body = JSON.parse(event.data);
        if (event.event === 'end') {
          return body as IJob;
        }
        if (event.event === 'job') {
          onJob(body as IJob);
        } else if (event.id !== null) {
          next = Number(event.id) + 1;
          onMessage({ ...body, type: event.event } as IMessage);
        }
      }
    } catch (error) {
      const final = error instanceof FirepoolError && error.status < 500;
      if (final && !signal.aborted) {
        throw error;
      }
    }
    await pause(delay, signal);
    delay = Math.min(delay * 2, RETRY_MS.last);
  }
  return null;
}

/** Writes the messages of one job into an output area, as the kernel would have. */
export class Replay {
  constructor(private readonly _model: IOutputAreaModel) {}

  apply(message: IMessage): void {
    switch (message.type) {
      case 'stream':
        this._add({
          output_type: 'stream',
          name: message.name === 'stderr' ? 'stderr' : 'stdout',
          text: message.text ?? ''
        });
        break;
      case 'note':
      case 'divider':
        this._add({
          output_type: 'display_data',
          data: noteBundle(message.text ?? '', message.level === 'warning'),
          metadata: {}
        });
        break;
      case 'display_data':
        this._display(message, {
          output_type: 'display_data',
          data: (message.data ?? {}) as nbformat.IMimeBundle,
          metadata: (message.metadata ?? {}) as nbformat.OutputMetadata
        });
        break;
      case 'update_display_data':
        this._update(message);
        break;
      case 'execute_result':
        this._add({
          output_type: 'execute_result',
          execution_count: null,
          data: (message.data ?? {}) as nbformat.IMimeBundle,
          metadata: (message.metadata ?? {}) as nbformat.OutputMetadata
        });
        break;
      case 'clear_output':
        this._model.clear(message.wait);
        this._displays.clear();
        break;
      case 'error':
        this._add({
          output_type: 'error',
          ename: message.ename ?? '',
          evalue: message.evalue ?? '',
          traceback: message.traceback ?? []
        });
        break;
      default:
        break; // results and phases are not output
    }
  }

  private _add(output: nbformat.IOutput): number {
    return this._model.add(output);
  }

  private _display(message: IMessage, output: nbformat.IOutput): void {
    const index = this._add(output) - 1;
    const id = message.transient?.display_id;
    if (id) {
      this._displays.set(id, [...(this._displays.get(id) ?? []), index]);
    }
  }

  private _update(message: IMessage): void {
    for (const index of this._displays.get(message.transient?.display_id ?? '') ??
      []) {
      this._model.set(index, {
        output_type: 'display_data',
        data: (message.data ?? {}) as nbformat.IMimeBundle,
        metadata: (message.metadata ?? {}) as nbformat.OutputMetadata
      });
    }
  }

  private readonly _displays = new Map<string, number[]>();
}

/** A line of Firepool's own, as the magic shows it. */
function noteBundle(text: string, warning: boolean): nbformat.IMimeBundle {
  const line = document.createElement('div');
  line.textContent = text;
  line.style.color = warning ? 'var(--jp-warn-color0, #b45309)' : '#6b7280';
  line.style.fontSize = '90%';
  return { 'text/plain': text, 'text/html': line.outerHTML };
}
