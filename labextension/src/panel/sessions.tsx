import * as React from 'react';

import { IState } from '../model';
import { basename, clockText, durationText, plural } from '../text';
import { IPod, ISession } from '../types';
import type { IActions } from './panel';
import { Empty, Section } from './section';

export function Sessions(props: {
  state: IState;
  actions: IActions;
}): JSX.Element {
  const { pods } = props.state;
  const sessions = props.state.sessions.filter(
    session => session.connected || heldBy(session, pods).length > 0
  );
  return (
    <Section title="My sessions" count={sessions.length}>
      {sessions.length === 0 && (
        <Empty>
          A notebook that has run <code>%load_ext firepool_nb</code> and a{' '}
          <code>%%firepool</code> cell appears here.
        </Empty>
      )}
      <ul className="jp-Firepool-list">
        {sessions.map(session => (
          <Session
            key={session.lease_tag}
            session={session}
            held={heldBy(session, pods)}
            actions={props.actions}
          />
        ))}
      </ul>
    </Section>
  );
}

function Session(props: {
  session: ISession;
  held: IPod[];
  actions: IActions;
}): JSX.Element {
  const { session, held, actions } = props;
  const title = session.notebook
    ? basename(session.notebook)
    : session.lease_tag;
  const end = holdEnd(held);
  const until = end === null ? '' : ` until ${clockText(end)}`;
  const parts = [`${plural(held.length, 'pod')} held${until}`];
  if (session.jobs_running > 0) {
    parts.push(`${session.jobs_running} running`);
  }
  if (session.jobs_queued > 0) {
    parts.push(`${session.jobs_queued} waiting`);
  }
  if (!session.connected) {
    parts.push('kernel gone');
  }
  return (
    <li className="jp-Firepool-row" aria-label={`Session ${title}`}>
      <div className="jp-Firepool-what">
        <span
          className="jp-Firepool-name"
          title={session.notebook ?? session.lease_tag}
        >
          {title}
        </span>
        <span className="jp-Firepool-quiet" title={holdTitle(end)}>
          {parts.join(' · ')}
        </span>
      </div>
      {held.length > 0 && (
        <button
          type="button"
          className="jp-Firepool-button"
          aria-label={`Release the pods of ${title}`}
          title="Give this session's idle pods back now"
          onClick={() => actions.release(session.lease_tag)}
        >
          Release
        </button>
      )}
    </li>
  );
}

function heldBy(session: ISession, pods: readonly IPod[]): IPod[] {
  return pods.filter(
    pod =>
      pod.session === session.lease_tag || session.pods.includes(pod.name)
  );
}

function holdEnd(held: IPod[]): number | null {
  const ends = held
    .map(pod => pod.hold_expires_at)
    .filter((end): end is number => end !== null);
  return ends.length > 0 ? Math.max(...ends) : null;
}

function holdTitle(end: number | null): string | undefined {
  if (end === null) {
    return undefined;
  }
  const left = Math.max(0, end - Date.now() / 1000);
  return `Idle pods stay with this session for ${durationText(left)} more`;
}
