// The rows of a padded tensor or a pack, which a call of a layer takes in place of flat values.
#pragma once

#include "held.h"

namespace raglane::operators {

// The numbers of Table in packing/flat_values.py.
enum Layout : int64_t { FLAT, BATCH_FIRST, TIME_FIRST, PACK, EVEN_BATCH_FIRST, EVEN_TIME_FIRST };

class Rows : public Held {
 public:
  // Of an input; `sizes` are the lengths of a padded tensor, or the batch sizes of a pack.
  Rows(int64_t layout, const Tensor& table, const Tensor& sizes, const std::optional<Tensor>& order)
      : layout_(layout) {
    dtype = table.scalar_type();
    const bool is_pack = layout == PACK;
    fits = layout > FLAT && layout <= PACK && table.dim() == (is_pack ? 2 : 3) && sizes.dim() == 1;
    const auto* numbers = fits ? (const int64_t*)numbers_of(sizes, sizes.numel()) : nullptr;
    if (!numbers) fits = false;
    if (!fits) return;
    call_.sizes = numbers;
    if (is_pack) {
      call_.steps = sizes.numel(), call_.elements = table.sizes()[0];
      call_.sequences = order.has_value() ? order->numel() : numbers[0];
      if (order.has_value()) call_.order = (const int64_t*)numbers_of(*order, call_.sequences);
      fits &= call_.sequences > 0 && call_.sequences <= call_.elements;
    } else {
      call_.sequences = sizes.numel(), call_.steps = table.sizes()[layout == TIME_FIRST ? 0 : 1];
      for (int64_t b = 0; fits && b < call_.sequences; b++) {
        const int64_t length = numbers[b];
        fits = length >= 0 && length <= call_.steps;
        call_.elements += length;
      }
    }
    if (!fits) return;
    const int64_t plan = is_pack ? 2 * call_.sequences + 1 + call_.steps : call_.sequences + 1;
    places.emplace(empty(header + plan, ScalarType::Long));
    auto* written = (int64_t*)places->data_ptr();
    written[0] = layout, written[1] = call_.steps;
    call_.plan = call_.offsets = written + header;
    fits &= locate(table, {call_.elements, table.sizes()[is_pack ? 1 : 2]});
  }

  // From the places that forward returned.
  explicit Rows(const Tensor& given) {
    const int64_t size = given.numel();
    places.emplace(given);
    auto* numbers = (int64_t*)numbers_of(given, size);
    fits &= numbers && size > header;
    if (!fits) return;
    layout_ = numbers[0], call_.steps = numbers[1];
    fits = layout_ > FLAT && layout_ <= PACK && call_.steps >= 0 && (layout_ != PACK || call_.steps < size);
    if (!fits) return;
    const int64_t rest = size - header - 1 - (layout_ == PACK ? call_.steps : 0);
    call_.sequences = layout_ == PACK ? rest / 2 : rest;
    fits = rest >= 0 && (layout_ != PACK || rest % 2 == 0);
    if (!fits) return;
    call_.plan = numbers + header;
    call_.elements = call_.plan[call_.sequences];
    fits = call_.elements >= 0;
  }

  std::optional<Tensor> places;  // the layout, T, and the plan of raglane_rows, int64
  int64_t threads = 1;

  int64_t elements() const { return call_.elements; }
  // Let a layer read and write contiguous tables of this layout. Only after flatten, which checks the plan.
  void lead(raglane_layer& layer) {
    const int64_t B = call_.sequences, T = call_.steps, *order = call_.plan + B + 1, *sizes = order + B;
    rows_.resize(B + T);
    layer.rows = rows_.data(), layer.starts = layer.rows + B;
    layer.steps = T, layer.row_count = layout_ == PACK ? call_.elements : B * T;
    for (int64_t b = 0; b < B; b++) {
      if (layout_ == PACK) rows_[order[b]] = b;
      else rows_[b] = layout_ == BATCH_FIRST ? b * T : b;
    }
    for (int64_t t = 0, row = 0; t < T; t++) {
      rows_[B + t] = row;
      row += layout_ == PACK ? sizes[t] : layout_ == TIME_FIRST ? B : 1;
    }
  }
  // The first numbers of a plan.
  Tensor offsets() const {
    const int64_t sizes[] = {call_.sequences + 1}, strides[] = {1};
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(places->get(), 1, sizes, strides, header, &handle));
    return Tensor(handle);
  }

  // Copy the rows of the input to flat values, and write the places; without values only these.
  void flatten(void* flat) {
    if (!flat) call_.row_bytes = 0;
    move(raglane_flatten, flat);
  }
  // The flat values of another tensor of this layout, such as a gradient; none if C cannot read it.
  std::optional<Tensor> gather(const Tensor& table, const Shape& shape, ScalarType type) {
    dtype = type;
    fits &= shape.sizes[0] == call_.elements;
    if (!fits || !locate(table, shape)) return {};
    Tensor flat = empty(shape, type);
    move(raglane_gather, flat.data_ptr());
    return flat;
  }
  // Write zeros to the padding of a new tensor of this layout.
  void fill(const Tensor& table) {
    if (layout_ == PACK) return;
    dtype = table.scalar_type();
    locate(table, {call_.elements, table.sizes()[2]});
    move(raglane_fill, nullptr);
  }
  // A tensor of this layout with the rows of flat values (N, features).
  Tensor scatter(void* flat, int64_t features, ScalarType type) {
    dtype = type;
    Tensor table = empty(shape_of(features), type);
    locate(table, {call_.elements, features});
    move(raglane_scatter, flat);
    return table;
  }

  Shape shape_of(int64_t features) const {
    if (layout_ == PACK) return {call_.elements, features};
    return layout_ == TIME_FIRST ? Shape(call_.steps, call_.sequences, features)
                                 : Shape(call_.sequences, call_.steps, features);
  }

 private:
  static constexpr int64_t header = 2;
  raglane_rows call_{};
  int64_t layout_ = FLAT;
  std::vector<int64_t> rows_;

  void* numbers_of(const Tensor& tensor, int64_t count) {
    if (!is_like(tensor, count, ScalarType::Long) || !tensor.is_contiguous()) return fits = false, nullptr;
    return hold(tensor, count, Strides(count).of);
  }

  // Set the address and the strides of a tensor of this layout with flat values of a shape.
  bool locate(const Tensor& table, const Shape& flat) {
    const Shape own = shape_of(flat.sizes[1]);
    if (!is_like(table, own, dtype)) return false;
    const int64_t width = width_of(dtype), last = own.dims - 1;
    const Strides dense(own);
    // No number of an empty table is read, and torch makes no copy with other strides of it.
    const int64_t* strides = table.numel() == 0 ? dense.of : table.strides().data();
    if ((own.sizes[last] > 1 && strides[last] != 1) || (layout_ == PACK && !table.is_contiguous())) {
      fits &= has_all_numbers(table);
      return fits && locate(torch::stable::contiguous(table), flat);
    }
    call_.row_bytes = own.sizes[last] * width;
    call_.step_stride = strides[layout_ == BATCH_FIRST ? 1 : 0] * width;
    call_.sequence_stride = layout_ == PACK ? 0 : strides[layout_ == BATCH_FIRST ? 0 : 1] * width;
    call_.table = hold(table, own, strides);
    return fits;
  }

  void move(int32_t (*function)(const raglane_rows*, char*, int64_t), void* flat) {
    call_.abi = RAGLANE_ABI, call_.threads = threads, call_.is_pack = layout_ == PACK, call_.flat = flat;
    char message[256] = "";
    require_ok(function(&call_, message, sizeof message), message);
  }
};

}  // namespace raglane::operators
