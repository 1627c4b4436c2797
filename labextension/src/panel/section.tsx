import { caretDownIcon } from '@jupyterlab/ui-components';
import * as React from 'react';

/** A part of the panel that folds; the browser brings keyboard and roles. */
export function Section(props: {
  title: string;
  count?: number;
  children: React.ReactNode;
}): JSX.Element {
  return (
    <details className="jp-Firepool-section" open>
      <summary>
        <caretDownIcon.react tag="span" className="jp-Firepool-caret" />
        <h3>{props.title}</h3>
        {props.count !== undefined && (
          <span className="jp-Firepool-quiet">{props.count}</span>
        )}
      </summary>
      {props.children}
    </details>
  );
}

export function Empty(props: { children: React.ReactNode }): JSX.Element {
  return <p className="jp-Firepool-empty">{props.children}</p>;
}
