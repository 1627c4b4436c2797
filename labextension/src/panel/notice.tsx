import * as React from 'react';

import { IState } from '../model';
import { VERSION } from '../version';
import type { IActions } from './panel';

/** What went wrong with something the user asked for. */
export function Problem(props: {
  text: string;
  onDismiss(): void;
}): JSX.Element {
  return (
    <div className="jp-Firepool-problem" role="alert">
      <span>{props.text}</span>
      <button
        type="button"
        className="jp-Firepool-button"
        onClick={props.onDismiss}
      >
        Dismiss
      </button>
    </div>
  );
}

/** Why there is nothing to show, and the line that changes that. */
export function Notice(props: {
  state: IState;
  actions: IActions;
}): JSX.Element {
  const { state, actions } = props;
  const again = (
    <button
      type="button"
      className="jp-Firepool-button"
      onClick={actions.refresh}
    >
      Look again
    </button>
  );
  return (
    <div className="jp-Firepool-notice" role="status" data-phase={state.phase}>
      <Explanation state={state} actions={actions} />
      {state.phase !== 'loading' && state.phase !== 'none' && again}
    </div>
  );
}

function Explanation(props: {
  state: IState;
  actions: IActions;
}): JSX.Element {
  const { about, phase, starting } = props.state;
  switch (phase) {
    case 'loading':
      return <p>Looking for the broker …</p>;
    case 'none':
      return (
        <>
          <p>
            <b>No pods are kept warm yet.</b> The first <code>%%firepool</code>{' '}
            cell of a notebook starts the broker of this machine, or start it
            now, so that the first cell finds a warm pod:
          </p>
          <button
            type="button"
            className="jp-Firepool-button jp-mod-main"
            disabled={starting}
            onClick={props.actions.start}
          >
            {starting ? 'Starting …' : 'Start'}
          </button>
          <p className="jp-Firepool-quiet">In a notebook:</p>
          <pre>{'%load_ext firepool_nb'}</pre>
          <pre>{'%%firepool\nprint("hello from a warm pod")'}</pre>
        </>
      );
    case 'server-missing':
      return (
        <>
          <p>
            <b>The Jupyter server does not have Firepool's part.</b> This page
            has it ({VERSION}). In the environment that Jupyter runs in:
          </p>
          <pre>pip install firepool-nb=={VERSION}</pre>
          <p>
            Then restart the Jupyter server. If it is installed there already,
            it was switched off:
          </p>
          <pre>jupyter server extension enable firepool_nb.server</pre>
        </>
      );
    case 'version-mismatch':
      return (
        <>
          <p>
            <b>Two releases meet.</b> The Jupyter server runs{' '}
            {about?.version ?? 'another one'}, this page is of {VERSION}. After
            an update the server must be restarted and this page reloaded. If
            that does not help, in the environment that Jupyter runs in:
          </p>
          <pre>pip install --upgrade firepool-nb</pre>
        </>
      );
    case 'forbidden':
      return (
        <p>
          <b>You may not use Firepool on this server.</b> Ask its operator for
          access to the resource <code>firepool</code>, or log in again.
        </p>
      );
    case 'offline':
      return (
        <p>
          <b>The Jupyter server does not answer.</b> What runs on pods goes on;
          its output is kept.
        </p>
      );
    default:
      return (
        <p>
          <b>
            {phase === 'incompatible'
              ? 'The broker speaks another version.'
              : 'The broker does not answer.'}
          </b>{' '}
          {about?.broker.message ?? ''}
        </p>
      );
  }
}
