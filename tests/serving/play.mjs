// node play.mjs AGENT.onnx CASE.json: the actions of some lives in onnxruntime-web, as JSON.
// CASE: {"states": {name: next_name}, "types": {name: dtype}, "start": {name: tensor},
// "ticks": [{name: tensor}]}, a tensor as {"shape", "data"}.
import fs from 'node:fs';
import * as ort from 'onnxruntime-web';

ort.env.wasm.numThreads = 1;
const [agent, file] = process.argv.slice(2);
const given = JSON.parse(fs.readFileSync(file));
const arrays = {
  uint8: (x) => Uint8Array.from(x),
  bool: (x) => Uint8Array.from(x),
  int64: (x) => BigInt64Array.from(x.map(BigInt)),
  float32: (x) => Float32Array.from(x),
};
const tensors = (named) =>
  Object.fromEntries(
    Object.entries(named).map(([name, { shape, data }]) => {
      const type = given.types[name];
      return [name, new ort.Tensor(type, arrays[type](data), shape)];
    }),
  );

const session = await ort.InferenceSession.create(fs.readFileSync(agent), {
  executionProviders: ['wasm'],
  logSeverityLevel: 3,
});
let state = tensors(given.start);
const actions = [];
for (const tick of given.ticks) {
  const outputs = await session.run({ ...tensors(tick), ...state });
  actions.push(Array.from(outputs.action.data, Number));
  state = Object.fromEntries(
    Object.entries(given.states).map(([name, next]) => [name, outputs[next]]),
  );
}
console.log(JSON.stringify(actions));
