/* Runs a stored model on live streams with the CPU kernels alone: no Python, no torch.
 *
 *   stream MODEL SLOTS < frames.txt
 *
 * A line of the input is the number of a stream, below SLOTS, and new elements of it, as predict.c reads them. The
 * number alone ends the sequence of the stream, whose next element begins another one. After an empty line, or before a
 * stream that has a line already, all streams with lines run in one call of each layer. It prints a line per element:
 * the number of the stream, and the scores so far, with the bits of predict.c for the elements so far. */
#define PROGRAM "stream"
#include "model.h"

typedef struct streams {
  const model* of;
  int64_t slots;
  float **h, **c; /* of each layer, (slots, H) */
  void** packed;  /* the weights of each layer */
  float* pooled;  /* (slots, H): the first, the largest, or the sum of the outputs so far */
  int64_t* seen;  /* (slots): elements so far */
  int64_t *ready, *place; /* the slots of the step, and of each slot whether it is one of them */
  batch next;     /* the elements of the step */
  int64_t room;   /* elements for which it has memory */
} streams;

/* The weights of a layer in the form of the kernels, once for all calls. */
static void* packed_weights(const model* of, int64_t layer, int64_t width) {
  raglane_layer call = layer_call(of, layer, (batch){.width = width});
  char message[256];
  int64_t bytes = 0;
  check(raglane_pack(&call, NULL, &bytes, message, sizeof message), message);
  void* packed = aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
  if (!packed) fail("is full", "memory");
  check(raglane_pack(&call, packed, &bytes, message, sizeof message), message);
  return packed;
}

static streams open_streams(const model* of, int64_t slots) {
  streams made = {.of = of, .slots = slots, .room = 64, .next = {.width = of->width}};
  made.h = allocate(of->layers, sizeof(float*)), made.c = allocate(of->layers, sizeof(float*));
  made.packed = allocate(of->layers, sizeof(void*));
  for (int64_t layer = 0; layer < of->layers; layer++) {
    made.packed[layer] = packed_weights(of, layer, layer ? of->hidden : of->width);
    made.h[layer] = allocate(slots * of->hidden, sizeof(float));
    if (of->facts.has_c) made.c[layer] = allocate(slots * of->hidden, sizeof(float));
  }
  made.pooled = allocate(slots * of->hidden, sizeof(float)), made.seen = allocate(slots, sizeof(int64_t));
  made.ready = allocate(slots, sizeof(int64_t)), made.place = allocate(slots, sizeof(int64_t));
  made.next.offsets = allocate(slots + 1, sizeof(int64_t));
  made.next.values = allocate(made.room * of->width, sizeof(float));
  return made;
}

/* Begin a new sequence. */
static void begin(streams* of, int64_t slot) {
  size_t size = (size_t)of->of->hidden * sizeof(float);
  for (int64_t layer = 0; layer < of->of->layers; layer++) {
    memset(of->h[layer] + slot * of->of->hidden, 0, size);
    if (of->c[layer]) memset(of->c[layer] + slot * of->of->hidden, 0, size);
  }
  memset(of->pooled + slot * of->of->hidden, 0, size);
  of->seen[slot] = 0;
}

/* Replace the output of an element by the pooled outputs so far. */
static void pool_so_far(const char* how, float* row, float* pooled, int64_t seen, int64_t size) {
  for (int64_t j = 0; j < size; j++) {
    float* to = pooled + j;
    if (!strcmp(how, "mean")) row[j] = (*to += row[j]) / (float)seen;
    else if (!strcmp(how, "first")) row[j] = *to = seen == 1 ? row[j] : *to;
    else if (!strcmp(how, "max")) row[j] = *to = seen == 1 || !(isnan(*to) || row[j] <= *to) ? row[j] : *to;
  }
}

/* Add a line to the step. */
static void add(streams* to, int64_t slot, const double* numbers, int64_t count) {
  batch* next = &to->next;
  int64_t each = to->of->embedding.weight ? 1 : next->width;
  if (count % each) fail("a line whose numbers are not whole elements", "input");
  batch own = {.elements = count / each, .width = next->width};
  while (next->elements + own.elements > to->room) {
    next->values = grown(next->values, (to->room *= 2) * next->width, sizeof(float));
  }
  own.values = next->values + next->elements * next->width;
  read_elements(numbers, to->of, &own);
  to->ready[next->sequences++] = slot, to->place[slot] = 1;
  next->offsets[next->sequences] = next->elements += own.elements;
}

/* Run the elements of the step, and print their scores. */
static void step(streams* all) {
  const model* of = all->of;
  batch now = all->next;
  char message[256];
  for (int64_t layer = 0; layer < of->layers; layer++) {
    float* output = allocate(now.elements * of->hidden, sizeof(float));
    raglane_layer call = layer_call(of, layer, now);
    call.slots = all->ready, call.slot_count = all->slots, call.packed = all->packed[layer];
    call.output = output, call.final_h = all->h[layer], call.final_c = all->c[layer];
    check(raglane_forward(&call, message, sizeof message), message);
    if (layer) free(now.values);
    now.values = output, now.width = of->hidden;
  }
  for (int64_t b = 0; b < now.sequences; b++) {
    int64_t slot = all->ready[b];
    for (int64_t i = now.offsets[b]; i < now.offsets[b + 1]; i++) {
      all->seen[slot]++;
      if (of->per_element || of->is_forecast) continue;
      pool_so_far(of->pooling, now.values + i * now.width, all->pooled + slot * of->hidden, all->seen[slot], of->hidden);
    }
  }
  int64_t width = of->head.rows;
  float* scores = linear(now.values, now.elements, of->head);
  for (int64_t b = 0; b < now.sequences; b++) {
    for (int64_t i = now.offsets[b]; i < now.offsets[b + 1]; i++) {
      float* row = scores + i * width;
      for (int64_t j = 0; of->is_forecast && of->is_change && j < width; j++) {
        row[j] = all->next.values[i * of->width + j] + row[j];
      }
      printf("%lld ", (long long)all->ready[b]);
      print_row(row, width);
    }
    all->place[all->ready[b]] = 0;
  }
  free(scores), free(now.values);
  all->next.sequences = all->next.elements = 0;
  flush();
}

int main(int count, char** arguments) {
  const char* end = "";
  int64_t slots = count == 3 ? read_whole(arguments[2], &end) : 0;
  if (slots < 1 || *end) fail("stream MODEL SLOTS < frames.txt", "usage");
  model made = read_model(arguments[1]);
  if (made.directions > 1) fail("reads sequences from the end, which streams do not have", "bidirectional");
  streams all = open_streams(&made, slots);
  int64_t room = 1024, found = 0;
  double* numbers = allocate(room, sizeof(double));
  for (; read_line(stdin, &numbers, &found, &room); found = 0) {
    int64_t slot = found && numbers[0] >= 0 && numbers[0] < (double)slots ? (int64_t)numbers[0] : -1;
    if (found && (slot < 0 || (double)slot != numbers[0])) fail("a stream that is not below SLOTS", "input");
    if (!found || all.place[slot]) step(&all);
    if (found == 1) begin(&all, slot);
    else if (found) add(&all, slot, numbers + 1, found - 1);
  }
  step(&all);
  return 0;
}
