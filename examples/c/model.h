/* A stored model: its configuration and weights, the calls of its layers, its head, and the numbers that it reads. */
#ifndef MODEL_H
#define MODEL_H

#include "tensors.h"

#include <float.h>
#include <raglane.h>

typedef struct batch {
  int64_t sequences, elements;
  int64_t* offsets;
  float* values; /* (elements, width) */
  int64_t width;
} batch;

typedef struct matrix {
  const float *weight, *bias; /* (rows, columns), (rows) or null */
  int64_t rows, columns;
} matrix;

typedef struct model {
  char pooling[32];
  int is_forecast, is_change, has_thresholds, per_element, directions;
  int64_t width, hidden, layers, cell;
  raglane_cell_facts facts;
  matrix embedding, head; /* the first without weights where elements are numbers */
  raglane_weights* weights; /* (layers, directions) */
} model;

static void check(int32_t status, const char* message) {
  if (status != RAGLANE_OK) fail(message, "raglane");
}

/* The kernels' number of a cell by its name there. */
static int64_t find_cell(const char* name, raglane_cell_facts* facts) {
  char message[256];
  for (int64_t cell = 0; raglane_describe_cell(cell, facts, message, sizeof message) == RAGLANE_OK; cell++) {
    if (!strcmp(facts->name, name)) return cell;
  }
  fail("the library has no such cell", name);
  return 0;
}

static int64_t best_isa(void) {
  int64_t best = 0;
  for (int64_t isa = 0; raglane_isa_name(isa); isa++) {
    if (raglane_has_isa(isa)) best = isa;
  }
  return best;
}

/* The place of an entry's text among those that this program knows, or an error. */
static int choose(const char* object, const char* name, const char* const* words, int count, const char* what) {
  char text[64];
  read_entry(object, name, text, sizeof text);
  for (int place = 0; place < count; place++) {
    if (!strcmp(text, words[place])) return place;
  }
  fail(what, *text ? text : name);
  return 0;
}

#define CHOOSE(object, name, words, what) choose(object, name, words, (int)(sizeof words / sizeof *words), what)

/* Refuse what would make other numbers than those of this program. */
static void check_plain(const char* config) {
  static const char* const plain[][2] = {{"initial_state", "zeros"}, {"layer_norm", "false"}, {"tie_weights", "false"},
                                         {"gap_column", "null"},     {"categories", "[]"}};
  char text[64], *end;
  for (size_t place = 0; place < sizeof plain / sizeof *plain; place++) {
    read_entry(config, plain[place][0], text, sizeof text);
    if (strcmp(text, plain[place][1])) fail("this program runs models without it alone", plain[place][0]);
  }
  read_entry(config, "zoneout", text, sizeof text);
  if (strtod(text, &end) != 0 || end == text || *end) fail("this program runs models without it alone", "zoneout");
}

/* What config.json says of a model; its weights are still to be read. */
static model read_config(const char* path) {
  static const char* const tasks[] = {"classify", "regress", "multilabel", "tag", "language", "forecast", "transcribe"};
  static const char* const layers[] = {"lstm", "gru", "rnn", "indrnn", "sru", "qrnn", "mingru", "minlstm"};
  static const char* const poolings[] = {"final", "last", "first", "mean", "max"};
  static const char* const losses[] = {"bce", "null", "mse", "mae", "huber"};
  static const char* const flags[] = {"false", "true"};
  static const char* const formats[] = {"raglane-model"};
  static const char* const versions[] = {"3"};
  uint64_t size;
  const char* whole = json_space(read_file(path, &size));
  CHOOSE(whole, "format", formats, "is no model's format");
  CHOOSE(whole, "format_version", versions, "is a format that this program does not read");
  const char* config = json_find(whole, "model", path);
  if (!config) fail("has no model", path);
  check_plain(config);
  model made = {.hidden = read_size(config, "hidden_size"), .layers = read_size(config, "num_layers")};
  int task = CHOOSE(config, "task", tasks, "this program does not have that task");
  made.is_forecast = !strcmp(tasks[task], "forecast"), made.has_thresholds = !strcmp(tasks[task], "multilabel");
  if (made.is_forecast) made.is_change = CHOOSE(config, "loss", losses, "this program does not have that loss") > 0;
  made.directions = 1 + CHOOSE(config, "bidirectional", flags, "is neither true nor false");
  made.per_element = CHOOSE(config, "per_element", flags, "is neither true nor false");
  if (made.per_element ? task == 0 : task > 2) fail("does not go with the task", "per_element");
  const char* layer = layers[CHOOSE(config, "cell", layers, "no kernel runs this layer")];
  layer = !strcmp(layer, "rnn") ? "rnn_tanh" : !strcmp(layer, "indrnn") ? "indrnn_relu" : layer;
  made.cell = find_cell(layer, &made.facts);
  strcpy(made.pooling, poolings[CHOOSE(config, "pooling", poolings, "this program does not have that pooling")]);
  char embedding[32];
  read_entry(config, "embedding", embedding, sizeof embedding);
  made.width = read_size(config, "input_size");
  if (strcmp(embedding, "null")) {
    made.embedding = (matrix){.rows = made.width, .columns = read_size(config, "embedding")};
    made.width = made.embedding.columns;
  }
  made.head = (matrix){.rows = read_size(config, "output_size"), .columns = made.directions * made.hidden};
  if (made.is_forecast && (made.embedding.rows || made.head.rows > made.width)) {
    fail("is of more than what an element has", "output_size");
  }
  return made;
}

static const float* take(tensors* all, const char* kind, int64_t layer, int direction, int64_t rows, int64_t columns) {
  char name[128];
  if (rows == 0) return NULL;
  snprintf(name, sizeof name, "encoder.recurrent.%s_l%lld%s", kind, (long long)layer, direction ? "_reverse" : "");
  return take_tensor(all, name, rows, columns);
}

/* All weights, of the shapes that the configuration gives them. */
static void read_weights(const char* path, model* to) {
  tensors all = read_tensors(path);
  raglane_cell_facts facts = to->facts;
  int64_t width = to->width, size = to->hidden, gates = facts.gates * size;
  if (to->layers > all.count) fail("are more than the file has weights of", "num_layers");
  if (to->embedding.rows) {
    to->embedding.weight = take_tensor(&all, "encoder.embedding.weight", to->embedding.rows, to->embedding.columns);
  }
  to->weights = allocate(to->layers * to->directions, sizeof(raglane_weights));
  for (int64_t layer = 0; layer < to->layers; layer++, width = to->directions * size) {
    for (int k = 0; k < to->directions; k++) {
      raglane_weights* of = to->weights + layer * to->directions + k;
      of->input = take(&all, "weight_ih", layer, k, gates, width);
      of->input_bias = take(&all, "bias_ih", layer, k, facts.biases * size, 0);
      if (!facts.is_elementwise) {
        of->hidden = take(&all, "weight_hh", layer, k, gates, size);
        of->hidden_bias = take(&all, "bias_hh", layer, k, gates, 0);
      } else {
        of->hidden = take(&all, "weight_hh", layer, k, facts.factors * size, 0);
        of->skip = take(&all, "weight_skip", layer, k, facts.skips && width != size ? size : 0, width);
      }
    }
  }
  to->head.weight = take_tensor(&all, "head.weight", to->head.rows, to->head.columns);
  to->head.bias = take_tensor(&all, "head.bias", to->head.rows, 0);
  if (to->has_thresholds) take_tensor(&all, "thresholds", to->head.rows, 0); /* for who tells labels */
  check_taken(&all);
}

/* The model in a folder. */
static model read_model(const char* folder) {
  char path[4096];
  if (strlen(folder) > sizeof path - 32) fail("a name that is too long", "MODEL");
  if (raglane_abi() != RAGLANE_ABI) fail("a library of another version than raglane.h", "raglane");
  snprintf(path, sizeof path, "%s/config.json", folder);
  model made = read_config(path);
  snprintf(path, sizeof path, "%s/weights.safetensors", folder);
  read_weights(path, &made);
  return made;
}

/* The call of one layer, without its outputs. */
static raglane_layer layer_call(const model* of, int64_t layer, batch in) {
  raglane_layer call = {.abi = RAGLANE_ABI, .isa = best_isa(), .cell = of->cell, .dtype = RAGLANE_FLOAT32};
  call.threads = 1, call.directions = of->directions;
  call.sequences = in.sequences, call.elements = in.elements;
  call.input_size = in.width, call.hidden_size = of->hidden;
  call.gate_stride = of->facts.slots * ((of->hidden + 15) / 16 * 16);
  call.offsets = in.offsets, call.values = in.values;
  for (int k = 0; k < of->directions; k++) call.weights[k] = of->weights[layer * of->directions + k];
  return call;
}

/* rows (M, D) to (M, H): a product that adds up each row in the kernels' order, as raglane.nn.linear has it. It is a
 * minGRU whose gate is open, on sequences of one element each. */
static float* linear(const float* rows, int64_t count, matrix by) {
  raglane_cell_facts facts;
  int64_t size = by.rows, width = by.columns, cell = find_cell("mingru", &facts);
  float* both = allocate(2 * size * width, sizeof(float));
  float* biases = allocate(2 * size, sizeof(float));
  memcpy(both + size * width, by.weight, (size_t)(size * width) * sizeof(float));
  for (int64_t unit = 0; unit < size; unit++) biases[unit] = 100.0f; /* its sigmoid is 1 */
  memcpy(biases + size, by.bias, (size_t)size * sizeof(float));
  int64_t* offsets = allocate(count + 1, sizeof(int64_t));
  for (int64_t row = 0; row <= count; row++) offsets[row] = row;
  float* out = allocate(count * size, sizeof(float));
  float* final_h = allocate(count * size, sizeof(float));
  raglane_layer call = {.abi = RAGLANE_ABI, .isa = best_isa(), .cell = cell, .dtype = RAGLANE_FLOAT32};
  call.threads = 1, call.directions = 1, call.sequences = count, call.elements = count;
  call.input_size = width, call.hidden_size = size, call.offsets = offsets, call.values = rows;
  call.weights[0].input = both, call.weights[0].input_bias = biases;
  call.output = out, call.final_h = final_h;
  char message[256];
  check(raglane_forward(&call, message, sizeof message), message);
  free(both), free(biases), free(offsets), free(final_h);
  return out;
}

/* The numbers of a line as elements: rows of an embedding, or channels. */
static void read_elements(const double* numbers, const model* of, batch* to) {
  for (int64_t i = 0; i < to->elements; i++) {
    float* row = to->values + i * to->width;
    if (of->embedding.weight) {
      int is_place = numbers[i] >= 0 && numbers[i] < (double)of->embedding.rows;
      if (!is_place || (double)(int64_t)numbers[i] != numbers[i]) fail("a token that the vocabulary lacks", "input");
      memcpy(row, of->embedding.weight + (int64_t)numbers[i] * to->width, (size_t)to->width * sizeof(float));
      continue;
    }
    for (int64_t j = 0; j < to->width; j++) {
      if (!(fabs(numbers[i * to->width + j]) <= FLT_MAX)) fail("a number that 32 bits do not hold", "input");
      row[j] = (float)numbers[i * to->width + j];
    }
  }
}

/* Append the numbers of a line; returns 0 after the last line. */
static int read_line(FILE* file, double** numbers, int64_t* count, int64_t* room) {
  for (int is_empty = 1;; is_empty = 0) {
    int sign = fgetc(file);
    if (sign == EOF && ferror(file)) fail("cannot be read", "input");
    if (sign == EOF) return !is_empty;
    if (sign == '\n') return 1;
    if (sign == ' ' || sign == '\t' || sign == '\r') continue;
    ungetc(sign, file);
    if (*count == *room) *numbers = grown(*numbers, *room *= 2, sizeof(double));
    if (fscanf(file, "%lf", *numbers + *count) != 1) fail("something that is no number", "input");
    ++*count;
    sign = fgetc(file);
    if (sign != EOF && !strchr(" \t\r\n", sign)) fail("something that is no number", "input");
    ungetc(sign, file);
  }
}

/* A row of scores, to the end of the line. */
static void print_row(const float* row, int64_t width) {
  for (int64_t place = 0; place < width; place++) {
    const char* end = place + 1 < width ? " " : "\n";
    if (isnan(row[place])) printf("nan%s", end);
    else printf("%.9g%s", row[place], end);
  }
}

static void flush(void) {
  if (fflush(stdout) || ferror(stdout)) fail("cannot be written", "output");
}

#endif
