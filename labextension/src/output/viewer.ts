import { MainAreaWidget } from '@jupyterlab/apputils';
import { OutputAreaModel, SimplifiedOutputArea } from '@jupyterlab/outputarea';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { Panel, Widget } from '@lumino/widgets';

import { FirepoolApi } from '../api';
import { firepoolIcon } from '../icon';
import { messageOf } from '../model';
import {
  durationText,
  errorText,
  jobTitle,
  startSeconds,
  STATE_WORDS
} from '../text';
import { IJob, isOver } from '../types';
import { follow, Replay } from './replay';

/** A tab of the main area with one job's output: replayed, then live until the job ends. */
export class JobOutput extends MainAreaWidget<Panel> {
  constructor(api: FirepoolApi, job: IJob, rendermime: IRenderMimeRegistry) {
    const content = new Panel();
    super({ content });
    content.addClass('jp-Firepool-output');
    this.id = outputId(job.id);
    this.title.label = `Output: ${jobTitle(job)}`;
    this.title.caption = `Output of job ${job.id}`;
    this.title.icon = firepoolIcon;
    this.title.closable = true;
    this.toolbar.hide();

    const model = new OutputAreaModel({ trusted: false });
    const area = new SimplifiedOutputArea({ model, rendermime });
    area.node.setAttribute('role', 'log');
    area.node.setAttribute('aria-label', `Output of ${jobTitle(job)}`);
    this._head = new Widget();
    this._head.addClass('jp-Firepool-output-head');
    this._head.node.setAttribute('role', 'status');
    this._describe(job);
    content.addWidget(this._head);
    content.addWidget(area);
    void this._follow(api, job, new Replay(model));
  }

  dispose(): void {
    this._left.abort();
    super.dispose();
  }

  private async _follow(
    api: FirepoolApi,
    job: IJob,
    replay: Replay
  ): Promise<void> {
    try {
      const end = await follow(
        api,
        job.id,
        this._left.signal,
        message => replay.apply(message),
        seen => this._describe(seen)
      );
      if (end) {
        this._describe(end);
      }
    } catch (error) {
      this._head.node.textContent = `The output of this job is not available: ${messageOf(error)}`;
    }
  }

  private _describe(job: IJob): void {
    const parts = [STATE_WORDS[job.state]];
    if (job.acquisition) {
      parts.push(`${job.acquisition.path} pod`);
    }
    const start = startSeconds(job);
    if (start !== null) {
      parts.push(`started in ${durationText(start)}`);
    }
    if (isOver(job) && job.times.ended && job.times.first_instruction) {
      const ran = job.times.ended - job.times.first_instruction;
      parts.push(`ran ${durationText(ran)}`);
    }
    const error = errorText(job);
    if (error) {
      parts.push(error);
    }
    this._head.node.textContent = parts.join(' · ');
  }

  private readonly _left = new AbortController();
  private readonly _head: Widget;
}

export function outputId(job: string): string {
  return `firepool-output-${job}`;
}
