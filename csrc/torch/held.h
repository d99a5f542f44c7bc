// Shared by the operators of torch: shapes, and the tensors of a call while the kernels read their memory.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "raglane.h"

namespace raglane::operators {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Parts = std::vector<std::optional<Tensor>>;

// The exception of a call that is refused, inside; outside it is an Answer, or an error of torch.
struct Refusal : std::runtime_error {
  std::string reason;
  int64_t status;
  explicit Refusal(const std::string& reason, int64_t status = RAGLANE_BAD_ARGUMENT)
      : std::runtime_error("raglane: " + reason), reason(reason), status(status) {}
};

// The status of a call that failed after it had overwritten tensors: the caller must not try it in another way.
constexpr int64_t spent = -1;

// The results of a call, its raglane_status or `spent`, and the reason why it was refused.
using Answer = std::tuple<std::vector<Tensor>, int64_t, std::optional<std::string>>;

[[noreturn]] inline void refuse(const std::string& reason) { throw Refusal(reason); }

struct Shape {
  int64_t dims, sizes[3];
  Shape() : dims(0), sizes{} {}
  Shape(int64_t a) : dims(1), sizes{a, 0, 0} {}
  Shape(int64_t a, int64_t b) : dims(2), sizes{a, b, 0} {}
  Shape(int64_t a, int64_t b, int64_t c) : dims(3), sizes{a, b, c} {}
  int64_t count() const {
    int64_t total = 1;
    for (int64_t place = 0; place < dims; place++) total *= sizes[place];
    return total;
  }
};

struct Strides {
  int64_t of[3];
  explicit Strides(const Shape& shape) {
    for (int64_t place = shape.dims - 1, stride = 1; place >= 0; stride *= shape.sizes[place--]) of[place] = stride;
  }
};

inline int32_t number_of_dtype(ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

inline Tensor empty(const Shape& shape, ScalarType dtype) {
  AtenTensorHandle handle;
  const Strides strides(shape);
  if (aoti_torch_empty_strided(shape.dims, shape.sizes, strides.of, number_of_dtype(dtype), 0, 0, &handle) != 0)
    throw Refusal("not enough memory for the results", RAGLANE_OUT_OF_MEMORY);
  return Tensor(handle);
}

// The numbers of a contiguous tensor in another shape.
inline Tensor reshaped(const Tensor& tensor, const Shape& shape) {
  AtenTensorHandle handle;
  const Strides strides(shape);
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), shape.dims, shape.sizes, strides.of, 0, &handle));
  return Tensor(handle);
}

inline int64_t width_of(ScalarType dtype) { return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2; }

// The same for tensors that only forward and backward use: from `least` bytes on in a block of the kernels, which
// returns to them when the last reference to its storage is gone; see runtime/blocks.h.
inline Tensor empty_in_block(const Shape& shape, ScalarType dtype, int64_t least) {
  const int64_t bytes = shape.count() * width_of(dtype);
  int64_t size = 0;
  void* block = bytes > 0 && bytes >= least ? raglane_take_block(bytes, &size) : nullptr;
  if (!block) return empty(shape, dtype);
  AtenTensorHandle handle;
  const Strides strides(shape);
  const auto give = [](void* data, void* bytes) { raglane_give_block(data, (int64_t)bytes); };
  if (torch_from_blob(block, shape.dims, shape.sizes, strides.of, 0, number_of_dtype(dtype), 0, -1, &handle, 0, nullptr, 0,
                      give, (void*)size) == 0)
    return Tensor(handle);
  raglane_give_block(block, size);
  throw Refusal("not enough memory for the results", RAGLANE_OUT_OF_MEMORY);
}

inline void require_ok(int32_t status, const char* message) {
  if (status != RAGLANE_OK) throw Refusal(message, status);
}

// True if the storage contains the last number of a tensor of any strides.
inline bool has_all_numbers(const Tensor& tensor) {
  int64_t bytes, last = tensor.storage_offset();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  if (tensor.numel() == 0) return true;
  for (int64_t place = 0; place < tensor.dim(); place++) last += (tensor.size(place) - 1) * tensor.stride(place);
  return bytes >= (last + 1) * (int64_t)tensor.element_size();
}

// The tensors of a call, and the storages that its addresses belong to, which another thread may replace.
class Held {
 public:
  ScalarType dtype;
  bool poisons = false;
  int64_t least_block = INT64_MAX;  // bytes from which `keep` takes a block
  bool fits = true;  // false if a tensor has other sizes, dtype or device than the call, or the kernels cannot read it

  bool is_like(const Tensor& tensor, const Shape& shape, ScalarType type) {
    const auto sizes = tensor.sizes();
    fits &= (int64_t)sizes.size() == shape.dims && tensor.scalar_type() == type &&
            tensor.device().type() == DeviceType::CPU;
    for (int64_t place = 0; fits && place < shape.dims; place++) fits = sizes[place] == shape.sizes[place];
    return fits;
  }

  // The address of a tensor's numbers. A view of its own keeps the storage alive.
  void* hold(const Tensor& tensor, const Shape& shape, const int64_t* strides) {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), shape.dims, shape.sizes, strides, 0, &handle));
    const Tensor& view = held_.emplace_back(handle);
    void* address = view.data_ptr();
    if (shape.count() == 0) return nullptr;
    fits &= address && has_all_numbers(view);
    return fits ? address : nullptr;
  }

  // The address of a tensor that the caller owns alone: no other thread can replace its storage.
  void* look(const Tensor& tensor, const Shape& shape, ScalarType type) {
    if (!is_like(tensor, shape, type)) return nullptr;
    fits &= tensor.is_contiguous() && has_all_numbers(tensor);
    void* address = fits ? tensor.data_ptr() : nullptr;
    fits &= address != nullptr;
    return address;
  }

  // A new tensor, and its address.
  void* write(std::vector<Tensor>& results, const Shape& shape) { return write(results, empty(shape, dtype)); }
  // The same, of a tensor that only forward and backward use.
  void* keep(std::vector<Tensor>& results, const Shape& shape) {
    return write(results, empty_in_block(shape, dtype, least_block));
  }

 protected:
  std::vector<Tensor> held_;

  void* write(std::vector<Tensor>& results, Tensor result) {
    void* address = result.data_ptr();
    if (poisons && address) std::memset(address, 0xff, result.numel() * width_of(dtype));
    results.push_back(std::move(result));
    return address;
  }
};

}  // namespace raglane::operators
