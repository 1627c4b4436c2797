import { IDisposable } from '@lumino/disposable';

import { IFirepoolModel } from './model';
import { pause } from './stream';

const GATHER_MS = 150;
const RETRY_MS = { first: 1_000, last: 30_000 };
const POLL_MS = { first: 10_000, last: 60_000 };
const GROWTH = 1.6;

/**
 * Keeps the model up to date for as long as somebody can see it.
 *
 * A visible panel follows the broker's events and falls back to polling while there are none; with
 * only the status bar in sight it polls, ever slower while nothing changes (an event stream would
 * count as interest and keep an idle broker from ending). In a hidden browser tab nothing happens.
 */
export class Updates implements IDisposable {
  constructor(private readonly _model: IFirepoolModel) {
    document.addEventListener('visibilitychange', this._wake);
    void this._run();
  }

  get isDisposed(): boolean {
    return this._disposed;
  }

  dispose(): void {
    this._disposed = true;
    document.removeEventListener('visibilitychange', this._wake);
    this._wake();
  }

  set panelVisible(value: boolean) {
    if (value !== this._panelVisible) {
      this._panelVisible = value;
      this._wake();
    }
  }

  private readonly _wake = (): void => {
    this._round.abort();
  };

  private async _run(): Promise<void> {
    let delay = 0;
    while (!this._disposed) {
      this._round = new AbortController();
      const signal = this._round.signal;
      if (document.hidden) {
        await new Promise<void>(resolve =>
          signal.addEventListener('abort', () => resolve())
        );
        delay = 0;
        continue;
      }
      const before = this._model.state;
      await this._model.refresh();
      const limits = this._panelVisible ? RETRY_MS : POLL_MS;
      if (this._panelVisible && this._model.state.phase === 'running') {
        if (await this._follow(signal)) {
          delay = 0;
        }
      }
      const changed = this._model.state !== before;
      delay =
        changed || delay === 0
          ? limits.first
          : Math.min(delay * GROWTH, limits.last);
      await pause(delay, signal);
      if (signal.aborted) {
        delay = 0;
      }
    }
  }

  /** Follow the events; tells whether the stream was there at all. */
  private async _follow(signal: AbortSignal): Promise<boolean> {
    let timer: number | null = null;
    let open = false;
    const refreshSoon = () => {
      timer ??= window.setTimeout(() => {
        timer = null;
        void this._model.refresh();
      }, GATHER_MS);
    };
    const onOpen = () => {
      open = true;
      refreshSoon(); // what changed before the stream was there
    };
    try {
      for await (const _ of this._model.api.events(signal, onOpen)) {
        refreshSoon();
      }
    } catch {
      // The stream broke off or was left; the next round's refresh finds out why
    }
    if (timer !== null) {
      window.clearTimeout(timer);
    }
    return open;
  }

  private _disposed = false;
  private _panelVisible = false;
  private _round = new AbortController();
}
