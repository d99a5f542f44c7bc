// The structs of the C interface as text, from the lists of their fields in raglane.h.
#include <cstddef>
#include <string>
#include <type_traits>

#include "abi/raglane.h"

// Python packs and reads these structs field by field.
static_assert(sizeof(raglane_layer) == 66 * 8 && sizeof(raglane_program) == 16 * 8 && sizeof(raglane_tensor) == 5 * 8);
static_assert(sizeof(raglane_outer) == 15 * 8 && sizeof(raglane_rows) == 15 * 8 && sizeof(raglane_factors) == 24 * 8);
static_assert(sizeof(raglane_lattices) == 11 * 8);
static_assert(sizeof(raglane_cell_facts) == 24 + 9 * 8);

namespace {

template <class T> void add_fields(std::string& text, const std::string& name, size_t offset);

// One line, or one for each field of a pair of structs or of an array.
template <class T> void add_field(std::string& text, const std::string& name, size_t offset) {
  if constexpr (std::is_same_v<T, raglane_name>) {
    text += name + " char[" + std::to_string(sizeof(T)) + "] " + std::to_string(offset) + "\n";
  } else if constexpr (std::is_array_v<T>) {
    using Part = std::remove_extent_t<T>;
    for (size_t i = 0; i < std::extent_v<T>; i++)
      add_field<Part>(text, name + "[" + std::to_string(i) + "]", offset + i * sizeof(Part));
  } else if constexpr (std::is_class_v<T>) {
    add_fields<T>(text, name + ".", offset);
  } else {
    static_assert(sizeof(T) == 8);
    text += name + (std::is_pointer_v<T> ? " pointer " : std::is_same_v<T, double> ? " double " : " int64 ") + std::to_string(offset) + "\n";
  }
}

#define RAGLANE_ADD_FIELD(type, name) add_field<type>(text, prefix + #name, offset + offsetof(Struct, name));
#define RAGLANE_ADD_FIELDS(name, FIELDS)                                                           \
  template <> void add_fields<name>(std::string & text, const std::string& prefix, size_t offset) { \
    using Struct = name;                                                                           \
    FIELDS(RAGLANE_ADD_FIELD)                                                                      \
  }
RAGLANE_ADD_FIELDS(raglane_weights, RAGLANE_WEIGHTS_FIELDS)
RAGLANE_ADD_FIELDS(raglane_weight_gradients, RAGLANE_WEIGHT_GRADIENTS_FIELDS)
RAGLANE_ADD_FIELDS(raglane_layer, RAGLANE_LAYER_FIELDS)
RAGLANE_ADD_FIELDS(raglane_program, RAGLANE_PROGRAM_FIELDS)
RAGLANE_ADD_FIELDS(raglane_tensor, RAGLANE_TENSOR_FIELDS)
RAGLANE_ADD_FIELDS(raglane_outer, RAGLANE_OUTER_FIELDS)
RAGLANE_ADD_FIELDS(raglane_gated_norm, RAGLANE_GATED_NORM_FIELDS)
RAGLANE_ADD_FIELDS(raglane_factors, RAGLANE_FACTORS_FIELDS)
RAGLANE_ADD_FIELDS(raglane_rows, RAGLANE_ROWS_FIELDS)
RAGLANE_ADD_FIELDS(raglane_lattices, RAGLANE_LATTICES_FIELDS)
RAGLANE_ADD_FIELDS(raglane_cell_facts, RAGLANE_CELL_FACTS_FIELDS)
RAGLANE_ADD_FIELDS(raglane_search, RAGLANE_SEARCH_FIELDS)
RAGLANE_ADD_FIELDS(raglane_alignment, RAGLANE_ALIGNMENT_FIELDS)
RAGLANE_ADD_FIELDS(raglane_pairs, RAGLANE_PAIRS_FIELDS)
RAGLANE_ADD_FIELDS(raglane_selective_scan, RAGLANE_SELECTIVE_SCAN_FIELDS)
RAGLANE_ADD_FIELDS(raglane_attention, RAGLANE_ATTENTION_FIELDS)
RAGLANE_ADD_FIELDS(raglane_convolution, RAGLANE_CONVOLUTION_FIELDS)
RAGLANE_ADD_FIELDS(raglane_rglru, RAGLANE_RGLRU_FIELDS)
RAGLANE_ADD_FIELDS(raglane_mamba_step, RAGLANE_MAMBA_STEP_FIELDS)
RAGLANE_ADD_FIELDS(raglane_attention_step, RAGLANE_ATTENTION_STEP_FIELDS)
RAGLANE_ADD_FIELDS(raglane_row_operation, RAGLANE_ROW_OPERATION_FIELDS)
RAGLANE_ADD_FIELDS(raglane_block_step, RAGLANE_BLOCK_STEP_FIELDS)

template <class Struct> std::string described(const char* name) {
  std::string text = std::string(name) + " " + std::to_string(sizeof(Struct)) + "\n";
  add_fields<Struct>(text, "", 0);
  return text;
}

}  // namespace

extern "C" const char* raglane_fields(int32_t number) try {
  static const std::string all[] = {
      described<raglane_layer>("raglane_layer"), described<raglane_program>("raglane_program"),
      described<raglane_tensor>("raglane_tensor"), described<raglane_outer>("raglane_outer"),
      described<raglane_rows>("raglane_rows"), described<raglane_lattices>("raglane_lattices"),
      described<raglane_search>("raglane_search"), described<raglane_alignment>("raglane_alignment"),
      described<raglane_pairs>("raglane_pairs"), described<raglane_factors>("raglane_factors"),
      described<raglane_gated_norm>("raglane_gated_norm"),
      described<raglane_selective_scan>("raglane_selective_scan"),
      described<raglane_attention>("raglane_attention"),
      described<raglane_convolution>("raglane_convolution"), described<raglane_rglru>("raglane_rglru"),
      described<raglane_mamba_step>("raglane_mamba_step"),
      described<raglane_attention_step>("raglane_attention_step"),
      described<raglane_row_operation>("raglane_row_operation"),
      described<raglane_block_step>("raglane_block_step"), described<raglane_cell_facts>("raglane_cell_facts")};
  return number >= 0 && number < (int32_t)std::size(all) ? all[number].c_str() : nullptr;
} catch (...) {
  return nullptr;  // no memory
}
