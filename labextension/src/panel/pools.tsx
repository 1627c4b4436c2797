import * as React from 'react';

import { durationText, isolationText, shapeText } from '../text';
import { IPool } from '../types';
import { Section } from './section';

const WORDS: [keyof IPool['counts'], string][] = [
  ['warm_ready', 'warm-ready'],
  ['warming', 'warming'],
  ['busy', 'busy'],
  ['draining', 'draining'],
  ['unhealthy', 'unhealthy']
];

export function Pools(props: { pools: readonly IPool[] }): JSX.Element {
  return (
    <Section title="Pools" count={props.pools.length}>
      <ul className="jp-Firepool-list">
        {props.pools.map(pool => (
          <Pool key={pool.name} pool={pool} />
        ))}
      </ul>
    </Section>
  );
}

function Pool({ pool }: { pool: IPool }): JSX.Element {
  const waiting =
    pool.queue_length > 0 && pool.estimated_wait_seconds !== null
      ? ` (~${durationText(pool.estimated_wait_seconds)})`
      : '';
  return (
    <li className="jp-Firepool-pool" aria-label={`Pool ${pool.name}`}>
      <div className="jp-Firepool-line">
        <span className="jp-Firepool-name" title={pool.description}>
          {pool.name}
        </span>
        <span className="jp-Firepool-quiet">{shapeText(pool)}</span>
      </div>
      <Bar pool={pool} />
      <ul className="jp-Firepool-counts" aria-label="Pods">
        {WORDS.map(([key, word]) => (
          <li
            key={key}
            className={`jp-Firepool-count jp-mod-${word}`}
            data-count={pool.counts[key]}
          >
            <b>{pool.counts[key]}</b> {word}
          </li>
        ))}
      </ul>
      <div className="jp-Firepool-quiet">
        queue {pool.queue_length}
        {waiting} · isolation: {isolationText(pool)}
      </div>
    </li>
  );
}

/** The same figures as one bar; for the eye only, the words beside it say them. */
function Bar({ pool }: { pool: IPool }): JSX.Element {
  return (
    <div className="jp-Firepool-bar" aria-hidden="true">
      {WORDS.filter(([key]) => pool.counts[key] > 0).map(([key, word]) => (
        <span
          key={key}
          className={`jp-mod-${word}`}
          style={{ flexGrow: pool.counts[key] }}
        />
      ))}
    </div>
  );
}
