// Classify sequences with the files of `raglane export RUN -o model.onnx`: npm install onnxruntime-web
// node classify.js model.onnx '[[[0.1, 2.0], [0.3, 1.9]], [[0.7, 1.1]]]'
const ort = require("onnxruntime-web");
const fs = require("fs");

async function main([, , file, text]) {
  const session = await ort.InferenceSession.create(new Uint8Array(fs.readFileSync(file)));
  const { labels } = JSON.parse(fs.readFileSync(file.replace(/\.onnx$/, ".json")));
  const sequences = JSON.parse(text);
  const [rows, steps, size] = [sequences.length, Math.max(...sequences.map((s) => s.length)), sequences[0][0].length];
  const values = new Float32Array(rows * steps * size);
  sequences.forEach((sequence, row) => values.set(sequence.flat(), row * steps * size));
  const lengths = BigInt64Array.from(sequences, (sequence) => BigInt(sequence.length));
  const inputs = { values: new ort.Tensor(values, [rows, steps, size]), lengths: new ort.Tensor(lengths, [rows]) };
  const shares = (await session.run(inputs)).output_probabilities.data;
  for (let row = 0; row < rows; row++) {
    const share = shares.slice(row * labels.length, (row + 1) * labels.length);
    console.log(labels[share.indexOf(Math.max(...share))], Math.max(...share).toFixed(4));
  }
}
main(process.argv);
