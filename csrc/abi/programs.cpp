// The C interface of programs: decodes and checks a call, and calls the kernel of the instruction set.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>

#include "abi/checks.h"
#include "program/code.h"
#include "targets/processor.h"

namespace {

using namespace raglane;

// Within these limits no product or sum below overflows, and every useful program is within them.
constexpr int64_t most_parts = 1 << 14, most_width = 1 << 20, most_columns = 1 << 22, most_rows = int64_t(1) << 40;

// Reads the integers of a program.
class Reader {
 public:
  Reader(const int64_t* code, int64_t size) : next_(code), left_(size) {}
  int64_t number(const char* name, int64_t least, int64_t most) {
    if (left_ < 1) fail("code must be as many integers as it counts, got an end in place of %s", name);
    int64_t value = *next_++;
    left_--;
    if (value < least || value > most)
      fail("%s must be from %lld to %lld, got %lld", name, (long long)least, (long long)most, (long long)value);
    return value;
  }
  double real(const char* name) {
    int64_t bits = number(name, INT64_MIN, INT64_MAX);
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  int64_t left() const { return left_; }

 private:
  const int64_t* next_;
  int64_t left_;
};

// A program in its own memory, so that the kernels read what was checked.
class Decoded {
 public:
  Code code{};

  Decoded(const int64_t* integers, int64_t size) : integers_(integers, integers + size) {
    Reader reader(integers_.data(), size);
    read_counts(reader);
    for (CodeBlock& block : blocks_) read_block(reader, block);
    for (CodeWeight& weight : weights_) {
      weight.groups = reader.number("groups of a weight", 1, most_width);
      weight.rows = reader.number("rows of a weight", 1, most_width / weight.groups);
      weight.depth = reader.number("depth of a weight", 1, most_width / weight.groups);
    }
    int64_t gathered = 0;
    for (CodeInstruction& instruction : instructions_) gathered += read_instruction(reader, instruction);
    for (CodeOutput& output : outputs_) read_output(reader, output);
    check_columns(reader, gathered);
    count_tensors();
    follow();
  }

  // True if it was decoded from these integers, which another thread may be writing to.
  bool is_of(const int64_t* integers, int64_t size) const {
    return (int64_t)integers_.size() == size && std::memcmp(integers_.data(), integers, size * sizeof(int64_t)) == 0;
  }
  int64_t tensors() const { return code.first_tensor[RAGLANE_LOCAL + 2] + code.states; }
  // Floating-point operations of a step's products, and numbers written by its other instructions.
  double work() const {
    double operations = 0;
    for (const CodeInstruction& i : instructions_) {
      bool multiplies = i.operation == RAGLANE_OF_PRODUCT;
      operations += (double)i.width * (multiplies ? 2.0 * weights_[i.weight].depth : tuning::instruction_operations);
    }
    return operations;
  }
  // True if elements depend on others, or on their sequence.
  bool has_memory() const {
    for (const CodeBlock& block : blocks_)
      if (block.kind == RAGLANE_STATE || block.kind == RAGLANE_SEQUENCE) return true;
    return false;
  }

 private:
  std::vector<int64_t> integers_;
  std::vector<CodeBlock> blocks_;
  std::vector<CodeWeight> weights_;
  std::vector<CodeInstruction> instructions_;
  std::vector<CodeOutput> outputs_;
  std::vector<int64_t> runs_;
  int64_t columns_ = 0;
  // For each column of the locals, the phase that wrote it last, 0 for none.
  std::vector<int64_t> first_column_;
  std::vector<int32_t> written_;

  void read_counts(Reader& reader) {
    code.blocks = reader.number("blocks", 0, most_parts), code.weights = reader.number("weights", 0, most_parts);
    code.instructions = reader.number("instructions", 0, most_parts);
    code.outputs = reader.number("outputs", 0, most_parts), code.states = reader.number("states", 0, most_parts);
    columns_ = reader.number("columns", 0, most_columns);
    const int64_t counts[] = {code.blocks, code.weights, code.instructions, code.outputs, code.states, columns_};
    int64_t sizes[] = RAGLANE_CODE_SIZES, needed = 0;
    for (int part = 0; part < 6; part++) needed += sizes[part] * counts[part];
    if (reader.left() != needed)
      fail("code must be %lld integers after the counts, got %lld", (long long)needed, (long long)reader.left());
    blocks_.resize(code.blocks), weights_.resize(code.weights), instructions_.resize(code.instructions);
    outputs_.resize(code.outputs + code.states);
    code.block = blocks_.data(), code.weight = weights_.data();
    code.instruction = instructions_.data(), code.output = outputs_.data();
  }

  void read_block(Reader& reader, CodeBlock& block) {
    block.kind = reader.number("kind of a block", RAGLANE_ELEMENT, RAGLANE_LOCAL);
    block.width = reader.number("width of a block", 1, most_width);
    block.index = reader.number("index of a block", 0, most_parts);
    block.carried = false;
  }

  Place read_place(Reader& reader) {
    Place place;
    place.block = reader.number("block of a place", INT64_MIN, INT64_MAX);
    place.start = reader.number("start of a place", INT64_MIN, INT64_MAX);
    place.spread = reader.number("spread of a place", INT64_MIN, INT64_MAX);
    place.number = reader.real("number of a place");
    return place;
  }

  // Returns the number of columns that it gathers.
  int64_t read_instruction(Reader& reader, CodeInstruction& i) {
    i.operation = reader.number("operation", 0, RAGLANE_OPERATIONS - 1);
    i.width = reader.number("width of an instruction", 1, most_width);
    i.segments = reader.number("segments", 1, most_width);
    i.epsilon = reader.real("epsilon");
    i.weight = reader.number("weight of an instruction", -1, code.weights - 1);
    int64_t gathered = reader.number("columns of an instruction", 0, columns_);
    i.groups = reader.number("groups of an instruction", 1, most_width);
    for (Place& place : i.results) place = read_place(reader);
    for (Place& place : i.operands) place = read_place(reader);
    if (gathered != (i.operation == RAGLANE_OF_GATHER ? i.width : 0))
      fail("columns of an instruction must be as many as its width for gather, else 0, got %lld", (long long)gathered);
    if (i.operation == RAGLANE_OF_PRODUCT) {
      if (i.weight < 0) fail("weight of an instruction must be the index of a weight for a product, got -1");
      const CodeWeight& weight = weights_[i.weight];
      if (i.width != i.segments * weight.groups * weight.rows)
        fail("width of an instruction must be segments * groups * rows of its weight, %lld, got %lld",
            (long long)(i.segments * weight.groups * weight.rows), (long long)i.width);
    }
    if (i.width % i.segments != 0)
      fail("segments must be a divisor of the width, %lld, got %lld", (long long)i.width, (long long)i.segments);
    if (i.segments % i.groups != 0)
      fail("groups of an instruction must be a divisor of the segments, %lld, got %lld", (long long)i.segments,
           (long long)i.groups);
    i.columns = integers_.data() + integers_.size() - columns_;  // check_columns() advances it
    return gathered;
  }

  void read_output(Reader& reader, CodeOutput& output) {
    bool is_state = &output - outputs_.data() >= code.outputs;
    output.place = read_place(reader);
    output.width = is_state ? 1 : reader.number("width of an output", 1, most_width);
  }

  void check_columns(Reader& reader, int64_t gathered) {
    if (gathered != columns_) fail("columns must be those of all gathers, got %lld", (long long)columns_);
    const int64_t* next = integers_.data() + integers_.size() - columns_;
    runs_.reserve(2 * columns_);  // instructions keep addresses in it
    for (CodeInstruction& i : instructions_) {
      if (i.operation != RAGLANE_OF_GATHER) continue;
      i.columns = next, next += i.width, i.runs = runs_.data() + runs_.size();
      for (int64_t c = 0; c < i.width; c++) {
        if (c > 0 && i.columns[c] == i.columns[c - 1] + 1) runs_.back()++;
        else runs_.insert(runs_.end(), {i.columns[c], 1});
      }
    }
    for (int64_t i = 0; i < columns_; i++) reader.number("column", 0, most_width);
  }

  // Checks that the indices of each kind are 0, 1, 2 ..., and sets the index of its first tensor.
  void count_tensors() {
    int64_t begin = 0;
    for (int64_t kind = 0; kind < RAGLANE_LOCAL; kind++) {
      std::vector<bool> seen;
      for (const CodeBlock& block : blocks_) seen.resize(seen.size() + (block.kind == kind));
      for (const CodeBlock& block : blocks_) {
        if (block.kind != kind) continue;
        if (block.index >= (int64_t)seen.size() || seen[block.index])
          fail("index of a block must be 0, 1, 2 ... within its kind, got %lld", (long long)block.index);
        seen[block.index] = true;
      }
      code.first_tensor[kind] = begin, begin += (int64_t)seen.size();
    }
    int64_t states = code.first_tensor[RAGLANE_VECTOR] - code.first_tensor[RAGLANE_STATE];
    if (states != code.states)
      fail("next states must be one for each of the %lld states, got %lld", (long long)states, (long long)code.states);
    for (const CodeBlock& block : blocks_)
      if (block.kind == RAGLANE_STATE) outputs_[code.outputs + block.index].width = block.width;
    code.first_tensor[RAGLANE_LOCAL] = begin;
    code.first_tensor[RAGLANE_LOCAL + 1] = begin + code.weights;
    code.first_tensor[RAGLANE_LOCAL + 2] = begin + code.weights + code.outputs;
  }

  // Check a step: every place is within its block, every column is written before it is read, and nothing is
  // overwritten while it is read. Columns that one phase writes and another reads are marked as carried.
  void follow() {
    int64_t columns = 0;
    for (const CodeBlock& block : blocks_) {
      first_column_.push_back(columns);
      if (block.kind == RAGLANE_LOCAL) columns += block.width;
    }
    if (columns > most_columns)
      fail("columns of all locals must be at most %lld, got %lld", (long long)most_columns, (long long)columns);
    written_.resize(columns);
    int32_t phase = 1;
    for (const CodeInstruction& i : instructions_) {
      bool multiplies = i.operation == RAGLANE_OF_PRODUCT;
      phase += multiplies;
      OperationFacts facts = facts_of_operation(i.operation);
      for (int operand = 0; operand < facts.operands; operand++) read(i, operand, phase);
      for (int result = 0; result < facts.results; result++) {
        write(i, result, phase);
        if (multiplies) blocks_[i.results[result].block].carried = true;
      }
      if (facts.results == 2 && overlap(i.results[0], i.width, i.results[1], i.segments))
        fail("results must be columns that do not overlap, got two that do");
      phase += multiplies;
    }
    for (const CodeOutput& output : outputs_) read(output.place, output.place.spread ? 1 : output.width, phase);
  }

  void read(const CodeInstruction& i, int operand, int32_t phase) {
    const Place& place = i.operands[operand];
    if (i.operation == RAGLANE_OF_GATHER) {
      if (place.block < 0 || place.spread) fail("operand of gather must be columns, got a number or a spread column");
      for (int64_t j = 0; j < i.width; j++) {
        Place column = place;
        if (place.start < 0 || place.start > most_width)
          fail("start of a place must be within its block, got %lld", (long long)place.start);
        column.start += i.columns[j];
        read(column, 1, phase);
      }
    } else {
      const bool is_matrix = facts_of_operation(i.operation).each || is_dot(i.operation);
      if (place.spread < RAGLANE_ADJACENT || place.spread > (is_matrix ? RAGLANE_BY_COLUMN : RAGLANE_ONE))
        fail("spread of a place must be a raglane_spread of its operation, got %lld", (long long)place.spread);
      read(place, columns_of(i, operand, weights_.data()), phase);
    }
  }

  void read(const Place& place, int64_t columns, int32_t phase) {
    if (place.block == -1) return;
    check_place(place, columns);
    CodeBlock& block = blocks_[place.block];
    if (block.kind != RAGLANE_LOCAL) return;
    const int32_t* column = written_.data() + first_column_[place.block] + place.start;
    for (int64_t i = 0; i < columns; i++) {
      if (column[i] == 0)
        fail("operand must be a column that was written before, got column %lld of block %lld, a local",
            (long long)(place.start + i), (long long)place.block);
      block.carried |= column[i] != phase;
    }
  }

  void write(const CodeInstruction& i, int result, int32_t phase) {
    const Place& place = i.results[result];
    int64_t width = columns_written(i, result);
    OperationFacts facts = facts_of_operation(i.operation);
    if (place.block < 0 || place.spread) fail("result must be columns of a local, got a number or a spread column");
    check_place(place, width);
    if (blocks_[place.block].kind != RAGLANE_LOCAL)
      fail("result must be a local, got block %lld", (long long)place.block);
    for (int operand = 0; operand < facts.operands; operand++) {
      const Place& from = i.operands[operand];
      int64_t read = columns_of(i, operand, weights_.data());
      bool overlaps = i.operation != RAGLANE_OF_GATHER && overlap(place, width, from, read);
      for (int64_t c = 0; i.operation == RAGLANE_OF_GATHER && c < width; c++)
        overlaps |= from.block == place.block && from.start + i.columns[c] >= place.start &&
                    from.start + i.columns[c] < place.start + width;
      if (overlaps) {
        bool same = facts.each && from.start == place.start && read == width;
        if (!same) fail("result must not overlap an operand, except at the same place in a pointwise operation");
      }
    }
    int32_t* column = written_.data() + first_column_[place.block] + place.start;
    for (int64_t c = 0; c < width; c++) column[c] = phase;
  }

  static bool overlap(const Place& a, int64_t a_width, const Place& b, int64_t b_width) {
    return a.block == b.block && a.start < b.start + b_width && b.start < a.start + a_width;
  }

  void check_place(const Place& place, int64_t width) {
    if (place.block < 0 || place.block >= code.blocks)
      fail("block of a place must be below %lld, or -1 for a number, got %lld", (long long)code.blocks,
          (long long)place.block);
    int64_t most = blocks_[place.block].width - width;
    if (place.start < 0 || place.start > most)
      fail("start of a place must be that of %lld columns within the %lld of its block, got %lld", (long long)width,
          (long long)blocks_[place.block].width, (long long)place.start);
  }
};

// The decoded program of a call, valid until the thread's next one. A thread keeps the last ones, because decoding takes
// longer than a step of one row: for 37 instructions 15 to 20 microseconds.
const Decoded& decoded_of(const raglane_program& p) {
  constexpr size_t most = 16;
  thread_local std::vector<std::unique_ptr<Decoded>> recent;
  thread_local size_t oldest = 0;
  for (const std::unique_ptr<Decoded>& known : recent)
    if (known->is_of(p.code, p.code_size)) return *known;
  auto made = std::make_unique<Decoded>(p.code, p.code_size);
  if (recent.size() < most) return *recent.emplace_back(std::move(made));
  oldest = (oldest + 1) % most;
  return *(recent[oldest] = std::move(made));
}

void check_call(const raglane_program& p) {
  if (p.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)p.abi);
  if (p.dtype != RAGLANE_FLOAT32 && p.dtype != RAGLANE_FLOAT64)
    fail("dtype must be float32 or float64, got %lld", (long long)p.dtype);
  if (p.ascending != 0 && p.ascending != 1) fail("ascending must be 0 or 1, got %lld", (long long)p.ascending);
  at_least("threads", p.threads, 1);
  at_least("sequences", p.sequences, 0);
  at_least("elements", p.elements, 0);
  at_least("code_size", p.code_size, 0);
  at_least("tensor_count", p.tensor_count, 0);
  if (p.threads > most_threads || p.sequences > most_rows || p.elements > most_rows || p.slot_count > most_rows || p.code_size > (1 << 24))
    fail("sizes must be at most those that this kernel supports, got more");
  present("code", p.code);
}

enum class Tensors { all, weights };

// Checks the tensors that a call reads as far as possible by their numbers.
std::vector<raglane_tensor> checked_tensors(const raglane_program& p, const Decoded& decoded, Tensors which) {
  const Code& code = decoded.code;
  if (p.tensor_count != decoded.tensors())
    fail("tensor_count must be that of the program, %lld, got %lld", (long long)decoded.tensors(),
        (long long)p.tensor_count);
  if (p.tensor_count > 0) present("tensors", p.tensors);
  std::vector<raglane_tensor> tensors(p.tensors, p.tensors + p.tensor_count);
  const int64_t *first = code.first_tensor, weights = first[RAGLANE_LOCAL], outputs = first[RAGLANE_LOCAL + 1];
  if (p.slots)  // of pools, which are read and written
    std::copy_n(tensors.begin() + first[RAGLANE_STATE], code.states, tensors.begin() + first[RAGLANE_LOCAL + 2]);
  for (int64_t i = 0; i < p.tensor_count; i++) {
    const raglane_tensor& tensor = tensors[i];
    bool is_weight = i >= weights && i < outputs;
    if (which == Tensors::weights ? !is_weight : is_weight && p.packed) continue;
    bool of_elements = i < first[RAGLANE_SEQUENCE] || (i >= outputs && i < outputs + code.outputs);
    bool of_sequences = !of_elements && (i < first[RAGLANE_VECTOR] || i >= outputs);
    if (of_elements ? p.elements > 0 : !of_sequences || p.sequences > 0) present("data of a tensor", tensor.data);
    if (tensor.dtype != p.dtype &&
        !(of_elements && p.dtype == RAGLANE_FLOAT32 && tensor.dtype == RAGLANE_BFLOAT16))
      fail("dtype of a tensor must be the call's, or bfloat16 for elements and outputs of float32, got %lld",
          (long long)tensor.dtype);
    int64_t least = i >= outputs ? code.output[i - outputs].width : 0;
    for (int s = 0; s < (is_weight ? 3 : 1); s++)
      if (tensor.strides[s] < least || tensor.strides[s] > most_rows)
        fail("strides of a tensor must be at least %lld, got %lld", (long long)least, (long long)tensor.strides[s]);
  }
  return tensors;
}

PackedHeader header_of(const raglane_program& p, const Code& code) {
  uint64_t shapes = 14695981039346656037u;
  int64_t numbers = 0;
  for (const CodeWeight* weight = code.weight; weight < code.weight + code.weights; weight++) {
    for (int64_t size : {weight->groups, weight->rows, weight->depth}) shapes = (shapes ^ (uint64_t)size) * 1099511628211u;
    numbers += weight->groups * weight->rows * weight->depth;
  }
  return PackedHeader::of_program(p.isa, p.dtype, code.weights, numbers, (int64_t)shapes);
}

// Independent elements, in pieces of as many elements as there are lanes.
std::vector<int64_t> pieces(const raglane_program& p) {
  int64_t lanes = p.threads * tuning::most_lanes, each = std::max((p.elements + lanes - 1) / lanes, int64_t(1));
  std::vector<int64_t> offsets;
  for (int64_t at = 0; at < p.elements; at += each) offsets.push_back(at);
  offsets.push_back(p.elements);
  return offsets;
}

}  // namespace

extern "C" int32_t raglane_run_program(const raglane_program* program, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("program", program);
    raglane_program mine = *program;
    check_call(mine);
    std::vector<int64_t> offsets = checked_offsets(mine.offsets, mine.sequences, mine.elements);
    const Decoded& decoded = decoded_of(mine);
    std::vector<raglane_tensor> tensors = checked_tensors(mine, decoded, Tensors::all);
    mine.tensors = tensors.data();
    check_packed(mine.packed, header_of(mine, decoded.code));
    std::vector<int64_t> slots = checked_slots(mine.slots, mine.sequences, mine.slot_count);
    if (mine.slots) mine.slots = slots.data();
    const Kernels& kernels = kernels_of(mine.isa, mine.dtype);
    if (mine.flags == 0) mine.threads = useful_threads(mine.threads, decoded.work(), offsets.data(), mine.sequences);
    if (!decoded.has_memory()) {
      offsets = pieces(mine);
      mine.sequences = (int64_t)offsets.size() - 1;
    }
    mine.offsets = offsets.data();
    std::vector<int64_t> order = order_of(mine.offsets, mine.sequences);
    ProgramCall call{batch_of(mine.offsets, mine.elements, order), &mine, &decoded.code};
    return kernels.program(call);
  });
}

extern "C" int32_t raglane_product(const raglane_factors* factors, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("factors", factors);
    const raglane_factors& f = *factors;
    for (int64_t count : {f.groups, f.width, f.depth}) at_least("groups, width and depth", count, 1);
    if (f.groups > most_width || f.width > most_width || f.depth > most_width)
      fail("sizes must be at most those that this kernel supports, got more");
    const int64_t columns = f.groups * f.width, none = -1;
    // A program of one instruction, from the block of an element's values to that of an output.
    const int64_t code[] = {2, 1, 1, 1, 0, 0,                          // counts
                            RAGLANE_ELEMENT, f.groups * f.depth, 0,    // blocks
                            RAGLANE_LOCAL, columns, 0,                 //
                            f.groups, f.width, f.depth,                // weight
                            RAGLANE_OF_PRODUCT, columns, 1, 0, 0, 0, 1,  // instruction
                            1, 0, 0, 0, none, 0, 0, 0,                 // its results
                            none, 0, 0, 0, 0, 0, 0, 0, none, 0, 0, 0,  // its operands
                            1, 0, 0, 0, columns};                      // output
    const raglane_tensor tensors[] = {f.values, f.weight, f.output};
    const int64_t offsets[] = {0, f.elements};
    raglane_program program{};
    program.abi = f.abi, program.isa = f.isa, program.dtype = f.dtype, program.flags = f.flags;
    program.threads = f.threads, program.sequences = 1, program.elements = f.elements, program.ascending = 1;
    program.offsets = offsets, program.code = code, program.code_size = std::size(code);
    program.tensors = tensors, program.tensor_count = std::size(tensors);
    return raglane_run_program(&program, message, size);
  });
}

extern "C" int32_t raglane_pack_program(const raglane_program* program, void* to, int64_t* bytes, char* message,
                                        int64_t size) {
  return guarded(message, size, [&] {
    present("program", program);
    present("bytes", bytes);
    raglane_program mine = *program;
    mine.threads = 1, mine.sequences = mine.elements = mine.ascending = 0;
    mine.slots = nullptr, mine.packed = nullptr;
    check_call(mine);
    const Decoded& decoded = decoded_of(mine);
    std::vector<raglane_tensor> tensors = checked_tensors(mine, decoded, Tensors::weights);
    mine.tensors = tensors.data();
    const Kernels& kernels = kernels_of(mine.isa, mine.dtype);
    return pack_after_header(header_of(mine, decoded.code), to, bytes, [&](PackTo packing) {
      return kernels.program_pack(ProgramCall{{}, &mine, &decoded.code, packing});
    });
  });
}

extern "C" int32_t raglane_outer_products(const raglane_outer* outer, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("outer", outer);
    raglane_outer mine = *outer;
    if (mine.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)mine.abi);
    if (mine.dtype < RAGLANE_FLOAT32 || mine.dtype > RAGLANE_BFLOAT16)
      fail("dtype must be one of raglane_dtype, got %lld", (long long)mine.dtype);
    at_least("threads", mine.threads, 1);
    at_least("elements", mine.elements, 0);
    for (int64_t count : {mine.groups, mine.left_columns, mine.right_columns}) at_least("groups and columns", count, 1);
    for (int64_t stride : {mine.left_stride, mine.right_stride}) at_least("stride", stride, 0);
    if (mine.threads > most_threads || mine.elements > most_rows || mine.groups > most_width || mine.left_columns > most_width ||
        mine.right_columns > most_width || mine.left_stride > most_rows || mine.right_stride > most_rows)
      fail("sizes must be at most those that this kernel supports, got more");
    if (mine.elements > 0) present("left", mine.left);
    if (mine.elements > 0 && mine.to) present("right", mine.right);
    double columns = mine.to ? (double)mine.right_columns : 1;
    double work = 2.0 * (double)mine.elements * (double)mine.left_columns * columns;
    if (mine.flags == 0) mine.threads = useful_threads(mine.threads, work);
    return kernels_of(mine.isa, RAGLANE_FLOAT32).outer(mine);
  });
}
