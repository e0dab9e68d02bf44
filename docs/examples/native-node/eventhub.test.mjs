// Holds eventhub.mjs against testdata/subjects.json, which every implementation is held against.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { bucketName, consumerName, isTopic, parseKeyToken, parseSubject, streamName, subject } from "./eventhub.mjs";

const mapping = JSON.parse(readFileSync(new URL("../../../testdata/subjects.json", import.meta.url)));

test("subjects", () => {
  assert.ok(mapping.subjects.length > 0);
  for (const { topic, key, subject: want } of mapping.subjects) {
    assert.equal(subject(topic, key), want);
    assert.deepEqual(parseSubject(want), { topic, key });
  }
  for (const { subject: foreign } of mapping.foreign) assert.equal(parseSubject(foreign), undefined);
});

test("tokens", () => {
  for (const { token, key } of mapping.tokens) assert.equal(parseKeyToken(token), key);
});

test("names", () => {
  for (const { topic, stream } of mapping.streams) assert.equal(streamName(topic), stream);
  for (const { topic, group, family, consumer } of mapping.consumers) assert.equal(consumerName(topic, group, family), consumer);
  for (const { topic, bucket } of mapping.buckets) assert.equal(bucketName(topic), bucket);
});

test("topics", () => {
  for (const topic of mapping.topics.valid) assert.ok(isTopic(topic), topic);
  for (const topic of mapping.topics.invalid) assert.ok(!isTopic(topic), topic);
});
