/** Server-sent events over `fetch`, so that Jupyter's token and base URL apply. */

export interface IServerEvent {
  event: string;
  data: string;
  id: string | null;
}

/** Yield the events of a response's body until it ends. */
export async function* serverEvents(
  response: Response
): AsyncGenerator<IServerEvent> {
  if (!response.body) {
    return;
  }
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop() ?? '';
      for (const block of blocks) {
        const event = parseBlock(block);
        if (event) {
          yield event;
        }
      }
      if (done) {
        return;
      }
    }
  } finally {
    // Leaving early (the caller's `break` or an abort) closes the connection
    void reader.cancel().catch(() => undefined);
  }
}

function parseBlock(block: string): IServerEvent | null {
  let event = 'message';
  let id: string | null = null;
  const data: string[] = [];
  for (const line of block.split(/\r?\n/)) {
    const colon = line.indexOf(':');
    if (colon === 0) {
      continue; // a comment: the broker's heartbeat
    }
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (field === 'event') {
      event = value;
    } else if (field === 'id') {
      id = value;
    } else if (field === 'data') {
      data.push(value);
    }
  }
  return data.length > 0 ? { event, id, data: data.join('\n') } : null;
}

/** Wait, or return early when the signal fires. */
export function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise(resolve => {
    if (signal.aborted) {
      resolve();
      return;
    }
    const end = () => {
      window.clearTimeout(timer);
      signal.removeEventListener('abort', end);
      resolve();
    };
    const timer = window.setTimeout(end, milliseconds);
    signal.addEventListener('abort', end);
  });
}
