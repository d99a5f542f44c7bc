// Input products of a whole layer, prepared before its forward loop.
//
// This is done for few active rows: products folded into the loop need no memory traffic, but their weights
// are read at every step, which for few rows takes longer. Prepared rows are stored where the saved gates, or
// the outputs of an Elman network, will replace them one by one, otherwise in scratch.
#pragma once

#include <algorithm>

#include "scan/scan.h"

namespace raglane::RAGLANE_TARGET {

template <class Cell, class S> class PreparedProducts {
  using A = typename Arithmetic<S>::type;

 public:
  PreparedProducts(const raglane_layer& layer, const InputProducts<Cell, S>& input) : l_(layer), input_(input) {}

  // Choose, for an average number of rows and the bytes of the weights. In a single step of one thread packed weights are
  // read once in any case.
  void decide(double rows, int64_t weight_bytes, int64_t cache, int64_t longest) {
    bool cached = weight_bytes <= cache / tuning::weights_of_cache;
    int64_t bytes = l_.directions * l_.elements * input_.row_size() * (int64_t)sizeof(A);
    wanted_ = rows < (cached ? tuning::fold_rows_cached : tuning::fold_rows);
    // If gates are not saved, to save memory, products are not stored either.
    if (!rest_in_results() && (bytes > tuning::most_products || l_.checkpoint_every > 0)) wanted_ = false;
    if ((l_.flags & RAGLANE_FOLD) || (longest <= 1 && l_.threads == 1 && l_.packed)) wanted_ = false;
    if (l_.flags & RAGLANE_PREPARE) wanted_ = true;
  }

  bool reserve(bool poison) {
    if (!wanted_) return true;
    int64_t P = l_.projection_size ? l_.projection_size : l_.hidden_size;
    if (rest_in_results() && Cell::saved > 0) {
      stride_ = l_.gate_stride;
      for (int d = 0; d < l_.directions; d++) rows_[d] = (A*)l_.gates + d * l_.elements * stride_;
    } else if (rest_in_results()) {
      stride_ = l_.directions * P;
      for (int d = 0; d < l_.directions; d++) rows_[d] = (A*)l_.output + d * P;
    } else {
      stride_ = input_.row_size();
      if (!scratch_.reserve(l_.directions * l_.elements * stride_, poison)) return false;
      for (int d = 0; d < l_.directions; d++) rows_[d] = scratch_.get() + d * l_.elements * stride_;
    }
    return true;
  }

  // The rows are few, so that threads divide the panels and use each once.
  bool by_panels(int64_t threads) const { return l_.elements <= block_rows && input_.panels(0).count() >= threads; }

  // The part of one thread in a direction: blocks of rows, or some panels. Before it uses a panel of the weights, it
  // calls at_use(panel).
  template <class AtUse> void make(int d, int thread, int threads, const Panels<S>& weights, AtUse&& at_use) const {
    const int64_t panels = input_.panels(d).count();
    int64_t blocks = (l_.elements + block_rows - 1) / block_rows, first_panel = 0, end_panel = panels;
    const int room = thread;
    if (by_panels(threads)) {
      first_panel = panels * thread / threads, end_panel = panels * (thread + 1) / threads;
      thread = 0, threads = 1;
    }
    blocks = (blocks + threads - 1) / threads * threads;
    for (int64_t block = thread; block < blocks; block += threads) {
      int64_t begin = l_.elements * block / blocks, end = l_.elements * (block + 1) / blocks;
      const A* rows[block_rows];
      int64_t b = l_.rows ? std::upper_bound(l_.offsets, l_.offsets + l_.sequences, begin) - l_.offsets - 1 : 0;
      for (int64_t i = begin; i < end; i++) {
        if (l_.rows)
          while (i >= l_.offsets[b + 1]) b++;
        const int64_t row = l_.rows ? l_.rows[b] + l_.starts[i - l_.offsets[b]] : i;
        rows[i - begin] = input_.row(row, room, (int)(i - begin));
      }
      for (int64_t panel = first_panel; panel < end_panel; panel++) {
        at_use(panel);
        input_.multiply(d, panel, weights, (int)(end - begin), rows, rows_[d] + begin * stride_, stride_);
      }
    }
  }

  bool wanted() const { return wanted_; }
  int64_t stride() const { return stride_; }
  const A* at(int d, int64_t element) const { return rows_[d] + element * stride_; }

 private:
  const raglane_layer& l_;
  const InputProducts<Cell, S>& input_;
  bool wanted_ = false;
  int64_t stride_ = 0;
  A* rows_[2] = {};
  Scratch<A> scratch_;

  bool rest_in_results() const {
    return sizeof(S) == sizeof(A) && !l_.rows && (Cell::saved > 0 ? l_.gates : l_.output) != nullptr;
  }
};

}  // namespace raglane::RAGLANE_TARGET
