import { TextItem } from '@jupyterlab/statusbar';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import * as React from 'react';

import { IFirepoolModel } from './model';
import { statusText } from './text';

/** `2 warm · 1 busy · queue 0`; opens the panel. */
export class FirepoolStatus extends ReactWidget {
  constructor(
    private readonly _model: IFirepoolModel,
    private readonly _open: () => void
  ) {
    super();
    this.addClass('jp-Firepool-status');
    this.addClass('jp-mod-highlighted');
  }

  protected render(): JSX.Element {
    return (
      <UseSignal signal={this._model.changed}>
        {() => {
          const text = statusText(this._model.state);
          return (
            <TextItem
              source={text}
              title={`Firepool: ${text.replace(/^Firepool:? /, '')}. Click to open the panel`}
              role="button"
              tabIndex={0}
              onClick={this._open}
              onKeyDown={(event: React.KeyboardEvent) => {
                if (event.key === 'Enter' || event.key === ' ') {
                  event.preventDefault();
                  this._open();
                }
              }}
            />
          );
        }}
      </UseSignal>
    );
  }
}
