// A client of deltaline made of the .proto files, grpc-js and nothing else. The rules that it keeps: docs/without-python.md.

import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const FILES = ['layer_service', 'state_service', 'admin_service'].map((name) => `deltaline/v1/${name}.proto`);
const contract = loadSync([...FILES, 'google/rpc/status.proto', 'google/rpc/error_details.proto'], {
  includeDirs: ['../../proto', '../../proto/third_party'].map((path) => fileURLToPath(new URL(path, import.meta.url))),
  // A handle has 64 bits and a Number holds 53: one that is rounded is another sequence's. Strings keep them all.
  longs: String,
  enums: String,
  keepCase: true,
  defaults: true,
  oneofs: true,
});
const { v1 } = grpc.loadPackageDefinition(contract).deltaline;

// What a message has besides its tensor, generously; the most that gRPC takes of a reply unless told otherwise.
const ENVELOPE_BYTES = 64 << 10;
const MESSAGE_BYTES = 4 << 20;
const TRIES = 6;
// The outcome of a call that ended so is unknown here: the same request again finds it out.
const UNKNOWN = [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED, grpc.status.CANCELLED];

// Why a call, or a row of a step, was refused. reason: the stable one, '' where gRPC itself gave up.
export class DeltalineError extends Error {
  constructor(code, message, details = []) {
    super(message);
    const found = Object.fromEntries(details.map((any) => {
      const type = any.type_url.split('/').at(-1);
      return [type, contract[type]?.deserialize(any.value)];
    }));
    const delay = found['google.rpc.RetryInfo']?.retry_delay;
    this.code = code;
    this.reason = found['google.rpc.ErrorInfo']?.reason ?? '';
    this.metadata = found['google.rpc.ErrorInfo']?.metadata ?? {};
    this.retryAfterMs = delay === undefined ? null : Number(delay.seconds) * 1000 + delay.nanos / 1e6;
  }
}

function errorOf(failure) {
  const [packed] = failure.metadata?.get('grpc-status-details-bin') ?? [];
  const details = packed === undefined ? [] : contract['google.rpc.Status'].deserialize(packed).details;
  return new DeltalineError(failure.code, failure.details ?? failure.message, details);
}

export class Client {
  constructor(address, { deadlineMs = 30_000, credentials = grpc.credentials.createInsecure() } = {}) {
    this.deadlineMs = deadlineMs;
    this.affinity = randomBytes(16).toString('hex');
    this.stubs = [v1.LayerService, v1.StateService, v1.AdminService].map((Stub) => new Stub(address, credentials));
    [this.layers, this.states, this.admin] = this.stubs;
  }

  // Makes a call, and the same call again where its outcome is unknown or the server says that it may succeed later.
  // server: the name of the one that it means, of several behind one address; '' where any will do.
  async call(stub, method, request, server = '') {
    const metadata = new grpc.Metadata();
    metadata.set('deltaline-affinity', this.affinity);
    if (server !== '') metadata.set('deltaline-server', server);
    for (let tries = 1; ; tries += 1) {
      try {
        return await new Promise((resolve, reject) => {
          const deadline = Date.now() + this.deadlineMs;
          stub[method](request, metadata, { deadline }, (failure, reply) => (failure ? reject(errorOf(failure)) : resolve(reply)));
        });
      } catch (error) {
        const again = error.retryAfterMs !== null || (error.reason === '' && UNKNOWN.includes(error.code));
        if (!again || tries === TRIES) throw error;
        await sleep(error.retryAfterMs ?? 50 * 2 ** tries);
      }
    }
  }

  async info() {
    this.served ??= await this.call(this.admin, 'GetServerInfo', {});
    if (this.served.dtype !== 'DATA_TYPE_FLOAT32') throw new Error(`expected a float32 server, got ${this.served.dtype}`);
    return this.served;
  }

  // Opens sequences. What is remembered of one: its handle, its server's epoch and name, its last step, its committed
  // tokens.
  async open(count = 1) {
    const reply = await this.call(this.layers, 'OpenSequences', { count, open_token: randomBytes(16) });
    return reply.sequence.map((handle) => sequenceOf(reply, handle, 0));
  }

  // Hidden states [tokens, hidden] of one sequence: steps that fit a message. Returns the outputs, [tokens, hidden].
  async prefill(sequence, hidden) {
    const { hidden_size: width, inline_limit_bytes: limit } = await this.info();
    const tokens = Math.floor((Math.min(Number(limit), MESSAGE_BYTES) - ENVELOPE_BYTES) / (4 * width));
    const outputs = new Float32Array(hidden.length);
    for (let at = 0; at < hidden.length; at += tokens * width) {
      const part = hidden.subarray(at, at + tokens * width);
      outputs.set(await this.step('ROW_KIND_PREFILL', [sequence], part), at);
    }
    return outputs;
  }

  // One token of each sequence, [sequences, hidden]: one batch.
  decode(sequences, hidden) {
    return this.step('ROW_KIND_DECODE', sequences, hidden);
  }

  // Tokens of one sequence that are computed and wait for a commit.
  verify(sequence, hidden) {
    return this.step('ROW_KIND_VERIFY', [sequence], hidden);
  }

  // The next step of each sequence, with as many tokens of each. Returns the outputs of all, packed.
  async step(kind, sequences, hidden) {
    const { hidden_size: width } = await this.info();
    const rows = sequences.length;
    const each = hidden.length / width / rows;
    this.lastStep = {
      server_epoch: sequences[0].epoch,
      sequence: sequences.map(({ handle }) => handle),
      kind: Array(rows).fill(kind),
      step: sequences.map(({ step }) => step + 1),
      position: sequences.map(({ position }) => position),
      query_start_loc: Array.from({ length: rows + 1 }, (_, row) => row * each),
      hidden: {
        dtype: 'DATA_TYPE_FLOAT32',
        shape: [rows * each, width],
        // Little-endian, as every machine is that runs Node.
        inline: Buffer.from(hidden.buffer, hidden.byteOffset, hidden.byteLength),
      },
    };
    const reply = await this.call(this.layers, 'Step', this.lastStep, sequences[0].server);
    const refused = new Set(reply.row_status.map(({ row }) => row));
    sequences.forEach((sequence, row) => {
      if (!refused.has(row)) {
        sequence.step += 1;
        sequence.position = Number(reply.position[row]);
      }
    });
    for (const { status } of reply.row_status) throw new DeltalineError(status.code, status.message, status.details);
    return outputsOf(reply);
  }

  // How many of the verify's tokens join the sequence, its first included.
  async commit(sequence, accepted) {
    const { handle, epoch, server, step } = sequence;
    const request = { server_epoch: epoch, sequence: [handle], step: [step], accepted: [accepted] };
    const reply = await this.call(this.layers, 'CommitSequences', request, server);
    for (const { status } of reply.row_status) throw new DeltalineError(status.code, status.message, status.details);
    sequence.position = Number(reply.position[0]);
  }

  // Children that go on from where a sequence is.
  async fork({ handle, epoch, server }, count) {
    const request = { request_id: randomBytes(16), server_epoch: epoch, sequence: [handle], count };
    const reply = await this.call(this.states, 'ForkSequences', request, server);
    const position = Number(reply.position[0]);
    return reply.sequence.map((child) => sequenceOf(reply, child, position));
  }

  async close(sequences) {
    const request = { server_epoch: sequences[0].epoch, sequence: sequences.map(({ handle }) => handle) };
    return (await this.call(this.layers, 'CloseSequences', request, sequences[0].server)).state;
  }

  disconnect() {
    this.stubs.forEach((stub) => stub.close());
  }
}

function sequenceOf({ server_epoch: epoch, server }, handle, position) {
  return { handle, epoch, server, step: 0, position };
}

// The outputs of a StepResponse, a copy: a Buffer's bytes are not aligned.
export function outputsOf({ hidden: { inline } }) {
  return new Float32Array(inline.buffer.slice(inline.byteOffset, inline.byteOffset + inline.length));
}
