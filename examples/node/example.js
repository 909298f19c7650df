// Opens a sequence, prefills, decodes, verifies drafts, commits, forks and closes, and checks what comes back.
//
//     npm ci && node example.js 127.0.0.1:50051

import assert from 'node:assert/strict';
import { Client, outputsOf } from './client.js';

const address = process.argv[2] ?? '127.0.0.1:50051';
const client = new Client(address);
const { hidden_size: width, model_type: model, max_context: context } = await client.info().catch((error) => {
  console.error(`${address}: ${error.details || error.message}`);
  process.exit(1);
});

// Hidden states of some tokens, the same in every run.
let seed = 1;
const tokens = (count) => Float32Array.from({ length: count * width }, () => {
  seed = (seed * 48271) % 2147483647;
  return seed / 1073741824 - 1;
});

const [sequence] = await client.open();
let outputs = await client.prefill(sequence, tokens(100));
assert.equal(outputs.length, 100 * width);
assert.equal(sequence.position, 100);

outputs = await client.decode([sequence], tokens(1));
assert.equal(outputs.length, width);
assert.equal(sequence.position, 101);

// The same step again, as after a reply that was lost: it is not applied twice, and its bytes are the same.
const again = await client.call(client.layers, 'Step', client.lastStep);
assert.deepEqual(again.outcome, ['ROW_OUTCOME_REPLAYED']);
assert.deepEqual(outputsOf(again), outputs);

await client.verify(sequence, tokens(4));
assert.equal(sequence.position, 101);
await client.commit(sequence, 2);
assert.equal(sequence.position, 103);

const children = await client.fork(sequence, 2);
const family = [sequence, ...children];
assert.deepEqual(family.map(({ position }) => position), [103, 103, 103]);
assert.equal(new Set(family.map(({ handle }) => handle)).size, 3);
const token = tokens(1);
outputs = await client.decode(family, Float32Array.from({ length: 3 * width }, (_, at) => token[at % width]));
const rows = family.map((_, row) => outputs.subarray(row * width, (row + 1) * width));
assert.deepEqual(rows[1], rows[0]);
assert.deepEqual(rows[2], rows[0]);
assert(rows[0].some((value) => value !== 0));
assert.deepEqual(family.map(({ position }) => position), [104, 104, 104]);

// More than a message holds, with the limits that gRPC has by default.
const [long] = await client.open();
const many = Math.min(Math.ceil((5 << 20) / (4 * width)), context || Infinity);
outputs = await client.prefill(long, tokens(many));
assert.equal(outputs.length, many * width);
assert.equal(long.position, many);

assert.deepEqual(await client.close([...family, long]), Array(4).fill('SEQUENCE_STATE_CLOSED'));
await assert.rejects(client.decode([sequence], token), { reason: 'SEQUENCE_CLOSED' });
client.disconnect();
console.log(`${model}, hidden ${width}: opened, prefilled, decoded, verified, committed, forked and closed; all as expected`);
