/* Runs a stored model with the CPU kernels alone: no Python, no torch.
 *
 *   predict MODEL < sequences.txt
 *
 * MODEL is the folder that `raglane train` calls best/, or that Run.save wrote. Each line of the input is a sequence:
 * places of tokens in the vocabulary, or the channels of each element, one element after the other, as the network
 * reads them (scaled). It prints the numbers that the head gives, one line per sequence or element, as %.9g: the bits
 * that Python has.
 *
 * It knows LSTM, GRU, RNN and the element-wise cells, any layers and directions, and the poolings summary, last, first,
 * mean and max. Everything is float32. */
#include "tensors.h"

#include <raglane.h>

typedef struct batch {
  int64_t sequences, elements;
  int64_t* offsets;
  float* values; /* (elements, width) */
  int64_t width;
} batch;

static void* allocate(int64_t count, size_t size) {
  void* memory = calloc(count > 0 ? (size_t)count : 1, size);
  if (!memory) fail("is full", "memory");
  return memory;
}

static void check(int32_t status, const char* message) {
  if (status != RAGLANE_OK) fail(message, "raglane");
}

/* The text of an entry of config.json, such as "layer": "gru"; the default where it is null. */
static void read_entry(const char* config, const char* name, const char* otherwise, char* text, size_t size) {
  char key[64];
  snprintf(key, sizeof key, "\"%s\":", name);
  const char* model = strstr(config, "\"model\":");
  const char* entry = model ? strstr(model, key) : NULL;
  if (!entry) fail("has no such entry; is it of a model?", name);
  entry += strlen(key);
  while (*entry == ' ') entry++;
  size_t count = 0;
  if (*entry == '"') {
    for (entry++; entry[count] && entry[count] != '"'; count++) {
    }
  } else {
    while (entry[count] && entry[count] != ',' && entry[count] != '}') count++;
    if (!strncmp(entry, "null", 4)) entry = otherwise, count = strlen(otherwise);
  }
  if (count >= size) fail("is too long", name);
  memcpy(text, entry, count);
  text[count] = 0;
}

static raglane_cell_facts find_cell(const char* layer, int64_t* number) {
  const char* name = !strcmp(layer, "rnn") ? "rnn_tanh" : !strcmp(layer, "indrnn") ? "indrnn_relu" : layer;
  raglane_cell_facts facts;
  char message[256];
  for (*number = 0; raglane_describe_cell(*number, &facts, message, sizeof message) == RAGLANE_OK; ++*number) {
    if (!strcmp(facts.name, name)) return facts;
  }
  fail("no kernel runs this layer", layer);
  return facts;
}

static int64_t best_isa(void) {
  for (int64_t isa = RAGLANE_AMX; isa > RAGLANE_PORTABLE; isa--) {
    if (raglane_has_isa(isa)) return isa;
  }
  return RAGLANE_PORTABLE;
}

static tensor weight(const tensors* all, const char* kind, int layer, int direction) {
  char name[128];
  snprintf(name, sizeof name, "encoder.recurrent.%s_l%d%s", kind, layer, direction ? "_reverse" : "");
  return find_tensor(all, name);
}

/* One layer in all its directions: new values, and the final h (K, B, H). */
static batch run_layer(const tensors* all, int64_t cell, raglane_cell_facts facts, int index, int directions,
                       batch in, float** final_h) {
  tensor input = weight(all, "weight_ih", index, 0);
  if (!input.data || input.columns != in.width) fail("does not fit its input", "weight_ih");
  int64_t size = input.rows / facts.gates;
  batch out = in;
  out.width = directions * size;
  out.values = allocate(in.elements * out.width, sizeof(float));
  *final_h = allocate(directions * in.sequences * size, sizeof(float));
  float* final_c = facts.has_c ? allocate(directions * in.sequences * size, sizeof(float)) : NULL;
  char message[256];
  if (facts.is_elementwise) {
    raglane_elementwise call = {.abi = RAGLANE_ABI, .isa = best_isa(), .cell = cell, .dtype = RAGLANE_FLOAT32};
    call.threads = 1, call.directions = directions;
    call.sequences = in.sequences, call.elements = in.elements;
    call.input_size = in.width, call.hidden_size = size;
    call.offsets = in.offsets, call.values = in.values;
    for (int k = 0; k < directions; k++) {
      call.weights[k].input = weight(all, "weight_ih", index, k).data;
      call.weights[k].recurrent = weight(all, "weight_hh", index, k).data;
      call.weights[k].bias = weight(all, "bias_ih", index, k).data;
      call.weights[k].skip = weight(all, "weight_skip", index, k).data;
    }
    call.output = out.values, call.final_h = *final_h, call.final_c = final_c;
    check(raglane_elementwise_forward(&call, message, sizeof message), message);
  } else {
    raglane_layer call = {.abi = RAGLANE_ABI, .isa = best_isa(), .cell = cell, .dtype = RAGLANE_FLOAT32};
    call.threads = 1, call.directions = directions;
    call.sequences = in.sequences, call.elements = in.elements;
    call.input_size = in.width, call.hidden_size = size;
    call.gate_stride = facts.slots * ((size + 15) / 16 * 16);
    call.offsets = in.offsets, call.values = in.values;
    for (int k = 0; k < directions; k++) {
      call.weights[k].input = weight(all, "weight_ih", index, k).data;
      call.weights[k].hidden = weight(all, "weight_hh", index, k).data;
      call.weights[k].input_bias = weight(all, "bias_ih", index, k).data;
      call.weights[k].hidden_bias = weight(all, "bias_hh", index, k).data;
    }
    call.output = out.values, call.final_h = *final_h, call.final_c = final_c;
    check(raglane_forward(&call, message, sizeof message), message);
  }
  free(final_c);
  return out;
}

/* rows (M, D) to (M, H): a product that adds up each row in the kernels' order, as raglane.nn.linear has it. It is a
 * minGRU whose gate is open, on sequences of one element each. */
static float* linear(const float* rows, int64_t count, tensor matrix, tensor bias) {
  int64_t size = matrix.rows, width = matrix.columns, cell;
  find_cell("mingru", &cell);
  float* both = allocate(2 * size * width, sizeof(float));
  float* biases = allocate(2 * size, sizeof(float));
  memcpy(both + size * width, matrix.data, (size_t)(size * width) * sizeof(float));
  for (int64_t unit = 0; unit < size; unit++) biases[unit] = 100.0f; /* its sigmoid is 1 */
  if (bias.data) memcpy(biases + size, bias.data, (size_t)size * sizeof(float));
  int64_t* offsets = allocate(count + 1, sizeof(int64_t));
  for (int64_t row = 0; row <= count; row++) offsets[row] = row;
  float* out = allocate(count * size, sizeof(float));
  float* final_h = allocate(count * size, sizeof(float));
  raglane_elementwise call = {.abi = RAGLANE_ABI, .isa = best_isa(), .cell = cell, .dtype = RAGLANE_FLOAT32};
  call.threads = 1, call.directions = 1, call.sequences = count, call.elements = count;
  call.input_size = width, call.hidden_size = size, call.offsets = offsets, call.values = rows;
  call.weights[0].input = both, call.weights[0].bias = biases;
  call.output = out, call.final_h = final_h;
  char message[256];
  check(raglane_elementwise_forward(&call, message, sizeof message), message);
  free(both), free(biases), free(offsets), free(final_h);
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
      if (!strcmp(how, "summary")) *to = final_h[((j / size) * of.sequences + b) * size + j % size];
      else if (first == end) *to = 0;
      else if (!strcmp(how, "first")) *to = column[first * of.width];
      else if (!strcmp(how, "last")) *to = column[(end - 1) * of.width];
      else if (!strcmp(how, "max")) {
        *to = column[first * of.width];
        for (int64_t i = first + 1; i < end; i++) *to = column[i * of.width] > *to ? column[i * of.width] : *to;
      } else if (!strcmp(how, "mean")) {
        for (int64_t i = first; i < end; i++) *to += column[i * of.width];
        *to /= (float)(end - first);
      } else {
        fail("this program does not have that pooling", how);
      }
    }
  }
  return rows;
}

/* Sequences from lines of numbers. With an embedding each number is a token. */
static batch read_batch(FILE* file, tensor embedding, int64_t width) {
  batch found = {0, 0, allocate(1, sizeof(int64_t)), NULL, width};
  int64_t room = 0, count = 0, line_end = 1;
  double* numbers = NULL;
  for (;;) {
    int sign = fgetc(file);
    if (sign == EOF || sign == '\n') {
      if (sign == EOF && line_end) break; /* nothing stands behind the last line */
      found.offsets = realloc(found.offsets, (size_t)(found.sequences + 2) * sizeof(int64_t));
      if (!found.offsets) fail("is full", "memory");
      int64_t each = embedding.data ? 1 : width;
      if (count % each) fail("a line whose numbers are not whole elements", "input");
      found.offsets[++found.sequences] = count / each;
      line_end = 1;
      if (sign == EOF) break;
      continue;
    }
    line_end = 0;
    if (sign == ' ' || sign == '\t' || sign == '\r') continue;
    ungetc(sign, file);
    if (count == room) {
      room = room ? 2 * room : 1024;
      numbers = realloc(numbers, (size_t)room * sizeof(double));
      if (!numbers) fail("is full", "memory");
    }
    if (fscanf(file, "%lf", numbers + count) != 1) fail("something that is no number", "input");
    count++;
  }
  found.elements = found.offsets[found.sequences];
  found.values = allocate(found.elements * width, sizeof(float));
  for (int64_t i = 0; i < found.elements; i++) {
    float* to = found.values + i * width;
    if (embedding.data) {
      int64_t token = (int64_t)numbers[i];
      if (!(numbers[i] >= 0 && numbers[i] < (double)embedding.rows)) fail("a token that the vocabulary lacks", "input");
      memcpy(to, embedding.data + token * width, (size_t)width * sizeof(float));
    } else {
      for (int64_t j = 0; j < width; j++) to[j] = (float)numbers[i * width + j];
    }
  }
  free(numbers);
  return found;
}

int main(int count, char** arguments) {
  if (count != 2) fail("predict MODEL < sequences.txt", "usage");
  char path[4096], layer[64], layers[16], both[16], pooling[64], start[64], per_element[16], norm[16], tied[16];
  uint64_t size;
  if (strlen(arguments[1]) > sizeof path - 32) fail("a name that is too long", "MODEL");
  snprintf(path, sizeof path, "%s/config.json", arguments[1]);
  char* config = read_file(path, &size);
  snprintf(path, sizeof path, "%s/weights.safetensors", arguments[1]);
  tensors all = read_tensors(path);
  read_entry(config, "layer", "", layer, sizeof layer);
  read_entry(config, "layers", "1", layers, sizeof layers);
  read_entry(config, "bidirectional", "false", both, sizeof both);
  read_entry(config, "pooling", "summary", pooling, sizeof pooling);
  read_entry(config, "initial_state", "zeros", start, sizeof start);
  read_entry(config, "per_element", "false", per_element, sizeof per_element);
  read_entry(config, "layer_norm", "false", norm, sizeof norm);
  read_entry(config, "tie_weights", "false", tied, sizeof tied);
  if (strcmp(start, "zeros")) fail("this program begins with zeros alone", start);
  if (!strcmp(norm, "true")) fail("no kernel of this program normalises", "layer_norm");
  if (!strcmp(tied, "true")) fail("this program has a head of its own alone", "tie_weights");
  if (raglane_abi() != RAGLANE_ABI) fail("a library of another version than raglane.h", "raglane");
  int directions = strcmp(both, "true") ? 1 : 2;
  int64_t cell;
  raglane_cell_facts facts = find_cell(layer, &cell);
  tensor embedding = find_tensor(&all, "encoder.embedding.weight");
  int64_t width = embedding.data ? embedding.columns : weight(&all, "weight_ih", 0, 0).columns;
  batch now = read_batch(stdin, embedding, width);
  float* final_h = NULL;
  for (int index = 0; index < atoi(layers); index++) {
    batch next = run_layer(&all, cell, facts, index, directions, now, &final_h);
    free(now.values);
    now = next;
    if (index < atoi(layers) - 1) free(final_h);
  }
  int each = !strcmp(per_element, "true");
  int64_t rows = each ? now.elements : now.sequences;
  float* pooled = each ? now.values : pool(pooling, now, final_h, directions);
  tensor matrix = find_tensor(&all, "head.weight");
  if (!matrix.data || matrix.columns != now.width) fail("does not fit the layers", "head.weight");
  float* answers = linear(pooled, rows, matrix, find_tensor(&all, "head.bias"));
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t j = 0; j < matrix.rows; j++) printf(j ? " %.9g" : "%.9g", answers[row * matrix.rows + j]);
    printf("\n");
  }
  return 0;
}
