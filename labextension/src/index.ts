import {
  ILayoutRestorer,
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { IStatusBar } from '@jupyterlab/statusbar';

import { FirepoolApi } from './api';
import { firepoolIcon } from './icon';
import { FirepoolModel, IFirepoolModel } from './model';
import { JobOutput, outputId } from './output/viewer';
import { FirepoolPanel, PANEL_ID } from './panel/panel';
import { OutputRestorer } from './restore';
import { FirepoolStatus } from './statusbar';
import { IJob } from './types';
import { Updates } from './updates';

/** Ids of the commands, for menus, shortcuts and other extensions. */
export namespace CommandIDs {
  export const open = 'firepool:open';
  export const start = 'firepool:start';
  export const refresh = 'firepool:refresh';
  export const showOutput = 'firepool:show-output';
}

const model: JupyterFrontEndPlugin<IFirepoolModel> = {
  id: 'firepool-nb:model',
  description: 'Knows the pools, sessions and jobs of the broker.',
  autoStart: true,
  provides: IFirepoolModel,
  activate: (app: JupyterFrontEnd): IFirepoolModel =>
    new FirepoolModel(new FirepoolApi(app.serviceManager.serverSettings))
};

const panel: JupyterFrontEndPlugin<void> = {
  id: 'firepool-nb:panel',
  description: 'The left panel with pools, sessions and jobs.',
  autoStart: true,
  requires: [IFirepoolModel],
  optional: [ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    model: IFirepoolModel,
    restorer: ILayoutRestorer | null
  ): void => {
    const { commands, shell } = app;
    const widget = new FirepoolPanel(model, {
      start: () => void commands.execute(CommandIDs.start),
      refresh: () => void commands.execute(CommandIDs.refresh),
      showOutput: job =>
        void commands.execute(CommandIDs.showOutput, { job: job.id }),
      cancel: job => void model.cancel(job.id),
      release: session => void model.release(session)
    });
    shell.add(widget, 'left', { rank: 600, type: 'Firepool' });
    restorer?.add(widget, PANEL_ID);
    const updates = new Updates(model);
    widget.visibleChanged.connect((_, visible) => {
      updates.panelVisible = visible;
    });
    widget.disposed.connect(() => updates.dispose());
  }
};

const commands: JupyterFrontEndPlugin<void> = {
  id: 'firepool-nb:commands',
  description: 'Commands, and their place in the palette.',
  autoStart: true,
  requires: [IFirepoolModel, IRenderMimeRegistry],
  optional: [ICommandPalette],
  activate: (
    app: JupyterFrontEnd,
    model: IFirepoolModel,
    rendermime: IRenderMimeRegistry,
    palette: ICommandPalette | null
  ): void => {
    const { commands, shell } = app;
    const job = (id: unknown): IJob | undefined =>
      model.state.jobs.find(candidate => candidate.id === id);

    commands.addCommand(CommandIDs.open, {
      label: 'Show the Firepool Panel',
      icon: firepoolIcon,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => shell.activateById(PANEL_ID)
    });
    commands.addCommand(CommandIDs.start, {
      label: 'Start the Firepool Broker',
      describedBy: { args: { type: 'object', properties: {} } },
      isEnabled: () => model.state.phase === 'none' && !model.state.starting,
      execute: () => model.start()
    });
    commands.addCommand(CommandIDs.refresh, {
      label: 'Refresh the Firepool Panel',
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => model.refresh(true)
    });
    commands.addCommand(CommandIDs.showOutput, {
      label: 'Show the Output of a Firepool Job',
      describedBy: {
        args: {
          type: 'object',
          properties: {
            job: { type: 'string', description: 'Id of a recent job' }
          },
          required: ['job']
        }
      },
      isEnabled: args => job(args.job) !== undefined,
      execute: args => {
        const found = job(args.job);
        if (!found) {
          return;
        }
        const id = outputId(found.id);
        for (const widget of shell.widgets('main')) {
          if (widget.id === id) {
            shell.activateById(id);
            return;
          }
        }
        shell.add(new JobOutput(model.api, found, rendermime), 'main');
        shell.activateById(id);
      }
    });
    for (const command of [
      CommandIDs.open,
      CommandIDs.start,
      CommandIDs.refresh
    ]) {
      palette?.addItem({ command, category: 'Firepool' });
    }
  }
};

const status: JupyterFrontEndPlugin<void> = {
  id: 'firepool-nb:status',
  description: 'Warm and busy pods and the queue, in the status bar.',
  autoStart: true,
  requires: [IFirepoolModel, IStatusBar],
  activate: (
    app: JupyterFrontEnd,
    model: IFirepoolModel,
    bar: IStatusBar
  ): void => {
    const item = new FirepoolStatus(
      model,
      () => void app.commands.execute(CommandIDs.open)
    );
    bar.registerStatusItem('firepool-nb:status', {
      item,
      align: 'left',
      rank: 90
    });
  }
};

const restore: JupyterFrontEndPlugin<void> = {
  id: 'firepool-nb:restore',
  description: 'Fills in the output that a reloaded page has missed.',
  autoStart: true,
  requires: [IFirepoolModel, INotebookTracker],
  activate: (
    _app: JupyterFrontEnd,
    model: IFirepoolModel,
    tracker: INotebookTracker
  ): void => {
    new OutputRestorer(model, tracker);
  }
};

const plugins: JupyterFrontEndPlugin<unknown>[] = [
  model,
  panel,
  commands,
  status,
  restore
] as JupyterFrontEndPlugin<unknown>[];

export default plugins;
export { IFirepoolModel } from './model';
