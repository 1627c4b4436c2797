import { Token } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';

import { FirepoolApi, FirepoolError } from './api';
import { IAbout, IJob, IPod, IPool, ISession } from './types';
import { VERSION } from './version';

/**
 * What is known of the whole chain, from this page to the broker:
 *
 * - `loading`: nothing yet
 * - `server-missing`: the Jupyter server does not have our part
 * - `forbidden`: it has, and this user may not use it
 * - `version-mismatch`: this page and the server are of different releases
 * - `offline`: the Jupyter server does not answer
 * - `none`, `unreachable`, `incompatible`, `running`: the broker's state
 */
export type Phase =
  | 'loading'
  | 'server-missing'
  | 'forbidden'
  | 'version-mismatch'
  | 'offline'
  | 'none'
  | 'unreachable'
  | 'incompatible'
  | 'running';

export interface IState {
  readonly phase: Phase;
  readonly about: IAbout | null;
  readonly pools: readonly IPool[];
  readonly pods: readonly IPod[];
  readonly sessions: readonly ISession[];
  readonly jobs: readonly IJob[];
  /** What the user asked for and did not get; shown until dismissed. */
  readonly problem: string | null;
  readonly starting: boolean;
}

const NOTHING = { pools: [], pods: [], sessions: [], jobs: [] };
const RECENT_JOBS = 20;
const ABOUT_MS = 30_000;

export interface IFirepoolModel {
  readonly api: FirepoolApi;
  readonly state: IState;
  readonly changed: ISignal<IFirepoolModel, IState>;
  /** Read everything anew; with `true` also who answers, which else is taken from a while ago. */
  refresh(whoAnswersToo?: boolean): Promise<void>;
  start(): Promise<void>;
  cancel(job: string): Promise<void>;
  release(session: string): Promise<void>;
  dismiss(): void;
}

export const IFirepoolModel = new Token<IFirepoolModel>(
  'firepool-nb:IFirepoolModel',
  'Pools, sessions and jobs of the Firepool broker, kept up to date.'
);

export class FirepoolModel implements IFirepoolModel {
  constructor(readonly api: FirepoolApi) {}

  get state(): IState {
    return this._state;
  }

  get changed(): ISignal<IFirepoolModel, IState> {
    return this._changed;
  }

  /** Read everything anew. Calls that overlap share one round and one more. */
  async refresh(whoAnswersToo = false): Promise<void> {
    if (whoAnswersToo) {
      this._aboutAt = -Infinity;
    }
    if (this._running) {
      this._again = true;
      return this._running;
    }
    this._running = (async () => {
      do {
        this._again = false;
        this._update(await this._read());
      } while (this._again);
    })();
    try {
      await this._running;
    } finally {
      this._running = null;
    }
  }

  async start(): Promise<void> {
    this._update({ starting: true });
    await this._act(() => this.api.start());
    this._update({ starting: false });
  }

  async cancel(job: string): Promise<void> {
    await this._act(() => this.api.cancel(job));
  }

  async release(session: string): Promise<void> {
    await this._act(() => this.api.release(session));
  }

  dismiss(): void {
    this._update({ problem: null });
  }

  private async _act(action: () => Promise<void>): Promise<void> {
    try {
      await action();
      this._update({ problem: null });
    } catch (error) {
      this._update({ problem: messageOf(error) });
    }
    await this.refresh();
  }

  private async _read(): Promise<Partial<IState>> {
    try {
      const about = await this._about();
      if (about.version !== VERSION) {
        return { ...NOTHING, phase: 'version-mismatch', about };
      }
      if (about.broker.state !== 'running') {
        return { ...NOTHING, phase: about.broker.state, about };
      }
      const [pools, pods, sessions, jobs] = await Promise.all([
        this.api.pools(),
        this.api.pods(),
        this.api.sessions(),
        this.api.jobs(RECENT_JOBS)
      ]);
      return { phase: 'running', about, pools, pods, sessions, jobs };
    } catch (error) {
      this._aboutAt = -Infinity;
      if (!(error instanceof FirepoolError)) {
        return { phase: 'offline' }; // what was seen last stays on the page
      }
      if (error.status === 404 && !error.errorClass) {
        return { ...NOTHING, phase: 'server-missing', about: null };
      }
      if (error.status === 403) {
        return { ...NOTHING, phase: 'forbidden', about: null };
      }
      if (error.errorClass === 'BrokerNotRunning') {
        return { ...NOTHING, phase: 'none' };
      }
      return { phase: 'unreachable', problem: error.message };
    }
  }

  /** Who answers changes seldom: while all is well it is asked again only now and then. */
  private async _about(): Promise<IAbout> {
    const { phase, about } = this._state;
    const now = performance.now();
    if (about && phase === 'running' && now - this._aboutAt < ABOUT_MS) {
      return about;
    }
    const answer = await this.api.about();
    this._aboutAt = now;
    return answer;
  }

  private _update(part: Partial<IState>): void {
    const next = { ...this._state, ...part };
    // Answers that say nothing new must not repaint the panel under the user's pointer
    if (JSON.stringify(next) !== JSON.stringify(this._state)) {
      this._state = next;
      this._changed.emit(next);
    }
  }

  private _state: IState = {
    ...NOTHING,
    phase: 'loading',
    about: null,
    problem: null,
    starting: false
  };
  private readonly _changed = new Signal<IFirepoolModel, IState>(this);
  private _running: Promise<void> | null = null;
  private _again = false;
  private _aboutAt = -Infinity;
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
