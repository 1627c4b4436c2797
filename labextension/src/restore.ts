import { CodeCell, ICodeCellModel } from '@jupyterlab/cells';
import {
  INotebookTracker,
  Notebook,
  NotebookActions,
  NotebookPanel
} from '@jupyterlab/notebook';

import { IFirepoolModel } from './model';
import { follow, Replay } from './output/replay';
import { basename } from './text';
import { IJob, isOver } from './types';

const JOBS_TO_LOOK_AT = 200;

/**
 * Brings back what a page missed.
 *
 * JupyterLab drops the output of a running cell when its page is reloaded or closed: the kernel's
 * messages answer a request that the new page does not know. The broker has kept the output of
 * remote cells, so a notebook that is opened fills those cells in again, and goes on with those
 * that still run.
 *
 * A cell is filled in when its newest job ended after the notebook was last saved (what was saved
 * cannot hold all of its output then) or still runs. With collaboration the document lives on the
 * server and is shared by several pages: nothing is filled in there.
 */
export class OutputRestorer {
  constructor(
    private readonly _model: IFirepoolModel,
    tracker: INotebookTracker
  ) {
    tracker.forEach(panel => void this._restore(panel));
    tracker.widgetAdded.connect((_, panel) => void this._restore(panel));
  }

  private async _restore(panel: NotebookPanel): Promise<void> {
    await panel.revealed;
    await panel.context.ready;
    if (panel.isDisposed || panel.context.model.collaborative) {
      return;
    }
    const missed = await this._missedJobs(panel);
    for (const widget of panel.content.widgets) {
      const job = missed.get(widget.model.id);
      if (job && widget instanceof CodeCell && !isExecuting(widget)) {
        void this._fill(panel, widget, job);
      }
    }
  }

  /** Return the newest job of each cell whose output cannot be in the saved file. */
  private async _missedJobs(panel: NotebookPanel): Promise<Map<string, IJob>> {
    const newest = new Map<string, IJob>();
    let jobs: IJob[];
    try {
      jobs = await this._model.api.jobs(JOBS_TO_LOOK_AT);
    } catch {
      return newest; // no broker, no jobs: the panel is where that is said
    }
    const name = basename(panel.context.path);
    for (const job of jobs) {
      const cell = job.cell?.cell_id;
      if (!cell || (job.cell?.notebook && basename(job.cell.notebook) !== name)) {
        continue;
      }
      const other = newest.get(cell);
      if (!other || submitted(job) > submitted(other)) {
        newest.set(cell, job);
      }
    }
    const modified = panel.context.contentsModel?.last_modified;
    const saved = modified ? Date.parse(modified) / 1000 : 0;
    for (const [cell, job] of newest) {
      if (isOver(job) && (job.times.ended ?? 0) <= saved) {
        newest.delete(cell);
      }
    }
    return newest;
  }

  private async _fill(
    panel: NotebookPanel,
    cell: CodeCell,
    job: IJob
  ): Promise<void> {
    const stop = new AbortController();
    const model: ICodeCellModel = cell.model;
    // The user runs the cell anew, or the cell goes: what comes belongs to somebody else then
    const onScheduled = (
      _: unknown,
      started: { notebook: Notebook; cell: { model: { id: string } } }
    ) => {
      if (
        started.notebook === panel.content &&
        started.cell.model.id === model.id
      ) {
        stop.abort();
      }
    };
    const leave = () => stop.abort();
    NotebookActions.executionScheduled.connect(onScheduled);
    cell.disposed.connect(leave);
    panel.disposed.connect(leave);

    const replay = new Replay(model.outputs);
    let first = true;
    const begin = () => {
      if (first) {
        first = false;
        model.outputs.clear();
      }
    };
    try {
      if (!isOver(job)) {
        model.executionState = 'running';
      }
      const end = await follow(
        this._model.api,
        job.id,
        stop.signal,
        message => {
          if (!stop.signal.aborted) {
            begin();
            replay.apply(message);
          }
        }
      );
      if (end) {
        begin();
      }
    } catch {
      // The broker no longer has the output: what the file holds stays as it is
    } finally {
      NotebookActions.executionScheduled.disconnect(onScheduled);
      if (!stop.signal.aborted && !model.isDisposed) {
        model.executionState = 'idle';
      }
    }
  }
}

function submitted(job: IJob): number {
  return job.times.submitted ?? 0;
}

function isExecuting(cell: CodeCell): boolean {
  return cell.outputArea.future !== null && cell.outputArea.future !== undefined;
}
