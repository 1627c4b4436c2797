import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import { Message } from '@lumino/messaging';
import { Signal } from '@lumino/signaling';
import * as React from 'react';

import { firepoolIcon } from '../icon';
import { IFirepoolModel, IState } from '../model';
import { IJob } from '../types';
import { Jobs } from './jobs';
import { Notice, Problem } from './notice';
import { Pools } from './pools';
import { Sessions } from './sessions';

export const PANEL_ID = 'firepool-panel';

/** What a row of the panel can ask for. */
export interface IActions {
  start(): void;
  refresh(): void;
  showOutput(job: IJob): void;
  cancel(job: IJob): void;
  release(session: string): void;
}

/** The left panel. */
export class FirepoolPanel extends ReactWidget {
  constructor(
    private readonly _model: IFirepoolModel,
    private readonly _actions: IActions
  ) {
    super();
    this.id = PANEL_ID;
    this.title.icon = firepoolIcon;
    this.title.caption = 'Firepool';
    this.addClass('jp-Firepool-panel');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', 'Firepool');
  }

  /** Emits whether the panel can be seen now. */
  readonly visibleChanged = new Signal<this, boolean>(this);

  protected onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.visibleChanged.emit(this.isVisible);
  }

  protected onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.visibleChanged.emit(true);
  }

  protected onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.visibleChanged.emit(false);
  }

  protected render(): JSX.Element {
    return (
      <UseSignal signal={this._model.changed} initialArgs={this._model.state}>
        {() => (
          <Body
            state={this._model.state}
            model={this._model}
            actions={this._actions}
          />
        )}
      </UseSignal>
    );
  }
}

function Body(props: {
  state: IState;
  model: IFirepoolModel;
  actions: IActions;
}): JSX.Element {
  const { state, model, actions } = props;
  const running = state.phase === 'running';
  return (
    <>
      <Heading state={state} />
      {state.problem && (
        <Problem text={state.problem} onDismiss={() => model.dismiss()} />
      )}
      {!running && <Notice state={state} actions={actions} />}
      {running && (
        <>
          <Pools pools={state.pools} />
          <Sessions state={state} actions={actions} />
          <Jobs jobs={state.jobs} actions={actions} />
        </>
      )}
    </>
  );
}

function Heading(props: { state: IState }): JSX.Element {
  const broker = props.state.about?.broker;
  const where =
    props.state.phase === 'running' && broker
      ? `${broker.kind === 'remote' ? 'Remote broker' : 'Broker of this machine'}, ${broker.version ?? ''}`
      : '';
  return (
    <header className="jp-Firepool-heading">
      <h2>Firepool</h2>
      {where && <div className="jp-Firepool-quiet">{where}</div>}
    </header>
  );
}
