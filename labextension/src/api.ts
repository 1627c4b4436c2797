import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import { IServerEvent, serverEvents } from './stream';
import { IAbout, IJob, IPod, IPool, ISession } from './types';

/** A refusal or failure, with the class that programs switch on. */
export class FirepoolError extends Error {
  constructor(
    readonly status: number,
    readonly errorClass: string,
    message: string
  ) {
    super(message);
    this.name = 'FirepoolError';
  }
}

/** The broker's API, as the Jupyter server forwards it. */
export class FirepoolApi {
  constructor(private readonly _settings: ServerConnection.ISettings) {}

  about(): Promise<IAbout> {
    return this._json('GET', 'about');
  }

  async start(): Promise<void> {
    await this._json('POST', 'start', {});
  }

  async pools(): Promise<IPool[]> {
    return (await this._json<{ pools: IPool[] }>('GET', 'v1/pools')).pools;
  }

  async pods(): Promise<IPod[]> {
    return (await this._json<{ pods: IPod[] }>('GET', 'v1/pods')).pods;
  }

  async sessions(): Promise<ISession[]> {
    return (await this._json<{ sessions: ISession[] }>('GET', 'v1/sessions'))
      .sessions;
  }

  async jobs(limit: number): Promise<IJob[]> {
    const path = `v1/jobs?limit=${limit}`;
    return (await this._json<{ jobs: IJob[] }>('GET', path)).jobs;
  }

  async cancel(job: string): Promise<void> {
    await this._json('POST', `v1/jobs/${encodeURIComponent(job)}/cancel`, {});
  }

  async release(session: string): Promise<void> {
    const tag = encodeURIComponent(session);
    await this._json('POST', `v1/sessions/${tag}/release`, {});
  }

  /** Changes of jobs, pods, pools and sessions, as they happen; none is missed after `onOpen`. */
  events(
    signal: AbortSignal,
    onOpen: () => void
  ): AsyncGenerator<IServerEvent> {
    return this._stream('v1/events', signal, onOpen);
  }

  /** A job's output from the message with the given number on. */
  output(
    job: string,
    from: number,
    signal: AbortSignal
  ): AsyncGenerator<IServerEvent> {
    const path = `v1/jobs/${encodeURIComponent(job)}/output?from=${from}`;
    return this._stream(path, signal);
  }

  private async *_stream(
    path: string,
    signal: AbortSignal,
    onOpen?: () => void
  ): AsyncGenerator<IServerEvent> {
    const headers = { Accept: 'text/event-stream' };
    const response = await this._send(path, { signal, headers });
    onOpen?.();
    yield* serverEvents(response);
  }

  private async _json<T = unknown>(
    method: string,
    path: string,
    body?: unknown
  ): Promise<T> {
    const init: RequestInit = { method };
    if (body !== undefined) {
      init.body = JSON.stringify(body);
    }
    const text = await (await this._send(path, init)).text();
    return (text ? JSON.parse(text) : {}) as T;
  }

  private async _send(path: string, init: RequestInit): Promise<Response> {
    const url = URLExt.join(this._settings.baseUrl, 'firepool', path);
    const response = await ServerConnection.makeRequest(
      url,
      init,
      this._settings
    );
    if (!response.ok) {
      throw await errorOf(response);
    }
    return response;
  }
}

async function errorOf(response: Response): Promise<FirepoolError> {
  let errorClass = '';
  let message = `${response.status} ${response.statusText}`;
  try {
    const document = await response.json();
    errorClass = document.error?.class ?? '';
    message = document.error?.message ?? document.message ?? message;
  } catch {
    // Not ours: a proxy's page, or Jupyter's own answer. The status says it.
  }
  return new FirepoolError(response.status, errorClass, message);
}
