import * as React from 'react';

import {
  clockText,
  durationText,
  errorText,
  jobPlace,
  jobTitle,
  startSeconds,
  STATE_WORDS
} from '../text';
import { IJob, isOver } from '../types';
import type { IActions } from './panel';
import { Empty, Section } from './section';

export function Jobs(props: {
  jobs: readonly IJob[];
  actions: IActions;
}): JSX.Element {
  return (
    <Section title="Recent jobs" count={props.jobs.length}>
      {props.jobs.length === 0 && (
        <Empty>Cells that ran on a pod appear here, with their output.</Empty>
      )}
      <ul className="jp-Firepool-list">
        {props.jobs.map(job => (
          <Job key={job.id} job={job} actions={props.actions} />
        ))}
      </ul>
    </Section>
  );
}

function Job({ job, actions }: { job: IJob; actions: IActions }): JSX.Element {
  const title = jobTitle(job);
  return (
    <li
      className="jp-Firepool-row"
      aria-label={`Job ${title}`}
      data-job={job.id}
      data-state={job.state}
    >
      <span
        className={`jp-Firepool-dot jp-mod-${STATE_WORDS[job.state]}`}
        aria-hidden="true"
      />
      <div className="jp-Firepool-what">
        <span className="jp-Firepool-line">
          <span className="jp-Firepool-name" title={`${title} (${job.id})`}>
            {title}
          </span>
          <span className={`jp-Firepool-state jp-mod-${STATE_WORDS[job.state]}`}>
            {STATE_WORDS[job.state]}
          </span>
        </span>
        <span className="jp-Firepool-line">
          <span className="jp-Firepool-quiet" title={explanation(job)}>
            {summary(job)}
          </span>
          <span className="jp-Firepool-actions">
            {!isOver(job) && (
              <button
                type="button"
                className="jp-Firepool-button"
                aria-label={`Cancel ${title}`}
                onClick={() => actions.cancel(job)}
              >
                Cancel
              </button>
            )}
            <button
              type="button"
              className="jp-Firepool-button"
              aria-label={`Show the output of ${title}`}
              onClick={() => actions.showOutput(job)}
            >
              Output
            </button>
          </span>
        </span>
      </div>
    </li>
  );
}

/** `report.ipynb · 14:03 · warm · 12 ms`: where and when, how the pod was found, how long the
 * start took. */
function summary(job: IJob): string {
  const parts: string[] = [];
  const place = jobPlace(job);
  if (place && place !== jobTitle(job)) {
    parts.push(place);
  }
  if (job.times.submitted !== null) {
    parts.push(clockText(job.times.submitted));
  }
  if (job.waiting && !isOver(job)) {
    parts.push(job.waiting.message);
  }
  if (job.acquisition) {
    parts.push(job.acquisition.path);
  }
  const start = startSeconds(job);
  if (start !== null) {
    parts.push(durationText(start));
  }
  const error = errorText(job);
  if (error) {
    parts.push(error);
  }
  return parts.join(' · ');
}

function explanation(job: IJob): string {
  const lines: string[] = [];
  if (job.cell?.notebook) {
    lines.push(job.cell.notebook);
  }
  if (job.acquisition) {
    lines.push(`Pod: ${job.acquisition.path} (${job.acquisition.reason})`);
  }
  const start = startSeconds(job);
  if (start !== null) {
    lines.push(`First instruction ${durationText(start)} after the submit`);
  }
  if (job.error) {
    lines.push(`${job.error.class}: ${job.error.message}`);
  }
  return lines.join('\n');
}
