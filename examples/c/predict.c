/* Runs a stored model with the CPU kernels alone: no Python, no torch.
 *
 *   predict MODEL < sequences.txt
 *
 * MODEL is the folder that `raglane train` calls best/, or that Run.save wrote. Each line of the input is a sequence:
 * places of tokens in the vocabulary, or the channels of each element, one element after the other, as the network
 * reads them (scaled). It prints what the network tells, as %.9g, with the bits that Python has: a line per sequence or
 * element. README.md says what the numbers are in each task, and which models are refused. */
#define PROGRAM "predict"
#include "model.h"

/* One layer in all its directions: new values, and the final h (K, B, H). */
static batch run_layer(const model* of, int64_t layer, batch in, float** final_h) {
  batch out = in;
  out.width = of->directions * of->hidden;
  out.values = allocate(in.elements * out.width, sizeof(float));
  *final_h = allocate(in.sequences * out.width, sizeof(float));
  float* final_c = of->facts.has_c ? allocate(in.sequences * out.width, sizeof(float)) : NULL;
  raglane_layer call = layer_call(of, layer, in);
  call.output = out.values, call.final_h = *final_h, call.final_c = final_c;
  char message[256];
  check(raglane_forward(&call, message, sizeof message), message);
  free(final_c);
  return out;
}

/* One row per sequence, (B, width); zeros for an empty one. */
static float* pool(const char* how, batch of, const float* final_h, int directions) {
  int64_t size = of.width / directions;
  float* rows = allocate(of.sequences * of.width, sizeof(float));
  for (int64_t b = 0; b < of.sequences; b++) {
    int64_t first = of.offsets[b], end = of.offsets[b + 1];
    for (int64_t j = 0; j < of.width; j++) {
      float* to = rows + b * of.width + j;
      const float* column = of.values + j;
      if (!strcmp(how, "final")) *to = final_h[((j / size) * of.sequences + b) * size + j % size];
      else if (first == end) *to = 0;
      else if (!strcmp(how, "first")) *to = column[first * of.width];
      else if (!strcmp(how, "last")) *to = column[(end - 1) * of.width];
      else if (!strcmp(how, "max")) {
        *to = column[first * of.width];
        /* A NaN stays, as it does in torch. */
        for (int64_t i = first + 1; i < end; i++) {
          if (!isnan(*to) && !(column[i * of.width] <= *to)) *to = column[i * of.width];
        }
      } else {
        for (int64_t i = first; i < end; i++) *to += column[i * of.width];
        *to /= (float)(end - first);
      }
    }
  }
  return rows;
}

/* Sequences from lines of numbers. */
static batch read_batch(FILE* file, const model* of) {
  batch found = {0, 0, allocate(2, sizeof(int64_t)), NULL, of->width};
  int64_t room = 1024, rows = 2, count = 0, each = of->embedding.weight ? 1 : of->width;
  double* numbers = allocate(room, sizeof(double));
  while (read_line(file, &numbers, &count, &room)) {
    if (count % each) fail("a line whose numbers are not whole elements", "input");
    if (found.sequences + 2 > rows) found.offsets = grown(found.offsets, rows *= 2, sizeof(int64_t));
    found.offsets[++found.sequences] = count / each;
  }
  found.elements = found.offsets[found.sequences];
  found.values = allocate(found.elements * found.width, sizeof(float));
  read_elements(numbers, of, &found);
  free(numbers);
  return found;
}

/* What the head tells, a row per sequence or element; `count` says how many. */
static float* predict(const model* of, batch given, int64_t* count) {
  batch now = given;
  float* final_h = NULL;
  for (int64_t layer = 0; layer < of->layers; layer++) {
    batch next = run_layer(of, layer, now, &final_h);
    if (layer) free(now.values);
    if (layer < of->layers - 1) free(final_h);
    now = next;
  }
  int each = of->per_element && !of->is_forecast;
  *count = each ? now.elements : now.sequences;
  const float* rows = each ? now.values : pool(of->is_forecast ? "last" : of->pooling, now, final_h, of->directions);
  float* answers = linear(rows, *count, of->head);
  if (!of->is_forecast) return answers;
  /* What comes next is the last element and a change; nothing follows from none. */
  const float* last = pool("last", given, NULL, 1);
  for (int64_t b = 0; b < given.sequences; b++) {
    for (int64_t j = 0; j < of->head.rows; j++) {
      float* to = answers + b * of->head.rows + j;
      if (given.offsets[b] == given.offsets[b + 1]) *to = NAN;
      else if (of->is_change) *to = last[b * given.width + j] + *to;
    }
  }
  return answers;
}

int main(int count, char** arguments) {
  if (count != 2) fail("predict MODEL < sequences.txt", "usage");
  model made = read_model(arguments[1]);
  int64_t rows, width = made.head.rows;
  float* answers = predict(&made, read_batch(stdin, &made), &rows);
  for (int64_t place = 0; place < rows; place++) print_row(answers + place * width, width);
  flush();
  return 0;
}
